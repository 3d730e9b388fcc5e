"""Free generation: references, and the option that an answer names."""

import json

import pytest

import tiny
from foreword.cli import main
from foreword.errors import ForewordError
from foreword.evaluate import evaluate, generation, read_task
from foreword.evaluate import evaluation as evaluation_module
from foreword.evaluate.evaluation import default_sampling
from foreword.evaluate.generation import match_option, option_prompt
from foreword.generation import Sampling

OPTIONS = ["a red fox", "a blue whale", "a green frog"]


@pytest.mark.parametrize(
    ("said", "option"),
    [
        ("It must be A Blue Whale.", 1),
        ("a red fox or a green frog", None),  # two options occur: wrong, whichever is right
        ("a gren frog", 2),  # none occurs: the nearest
    ],
)
def test_the_option_that_an_answer_names(said, option):
    assert match_option(said, OPTIONS) == option


def test_no_answer_names_a_blank_option():
    assert match_option("It must be a blue whale.", [*OPTIONS, " "]) == 1


def test_options_are_shown_as_lines(tokenizer):
    example = {"prompt": "Question: Who swims?\nAnswer:", "choices": [f" {option}" for option in OPTIONS]}
    (turn,) = option_prompt(example, tokenizer)
    assert turn["content"] == "Who swims?\n- a red fox\n- a blue whale\n- a green frog"
    tokenizer.chat_template = None
    assert option_prompt(example, tokenizer).startswith("### Instruction:\nWho swims?\n- a red fox\n")


def say(monkeypatch, module, answers):
    monkeypatch.setattr(module, "answer", lambda model, tokenizer, prompts, sampling: answers[: len(prompts)])


def test_the_protocol_counts_named_options(monkeypatch, tmp_path, tokenizer):
    rows = [{"question": "Who swims?", "choices": OPTIONS, "answer": 1} for _ in range(3)]
    task = read_task(tiny.write_jsonl(tmp_path / "animals.jsonl", rows))
    say(monkeypatch, generation, ["the blue whale: a blue whale", "a red fox", "a red fox, a blue whale"])
    result = evaluate(None, tokenizer, task, protocol="generation")
    assert [record["accuracy"] for record in result.records] == [1, 0, 0]
    assert default_sampling("choices", "generation").temperature == 0.1


def test_generation_takes_the_best_of_several_references(monkeypatch, tmp_path, tokenizer):
    pytest.importorskip("sacrebleu", reason="sacrebleu is not installed: pip install 'foreword[eval]'")
    pytest.importorskip("rouge_score", reason="rouge-score is not installed: pip install 'foreword[eval]'")
    rows = [
        {"prompt": "Say it.", "references": ["the cat sat on the mat", "a cat was on a mat"]},
        {"prompt": "Say it again.", "references": ["the dog stood in the long grass"]},
    ]
    task = read_task(tiny.write_jsonl(tmp_path / "pairs.jsonl", rows))
    assert task.kind == "generation"
    say(monkeypatch, generation, ["a cat was on a mat", "the dog stood in the short grass"])
    result = evaluate(None, tokenizer, task)
    assert [record["exact_match"] for record in result.records] == [1, 0]
    assert result.records[0]["rougeL"] == 1
    assert result.records[1]["rougeL"] == pytest.approx(6 / 7)  # six of seven words in order, either way
    assert 0 < result.scores["bleu"].low <= result.scores["bleu"].value < 100


def test_prompts_with_references_become_messages_as_those_of_training_do(tmp_path):
    path = tiny.write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "Say it.", "references": ["it"]}])
    assert read_task(path).examples[0]["prompt"] == "Say it."
    assert read_task(path, chat=True).examples[0]["prompt"] == [{"role": "user", "content": "Say it."}]


def test_restaurants_are_scored_by_their_facts(monkeypatch, tokenizer):
    task = read_task("restaurant").limited(4)
    right = [example["completion"][0]["content"] for example in task.examples]
    say(monkeypatch, evaluation_module, [*right[:3], "nothing"])
    result = evaluate(None, tokenizer, task)
    assert [record["facts"] for record in result.records] == [1, 1, 1, 0]
    assert result.scores["exact_match"].value == 0.75
    assert result.metric == "facts"


def test_tasks_name_what_is_wrong_with_a_file(tmp_path):
    with pytest.raises(ForewordError, match="holds plain text, which has no answers"):
        read_task(tiny.write_jsonl(tmp_path / "a.jsonl", [{"text": "once"}]))
    with pytest.raises(ForewordError, match="line 2: field 'references' must be a list of one or more texts"):
        read_task(tiny.write_jsonl(tmp_path / "b.jsonl", [{"prompt": "p", "references": ["x"]}, {"prompt": "p"}]))


def test_the_command_scores_files_and_times_the_model(tmp_path, capsys):
    base = tiny.save(tmp_path / "base")
    labels = tiny.write_jsonl(
        tmp_path / "colours.jsonl", [{"text": "sky", "label": "blue"}, {"text": "lawn", "label": "green"}]
    )
    code = main(
        f"eval --tasks {labels} --model {base} --output {tmp_path / 'out'} --speed --json --batch_size 2".split()
    )
    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert printed == json.loads((tmp_path / "out" / "eval.json").read_text())
    assert printed["results"][0]["examples"] == 2
    assert printed["speed"]["first_token_ms"] > 0
    assert printed["speed"]["decode_tokens_per_second"] > 0
    records = [json.loads(line) for line in (tmp_path / "out" / "colours.jsonl").read_text().splitlines()]
    assert {"loglikelihoods", "predicted", "answer"} <= records[0].keys()
    assert main(["eval", "--model", str(base)]) == 2
    assert "eval needs --tasks" in capsys.readouterr().err


def test_two_tasks_of_one_name_are_refused_before_the_model_is_loaded(tmp_path, capsys):
    for tasks in ("one/colours.jsonl,two/colours.jsonl", "arc_easy@a.jsonl,arc_easy@b.jsonl"):
        assert main(["eval", "--tasks", tasks, "--model", str(tmp_path / "absent")]) == 2
        assert "two of the tasks are called" in capsys.readouterr().err


def test_sampling_of_the_command_starts_from_the_tasks_own():
    assert default_sampling("restaurant") == Sampling(max_new_tokens=64)
    assert default_sampling("labels") == Sampling()
