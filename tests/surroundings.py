"""What attaching may not change of a model, taken down before and compared after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import foreword as fw


@dataclass
class State:
    """Every visible part of a model: class, modules, numbers, what is trainable, hooks, modes."""

    kind: type
    modules: dict[str, nn.Module]
    tensors: dict[str, Tensor]
    trainable: dict[str, bool]
    hooks: dict[str, int]
    training: dict[str, bool]

    @classmethod
    def of(cls, model: PreTrainedModel) -> State:
        modules = dict(model.named_modules())
        return cls(
            kind=type(model),
            modules=modules,
            tensors={name: tensor.clone() for name, tensor in model.state_dict().items()},
            trainable={name: parameter.requires_grad for name, parameter in model.named_parameters()},
            hooks={name: _hooks(module) for name, module in modules.items()},
            training={name: module.training for name, module in modules.items()},
        )


def assert_unchanged(model: PreTrainedModel, before: State) -> None:
    """The model is bit for bit, module for module and hook for hook what it was."""
    after = State.of(model)
    assert fw.adapters(model) == []
    assert after.kind is before.kind
    assert after.modules == before.modules
    assert after.tensors.keys() == before.tensors.keys()
    for name, tensor in before.tensors.items():
        assert torch.equal(after.tensors[name], tensor), name
    assert after.trainable == before.trainable
    assert after.hooks == before.hooks
    assert after.training == before.training


def refusal(call: Callable[..., Any], *args: Any) -> fw.ForewordError | None:
    """The `ForewordError` that a call raises, or None; any other error fails the test."""
    try:
        call(*args)
    except fw.ForewordError as error:
        return error
    return None


def attach_or_skip(model: PreTrainedModel, method: fw.Method, **kwargs: Any) -> fw.Adapter:
    """The attached adapter; a refusal skips the test with its reason, and is itself the conformance tests' subject."""
    try:
        return fw.attach(model, method, **kwargs)
    except fw.ForewordError as refusal:
        pytest.skip(str(refusal))


def _hooks(module: nn.Module) -> int:
    return sum(len(value) for name, value in vars(module).items() if name.endswith("_hooks"))


def is_one_line(error: BaseException) -> bool:
    return isinstance(error, fw.ForewordError) and "\n" not in str(error) and len(str(error)) > 10
