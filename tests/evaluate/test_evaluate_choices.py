"""Choices and labels by log-likelihood: against a plain computation, and against lm-evaluation-harness."""

import json
import math

import pytest
import torch
import yaml

import foreword as fw
import tiny
from foreword.errors import ForewordError
from foreword.evaluate import Interval, Result, evaluate, read_task
from foreword.evaluate.choices import score_choices
from foreword.evaluate.labels import macro_f1, with_labels
from foreword.evaluate.likelihood import Pair, encode_pair, loglikelihoods


def plain(model, pair):
    """log p(continuation | context), one token after the other."""
    total, ids = 0.0, list(pair.context)
    for token in pair.continuation:
        with torch.no_grad():
            total += model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token].item()
        ids.append(token)
    return total


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_loglikelihoods_are_those_of_one_token_after_the_other(adapted, tokenizer, batch_size):
    texts = [("ab", " c"), ("ab", " d"), ("a longer one:", " xyz"), ("", "q"), ("trailing ", "space")]
    pairs = [encode_pair(tokenizer, *text, templated=False) for text in texts]
    expected = [plain(adapted, pair) for pair in pairs]
    assert loglikelihoods(adapted, pairs, batch_size=batch_size) == pytest.approx(expected, abs=1e-4)


def test_choices_of_one_token_cost_one_row(adapted):
    rows = []
    handle = adapted.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    context = (5, 6, 7)
    scores = loglikelihoods(adapted, [Pair(context, (token,)) for token in (8, 9, 10)])
    handle.remove()
    assert rows == [1]
    assert scores == pytest.approx([plain(adapted, Pair(context, (token,))) for token in (8, 9, 10)], abs=1e-5)


def test_spaces_before_a_continuation_belong_to_it(tokenizer):
    pair = encode_pair(tokenizer, "to be  ", "or not", templated=False)
    assert tokenizer.decode(pair.context) == "to be"
    assert tokenizer.decode(pair.continuation) == "  or not"
    rendered = encode_pair(tokenizer, "<user>hi<end>\n", "yes", templated=True)
    assert tokenizer.decode(rendered.continuation) == "yes"


def test_what_cannot_be_scored_is_refused_in_one_line(adapted):
    with pytest.raises(ForewordError, match="continuation 2 has no tokens"):
        loglikelihoods(adapted, [Pair((3,), (4,)), Pair((3,), ())])
    longest = adapted.config.max_position_embeddings
    with pytest.raises(ForewordError, match=f"pair 1 is {longest + 1} tokens long; the model reads at most {longest}"):
        loglikelihoods(adapted, [Pair((3,) * (longest + 1), (4,))])


def test_an_adapter_that_has_diverged_has_no_score(tokenizer, questions):
    model = tiny.model()
    for parameter in fw.attach(model, fw.PrefixTuning(length=3)).trainable_parameters:
        parameter.data.fill_(torch.nan)
    with pytest.raises(ForewordError, match=r"the log-likelihood of pair \d+ is nan: the adapter has diverged"):
        evaluate(model, tokenizer, read_task(questions))


def test_what_is_no_number_is_null_in_json():
    result = Result("task", "lm-eval", "acc", {"acc": Interval(0.5, -math.inf, math.nan)}, [], 0.0)
    assert result.to_dict()["scores"] == {"acc": [0.5, None, None]}


def test_the_gates_of_unipelt_see_the_prompt_alone(tokenizer):
    model = tiny.model()
    adapter = fw.attach(model, fw.UniPELT())
    for parameter in adapter.trainable_parameters:
        torch.nn.init.normal_(parameter, std=0.5)
    pair = encode_pair(tokenizer, "a prompt", " and what follows", templated=False)
    ids = torch.tensor([pair.context + pair.continuation])
    with fw.known_prompt((torch.arange(ids.shape[1]) < len(pair.context))[None]), torch.no_grad():
        logs = model(ids).logits[0].log_softmax(-1)
    start = len(pair.context)
    expected = sum(logs[start - 1 + k, token].item() for k, token in enumerate(pair.continuation))
    assert loglikelihoods(model, [pair]) == pytest.approx([expected], abs=1e-4)


