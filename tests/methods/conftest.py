"""Small models with and without rotary positions and grouped queries, each with its naive twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import equations
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import foreword as fw
import zoo


def _llama_of_all_heads() -> PreTrainedModel:
    model = LlamaForCausalLM(LlamaConfig(**{**zoo.COMMON, "num_key_value_heads": 4}))
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@dataclass
class Twin:
    """A transformers model and its equations."""

    model: PreTrainedModel
    equations: Callable[[PreTrainedModel, Tensor, equations.Terms], Tensor]

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        if self.model.config.is_encoder_decoder:
            return self.model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
        return self.model(ids, use_cache=False).logits

    @torch.no_grad()
    def naive(self, ids: Tensor, terms: equations.Terms | None = None) -> Tensor:
        return self.equations(self.model, ids, equations.Terms() if terms is None else terms)

    def attach(self, method: fw.Method | list, std: float = 0.3) -> dict[str, Tensor]:
        """Attach with every number moved away from its start; the adapter's tensors by name."""
        adapter = fw.attach(self.model, method)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in adapter.trainable_parameters:
                parameter += std * torch.randn(parameter.shape, generator=generator)
        return adapter.state_dict()


MAKERS = {
    "llama-gqa": (lambda: zoo.make("llama"), equations.llama),
    "llama-mha": (_llama_of_all_heads, equations.llama),
    "gpt2": (lambda: zoo.make("gpt2"), equations.gpt2),
    "bart": (lambda: zoo.make("bart"), equations.bart),
}


@pytest.fixture(params=MAKERS)
def twin(request) -> Twin:
    make, equations = MAKERS[request.param]
    return Twin(make(), equations)


@pytest.fixture
def llama() -> Twin:
    return Twin(zoo.make("llama"), equations.llama)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, zoo.VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(4))
