"""Sort what a layer runs besides the attention function, by the tensors that went in and out of its modules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from .layout import Block, Call, first_tensor, tensors_in

LAYER = re.compile(r".*?\.(\d+)(?=\.|$)")  # up to the first number in a dotted name


@dataclass
class Event:
    """A module finished: its call and its output."""

    module: nn.Module
    call: Call
    output: Any

    @property
    def input(self) -> Tensor | None:
        return first_tensor(self.call)


class Events:
    """The events of one forward, in order, without what runs inside a layer of PEFT's.

    Attributes:
        paths: dotted name of every module.
        attentions: the modules that call the attention function.
    """

    def __init__(self, model: nn.Module, events: list[Event], attentions: set[nn.Module]) -> None:
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}
        self.attentions = attentions
        self._all = events
        wrapped = {
            inner
            for layer in model.modules()
            if isinstance(layer, BaseTunerLayer)
            for inner in list(layer.modules())[1:]
        }
        self.visible = [event for event in events if event.module not in wrapped]
        self._of = {event.module: event for event in self.visible}

    def __getitem__(self, module: nn.Module) -> Event:
        return self._of[module]

    def inside(self, module: nn.Module) -> list[Event]:
        """The events of `module` and what it contains."""
        members = set(module.modules())
        return [event for event in self.visible if event.module in members]

    def before(self, moment: int, module: nn.Module) -> list[Event]:
        """The events inside `module` among the first `moment` of the forward."""
        early = {id(event) for event in self._all[:moment]}
        return [event for event in self.inside(module) if id(event) in early]

    def after(self, moment: int, module: nn.Module) -> list[Event]:
        early = {id(event) for event in self._all[:moment]}
        return [event for event in self.inside(module) if id(event) not in early]

    def children(self, module: nn.Module) -> list[nn.Module]:
        """The outermost modules inside `module` that were called, in the order in which they finished."""
        found: list[nn.Module] = []
        for child in module.children():
            found += [child] if child in self._of else self.children(child)
        order = {event.module: position for position, event in enumerate(self.visible)}
        return sorted(found, key=order.__getitem__)

    def attends(self, module: nn.Module) -> bool:
        return any(inner in self.attentions for inner in module.modules())

    def layer_of(self, module: nn.Module) -> nn.Module:
        return self.model.get_submodule(LAYER.match(self.paths[module]).group())


def projections_of(events: Events, attention: nn.Module, moment: int, kind: str) -> list[Block]:
    """The linear layers that ran before the attention function of `attention`."""
    return _linears(events, events.before(moment, _sublayer(events, attention)), kind)


def output_of(events: Events, attention: nn.Module, moment: int, kind: str) -> Block:
    """The attention sublayer: x is what `attention` reads, h what its output projection gives."""
    [output, *_] = _linears(events, events.after(moment, _sublayer(events, attention)), kind)
    inside = output.module in set(attention.modules())
    module = attention if inside else output.module
    return replace(_block(events, attention, module, f"{kind}-output"), linears=[output], post_norm=None)


def ffn_of(events: Events, path: str, in_encoder: bool) -> Block | None:
    """The feed-forward sublayer of the layer at `path`: what the layer runs last, x and h of the layer's width.

    One module in most models; in others (BART, OPT, BERT) two linear layers in a row, of which x enters the first and h
    leaves the second. None where a layer has none.
    """
    kind = "encoder-ffn" if in_encoder else "ffn"
    layer = events.model.get_submodule(path)
    found = _feed_forward(events, layer, events[layer].input.shape[-1])
    if found is None:
        return None
    enter, module = found
    block = _block(events, enter, module, kind)
    scope = [event for part in dict.fromkeys((enter, module)) for event in events.inside(part)]
    linears = _linears(events, scope, "encoder" if in_encoder else "")
    held = {id(parameter) for linear in linears for parameter in linear.module.parameters()}
    matrices = [p for part in (enter, module) for p in part.parameters() if p.dim() > 1]
    result = tensors_in(events[layer].output)[0]
    norms = [event for event in events.inside(layer) if _is_norm(event)]
    closing = [event.module for event in norms if event.output is result]
    opening = [event.module for event in norms if event.output is events[enter].input]
    return replace(
        block,
        linears=linears,
        dense=all(id(parameter) in held for parameter in matrices),
        post_norm=_norm(events, closing[0], in_encoder) if closing else None,
        pre_norm=opening[0] if opening and not closing else None,
    )


def norms_of(events: Events, stacks: list[PreTrainedModel], encoder: set[str]) -> list[Block]:
    """Every norm with parameters that runs inside a stack."""
    inside = {module for stack in stacks for module in stack.modules()}
    return [
        _norm(events, event.module, _layer_path(events.paths[event.module]) in encoder)
        for event in events.visible
        if event.module in inside and _is_norm(event)
    ]


def head_of(events: Events, stacks: list[PreTrainedModel]) -> Block | None:
    """The last linear layer that runs behind the stacks."""
    inside = {module for stack in stacks for module in stack.modules()}
    outside = [event.module for event in events.visible if event.module not in inside and _is_linear(event)]
    return _block(events, outside[-1], outside[-1], "head") if outside else None


def _feed_forward(events: Events, parent: nn.Module, width: int) -> tuple[nn.Module, nn.Module] | None:
    """(the module that x enters, the module that h leaves)."""
    members = [child for child in events.children(parent) if not events.attends(child) and _matrices(child)]
    if not members:
        return None
    last = events[members[-1]]
    whole = last.input.shape[-1] == width and len(_matrices(last.module)) > 1 and len(last.call.arguments) == 1
    if whole and not _opens_with_norm(events, last):
        return last.module, last.module
    if whole:
        return _feed_forward(events, last.module, width)
    linears = [event for member in members for event in events.inside(member) if _is_linear(event)]
    return (linears[-2].module, linears[-1].module) if len(linears) > 1 else None


def _opens_with_norm(events: Events, whole: Event) -> bool:
    """Whether a sublayer's first step is a norm of its own (T5), so that x is inside."""
    first = events.inside(whole.module)[0]
    return _is_norm(first) and first.input is whole.input


