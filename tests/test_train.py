"""Training: only the adapter learns, and a killed run ends as an uninterrupted one."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

import foreword as fw
import foreword.train as module
import tiny
from foreword.space import resolve
from foreword.train import Training, last_checkpoint, train
from foreword.trainer import AdapterTrainer, Diverged

METHOD = fw.PrefixTuning(length=4, dropout=0.1)  # dropout, so that random numbers matter


def settings(folder, **changes) -> Training:
    defaults = {
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.02,
        "save_strategy": "steps",
        "save_steps": 3,
        "logging_steps": 1,
    }
    return Training(output_dir=str(folder), **(defaults | changes))


def data(count: int = 24) -> Dataset:
    return Dataset.from_list(tiny.rows(count))


def weights(folder) -> dict[str, torch.Tensor]:
    model = tiny.model()
    return {name: tensor.clone() for name, tensor in fw.load(model, folder).state_dict().items()}


def test_only_the_adapter_learns(tmp_path):
    model, tokenizer = tiny.model(), tiny.tokenizer()
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    result = train(model, tokenizer, METHOD, data(), settings(tmp_path), eval_data=data(8))
    losses = [line["loss"] for line in result.history if "loss" in line]
    assert losses[-1] < losses[0]
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if "foreword" not in name)
    assert any("eval_loss" in line for line in result.history)
    summary = json.loads((tmp_path / "training.json").read_text())
    assert summary["trainable"] == result.adapter.num_trainable
    saved = weights(tmp_path)
    assert all(torch.equal(saved[name], tensor) for name, tensor in result.adapter.state_dict().items())


@pytest.mark.parametrize("method", ["zero-init", "zero-init-nonlinear", "deep-prompt", "prompt-tuning", "random-init"])
def test_each_method_lowers_the_loss(method, tmp_path):
    result = train(tiny.model(), tiny.tokenizer(), method, data(), settings(tmp_path, max_steps=20, save_strategy="no"))
    losses = [line["loss"] for line in result.history if "loss" in line]
    assert sum(losses[-4:]) < sum(losses[:4])


def test_checkpoints_hold_the_adapter_only(tmp_path):
    train(tiny.model(), tiny.tokenizer(), METHOD, data(), settings(tmp_path))
    checkpoint = last_checkpoint(tmp_path)
    names = {path.name for path in checkpoint.iterdir()}
    assert "model.safetensors" not in names
    assert "adapter.json" in names
    assert checkpoint.name == "checkpoint-12"


RUN = """
    import sys
    sys.path.insert(0, {tests!r})
    import tiny, torch
    from test_train import METHOD, data, settings
    from foreword.train import train
    torch.set_num_threads(1)
    train(tiny.model(), tiny.tokenizer(), METHOD, data(), settings({folder!r}, resume_from_checkpoint=True))
