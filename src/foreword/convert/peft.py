"""PEFT's adapters: `adapter_config.json` with a `peft_type`, and `adapter_model.safetensors` or `.bin`.

PREFIX_TUNING, CARTRIDGE     prompt_embeddings (l, 2·L·G·D), text after the prefix; an MLP is saved evaluated
PROMPT_TUNING, P_TUNING      prompt_embeddings (l, d); an encoder is saved evaluated
MULTITASK_PROMPT_TUNING      prompt_embeddings (l, d) ⊙ prefix_task_cols[t] (l, r) prefix_task_rows[t] (r, d)
ADAPTION_PROMPT              <attention>.adaption_prompt (1, l, d), .adaption_gate (1,): one factor a layer, no tanh
LORA, IA3, VERA              written, not read: PEFT's own loading puts them beside ours on one model
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ForewordError
from ..files import atomic_path, write_json
from ..methods.prompt_tuning import PromptTuning
from ..methods.zero_init import ZeroInit
from ..model.adapter import Adapter
from ..model.layout import Layout
from ..model.part import Part
from ..model.peft_part import PeftPart
from ..model.slot import Prefix
from .gated import gated
from .prefixes import flat, prefix, stacked
from .rotation import rotate
from .source import Converted, Source, same_path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def matches(source: Source) -> bool:
    return "peft_type" in source.config(CONFIG)


# ---------------------------------------------------------------------------------------------------------------------
# From PEFT


def read(source: Source, layout: Layout, task: int = 0) -> Converted:
    """What an adapter of PEFT's is here.

    Args:
        task: of a MULTITASK_PROMPT_TUNING adapter, the task whose prompt to take.
    """
    config = source.config(CONFIG)
    kind = config.get("peft_type")
    if kind == "ADAPTION_PROMPT":
        return _adaption_prompt(source, layout, config)
    if kind not in ("PREFIX_TUNING", "CARTRIDGE", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING"):
        raise ForewordError(f"{source.path} is a {kind} adapter of PEFT's; load it with PEFT, on the same model")
    if not layout.decoder_only or config.get("num_transformer_submodules") not in (None, 1):
        raise ForewordError(
            f"{source.path}: PEFT places {kind} in {type(layout.model).__name__} as no method here does; only those of "
            "decoders can be converted"
        )
    embeddings = source.tensor("prompt_embeddings", config.get("num_virtual_tokens"), None)
    if kind in ("PREFIX_TUNING", "CARTRIDGE"):
        states = stacked(embeddings, layout.kinds["self"])
        frozen = int(config.get("num_frozen_tokens", 0)) if kind == "CARTRIDGE" else 0
        if frozen == len(embeddings):
            raise ForewordError(f"{source.path}: num_frozen_tokens is {frozen}, all of the cartridge")
        return prefix(layout, states, text_after=True, frozen_tokens=frozen)
    notes = []
    if kind == "MULTITASK_PROMPT_TUNING":
        embeddings = embeddings * _task_prompt(source, task, embeddings)
        notes.append(f"the prompt of task {task}; the other tasks' are left out")
    return Converted([PromptTuning(length=len(embeddings))], {"0.shared.rows": embeddings}, notes)


def _task_prompt(source: Source, task: int, embeddings: Tensor) -> Tensor:
    columns = source.tensor("prefix_task_cols", None, len(embeddings), None)
    rows = source.tensor("prefix_task_rows", len(columns), columns.shape[2], embeddings.shape[1])
    if not 0 <= task < len(columns):
        raise ForewordError(f"{source.path} has the tasks 0 … {len(columns) - 1}, not {task}")
    return columns[task] @ rows[task]


def _adaption_prompt(source: Source, layout: Layout, config: dict[str, Any]) -> Converted:
    if layout.model.config.model_type == "gpt2":
        raise ForewordError(
            f"{source.path}: on GPT-2 PEFT adds the prompt's heads behind the output projection, without projecting "
            "them; no method here does that"
        )
    sites = layout.select(config.get("adapter_layers"), "self")
    names = {}
    for name in source.tensors:
        if match := re.fullmatch(r"(?:base_model\.model\.)?(.*)\.adaption_prompt", name):
            names[match.group(1)] = name
    found = {site: name for site in sites for path, name in names.items() if same_path(path, site.path)}
    if not len(found) == len(names) == len(sites):
        raise ForewordError(
            f"{source.weights} has prompts of {len(names)} layers, {len(found)} of them in the top {len(sites)}"
        )
    prompts = [source.tensor(name, 1, None, site.hidden_size)[0] for site, name in found.items()]
    gates = [source.tensor(name.replace("adaption_prompt", "adaption_gate"), 1) for name in found.values()]
    return gated(layout, sites, prompts, gates, tanh=False)


# ---------------------------------------------------------------------------------------------------------------------
# To PEFT


@torch.no_grad()
def write(adapter: Adapter, folder: Path) -> list[str]:
    """Write the adapter as one of PEFT's and return what PEFT can't express of it.

    Raises `ForewordError` where PEFT has no such method.
    """
    if len(adapter.parts) != 1:
        raise ForewordError(f"an adapter of PEFT's holds one method, not {' + '.join(m.name for m in adapter.methods)}")
    part = adapter.parts[0]
    if isinstance(part, PeftPart):
        config, tensors, notes = _of_peft(part)
    elif part.method.name == PromptTuning.name:
        config, tensors, notes = _prompt(part)
    elif isinstance(part.method, ZeroInit):
        config, tensors, notes = _as_adaption_prompt(adapter, part)
    else:
        config, tensors, notes = _as_prefix(adapter, part)
    base = adapter.model.config.name_or_path
    config = replace(config, task_type="CAUSAL_LM", base_model_name_or_path=base, inference_mode=True)
    with atomic_path(folder / WEIGHTS) as temporary:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary, {"format": "pt"})
    write_json(folder / CONFIG, _plain(config.to_dict()))
    return notes


Written = tuple[peft.PeftConfig, dict[str, Tensor], list[str]]


def _of_peft(part: PeftPart) -> Written:
    tensors = {
        f"base_model.model.{block.path}.{name}": tensor
        for block, module in part.modules.items()
        for name, tensor in module.state_dict().items()
    }
    assert part.config is not None
    return part.config, tensors, []


def _prompt(part: Part) -> Written:
    shared: Any = part.shared
    rows = shared.rows
    config = peft.PromptTuningConfig(num_virtual_tokens=len(rows), token_dim=rows.shape[1])
    return config, {"prompt_embeddings": rows}, []


def _as_adaption_prompt(adapter: Adapter, part: Part) -> Written:
    model, sites = adapter.model, list(part.modules)
    method: Any = part.method
    top = adapter.host.layout.kinds["self"][-len(sites) :]
    if model.config.model_type not in ("llama", "mistral") or {site.kind for site in sites} != {"self"} or sites != top:
        raise ForewordError(
            "PEFT's ADAPTION_PROMPT is the top n layers of a llama's or mistral's self-attention, not "
            f"layers={method.layers} of a {model.config.model_type}"
        )
    tensors = {}
    placed: dict[Any, Any] = part.modules  # type: ignore[assignment]
    for site, module in placed.items():
        gate = torch.tanh(module.combine.gate)
        if (gate - gate[0]).abs().max() > 1e-6:
            raise ForewordError(
                f"PEFT's ADAPTION_PROMPT has one gate a layer; this adapter's {len(gate)} heads in layer {site.layer} "
                "have different ones"
            )
        tensors[f"base_model.model.{site.path}.adaption_prompt"] = module.source.prompt[None]
        tensors[f"base_model.model.{site.path}.adaption_gate"] = gate[:1]
    config = peft.AdaptionPromptConfig(adapter_len=method.length, adapter_layers=len(sites), target_modules="self_attn")
    return config, tensors, []


def _as_prefix(adapter: Adapter, part: Part) -> Written:
    layout = adapter.host.layout
    sites: list[Any] = list(part.modules)
    modules: list[Any] = list(part.modules.values())
    in_softmax = all(type(module) is Prefix and module.joins_softmax for module in modules)
    if not in_softmax or not layout.decoder_only or sites != layout.kinds["self"]:
        raise ForewordError(
            f"PEFT has no {part.method.name}; of prefixes it can express those in the softmax of every self-attention "
            "of a decoder"
        )
    notes = []
    if layout.absolute_positions and not part.shift:
        raise ForewordError("PEFT counts text positions after the prefix; this one's text has its own positions")
    if any(site.rotary is None for site in sites) and layout.rotates:
        raise ForewordError("PEFT's prefix would move in some layers of this model and not in others")
    shared = None if part.shared is None else part.shared()
    states = {}
    for site, module in zip(sites, modules, strict=True):
        key, value = module.source(site, shared)
        states[site] = (rotate(site, key, key.shape[1]), value)
    embeddings = flat(states)
    heads = {(site.num_key_value_heads, site.key_dim, site.value_dim) for site in sites}
    if len(heads) != 1 or sites[0].key_dim != sites[0].value_dim:
        raise ForewordError(f"PEFT needs keys and values of one width in every layer; this model has {sorted(heads)}")
    sizes: dict[str, Any] = {
        "num_virtual_tokens": len(embeddings),
        "num_layers": len(sites),
        "num_attention_heads": sites[0].num_key_value_heads,
        "token_dim": sites[0].num_key_value_heads * sites[0].key_dim,
        "num_transformer_submodules": 1,
    }
    if hasattr(modules[0].source, "fold"):
        notes.append("the reparameterisation is evaluated: PEFT stores keys and values, and can't train it further")
    if getattr(layout.model.config, "sliding_window", None):
        notes.append("in PEFT's cache the prefix leaves the sliding window of this model; here it never does")
    frozen = getattr(modules[0].source, "frozen_tokens", 0)
    if frozen:
        return peft.CartridgeConfig(num_frozen_tokens=frozen, **sizes), {"prompt_embeddings": embeddings}, notes
    return peft.PrefixTuningConfig(**sizes), {"prompt_embeddings": embeddings}, notes


def _plain(value: Any) -> Any:
    """A configuration of PEFT's as JSON: enumerations by their value, sets as lists."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(one) for one in value]
    return getattr(value, "value", value)
