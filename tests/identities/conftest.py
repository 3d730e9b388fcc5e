"""The tiny model of the identities, fresh for every test."""

import naive
import pytest
import torch
from transformers import LlamaForCausalLM


@pytest.fixture
def model() -> LlamaForCausalLM:
    return naive.llama()


@pytest.fixture
def decoder(model) -> naive.Decoder:
    """The same function as `model` without an adapter, independent of transformers and of the library."""
    return naive.Decoder(model)


@pytest.fixture
def ids() -> torch.Tensor:
    return naive.random_ids()