def test_labels_are_counted_by_class(adapted, tokenizer, tmp_path):
    rows = [{"text": f"text {n}", "label": "yes" if n % 3 else "no"} for n in range(9)]
    task = read_task(tiny.write_jsonl(tmp_path / "test.jsonl", rows))
    assert (task.kind, task.name) == ("labels", f"{tmp_path.name}-test")
    result = evaluate(adapted, tokenizer, task)
    right = [record["predicted"] == record["answer"] for record in result.records]
    assert result.scores["accuracy"].value == sum(right) / 9
    assert 0 <= result.scores["macro_f1"].low <= result.scores["macro_f1"].value <= result.scores["macro_f1"].high
    wider = with_labels(task.examples, [" maybe", " no", " yes"])
    assert [example["answer"] for example in wider] == [2 if n % 3 else 1 for n in range(9)]


def test_macro_f1_by_hand():
    import numpy as np

    # class 0: TP 1, FN 1, FP 0 → 2/3; class 1: TP 1, FP 1, FN 0 → 2/3; class 2 is predicted once and never right → 0
    assert macro_f1(np.array([0, 0, 1, 1]), np.array([0, 1, 1, 2])) == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)


def test_lm_eval_on_the_adapted_model_says_the_same_item_by_item(adapted, tokenizer, questions):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'foreword[eval]'")
    from foreword.evaluate.harness import run_harness

    task = {
        "task": "arc_here",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{choices.label.index(answerKey)}}",
        "doc_to_choice": "{{choices.text}}",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    }
    path = questions.with_name("arc_here.yaml")
    path.write_text(yaml.safe_dump(task))
    (theirs,) = run_harness(adapted, tokenizer, [str(path)])
    examples = read_task(questions).examples
    ours = score_choices(adapted, tokenizer, examples)
    assert len(theirs.records) == len(ours) == 7
    for their, our in zip(theirs.records, ours, strict=True):
        assert their["row"] == our["row"]
        assert [float(log) for log in their["responses"]] == pytest.approx(our["loglikelihoods"], abs=1e-3)
        assert (their["acc"], their["acc_norm"]) == (our["accuracy"], our["accuracy_norm"])
    fw.set_active(adapted, None)
    base = score_choices(adapted, tokenizer, examples)
    assert any(abs(a - b) > 0.1 for a, b in zip(base[0]["loglikelihoods"], ours[0]["loglikelihoods"], strict=True))


def test_gates_that_read_the_prompt_are_refused_by_lm_eval(tokenizer):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'foreword[eval]'")
    from foreword.evaluate.harness import run_harness

    model = tiny.model()
    fw.attach(model, "unipelt")
    with pytest.raises(ForewordError, match="unipelt computes its gates from the prompt"):
        run_harness(model, tokenizer, ["arc_easy"])


def test_two_tasks_of_one_name_are_refused(tokenizer):
    from foreword.evaluate.harness import run_harness

    with pytest.raises(ForewordError, match="two of the tasks are called arc_easy; rename a file"):
        run_harness(tiny.model(), tokenizer, ["arc_easy@a.jsonl", "arc_easy@b.jsonl"])


def test_lm_eval_gives_no_score_of_an_adapter_that_has_diverged(tokenizer, questions):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'foreword[eval]'")
    from foreword.evaluate.harness import run_harness

    model = tiny.model()
    for parameter in fw.attach(model, fw.PrefixTuning(length=3)).trainable_parameters:
        parameter.data.fill_(torch.nan)
    with pytest.raises(ForewordError, match="arc_easy: a score of document 1 is not finite"):
        run_harness(model, tokenizer, [f"arc_easy@{questions}"], limit=3)


def test_a_task_of_lm_eval_takes_local_documents(adapted, tokenizer, questions):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'foreword[eval]'")
    from foreword.evaluate.harness import run_harness

    (result,) = run_harness(adapted, tokenizer, [f"arc_easy@{questions}"], limit=3)
    assert result.task == "arc_easy"
    assert len(result.records) == 3
    assert result.scores["acc"].value == sum(record["acc"] for record in result.records) / 3
    json.dumps(result.records)
    with pytest.raises(ForewordError, match="lm-eval has no task 'arc_eazy'"):
        run_harness(adapted, tokenizer, ["arc_eazy"])
