"""What Foreword keeps on a model that carries adapters, and the hook that starts every forward."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.dispatch import install
from ..attention.readers import Plan
from ..errors import ForewordError
from .frames import alone, current, is_reentrant, watch, watch_head
from .layout import Layout, by_name
from .peft_layers import peft_parameters
from .positions import moved, positions_of, shift_of
from .prompt import prompt_of, require_known, watch_labels
from .stream_part import StreamPart
from .streams import Sets, Streams, indices, read_streams, set_name, tile
from .survey import implementation_of, survey

if TYPE_CHECKING:
    from .part import Part

Names = tuple[str | None, ...]
row_names: ContextVar[dict[int, Names]] = ContextVar("row_names")  # id(host) → adapter of each batch row
row_streams: ContextVar[dict[int, tuple[int | None, ...]]] = ContextVar("row_streams")  # and its P


class Host(nn.Module):
    """Child module `foreword` of a model: its survey, its adapters, and their shared modules.

    Before each stack of the model runs, `before_stack` passes it a `Plan` of which rows read which adapter, and token
    positions that start at the first real token of each row.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.layout: Layout = survey(
            model
        )  # a dataclass, so that the model is not registered as a child of its own child
        self.adapters: dict[str, Any] = {}
        self.active: str | None = None
        self.shared = nn.ModuleDict()  # adapter → part → module evaluated once a forward
        self.sets: dict[str, Sets] = {}  # adapter → its sets of parallel streams
        self.aggregators = nn.ModuleDict()  # set → module that joins its streams
        self._memories: WeakKeyDictionary[Any, dict[nn.Module, Any]] = WeakKeyDictionary()  # KV cache → memory
        self._counts: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()  # KV cache → P of each row
        kept = peft_parameters(model)
        self._required_grad = [p for p in model.parameters() if p.requires_grad and id(p) not in kept]
        for parameter in self._required_grad:
            parameter.requires_grad_(False)
        self._handles: list[Any] = []
        for stack in self.layout.stacks:
            self._handles.append(stack.register_forward_pre_hook(self.before_stack, with_kwargs=True))
            self._handles.append(stack.register_forward_hook(self.after_stack, with_kwargs=True))
            self._handles += watch(stack)
        self._watched: set[str] = set()

    @property
    def model(self) -> PreTrainedModel:
        return self.layout.model

    def require(self, name: str) -> Any:
        """The adapter of that name. Raises `ForewordError` with the names there are."""
        if not isinstance(name, str):
            raise ForewordError(
                f"{name!r} is no adapter's name: a forward reads one adapter, or one for each row (`rows`); `attach` "
                "takes several methods as one, and `join` puts trained prefixes side by side"
            )
        if name not in self.adapters:
            present = ", ".join(map(repr, self.adapters)) or "none"
            raise ForewordError(f"the model has no adapter {name!r}; it has {present}")
        return self.adapters[name]

    def activate(self, name: str | None) -> None:
        """Make the adapter of that name, or the base model, what every forward reads."""
        if self.active is not None:
            self.adapters[self.active].set_active(False)
        self.active = name
        if name is not None:
            self.adapters[name].set_active(True)

    def watch_layers(self) -> None:
        """From now on keep the plan of each running layer for modules inside it that receive no keyword."""
        if "layers" not in self._watched:
            self._watched.add("layers")
            for path in self.layout.layers:
                self._handles += watch(self.model.get_submodule(path))

    def watch_head(self) -> None:
        """From now on keep the plan of the last stack for the output head."""
        if "head" not in self._watched:
            self._watched.add("head")
            self._handles += watch_head(self.layout.stacks[-1], self.model)

    def watch_prompt(self) -> None:
        """From now on know which tokens are the prompt."""
        if "prompt" not in self._watched:
            self._watched.add("prompt")
            self._handles += watch_labels(self.model)

    def watch_positions(self) -> None:
        """From now on move the text behind a prefix, in a model that counts positions by itself."""
        embedding = self.layout.position_embedding
        if embedding is not None and "positions" not in self._watched:
            self._watched.add("positions")
            self._handles.append(embedding.register_forward_pre_hook(self.before_positions))

    def place_shared(self, name: str, part: int, module: nn.Module) -> None:
        if name not in self.shared:
            self.shared[name] = nn.ModuleDict()
        self.shared[name][str(part)] = module.to(self.model.device)

    def remove_shared(self, name: str, part: int | None = None) -> None:
        """Drop the shared module of one part of an adapter, or of all its parts."""
        if name in self.shared:
            parts = self.shared[name]
            for key in list(parts) if part is None else [str(part)]:
                if key in parts:
                    del parts[key]
            if not parts:
                del self.shared[name]

    def add_set(self, name: str, part: StreamPart) -> None:
        """Know a set of parallel streams of adapter `name`, and take a row's streams along in beam search."""
        self.sets.setdefault(name, Sets(name)).parts[part.streams] = part
        self.model._reorder_cache = self.reorder_cache

    def remove_set(self, name: str, part: StreamPart) -> None:
        key = set_name(name, part.streams)
        if key in self.aggregators:
            del self.aggregators[key]
        self.sets.pop(name, None)
        if not self.sets:
            self.model.__dict__.pop("_reorder_cache", None)

    def forget(self) -> None:
        """Drop what earlier steps of any generation computed: it may be of an adapter that is gone."""
        self._memories.clear()

    def leave_if_empty(self) -> None:
        """With no adapter left, restore the model: no hooks, no child module, parameters trainable as they were."""
        if self.adapters or host_on(self.model) is None:
            return
        for handle in self._handles:
            handle.remove()
        for parameter in self._required_grad:
            parameter.requires_grad_(True)
        del self.model.foreword

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Host:
        """Follow the model to another device or dtype."""
        self.layout.follow(fn)
        return super()._apply(fn, recurse)

    # -----------------------------------------------------------------------------------------------------------------
    # Each forward

    def before_stack(
        self, stack: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Forward pre-hook of a stack: add the plan, and positions where the stack was given none."""
        if "foreword" in kwargs:
            return None
        arguments = by_name(stack, args, kwargs)
        if "adapter_names" in arguments:
            raise ForewordError("`adapter_names` is PEFT's; choose an adapter for each row with `foreword.rows`")
        batch, length = _batch_and_length(arguments)
        names = self._names(batch)
        if names is None:
            return None
        cache = arguments.get("cache", arguments.get("past_key_values"))
        training = stack.training and torch.is_grad_enabled()
        if training:
            self._require_gradients(stack)
        prompt = self._prompt(stack, names, arguments, batch, length, training)
        streams = self._streams(names, cache, training)
        if streams is not None:
            tiling = streams.tiling
            tiling.repeat(arguments)
            names, batch = tuple(names[row] for row in tiling.rows), len(tiling.rows)
            prompt = None if prompt is None else prompt[tiling.source]
        parts, rows = self._parts(names, streams)
        plan = Plan(rows, memory=self._memory(cache, length), prompt=prompt, streams=streams)
        for name, own in parts.items():
            reading = None if streams is None else streams.readings.get(name)
            with alone(name):
                plan.shared[name] = [reading.stream if reading else _share(part, plan) for part in own]
        if not torch.compiler.is_compiling():
            install(implementation_of(stack))
        arguments["foreword"] = plan
        if self.layout.decoder_only:
            shifts = {name: shift_of(own) for name, own in parts.items()}
            position_ids = positions_of(arguments, cache, rows, shifts, batch, length, self.model.device)
            if position_ids is not None:
                arguments["position_ids"] = position_ids
        return (), arguments

    def after_stack(self, stack: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook of a stack: join the parallel streams of each row in its last hidden states."""
        plan = kwargs.get("foreword")
        if not isinstance(plan, Plan) or plan.streams is None:
            return None
        if isinstance(output, tuple):
            return (plan.streams.join(output[0]), *output[1:])
        if output.get("past_key_values") is not None:  # may have been made inside
            self._counts[output["past_key_values"]] = plan.streams.tiling.counts
        output["last_hidden_state"] = plan.streams.join(output["last_hidden_state"])
        return output

    def before_positions(self, module: nn.Module, args: tuple) -> tuple | None:
        """Forward pre-hook of an encoder's embedding of positions (1 | B, T): add the shift of each row's adapter."""
        frame = current()
        if frame is None:
            return None
        shifts = {name: shift_of(self.adapters[name].parts) for name in frame.plan.rows}
        return (moved(args[0], frame.batch, frame.plan.rows, shifts),) if any(shifts.values()) else None

    def reorder_cache(self, cache: Any, beam_idx: Tensor) -> Any:
        """What `generate` calls as `model._reorder_cache`: row b of the user's takes the place that beam_idx[b] had."""
        tiling = tile(self._counts[cache], self.model.device) if cache in self._counts else None
        cache.reorder_cache(beam_idx if tiling is None else tiling.reorder(beam_idx))
        return cache

    def _names(self, batch: int) -> Names | None:
        """The adapter of each of `batch` rows; None where all read the base model."""
        names = row_names.get({}).get(id(self))
        if names is None:
            return None if self.active is None else (self.active,) * batch
        if batch % len(names):
            raise ForewordError(f"rows names {len(names)} adapters for a batch of {batch} rows")
        every = tuple(name for name in names for _ in range(batch // len(names)))  # beams of a row stand side by side
        return every if any(every) else None

    def _require_gradients(self, stack: nn.Module) -> None:
        """Raise `ForewordError` where gradients would not reach what layers share or hand on."""
        if any(map(is_reentrant, (stack, self.model.get_submodule(self.layout.layers[0])))):
            raise ForewordError(
                "gradient checkpointing with use_reentrant=True loses gradients of adapters; enable it with "
                "use_reentrant=False, the default"
            )

    def _prompt(
        self, stack: nn.Module, names: Names, arguments: dict[str, Any], batch: int, length: int, training: bool
    ) -> Tensor | None:
        """The prompt (B, T) from which gates are computed; None where no row's adapter asks for it."""
        asks = any(part.reads_prompt for name in {*names} - {None} for part in self.adapters[name].parts)
        if not asks or "input_features" in arguments:
            return None
        is_target = stack not in self.layout.encoders
        if training and is_target and (self.layout.decoder_only or self.layout.encoders):
            require_known()
        return prompt_of(arguments.get("attention_mask"), batch, length, self.model.device, is_target)

    def _streams(self, names: Names, cache: Any, training: bool) -> Streams | None:
        """The parallel streams of rows that read the adapters `names`; None where each row has one."""
        if not self.sets:
            return None
        chosen = row_streams.get({}).get(id(self), (None,))
        usual = {name: self.sets[name].next(training) for name in {*names} & self.sets.keys()}
        repeats = len(names) // len(chosen)
        counts = tuple(chosen[row // repeats] or usual.get(name, 1) for row, name in enumerate(names))
        if cache is not None:
            before = self._counts.get(cache, counts)
            if before != counts and int(cache.get_seq_length()) > 0:
                raise ForewordError(
                    f"the KV cache holds P = {before} streams of each row; this forward reads P = {counts}"
                )
            self._counts[cache] = counts
        tiling = tile(counts, self.model.device)
        return None if tiling is None else read_streams(self.sets, names, tiling)

    def _parts(
        self, names: Names, streams: Streams | None
    ) -> tuple[dict[str, list[Part | None]], dict[str, Tensor | None]]:
        """Adapter, or set of streams, → its parts (None for those not read under that name), and → its rows."""
        rows = dict(indices(names, self.model.device))
        parts: dict[str, list[Part | None]] = {name: self.adapters[name].parts for name in rows}
        for name in rows.keys() & self.sets.keys():
            parts[name] = [None if isinstance(part, StreamPart) else part for part in parts[name]]
        for key, reading in ({} if streams is None else streams.readings).items():
            parts[key] = [part if part is reading.part else None for part in self.adapters[reading.adapter].parts]
            rows[key] = reading.rows
        return parts, rows

    def _memory(self, cache: Any, length: int) -> dict[nn.Module, Any] | None:
        """What earlier steps of this generation computed: kept beside their KV cache, and only without gradients.

        A step of several tokens, or on an empty cache, begins a generation or a turn of it, and computes anew.
        """
        if cache is None or torch.is_grad_enabled():
            return None
        if length > 1 or (not torch.compiler.is_compiling() and int(cache.get_seq_length()) == 0):
            self._memories[cache] = {}
        return self._memories.setdefault(cache, {})


def host_of(model: PreTrainedModel) -> Host:
    """The host on a model, made on first use. Raises `ForewordError` where the model can't be served."""
    if not isinstance(model, PreTrainedModel):
        raise ForewordError(f"{type(model).__name__} is not a transformers model")
    host = host_on(model)
    if host is None:
        _require_whole(model)
        model.foreword = host = Host(model)
    return host


def _require_whole(model: PreTrainedModel) -> None:
    """Raise `ForewordError` where this process holds parts of the weights only, and heads can't be told from them."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ForewordError(
            "DeepSpeed ZeRO-3 has partitioned this model's weights; attach first and use FSDP2, or ZeRO-1 or -2, which "
            "leave them whole"
        )
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise ForewordError(
            "a tensor-parallel plan has split this model, so that each process has some of its heads; load it without "
            "tp_plan, with device_map, or use FSDP2"
        )


def host_on(model: PreTrainedModel) -> Host | None:
    """The host that is on a model already, or None."""
    host = getattr(model, "foreword", None)
    return host if isinstance(host, Host) else None


def host_with(model: PreTrainedModel, name: str) -> Host:
    """The host of the adapter `name` on a model. Raises `ForewordError` where the model has no such adapter."""
    host = host_on(model)
    if host is None:
        raise ForewordError(f"the model has no adapter {name!r}; it has none")
    host.require(name)
    return host


def _share(part: Part | None, plan: Plan) -> Any:
    """What a part computes once for all its places in this forward."""
    return None if part is None or part.shared is None else plan.remember(part.shared, part.shared)


def _batch_and_length(arguments: dict[str, Any]) -> tuple[int, int]:
    """(B, T) of the inputs of a stack."""
    for name in ("input_ids", "inputs_embeds", "input_features", "hidden_states"):
        if arguments.get(name) is not None:
            return arguments[name].shape[0], arguments[name].shape[1]
    raise ForewordError("the model was called without input_ids or inputs_embeds")
