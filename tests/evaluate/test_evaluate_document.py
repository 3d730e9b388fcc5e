"""Questions about a document, answered from nothing, from a cartridge, and from the document itself."""

import pytest
import torch

import foreword as fw
import tiny
from foreword.compress import Dialogue, SelfStudy
from foreword.evaluate.answers import exact, f1
from foreword.evaluate.document import Question, evaluate_document, greedy, read_questions, write_questions


@pytest.fixture
def model():
    return tiny.sharp_model()


@pytest.fixture
def document():
    return Dialogue(tiny.tokenizer()).encode("The lighthouse of Brenn was built in 1731. Its keeper was called Ansa.")


@pytest.fixture
def questions(tmp_path):
    rows = [
        {"question": "Who kept the lighthouse?", "answer": "Ansa."},
        {"question": "When was it built?", "answer": "In 1731."},
    ]
    return read_questions(tiny.write_jsonl(tmp_path / "questions.jsonl", rows), tiny.tokenizer())


def loglikelihood(model, prompt: list[int], whole: list[int]) -> float:
    """Of what `whole` has behind `prompt`, by one forward without a cache."""
    with torch.no_grad():
        logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(logprobs[at - 1, whole[at]].item() for at in range(len(prompt), len(whole)))


def test_every_arm_by_forwards_of_its_own(model, document, questions):
    tokenizer = tiny.tokenizer()
    dialogue = Dialogue(tokenizer)
    fw.attach(model, fw.Cartridge(8), name="brenn")
    rows = evaluate_document(model, tokenizer, document, questions, ["brenn"], max_new_tokens=4, timed=1)
    assert [row["context"] for row in rows] == ["nothing", "brenn", "document"]
    assert [row["tokens"] for row in rows] == [0, 8, len(document)]
    for row, adapter, text in zip(rows, (None, "brenn", None), (None, None, document), strict=True):
        fw.set_active(model, adapter)
        total, count = 0.0, 0
        for question in questions:
            prompt = dialogue.ids(question.prompt, text=text)
            whole = dialogue.ids(question.prompt, question.answer, text)
            total += loglikelihood(model, prompt, whole)
            count += len(whole) - len(prompt)
        assert row["loglik/token"] == pytest.approx(total / count, abs=1e-4)
        assert row["first token s"] > 0
        assert row["tokens/s"] > 0
    low, own, high = (row["loglik/token"] for row in rows)
    assert rows[1]["gap closed"] == pytest.approx((own - low) / (high - low))
    assert rows[1]["gap low"] <= rows[1]["gap closed"] <= rows[1]["gap high"]
    assert [[row["gap low"], row["gap closed"], row["gap high"]] for row in rows[::2]] == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("count", [1, 2])
def test_a_template_that_opens_an_answer_with_a_thought(model, document, questions, count):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = tiny.TEMPLATE.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")
    rows = evaluate_document(model, tokenizer, document, questions[:count], [], max_new_tokens=4, timed=1)
    total, tokens = 0.0, 0
    for question in questions[:count]:
        prompt = tokenizer(f"<user>{question.prompt[0]['content']}<end><assistant>")["input_ids"]
        answer = tokenizer(f"{question.answer[0]['content']}<end>")["input_ids"]
        total += loglikelihood(model, prompt, prompt + answer)
        tokens += len(answer)
    assert rows[0]["loglik/token"] == pytest.approx(total / tokens, abs=1e-4)


def test_a_cartridge_that_has_diverged_is_refused(model, document, questions):
    for parameter in fw.attach(model, fw.Cartridge(8)).trainable_parameters:
        parameter.data.fill_(torch.nan)
    with pytest.raises(fw.ForewordError, match="of the answer to question 1 from default is nan: the adapter"):
        evaluate_document(model, tiny.tokenizer(), document, questions)


def test_bytes_are_those_of_keys_and_values(model, document, questions):
    tokenizer = tiny.tokenizer()
    fw.attach(model, fw.Cartridge(8))
    rows = evaluate_document(model, tokenizer, document, questions, max_new_tokens=4, timed=2)
    token = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes of fp32
    nothing, cartridge, whole = (row["KV bytes"] for row in rows)
    assert cartridge - nothing == 8 * token
    assert whole - nothing == token * (len(document) + len(tokenizer("<system><end>").input_ids))


