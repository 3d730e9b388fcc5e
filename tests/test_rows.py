"""One adapter a row: order, nesting, expansion, threads, errors."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

import foreword as fw
import zoo
from conformance import close, shake, text
from surroundings import is_one_line

METHODS = {"short": fw.PrefixTuning(length=2), "long": fw.PrefixTuning(length=7), "gated": fw.ZeroInit(length=3)}


@pytest.fixture
def model():
    model = zoo.make("llama")
    for seed, (name, method) in enumerate(METHODS.items()):
        shake(fw.attach(model, method, name=name), seed=seed, std=0.8)
    fw.set_active(model, None)
    return model


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def alone(model, ids, names):
    """Each row by itself, with its adapter active."""
    active = model.foreword.active
    outs = []
    for row, name in zip(ids, names, strict=True):
        fw.set_active(model, name)
        outs.append(logits(model, row[None])[0])
    fw.set_active(model, active)
    return torch.stack(outs)


@pytest.mark.parametrize(
    "names",
    [
        ["short", "long", None, "gated", "short", None],
        ["gated", "gated", "long", "long", "short", "short"],
        ["short"] * 6,
        [None] * 5 + ["gated"],
    ],
)
def test_each_row_reads_its_adapter(model, names):
    """Prefixes of several lengths, gated and joint ones, and the base in one batch."""
    ids = text(batch=6)
    with fw.rows(model, names):
        mixed = logits(model, ids)
    close(mixed, alone(model, ids, names))


def test_rows_of_the_base_are_the_base(model):
    ids = text()
    fw.set_active(model, "long")
    with fw.rows(model, [None] * 3):
        mixed = logits(model, ids)
    fw.set_active(model, None)
    assert torch.equal(mixed, logits(model, ids))


def test_names_repeat_over_a_larger_batch(model):
    """A batch of k·n rows gives each of n names k rows side by side, as beams and samples stand."""
    ids = text(batch=6)
    with fw.rows(model, ["short", "gated", None]):
        mixed = logits(model, ids)
    close(mixed, alone(model, ids, ["short", "short", "gated", "gated", None, None]))


def test_sampled_sequences_follow_their_row(model):
    ids = text(batch=2)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "num_return_sequences": 3}
    with fw.rows(model, ["short", "gated"]):
        greedy_beams = model.generate(ids, num_beams=3, **settings)
    for row, name in enumerate(["short", "gated"]):
        fw.set_active(model, name)
        single = model.generate(ids[row : row + 1], num_beams=3, **settings | {"attention_mask": torch.ones(1, 7)})
        assert torch.equal(greedy_beams[3 * row : 3 * row + 3], single)


def test_gradients_of_a_mixed_batch_are_those_of_the_rows(model):
    ids = text(batch=4)
    names = ["short", None, "long", "short"]
    with fw.rows(model, names):
        model(ids).logits.pow(2).sum().backward()
    mixed = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {key.split(".adapters.")[1].split(".")[0] for key in mixed} == {"short", "long"}
    model.zero_grad()
    for row, name in zip(ids, names, strict=True):
        if name is not None:
            fw.set_active(model, name)
            model(row[None]).logits.pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        if name in mixed:
            close(mixed[name], parameter.grad, 1e-2)  # sums of squares, large numbers


def test_blocks_nest_and_end(model):
    ids = text(batch=2)
    outer, inner, base = (alone(model, ids, names) for names in (["short"] * 2, ["gated"] * 2, [None] * 2))
    with fw.rows(model, ["short"] * 2):
        close(logits(model, ids), outer)
        with suppress(ZeroDivisionError), fw.rows(model, ["gated"] * 2):
            close(logits(model, ids), inner)
            raise ZeroDivisionError
        close(logits(model, ids), outer)
    close(logits(model, ids), base)


def test_models_are_kept_apart(model):
    other = zoo.make("llama")
    shake(fw.attach(other, METHODS["long"], name="long"), seed=1, std=0.8)
    ids = text(batch=2)
    expected = logits(other, ids)
    with fw.rows(model, ["short", "gated"]):
        assert torch.equal(logits(other, ids), expected)


@pytest.mark.parametrize("names", [[], (), "short"])
def test_no_names(model, names):
    with pytest.raises(fw.ForewordError, match="at least one row"), fw.rows(model, names):
        pass


def test_an_unknown_name(model):
    with pytest.raises(fw.ForewordError, match="no adapter 'shrt'") as error, fw.rows(model, ["short", "shrt"]):
        pass
    assert is_one_line(error.value)


def test_peft_s_way_to_name_adapters_is_refused(model):
    """PEFT ignores it beside a prefix, without a word."""
    with pytest.raises(fw.ForewordError, match=r"choose an adapter for each row with `foreword\.rows`"):
        model(text(batch=2), adapter_names=["short", "long"])


def test_several_adapters_for_one_row(model):
    for call in (fw.set_active, fw.detach):
        with pytest.raises(fw.ForewordError, match=r"`join` puts trained prefixes side by side") as error:
            call(model, ["short", "long"])
        assert is_one_line(error.value)
    with pytest.raises(fw.ForewordError, match="a forward reads one adapter"), fw.rows(model, [["short", "long"]]):
        pass


def test_a_batch_that_the_names_do_not_divide(model):
    with (
        fw.rows(model, ["short", "long"]),
        pytest.raises(fw.ForewordError, match="2 adapters for a batch of 3 rows") as error,
    ):
        logits(model, text(batch=3))
    assert is_one_line(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# Threads


def generate(model, ids):
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)


def test_threads_do_not_see_each_others_rows(model):
    """Several threads generate on one model at once, each with an adapter of its own."""
    ids = text(batch=2)
    expected = {}
    for name in [*METHODS, None]:
        fw.set_active(model, name)
        expected[name] = generate(model, ids)
    assert len({tuple(out.flatten().tolist()) for out in expected.values()}) == 4
    fw.set_active(model, "long")
    start = threading.Barrier(4)

    def work(name):
        start.wait()
        outs = []
        for _ in range(4):
            with fw.rows(model, [name, name]):
                outs.append(generate(model, ids))
            outs.append(generate(model, ids))
        return outs

    with ThreadPoolExecutor(4) as pool:
        for name, outs in zip(expected, pool.map(work, expected), strict=True):
            assert all(torch.equal(out, expected[name]) for out in outs[::2])
            assert all(torch.equal(out, expected["long"]) for out in outs[1::2])


def test_a_thread_trains_while_another_generates(model):
    """A gradient step in one thread reads its own rows; the other's tokens are those of its adapter."""
    ids = text(batch=2)
    fw.set_active(model, "gated")
    expected = generate(model, ids)
    fw.set_active(model, None)
    stop = threading.Event()
    parameter = model.foreword.adapters["short"].trainable_parameters[0]
    gradients = []

    def train():
        while not stop.is_set():
            with fw.rows(model, ["short", "short"]):
                loss = model(ids, use_cache=False).logits.pow(2).mean()
            (gradient,) = torch.autograd.grad(loss, [parameter])
            gradients.append(gradient)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(5):
            with fw.rows(model, ["gated", "gated"]):
                assert torch.equal(generate(model, ids), expected)
    finally:
        stop.set()
        trainer.join()
    assert len(gradients) > 1
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
