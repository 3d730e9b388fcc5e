"""A llama written out, one row and one head at a time, with gated prompts as the authors' code reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, GROUPS, DIM, WIDTH, LAYERS, VOCABULARY = 4, 2, 8, 32, 3, 40


def model(groups: int = GROUPS) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=groups,
        max_position_embeddings=64,
    )
    made = LlamaForCausalLM(config).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return made


@dataclass
class Prompt:
    """What a layer reads beside its tokens: keys and values (G, l, D), and the factor (H,) on their attention."""

    key: Tensor
    value: Tensor
    factor: Tensor | None  # None: in the tokens' own softmax


Linear = Callable[[str, Tensor, Tensor], Tensor]  # name, x, W → what the layer gives
Read = Callable[[int, Tensor, Tensor, Tensor], Prompt | None]  # layer, W_q, W_k, W_v → its prompt


def plain(name: str, x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def logits(
    weights: dict[str, Tensor], ids: Tensor, read: Read, meta: bool, groups: int = GROUPS, linear: Linear = plain
) -> Tensor:
    """(B, T, V).

    Args:
        weights: of a transformers llama.
        read: the prompt of each layer.
        meta: compute as Meta's code does: projections in its order of channels, pairs of neighbours rotated.
        linear: what a linear layer computes.
    """
    return torch.stack([_row(weights, row, read, meta, groups, linear) for row in ids])


def _row(weights: dict[str, Tensor], ids: Tensor, read: Read, meta: bool, groups: int, linear: Linear) -> Tensor:
    x = weights["model.embed_tokens.weight"][ids]
    length = len(ids)
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, DIM, 2) / DIM)  # (T, D/2)
    hidden = torch.arange(length)[None] > torch.arange(length)[:, None]
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        own = {name.removeprefix(start): w for name, w in weights.items() if name.startswith(start)}
        w_q, w_k, w_v = (own[f"self_attn.{name}_proj.weight"] for name in "qkv")
        if meta:
            w_q, w_k = _meta_order(w_q), _meta_order(w_k)
        prompt = read(layer, w_q, w_k, w_v)
        y = norm(x, own["input_layernorm.weight"])
        projected = zip("qkv", (w_q, w_k, w_v), strict=True)
        query, key, value = (linear(f"{start}self_attn.{n}_proj", y, w).view(length, -1, DIM) for n, w in projected)
        query, key = rotate(query, angles, meta), rotate(key, angles, meta)
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // groups)
            scores = (query[:, head] @ key[:, group].T / DIM**0.5).masked_fill(hidden, -torch.inf)
            if prompt is None:
                heads.append(scores.softmax(-1) @ value[:, group])
                continue
            beside = query[:, head] @ prompt.key[group].T / DIM**0.5
            if prompt.factor is None:
                weight = torch.cat([beside, scores], -1).softmax(-1)
                heads.append(weight @ torch.cat([prompt.value[group], value[:, group]]))
            else:
                added = prompt.factor[head] * (beside.softmax(-1) @ prompt.value[group])
                heads.append(scores.softmax(-1) @ value[:, group] + added)
        x = x + linear(f"{start}self_attn.o_proj", torch.cat(heads, -1), own["self_attn.o_proj.weight"])
        y = norm(x, own["post_attention_layernorm.weight"])
        gate, up = (linear(f"{start}mlp.{n}_proj", y, own[f"mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        x = x + linear(f"{start}mlp.down_proj", silu(gate) * up, own["mlp.down_proj.weight"])
    return linear("lm_head", norm(x, weights["model.norm.weight"]), weights["lm_head.weight"])


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def rotate(y: Tensor, angles: Tensor, meta: bool) -> Tensor:
    """y (T, H, D): as complex numbers of neighbouring entries (Meta), or of an entry of each half (transformers)."""
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    if meta:
        return torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn).flatten(-2)
    first, second = y.chunk(2, -1)
    turned = torch.complex(first, second) * turn
    return torch.cat([turned.real, turned.imag], -1)


def _meta_order(weight: Tensor) -> Tensor:
    """Rows of a projection (H·D, d): from an entry of each half side by side back to neighbours."""
    return weight.view(-1, 2, DIM // 2, WIDTH).transpose(1, 2).reshape(-1, WIDTH)
