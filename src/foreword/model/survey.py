"""Find where a model attends and what its layers are made of, by running it once on a few tokens and looking.

Nothing here knows the name of an architecture. A module that calls the dispatched attention function is a site;
whether it is self-, cross- or encoder attention shows in the lengths it attends over; the norm in front of it is the
module whose output it was given; its rotary embedding is the module whose output it received as
`position_embeddings`. What a layer runs besides attention is sorted by the tensors that go in and out
(`foreword.model.blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.dispatch import install
from ..attention.readers import Recorder
from ..errors import ForewordError
from .blocks import LAYER, Event, Events, ffn_of, head_of, norms_of, output_of, projections_of
from .layout import Call, Kind, Layout, Site, by_name, first_tensor, is_table, tensors_in

ENCODER_TOKENS, DECODER_TOKENS = 5, 3  # different, so that cross-attention shows in the shapes


def survey(model: PreTrainedModel) -> Layout:
    """Run `model` on a few tokens and return where and how it attends.

    Raises `ForewordError` where the attention can't be reached.
    """
    install(implementation_of(model))
    with _watch(model) as seen:
        recorder = Witness(seen)
        probe(model, foreword=recorder)
    if not recorder.calls:
        raise ForewordError(_why_unreachable(model))
    events = Events(model, seen.events, set(recorder.calls))
    sites = [_site(model, module, seen, events, recorder) for module in recorder.calls]
    stacks = list(dict.fromkeys(_stack_of(model, site.path) for site in sites))
    skipped = _layers_without(model, sites)
    layers = sorted({*(LAYER.match(site.path).group() for site in sites), *skipped}, key=_layer_order)
    encoder = {LAYER.match(site.path).group() for site in sites if site.kind == "encoder"}
    decoder_only = not model.config.is_encoder_decoder and all(getattr(s.module, "is_causal", True) for s in sites)
    rotary = next((site.rotary for site in sites if site.rotary is not None), None)
    looked_up = rotary is not None and is_table(rotary)
    embeddings = _other_embeddings(stacks[0], seen) if rotary is None else []
    counted = [] if decoder_only or len(stacks) > 1 else [e for e in embeddings if _varies(seen.calls[e])]
    return Layout(
        model=model,
        sites=sites,
        ffns=[block for path in layers if (block := ffn_of(events, path, path in encoder)) is not None],
        norms=norms_of(events, stacks, encoder),
        layers=layers,
        stacks=stacks,
        encoders=list(dict.fromkeys(_stack_of(model, site.path) for site in sites if site.kind == "encoder")),
        skipped=skipped,
        stateful=bool(skipped) or any(getattr(stack, "_is_stateful", False) for stack in stacks),
        decoder_only=decoder_only,
        rotates=rotary is not None and not looked_up,
        absolute_positions=decoder_only and (looked_up or bool(embeddings)),
        position_embedding=counted[0] if counted else None,
        head=head_of(events, stacks),
    )


@torch.no_grad()
def probe(model: PreTrainedModel, ids: Tensor | None = None, *, training: bool = False, **kwargs: Any) -> Any:
    """One forward of the whole model, in evaluation mode or in training's, on ids (1, T) or on a few arbitrary tokens.

    An encoder-decoder gets the same ids on both sides; a speech encoder gets silence.
    """
    config, device = model.config, model.device
    inputs: dict[str, Any] = {}
    if ids is None:
        ids = torch.arange(ENCODER_TOKENS, device=device)[None] % config.get_text_config().vocab_size
        decoder_ids = ids[:, :DECODER_TOKENS]
    else:
        ids = decoder_ids = ids.to(device)
    if model.main_input_name == "input_features":
        frames = 2 * config.max_source_positions
        inputs["input_features"] = torch.zeros(1, config.num_mel_bins, frames, device=device, dtype=model.dtype)
    else:
        inputs["input_ids"] = ids
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = decoder_ids
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    for module in modes:
        if hasattr(module, "support_avx512bf16_for_cpu"):  # of bitsandbytes: once evaluated on a CPU, its 4-bit layers
            module.training = True  # have packed their weights, and give no gradients from then on
    try:
        return model(**inputs, use_cache=False, **kwargs)
    finally:
        for module, mode in modes.items():
            module.training = mode


def implementation_of(model: PreTrainedModel) -> str:
    """The name of the model's attention function."""
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation is None:
        raise ForewordError(f"{type(model).__name__} names no attention; load it with attn_implementation='sdpa'")
    return implementation


