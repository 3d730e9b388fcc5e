"""The bottleneck that every adapter is made of, and where its term goes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, linear, silu

from ..attention.merge import Scoring
from ..attention.readers import Plan
from ..errors import ForewordError
from ..model.block_slot import Reading, Term
from ..model.layout import Site
from ..sources.text import Start

BERT_STD = 0.02
Norm = Literal["none", "in", "out"]
Init = Literal["lora", "bert"]
Activation = Literal["relu", "gelu", "silu", "tanh"]
ACTIVATIONS = {"relu": torch.relu, "gelu": gelu, "silu": silu, "tanh": torch.tanh}


class Bottleneck(nn.Module):
    """A(x) = s · (Drop(σ(LN?(x) W_d + b_d)) W_u + b_u), σ = ReLU (He et al. 2022, §3.3; the form of the released code).

    Args:
        input_size, output_size: widths of x and A(x).
        bottleneck: r, width in between.
        start: where random numbers come from.
        scale: s, a number, or "learned": a parameter that starts at 1.
        norm: a trainable layer norm on x ("in"), on the scaled result ("out"), or "none".
        init: "lora" (W_d Kaiming-uniform, U(±1/√d); W_u zero: nothing is added at the start) or "bert" (both
            N(0, 0.02²)).
        bias: whether b_d and b_u exist; they start at 0.
        dropout: on the bottleneck, in training.
        activation: σ.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bottleneck: int,
        start: Start,
        *,
        scale: float | Literal["learned"] = 1.0,
        norm: Norm = "none",
        init: Init = "lora",
        bias: bool = False,
        dropout: float = 0.0,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        self.down = nn.Parameter(start.normal(bottleneck, input_size, std=BERT_STD))  # W_dᵀ (r, d_in)
        self.up = nn.Parameter(start.normal(output_size, bottleneck, std=BERT_STD))  # W_uᵀ (d_out, r)
        if init == "lora":
            nn.init.uniform_(self.down, -(input_size**-0.5), input_size**-0.5, generator=start.generator)
            nn.init.zeros_(self.up)
        self.down_bias = nn.Parameter(torch.zeros(bottleneck)) if bias else None
        self.up_bias = nn.Parameter(torch.zeros(output_size)) if bias else None
        self.learned_scale = nn.Parameter(torch.ones(1)) if scale == "learned" else None
        self.scale = 1.0 if scale == "learned" else scale
        self.norm_in = nn.LayerNorm(input_size) if norm == "in" else None
        self.norm_out = nn.LayerNorm(output_size) if norm == "out" else None
        self.dropout = dropout
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """x (…, d_in) → A(x) (…, d_out), in the dtype of x."""
        x = _normalised(self.norm_in, x)
        hidden = self.activation(linear(x, self.down.to(x.dtype), _cast(self.down_bias, x)))  # (…, r)
        hidden = dropout(hidden, self.dropout, self.training)
        out = self.scale * linear(hidden, self.up.to(x.dtype), _cast(self.up_bias, x))
        if self.learned_scale is not None:
            out = self.learned_scale.to(x.dtype) * out
        return _normalised(self.norm_out, out)


class ParallelTerm(Term):
    """h + A(x)."""

    order: ClassVar[int] = 1

    def __init__(self, adapter: Bottleneck) -> None:
        super().__init__()
        self.adapter = adapter

    def forward(self, x: Tensor, h: Tensor, reading: Reading) -> Tensor:
        return h + self.adapter(x).to(h.dtype)


class SequentialTerm(Term):
    """h + A(h)."""

    order: ClassVar[int] = 2
    exclusive: ClassVar[bool] = True

    def __init__(self, adapter: Bottleneck) -> None:
        super().__init__()
        self.adapter = adapter

    def forward(self, x: Tensor, h: Tensor, reading: Reading) -> Tensor:
        return h + self.adapter(h)


class ResidualTerm(SequentialTerm):
    """h + A(x + h), where x is the residual stream that the sublayer's output h is about to be added to."""

    def forward(self, x: Tensor, h: Tensor, reading: Reading) -> Tensor:
        return h + self.adapter(x + h)


class PostNormTerm(SequentialTerm):
    """LN(s + A(LN(s))): in front of a norm that the layer applies to its residual sum s, which is passed twice."""

    def __init__(self, adapter: Bottleneck, norm: nn.Module) -> None:
        super().__init__(adapter)
        self._norm = (norm,)  # in a tuple: the norm is the model's

    @property
    def norm(self) -> nn.Module:
        return self._norm[0]

    def enter(self, x: Tensor, reading: Reading) -> Tensor:
        return x + self.adapter(self.norm.forward(x))  # `forward`: the norm's own hooks are about to run

    def forward(self, x: Tensor, h: Tensor, reading: Reading) -> Tensor:
        return h


class HeadTerm(nn.Module):
    """o + A(x): the concatenated heads plus an adapter that reads what the attention reads, before W_o."""

    joins_softmax = False
    reads_input = True

    def __init__(self, adapter: Bottleneck) -> None:
        super().__init__()
        self.adapter = adapter

    def reader(self, site: Site, shared: Any, rows: Tensor | None, plan: Plan) -> HeadReader:
        return HeadReader(self, plan.call["hidden_states"], rows)


@dataclass(frozen=True)
class HeadReader:
    """A `HeadTerm` in one attention call; `prefix` and `add` are those of `foreword.model.slot.Reader`."""

    prefix: HeadTerm
    x: Tensor  # (B, T, d)
    rows: Tensor | None

    def add(self, query: Tensor, out: Tensor, lse: Tensor | None, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
        """out (B, H, T, D) plus the adapter's output, cut into heads."""
        x = self.x if self.rows is None else self.x[self.rows]
        heads = self.prefix.adapter(x).unflatten(-1, (out.shape[1], -1)).transpose(1, 2).to(out.dtype)  # (B, H, T, D)
        return (out + heads if self.rows is None else out.index_add(0, self.rows, heads)), lse


def _normalised(norm: nn.LayerNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x.to(norm.weight.dtype)).to(x.dtype)


def _cast(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)


def num_weights(bottleneck: int, read: int, written: int, bias: bool, norm: Norm) -> int:
    """r·(d_in + d_out), plus r + d_out with biases and 2·d with a norm."""
    count = bottleneck * (read + written)
    if bias:
        count += bottleneck + written
    return count + {"none": 0, "in": 2 * read, "out": 2 * written}[norm]


def require_scale(config: Any) -> None:
    """Raise `ForewordError` where `config.scale` is neither a number nor "learned"."""
    if config.scale != "learned" and (isinstance(config.scale, (bool, str)) or not math.isfinite(config.scale)):
        raise ForewordError(f'{type(config).__name__}: scale must be a number or "learned", not {config.scale!r}')