def _sublayer(events: Events, attention: nn.Module) -> nn.Module:
    """The outermost module of a layer around `attention`."""
    layer = events.layer_of(attention)
    return next(child for child in events.children(layer) if attention in set(child.modules()))


def _linears(events: Events, scope: Iterable[Event], kind: str) -> list[Block]:
    name = "encoder-linear" if kind == "encoder" else "linear"
    return [_block(events, event.module, event.module, name, named=True) for event in scope if _is_linear(event)]


def _norm(events: Events, module: nn.Module, in_encoder: bool) -> Block:
    return _block(events, module, module, "encoder-norm" if in_encoder else "norm", named=True)


def _block(events: Events, enter: nn.Module, module: nn.Module, kind: str, named: bool = False) -> Block:
    path = events.paths[module]
    in_layer = LAYER.match(path)
    prefix = f"{in_layer.group()}." if in_layer else f"{getattr(events.model, 'base_model_prefix', '')}."
    h = tensors_in(events[module].output)[0]
    return Block(
        kind=kind,
        layer=int(in_layer.group(1)) if in_layer else None,
        name=path.removeprefix(prefix) if named else "",
        path=path,
        enter=enter,
        module=module,
        input_size=events[enter].input.shape[-1],
        output_size=h.shape[-1],
        like=h.new_empty(0),
    )


def _layer_path(path: str) -> str | None:
    match = LAYER.match(path)
    return match.group() if match else None


def _is_linear(event: Event) -> bool:
    module = event.module
    if isinstance(module, BaseTunerLayer):
        module = module.get_base_layer()
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, Tensor)
        and weight.dim() == 2
        and not isinstance(module, nn.Embedding)
        and not list(module.children())
        and isinstance(event.output, Tensor)
    )


def _is_norm(event: Event) -> bool:
    parameters = list(event.module.parameters())
    return (
        bool(parameters)
        and all(parameter.dim() == 1 for parameter in parameters)
        and not list(event.module.children())
        and isinstance(event.output, Tensor)
        and event.input is not None
        and event.output.shape == event.input.shape
        and sum(isinstance(value, Tensor) for value in event.call.arguments.values()) == 1
    )


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.dim() > 1]