@dataclass
class _Seen:
    """What a watched forward showed: the call of each module, in order, and which call produced a tensor."""

    calls: dict[nn.Module, Call] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    producers: dict[int, Call] = field(default_factory=dict)  # id of a tensor → the innermost call that returned it
    kept: list[Any] = field(default_factory=list)  # keeps the outputs alive, so that ids stay unique

    def producer(self, value: Any) -> Call | None:
        """The call that returned `value`, or the first of its tensors."""
        tensors = tensors_in(value)
        return self.producers.get(id(tensors[0])) if tensors else None


@contextmanager
def _watch(model: nn.Module) -> Iterator[_Seen]:
    seen = _Seen()

    def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        call = Call(module, by_name(module, args, kwargs))
        seen.calls[module] = call
        seen.events.append(Event(module, call, output))
        seen.kept.append(output)
        for tensor in tensors_in(output):
            seen.producers.setdefault(id(tensor), call)

    handles = [module.register_forward_hook(after, with_kwargs=True) for module in model.modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class Witness(Recorder):
    """A recorder that also notes when each attention function ran: how many modules had finished before."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self.seen = seen
        self.moments: dict[nn.Module, int] = {}

    def read(self, original, module, query, key, value, mask, **kwargs):
        self.moments[module] = len(self.seen.events)
        return super().read(original, module, query, key, value, mask, **kwargs)


def _site(model: PreTrainedModel, module: nn.Module, seen: _Seen, events: Events, recorder: Witness) -> Site:
    query, key, value = recorder.calls[module]
    path = events.paths[module]
    layer_path = LAYER.match(path)
    if layer_path is None:
        raise ForewordError(f"{path} attends outside of any numbered layer; Foreword places adapters by layer")
    call = seen.calls[module]
    hidden = call.arguments["hidden_states"]
    layer = model.get_submodule(layer_path.group())
    layer_input = first_tensor(seen.calls[layer])
    producer = seen.producer(hidden)
    norm = None
    if producer is not None and hidden is not layer_input and producer.module in set(layer.modules()):
        norm = producer.module
    kind: Kind = "self"
    if model.config.is_encoder_decoder and query.shape[2] != DECODER_TOKENS:
        kind = "encoder"
    elif key.shape[2] != query.shape[2]:
        kind = "cross"
    return Site(
        module=module,
        path=path,
        kind=kind,
        layer=int(layer_path.group(1)),
        layer_module=layer,
        num_heads=query.shape[1],
        num_key_value_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        hidden_size=hidden.shape[-1],
        norm=norm,
        reads_layer_input=(hidden if norm is None else first_tensor(seen.calls[norm])) is layer_input,
        rotary=seen.producer(call.arguments.get("position_embeddings")),
        call=call,
        linears=projections_of(events, module, recorder.moments[module], kind),
        output=output_of(events, module, recorder.moments[module], kind),
    )


def _stack_of(model: nn.Module, path: str) -> PreTrainedModel:
    """The innermost transformers model around the module at `path`."""
    parts = path.split(".")
    ancestors = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1))
    return next(module for module in ancestors if isinstance(module, PreTrainedModel))


def _layer_order(path: str) -> tuple[str, int]:
    parent, number = path.rsplit(".", 1)
    return parent, int(number)


def _layers_without(model: nn.Module, sites: list[Site]) -> list[str]:
    """Paths of the layers that stand beside the sites' layers and have no site."""
    served = {LAYER.match(site.path + ".").group() for site in sites}
    lists = dict.fromkeys(path.rsplit(".", 1)[0] for path in served)
    return [
        f"{parent}.{name}"
        for parent in lists
        for name, _ in model.get_submodule(parent).named_children()
        if f"{parent}.{name}" not in served
    ]


def _other_embeddings(stack: PreTrainedModel, seen: _Seen) -> list[nn.Module]:
    """The embeddings besides the token embedding that ran: learned absolute positions, token types."""
    tokens = stack.get_input_embeddings()
    return [m for m in stack.modules() if isinstance(m, nn.Embedding) and m is not tokens and m in seen.calls]


def _varies(call: Call) -> bool:
    """Whether the indices of an embedding differ from token to token: positions do, token types don't."""
    indices = first_tensor(call)
    return indices is not None and bool((indices != indices.flatten()[0]).any())


def _why_unreachable(model: PreTrainedModel) -> str:
    attentions = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
    named = ", ".join(attentions) or "no attention modules"
    return (
        f"{type(model).__name__} can't take adapters: its layers ({named}) do not call their attention through "
        "transformers' AttentionInterface"
    )
