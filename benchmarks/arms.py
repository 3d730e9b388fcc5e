"""What is compared: the frozen base, Foreword's methods, PEFT's, and a prefix in front of the keys and values.

Every arm adapts every layer of the same base, but for zero-init, which leaves out the lowest two as its authors do.
Arms that can share a model do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import foreword as fw

FLOOR = "frozen base"


class Arm:
    """A model that is ready for `forward`; `enter` makes it so where several arms share it."""

    def __init__(self, model: nn.Module, enter: Callable[[], None] = lambda: None, extra: dict[str, Any] | None = None):
        self.model = model
        self.enter = enter
        self.extra = extra or {}

    def parameters(self) -> list[Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def embed(self, ids: Tensor) -> dict[str, Tensor]:
        return {"input_ids": ids}

    def step(self, ids: Tensor) -> None:
        """Forward and backward of the language-modelling loss."""
        self.enter()
        self.model(**self.embed(ids), labels=ids, use_cache=False, **self.extra).loss.backward()
        for parameter in self.parameters():
            parameter.grad = None


class Floor(Arm):
    """The frozen base, differentiable in the output of its input embedding and nothing else."""

    def embed(self, ids: Tensor) -> dict[str, Tensor]:
        return {"inputs_embeds": self.model.get_input_embeddings()(ids).detach().requires_grad_()}


@dataclass
class Concatenation:
    """Rides on the keyword `foreword`: (1, G, l, D) for each module, in front of the tokens' keys and values."""

    prefixes: dict[nn.Module, tuple[Tensor, Tensor]]

    def read(self, original, module, query, key, value, mask, **kwargs):
        prefix_key, prefix_value = (x.to(key.dtype).expand(len(key), -1, -1, -1) for x in self.prefixes[module])
        length, size, extra = query.shape[2], key.shape[2], prefix_key.shape[2]
        if mask is None:
            mask = torch.ones(length, size, dtype=torch.bool).tril(size - length)[None, None]
        mask = torch.cat([mask.new_ones(*mask.shape[:-1], extra), mask], -1)
        key, value = torch.cat([prefix_key, key], 2), torch.cat([prefix_value, value], 2)
        return original(module, query, key, value, mask, **kwargs)


class Concatenated(Arm):
    def __init__(self, model: PreTrainedModel, length: int) -> None:
        fw.set_active(model, None)
        self.prefixes = {}
        for site in model.foreword.layout.select(None, "all"):
            shape = (1, site.num_key_value_heads, length, site.key_dim)
            self.prefixes[site.module] = tuple(
                torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(0.02).requires_grad_() for _ in "kv"
            )
        super().__init__(model, lambda: fw.set_active(model, None), {"foreword": Concatenation(self.prefixes)})

    def parameters(self) -> list[Tensor]:
        return [tensor for pair in self.prefixes.values() for tensor in pair]


class Attached(Arm):
    """One adapter of Foreword on a model that carries several."""

    def __init__(self, model: PreTrainedModel, method: fw.Method, name: str) -> None:
        self.adapter = fw.attach(model, method, name)
        super().__init__(model, lambda: fw.set_active(model, name))

    def parameters(self) -> list[Tensor]:
        return self.adapter.trainable_parameters


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules on the same weights.

    Two copies of the weights can differ in speed by where they lie in memory: on one machine by half in decoding.
    """
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def make(model: PreTrainedModel, lengths: list[int], peer_lengths: list[int]) -> dict[str, Arm]:
    """Every arm of the comparison, the floor first; PEFT's prefix and the concatenation have `peer_lengths`."""
    model.requires_grad_(False)
    carrier = twin(model)
    arms: dict[str, Arm] = {FLOOR: Floor(model)}
    for length in lengths:
        prefix, gated = fw.PrefixTuning(length=length, init="normal"), fw.ZeroInit(length=length)
        arms[f"prefix-tuning l={length}"] = Attached(carrier, prefix, f"prefix{length}")
        arms[f"zero-init l={length}"] = Attached(carrier, gated, f"gate{length}")
    for length in peer_lengths:
        arms[f"concatenation l={length}"] = Concatenated(carrier, length)
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=length)
        arms[f"PEFT prefix tuning l={length}"] = Arm(peft.get_peft_model(model, config))
    config = peft.AdaptionPromptConfig(
        task_type="CAUSAL_LM", adapter_len=30, adapter_layers=len(model.model.layers) - 2
    )
    arms["PEFT LLaMA-Adapter l=30"] = Arm(peft.get_peft_model(twin(model), config))
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
    arms["PEFT LoRA r=8"] = Arm(peft.get_peft_model(twin(model), config))
    return arms