"""


def run(folder) -> subprocess.Popen:
    code = textwrap.dedent(RUN.format(tests=os.path.dirname(__file__), folder=str(folder)))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_run_that_is_killed_again_and_again_always_goes_on(tmp_path):
    """SIGKILL at random moments, also while a checkpoint is written; FOREWORD_KILLS of them, 3 by default.

    The newest whole checkpoint always loads, and never is an older one than before.
    """
    draw, step = random.Random(0), 0
    for _ in range(int(os.environ.get("FOREWORD_KILLS", "3"))):
        process = run(tmp_path / "killed")
        while process.poll() is None and last_checkpoint_step(tmp_path / "killed") <= step:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.3))
        process.kill()
        process.wait()
        newest = last_checkpoint(tmp_path / "killed")
        step = last_checkpoint_step(tmp_path / "killed")
        assert newest.name == f"checkpoint-{step}"
        assert weights(newest)
        if step == 12:
            break
    assert run(tmp_path / "killed").wait() == 0
    assert weights(tmp_path / "killed")


def test_a_killed_run_ends_as_an_uninterrupted_one(tmp_path):
    assert run(tmp_path / "whole").wait() == 0
    process = run(tmp_path / "killed")
    while last_checkpoint_step(tmp_path / "killed") < 6:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "adapter.json").exists()
    assert run(tmp_path / "killed").wait() == 0
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_resumed_run_counts_the_seconds_before_its_checkpoint(tmp_path):
    train(tiny.model(), tiny.tokenizer(), METHOD, data(), settings(tmp_path))
    newest = last_checkpoint(tmp_path)
    assert 0 < json.loads((newest / "seconds.json").read_text())["seconds"] < 1000
    (newest / "seconds.json").write_text('{"seconds": 1000}')
    result = train(tiny.model(), tiny.tokenizer(), METHOD, data(), settings(tmp_path, resume_from_checkpoint=True))
    assert 1000 <= result.seconds < 2000


def test_a_resumed_run_logs_what_an_uninterrupted_one_does(tmp_path):
    """Also where checkpoints and log lines come at different steps."""
    chosen = settings(tmp_path, logging_steps=5, resume_from_checkpoint=True)
    whole = train(tiny.model(), tiny.tokenizer(), METHOD, data(), chosen)
    shutil.rmtree(last_checkpoint(tmp_path))
    assert last_checkpoint(tmp_path).name == "checkpoint-9"
    resumed = train(tiny.model(), tiny.tokenizer(), METHOD, data(), chosen)
    assert [line["step"] for line in loss_lines(whole)] == [3, 5, 6, 9, 10, 12]
    assert loss_lines(resumed) == loss_lines(whole)


def loss_lines(result) -> list[dict]:
    return [line for line in result.history if "loss" in line]


def last_checkpoint_step(folder) -> int:
    found = [int(path.parent.name.split("-")[1]) for path in folder.glob("checkpoints/checkpoint-*/trainer_state.json")]
    return max(found, default=0)


def test_a_cut_off_checkpoint_is_passed_over(tmp_path):
    train(tiny.model(), tiny.tokenizer(), METHOD, data(), settings(tmp_path))
    newest = last_checkpoint(tmp_path)
    (newest / "trainer_state.json").write_text('{"epoch": 1.')
    assert last_checkpoint(tmp_path).name == "checkpoint-9"
    assert not newest.exists()


def test_an_unfinished_run_is_not_overwritten(tmp_path):
    train(tiny.model(), tiny.tokenizer(), METHOD, data(), settings(tmp_path))
    (tmp_path / "training.json").unlink()
    with pytest.raises(fw.ForewordError, match="unfinished run"):
        train(tiny.model(), tiny.tokenizer(), METHOD, data(), settings(tmp_path))


def test_early_stopping_keeps_the_best(tmp_path):
    """Held-out completions that contradict the training data, so that their loss soon rises."""
    stops = settings(
        tmp_path, max_steps=90, learning_rate=0.2, early_stopping_patience=2, eval_strategy="steps", eval_steps=3
    )
    other = Dataset.from_list([row | {"completion": " ZZZZ"} for row in tiny.rows(8)])
    result = train(tiny.model(), tiny.tokenizer(), METHOD, data(), stops, eval_data=other)
    evals = [line["eval_loss"] for line in result.history if "eval_loss" in line]
    assert len(evals) < 30
    assert min(evals) < evals[-1]
    again = evaluate(result, other)
    assert abs(again - min(evals)) < 1e-3


def evaluate(result, examples) -> float:
    """The loss of the trained adapter on examples, row by row."""
    tokenizer, total, count = tiny.tokenizer(), 0.0, 0
    for row in examples:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor([prompt + tokenizer(row["completion"])["input_ids"] + [tokenizer.eos_token_id]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        learned = ids.shape[1] - len(prompt)
        with torch.no_grad():
            total += result.adapter.model(input_ids=ids, labels=labels).loss.item() * learned
        count += learned
    return total / count


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    named = (
        r"the loss is (nan|inf) at step \d+, in batch 1 of the step, whose first row begins '.+'; lower learning_rate"
    )
    with pytest.raises(Diverged, match=named):
        train(
            tiny.model(),
            tiny.tokenizer(),
            METHOD,
            data(),
            settings(tmp_path, learning_rate=1e38, max_grad_norm=0.0, warmup_steps=0, lr_scheduler_type="constant"),
        )


def test_after_a_loss_that_is_no_number_one_can_train_again(tmp_path):
    """Also where it came behind the last log line. Nothing was saved, and the model is as it was."""
    model, tokenizer = tiny.model(), tiny.tokenizer()
    fw.attach(model, "zero-init", name="other")
    chosen = settings(tmp_path, max_steps=4, logging_steps=5, learning_rate=1e20, save_strategy="no")
    with pytest.raises(Diverged, match="the loss is nan"):
        train(model, tokenizer, METHOD, data(), chosen)
    assert not list(tmp_path.glob("*.*"))
    assert fw.adapters(model) == ["other"]
    assert model.foreword.active == "other"
    assert not model.training
    train(model, tokenizer, METHOD, data(), settings(tmp_path, max_steps=1, learning_rate=1e-3, save_strategy="no"))
    assert fw.adapters(model) == ["other", "default"]


@pytest.mark.parametrize("save_strategy", ["no", "steps"])
def test_an_adapter_that_is_not_finite_is_not_saved(save_strategy, tmp_path):
    """The last update broke it, so that no loss tells."""
    chosen = settings(tmp_path, max_steps=1, learning_rate=1e39, warmup_steps=0, save_strategy=save_strategy)
    with pytest.raises(Diverged, match=r"numbers that are not finite after step 1; lower learning_rate \(1e\+39\)"):
        train(tiny.model(), tiny.tokenizer(), METHOD, data(), chosen)
    assert not list(tmp_path.rglob("adapter.json"))


def test_a_held_out_loss_that_is_no_number_stops_the_run(tmp_path):
    """The last update leaves numbers that are finite and too large to compute with."""
    chosen = settings(tmp_path, max_steps=1, learning_rate=1e38, warmup_steps=0, eval_strategy="steps", eval_steps=1)
    with pytest.raises(Diverged, match="the held-out loss is nan after step 1"):
        train(tiny.model(), tiny.tokenizer(), METHOD, data(), chosen, eval_data=data(8))
    assert not list(tmp_path.rglob("adapter.json"))


def test_the_batch_that_is_no_number_is_named(tmp_path, monkeypatch):
    """Found when the step is logged, two batches and a step later."""
    completion_loss = AdapterTrainer.objective

    def loss_of(model, inputs, num_items):
        loss, outputs = completion_loss(model, inputs, num_items)
        poisoned = (inputs["input_ids"] == tiny.tokenizer()("Z")["input_ids"][0]).any()
        return loss * (torch.nan if poisoned else 1), outputs

    monkeypatch.setattr(AdapterTrainer, "objective", staticmethod(loss_of))
    rows = Dataset.from_list([{"prompt": f"{'Z' if i == 13 else 'ok'} {i}:", "completion": " x"} for i in range(24)])
    changes = {"gradient_accumulation_steps": 2, "logging_steps": 3, "max_steps": 3, "per_device_train_batch_size": 1}
    chosen = settings(tmp_path, trainer={"shuffle_dataset": False, "train_sampling_strategy": "sequential"}, **changes)
    chosen.max_steps = 9
    with pytest.raises(
        fw.ForewordError, match=r"nan at step 7, in batch 2 of the step, whose first row begins 'Z 13: x"
    ):
        train(tiny.model(), tiny.tokenizer(), METHOD, rows, chosen)


def test_seeds_decide_the_result(tmp_path):
    results = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tiny.model(), tiny.tokenizer(), METHOD, data(), settings(tmp_path / name, seed=seed, save_strategy="no"))
        results.append(weights(tmp_path / name))
    key = next(iter(results[0]))
    assert torch.equal(results[0][key], results[1][key])
    assert not torch.equal(results[0][key], results[2][key])


def test_gradient_checkpointing_gives_the_same_adapter(tmp_path):
    results = []
    for name, on in (("plain", False), ("checkpointed", True)):
        chosen = settings(tmp_path / name, gradient_checkpointing=on, save_strategy="no")
        train(tiny.model(), tiny.tokenizer(), fw.PrefixTuning(length=4), data(), chosen)
        results.append(weights(tmp_path / name))
    for key in results[0]:
        torch.testing.assert_close(results[0][key], results[1][key], atol=1e-5, rtol=1e-4)


def test_bf16_base_keeps_fp32_adapters(tmp_path):
    model = tiny.model().bfloat16()
    result = train(model, tiny.tokenizer(), METHOD, data(), settings(tmp_path, save_strategy="no"))
    assert {parameter.dtype for parameter in result.adapter.trainable_parameters} == {torch.float32}
    assert all(
        parameter.dtype == torch.bfloat16 for name, parameter in model.named_parameters() if "foreword" not in name
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"no_such_field": 1}}, "SFTConfig has no field 'no_such_field'"),
        ({"trainer": {"max_steps": 2}}, "trainer: max_steps is a training setting itself"),
        ({"trainer": {"label_smoothing_factor": 0.1}}, "label_smoothing_factor can only be 0"),
        ({"trainer": {"loss_type": "dft"}}, "loss_type can only be 'nll'"),
        ({"trainer": {"optim": "zigzag"}}, "zigzag"),
        ({"max_length": 3}, r"the prompt of every training example fills max_length \(3 tokens\)"),
        ({"lr_scheduler_type": "zigzag"}, "zigzag"),
        ({"early_stopping_patience": 2}, "held-out data"),
    ],
)
def test_wrong_settings_are_one_line(changes, message, tmp_path):
    with pytest.raises(fw.ForewordError, match=message) as raised:
        train(tiny.model(), tiny.tokenizer(), METHOD, data(), settings(tmp_path, **changes))
    assert "\n" not in str(raised.value)


def test_examples_that_max_length_leaves_nothing_of_are_not_counted(tmp_path, caplog):
    rows = [{"prompt": "x" * length, "completion": " yes"} for length in [40] * 16 + [1] * 8]
    chosen = settings(tmp_path, max_steps=-1, num_train_epochs=1, max_length=32, save_strategy="no")
    train(tiny.model(), tiny.tokenizer(), METHOD, Dataset.from_list(rows), chosen, eval_data=Dataset.from_list(rows))
    summary = json.loads((tmp_path / "training.json").read_text())
    assert summary["examples"] == {"train": 8, "eval": 8}
    assert summary["steps"] == 2
    assert [record.getMessage() for record in caplog.records if record.name == "foreword.train"] == [
        f"16 of 24 {kind} examples are left out: their prompt fills max_length (32 tokens)"
        for kind in ("training", "held-out")
    ]


def test_a_prefix_may_be_longer_than_the_text_of_all_examples(tmp_path):
    chosen = settings(tmp_path, max_steps=1, per_device_train_batch_size=1, save_strategy="no")
    result = train(tiny.model(), tiny.tokenizer(), fw.PrefixTuning(length=4100), data(), chosen)
    assert result.adapter.num_stored == 3 * 4100 * 2 * 16


@pytest.mark.parametrize("method", sorted({*fw.methods()} - {"bitfit"}))  # the tiny model has no biases
def test_every_method_gets_the_text_that_it_starts_from(method, monkeypatch):
    monkeypatch.setattr(module, "LEAST", 1)
    ids = module._init_ids(data(1), tiny.tokenizer(), [resolve(method)])
    fw.attach(tiny.model(), method, init_ids=ids)


def test_the_text_to_start_from_has_the_special_tokens_that_training_has():
    tokenizer = tiny.tokenizer()
    start = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<start> $A", special_tokens=[("<start>", start)])
    turns = [{"role": "user", "content": "hi"}]
    templated = Dataset.from_list([{"prompt": turns, "completion": [{"role": "assistant", "content": "ho"}]}] * 2)
    for rows, count in ((data(2), 1), (templated, 0)):
        ids = module._init_ids(rows, tokenizer, [resolve("lora")])
        assert (ids[:12] == start).sum() == count


def test_an_encoder_decoder_is_refused(tmp_path):
    import zoo

    with pytest.raises(fw.ForewordError, match="causal language model"):
        train(zoo.make("t5"), tiny.tokenizer(), METHOD, data(), settings(tmp_path))