def test_given_answers_are_compared_and_written_ones_are_not(model, document, questions):
    rows = evaluate_document(model, tiny.tokenizer(), document, questions, [], max_new_tokens=4, timed=1)
    assert len(rows) == 2
    assert all(row["exact"] == 0 and 0 <= row["f1"] <= 1 for row in rows)
    written = [Question(one.prompt, one.answer, given=False) for one in questions]
    rows = evaluate_document(model, tiny.tokenizer(), document, written, [], max_new_tokens=4, timed=1)
    assert all(row["exact"] is None and row["f1"] is None for row in rows)


def test_a_document_longer_than_the_context_is_cut(model, document, questions):
    model.config.max_position_embeddings = 100
    row = evaluate_document(model, tiny.tokenizer(), document, questions, [], max_new_tokens=4, timed=1)[-1]
    assert row["context"] == f"document, first {row['tokens']} of {len(document)} tokens"
    assert 0 < row["tokens"] < len(document)
    model.config.max_position_embeddings = 40
    with pytest.raises(fw.ForewordError, match="context is 40"):
        evaluate_document(model, tiny.tokenizer(), document, questions, [])


@torch.no_grad()
def test_greedy_is_what_generate_says(model):
    from transformers import DynamicCache

    ids = [5, 6, 7, 8]
    expected = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 4:].tolist()
    assert greedy(model, ids, DynamicCache(config=model.config), 6, frozenset())[0] == expected
    assert greedy(model, ids, DynamicCache(config=model.config), 6, frozenset(expected[2:3]))[0] == expected[:2]


def test_written_questions_are_not_those_of_training(model, document, tmp_path, monkeypatch):
    from foreword.compress import study
    from foreword.compress.shards import Conversations

    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path))
    settings = SelfStudy(
        conversations=3, shortest_chunk=20, longest_chunk=30, question_tokens=8, answer_tokens=8, batch_size=2
    )
    trained = Conversations(study(model, tiny.tokenizer(), document, settings))
    written = write_questions(model, tiny.tokenizer(), document, settings)
    assert 0 < len(written) <= 3
    asked = {trained.conversation(i).question for i in range(len(trained))}
    assert not asked & {one.prompt[0]["content"] for one in written}


def test_questions_have_to_be_some(model, document, tmp_path):
    with pytest.raises(fw.ForewordError, match="no questions"):
        evaluate_document(model, tiny.tokenizer(), document, [], [])
    with pytest.raises(fw.ForewordError, match="plain text"):
        read_questions(tiny.write_jsonl(tmp_path / "text.jsonl", [{"text": "Once."}]), tiny.tokenizer())


@pytest.mark.parametrize(
    ("said", "right", "match", "overlap"),
    [
        ("The keeper, Ansa!", "keeper ansa", 1, 1),
        ("It was Ansa", "Ansa", 0, 0.5),
        ("Nobody", "Ansa", 0, 0),
        ("", "Ansa", 0, 0),
        ("the", "a", 1, 1),
    ],
)
def test_exact_match_and_f1(said, right, match, overlap):
    assert exact(said, right) == match
    assert f1(said, right) == pytest.approx(overlap)


def test_on_the_command_line(model, tmp_path, capsys, monkeypatch):
    import json

    from foreword.cli import main

    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path / "cache"))
    model.save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    base, _ = fw.base(tmp_path / "base")
    fw.attach(base, fw.Cartridge(8)).save(tmp_path / "cartridge")
    (tmp_path / "a.txt").write_text("The lighthouse of Brenn was built in 1731.")
    asked = tiny.write_jsonl(tmp_path / "questions.jsonl", [{"question": "When?", "answer": "In 1731."}])
    words = ["eval", "--document", tmp_path / "a.txt", "--adapter", tmp_path / "cartridge", "--max_new_tokens", "3"]
    for more, compared in ((["--questions", asked], True), (["--held_out", "2"], False)):
        code = main([str(word) for word in (*words, *more, "--json")])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        rows = json.loads(captured.out)["document"]
        assert [row["context"] for row in rows] == ["nothing", "default", "document"]
        assert all((row["f1"] is not None) == compared for row in rows)
    assert main([str(word) for word in (*words, "--questions", asked)]) == 0
    assert "gap closed" in capsys.readouterr().out
