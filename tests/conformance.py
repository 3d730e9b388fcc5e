"""What a user may do with an adapter on a model, each with the right answer.

Every check compares with something that can't share a mistake with the library: a whole forward without a cache, the
row run alone, the base model on [tokens; text], autograd without checkpointing. `CHECKS` is what a cell of the
conformance matrix has to pass; `test_conformance.py` asserts every cell and `conformance_matrix.py` prints the table.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import foreword as fw
import zoo

LENGTH = 4  # prefix tokens
TEXT = 7
NEW = 5
TOLERANCE = 1e-4


class NotApplicable(Exception):
    """The cell has no meaning: the reason."""


@dataclass
class Case:
    """A model with one adapter whose every parameter is away from its start."""

    architecture: str
    model: PreTrainedModel
    adapter: fw.Adapter

    @property
    def is_decoder(self) -> bool:
        return self.adapter.host.layout.decoder_only

    @property
    def is_seq2seq(self) -> bool:
        return self.model.config.is_encoder_decoder

    def inputs(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Keyword arguments of a forward whose text is `ids`; the encoder side of a seq2seq model is fixed."""
        if not self.is_seq2seq:
            return {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
        encoder = self.encoder_inputs(len(ids))
        return {**encoder, "decoder_input_ids": ids} | ({} if mask is None else {"decoder_attention_mask": mask})

    def encoder_inputs(self, batch: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(5)
        if self.model.main_input_name == "input_features":
            frames = 2 * self.model.config.max_source_positions
            features = torch.randn(4, self.model.config.num_mel_bins, frames, generator=generator)
            return {"input_features": features[:batch].to(self.model.dtype)}
        ids = torch.randint(3, zoo.VOCABULARY, (4, 6), generator=generator)
        mask = torch.tensor([[1] * 6, [1] * 5 + [0], [1] * 4 + [0] * 2, [1] * 6])
        return {"input_ids": ids[:batch], "attention_mask": mask[:batch]}

    def logits(self, ids: Tensor, mask: Tensor | None = None, **kwargs) -> Tensor:
        return self.model(**self.inputs(ids, mask), use_cache=False, **kwargs).logits

    def decode(self, ids: Tensor, mask: Tensor | None = None, **kwargs) -> tuple[Tensor, Tensor]:
        """The new tokens (B, NEW) that `generate` gives, and the logits (B, NEW, V) that it saw before each."""
        settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        if self.is_seq2seq:
            inputs = {**self.encoder_inputs(len(ids)), "decoder_input_ids": ids}
        else:
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}
        out = self.model.generate(**inputs, **settings | kwargs)
        return out.sequences[:, -NEW:], torch.stack(out.logits, dim=1)

    def generate(self, ids: Tensor, mask: Tensor | None = None, **kwargs) -> Tensor:
        """The new tokens (B, NEW)."""
        return self.decode(ids, mask, **kwargs)[0]

    def assert_greedy(self, ids: Tensor, new: Tensor, seen: Tensor) -> None:
        """`new` (B, NEW) and `seen` (B, NEW, V) are those of a whole forward, uncached; of tied tokens, any is."""
        with prompt_of(ids):
            expected = self.logits(torch.cat([ids, new], dim=1))[:, -NEW - 1 : -1]
        close(seen, expected, TOLERANCE * max(1.0, expected.abs().max().item()))
        assert (expected.amax(-1) - expected.gather(-1, new[..., None])[..., 0]).max() <= TOLERANCE


def make_case(architecture: str, method: fw.Method | str, dtype: torch.dtype = torch.float32) -> Case:
    """A model of the zoo with `method`, its parameters moved by noise so that every term of the equation acts."""
    model = zoo.make(architecture, dtype)
    adapter = fw.attach(model, method)
    whole = adapter.num_trainable > sum(parameter.numel() for parameter in model.parameters()) / 2
    shake(adapter, std=0.03 if whole else 0.3)  # all weights moved far are a model that amplifies rounding
    return Case(architecture, model, adapter)


def shake(adapter: fw.Adapter, seed: int = 1, std: float = 0.3) -> None:
    """Add N(0, std²) to every parameter of an adapter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.trainable_parameters:
            parameter += std * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def small(name: str) -> fw.Method:
    """A method of the registry at a size that suits the zoo, in every layer."""
    method = fw.methods()[name]
    fields = method.__dataclass_fields__
    sizes = {"length": LENGTH, "bottleneck": 4 * LENGTH, "r": LENGTH}  # with 4 units a bottleneck may be all dead ReLUs
    own = {name: size for name, size in sizes.items() if name in fields}
    if "layers" in fields and fields["layers"].default == "upper":
        own["layers"] = None  # of three layers, "upper" is one
    return method(**own)


def text(batch: int = 3, length: int = TEXT, seed: int = 2) -> Tensor:
    """Token ids (B, T) that begin with the start token, which `generate` otherwise puts in front of a decoder's."""
    ids = torch.randint(3, zoo.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
    ids[:, 0] = 1
    return ids


def left_padded(ids: Tensor, pads: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of `ids` with their last tokens kept behind `pads` pad tokens, and the mask."""
    padded, mask = ids.clone(), torch.ones_like(ids)
    for row, count in enumerate(pads):
        padded[row, :count], mask[row, :count] = 0, 0
    return padded, mask


def right_padded(ids: Tensor, pads: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of `ids` with `pads` pad tokens in the place of their last ones, and the mask."""
    padded, mask = ids.clone(), torch.ones_like(ids)
    for row, count in enumerate(pads):
        padded[row, ids.shape[1] - count :], mask[row, ids.shape[1] - count :] = 0, 0
    return padded, mask


def prompt_of(ids: Tensor):
    """A context in which forwards over `ids` and more know that `ids` is the prompt; only gates ask."""
    return fw.known_prompt(torch.ones_like(ids, dtype=torch.bool))


def close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# The columns


def backward(case: Case) -> None:
    """Every adapter parameter receives a gradient, no parameter of the base does."""
    case.logits(text()).float().pow(2).mean().backward()
    own = {id(parameter) for parameter in case.adapter.trainable_parameters}
    for name, parameter in case.model.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in own), name
    for name, parameter in case.adapter.named_parameters().items():
        if parameter.requires_grad:
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.abs().max() > 0, name


@torch.no_grad()
def mask_optional(case: Case) -> None:
    """An attention mask of ones changes nothing."""
    ids = text()
    close(case.logits(ids, torch.ones_like(ids)), case.logits(ids))


@torch.no_grad()
def acts(case: Case) -> None:
    """The adapter changes the logits; without it they, and what is generated, are the base's, bit for bit."""
    ids = text()
    adapted = case.logits(ids)
    fw.set_active(case.model, None)
    base = case.logits(ids)
    tokens = case.generate(ids, num_beams=2) if case.model.can_generate() else None
    fw.set_active(case.model, case.adapter.name)
    assert (adapted - base).abs().max() > 1e-3
    fw.detach(case.model, case.adapter.name)
    assert torch.equal(case.logits(ids), base)
    pristine = Case(case.architecture, zoo.make(case.architecture), case.adapter)
    assert torch.equal(pristine.logits(ids), base)
    assert tokens is None or torch.equal(pristine.generate(ids, num_beams=2), tokens)


@torch.no_grad()
def causal(case: Case) -> None:
    """A later token does not change an earlier logit."""
    if not (case.is_decoder or case.is_seq2seq):
        raise NotApplicable("bidirectional")
    ids = text()
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % zoo.VOCABULARY
    with prompt_of(ids[:, :2]):
        close(case.logits(other)[:, :-1], case.logits(ids)[:, :-1])


@torch.no_grad()
def padded_forward(case: Case) -> None:
    """Rows of a left-padded batch equal the rows alone, without explicit positions."""
    if not case.is_decoder:
        raise NotApplicable("an encoder's text is padded on the right")
    ids = text()
    pads = [0, 2, 3]
    padded, mask = left_padded(ids, pads)
    batch = case.logits(padded, mask)
    for row, count in enumerate(pads):
        close(batch[row, count:], case.logits(ids[row : row + 1, count:])[0])


@torch.no_grad()
def padded_encoder(case: Case) -> None:
    """Rows of an encoder's right-padded batch equal the rows alone."""
    if case.is_decoder or case.model.main_input_name == "input_features":
        raise NotApplicable("no encoder of padded text")
    ids = text()
    pads = [0, 2, 3]
    padded, mask = right_padded(ids, pads)
    decoded = {"decoder_input_ids": ids} if case.is_seq2seq else {}
    batch = case.model(input_ids=padded, attention_mask=mask, **decoded).logits
    for row, count in enumerate(pads):
        alone = ids[row : row + 1, : TEXT - count]
        decoded = {"decoder_input_ids": ids[row : row + 1]} if case.is_seq2seq else {}
        logits = case.model(input_ids=alone, attention_mask=torch.ones_like(alone), **decoded).logits
        close(batch[row, : logits.shape[1]], logits[0])


@torch.no_grad()
def greedy(case: Case) -> None:
    """Greedy generation with a cache, and without, equals a whole forward, in its logits before every token."""
    needs_generation(case)
    ids = text()
    case.assert_greedy(ids, *case.decode(ids))
    with prompt_of(ids):
        case.assert_greedy(ids, *case.decode(ids, use_cache=False))


@torch.no_grad()
def padded_greedy(case: Case) -> None:
    """Greedy generation of a left-padded batch equals each row generated alone."""
    needs_generation(case)
    if not case.is_decoder:
        raise NotApplicable("an encoder's text is padded on the right")
    assert_padded_greedy(case)


@torch.no_grad()
def beams(case: Case) -> None:
    """Beam search with a cache equals beam search without one."""
    needs_generation(case)
    ids = text(batch=2)
    with prompt_of(ids):
        assert torch.equal(case.generate(ids, num_beams=3), case.generate(ids, num_beams=3, use_cache=False))


@torch.no_grad()
def sampling(case: Case) -> None:
    """Sampling with a seed gives the same tokens with a cache and without."""
    needs_generation(case)
    ids = text()
    outs = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        with prompt_of(ids):
            outs.append(case.generate(ids, do_sample=True, top_k=20, use_cache=use_cache))
    assert torch.equal(*outs)


@torch.no_grad()
def static_cache(case: Case) -> None:
    """A static cache gives the logits of a whole forward, for a left-padded batch too."""
    needs_generation(case)
    ids = text()
    case.assert_greedy(ids, *case.decode(ids, cache_implementation="static"))
    if case.is_decoder:
        assert_padded_greedy(case, cache_implementation="static")


def checkpointing(case: Case) -> None:
    """Gradient checkpointing runs layers again and gives the gradients of the plain backward."""
    if not case.model.supports_gradient_checkpointing:
        raise NotApplicable("the model does not support it")
    runs: list[torch.nn.Module] = []
    case.adapter.host.layout.sites[-1].module.register_forward_pre_hook(lambda module, args: runs.append(module))
    plain = gradients(case)
    once = len(runs)
    case.model.activation_checkpointing_enable()
    case.model.train()
    checkpointed = gradients(case)
    assert len(runs) > 2 * once
    for name, gradient in plain.items():
        close(checkpointed[name], gradient)


@torch.no_grad()
def mixed_rows(case: Case) -> None:
    """Rows of a batch of three adapters and the base equal single runs, in a forward and with beams."""
    ids = text(batch=4)
    shake(fw.attach(case.model, case.adapter.methods, name="other"), seed=9)
    shake(fw.attach(case.model, fw.PrefixTuning(length=LENGTH + 3), name="longer"))
    names = [case.adapter.name, None, "other", "longer"]
    if not all(part.per_row for part in case.adapter.parts):
        with pytest.raises(fw.ForewordError, match=case.adapter.methods[0].name), fw.rows(case.model, names):
            pass
        raise NotApplicable("acts on every row alike; `rows` refuses it")
    expected = []
    for row, name in enumerate(names):
        fw.set_active(case.model, name)
        expected.append(case.logits(ids)[row])
    with fw.rows(case.model, names):
        close(case.logits(ids), torch.stack(expected))
    if case.model.can_generate():
        with fw.rows(case.model, names):
            mixed = case.generate(ids, num_beams=2)
        for row, name in enumerate(names):
            fw.set_active(case.model, name)
            assert torch.equal(mixed[row], case.generate(ids, num_beams=2)[row]), name


@torch.no_grad()
def saved(case: Case) -> None:
    """Saved, detached and loaded, the adapter gives the same logits, bit for bit; so does a fresh model."""
    ids = text()
    expected = case.logits(ids)
    with tempfile.TemporaryDirectory() as folder:
        case.adapter.save(folder)
        fw.detach(case.model, case.adapter.name)
        fw.load(case.model, folder)
        assert torch.equal(case.logits(ids), expected)
        fresh = zoo.make(case.architecture)
        fw.load(fresh, folder)
        assert torch.equal(fresh(**case.inputs(ids), use_cache=False).logits, expected)


@torch.no_grad()
def folded(case: Case) -> None:
    """Folding reparameterisations leaves the logits as they are, and leaves `num_stored` numbers."""
    ids = text()
    expected = case.logits(ids)
    stored = case.adapter.num_stored
    case.adapter.fold()
    close(case.logits(ids), expected, 1e-5)
    assert sum(tensor.numel() for tensor in case.adapter.state_dict().values()) == stored


@torch.no_grad()
def stands_for_text(case: Case) -> None:
    """Started from the tokens of a context, a prefix gives the base model's logits on [context; text]."""
    method = case.adapter.methods[0]
    if not (
        is_point(method) and isinstance(method.point().combine, fw.combines.Joint) and method.point().source.in_context
    ):
        raise NotApplicable("its tokens don't stand in the context")
    if not case.is_decoder:
        raise NotApplicable("in an encoder the context would read the text")
    if case.adapter.host.layout.stateful:
        raise NotApplicable("state-space layers read the context through their state")
    context = text(batch=1, length=LENGTH, seed=4)
    ids = text(length=1 if windowed(case.model) else TEXT)
    fw.detach(case.model, case.adapter.name)
    expected = case.logits(torch.cat([context.expand(len(ids), -1), ids], dim=1))[:, LENGTH:]
    fw.attach(case.model, method, init_ids=context)
    close(case.logits(ids), expected)


CHECKS: dict[str, Callable[[Case], None]] = {
    "backward": backward,
    "acts, detaches": acts,
    "mask optional": mask_optional,
    "causal": causal,
    "left pad: forward": padded_forward,
    "left pad: generate": padded_greedy,
    "encoder pad": padded_encoder,
    "greedy": greedy,
    "beams": beams,
    "sampling": sampling,
    "static cache": static_cache,
    "checkpointing": checkpointing,
    "mixed rows": mixed_rows,
    "save, load": saved,
    "fold": folded,
    "stands for text": stands_for_text,
}


def is_point(method: fw.Method) -> bool:
    """Whether a method is a source of keys and values with a way to combine them, and nothing else."""
    return type(method).point is not fw.Method.point


def assert_padded_greedy(case: Case, **kwargs) -> None:
    """Greedy generation of a left-padded batch is that of each row alone."""
    ids = text()
    pads = [0, 2, 3]
    new, seen = case.decode(*left_padded(ids, pads), **kwargs)
    for row, count in enumerate(pads):
        case.assert_greedy(ids[row : row + 1, count:], new[row : row + 1], seen[row : row + 1])


def needs_generation(case: Case) -> None:
    if not case.model.can_generate():
        raise NotApplicable("does not generate")


def windowed(model: PreTrainedModel) -> bool:
    """Whether some layers see a window: base tokens leave it, a prefix never does."""
    return "sliding_attention" in (
        getattr(model.config, "layer_types", None)
        or [getattr(model.config, "sliding_window", None) and "sliding_attention"]
    )


def gradients(case: Case) -> dict[str, Tensor]:
    case.model.zero_grad()
    with prompt_of(text()[:, :3]):
        case.logits(text()).float().pow(2).mean().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in case.adapter.named_parameters().items()
        if parameter.requires_grad
    }


@functools.lru_cache(maxsize=1)
def _prototype(architecture: str, method: str) -> Case:
    return make_case(architecture, small(method))


def fresh_case(architecture: str, method: str) -> Case:
    """A copy of the cell's case, for one check to do with as it likes. Raises `ForewordError` where it is refused."""
    return copy.deepcopy(_prototype(architecture, method))
