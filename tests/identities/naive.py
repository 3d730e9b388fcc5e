"""A Llama decoder written from its equations in float64, with every kind of prefix put in by hand.

It shares nothing with the library or with transformers but the weights: heads are looped over, rotations are complex
products, prefixes are concatenated and one softmax is taken. `llama` makes the model that the library adapts: tiny,
with grouped queries and rotary positions, and with float64 norms and rotations in place of transformers', which always
compute in float32. So both agree to rounding, and an identity holds to 1e-9 or not at all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM

import foreword as fw

VOCABULARY, WIDTH, HEADS, GROUPS, DIM, LAYERS = 50, 48, 6, 2, 8, 4  # H/G = 3
THETA = 10_000.0
EPS = 1e-6

KeyValues = list[tuple[Tensor, Tensor]]  # for each layer (G, l, D) and (G, l, D)


class Rotary(nn.Module):
    """Cosines and sines (B, T, D) in the half-split layout, in the dtype of the states."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.cat([_angles(position_ids)] * 2, dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def llama(groups: int = GROUPS, dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """The tiny model, with the same random weights every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=groups,
        head_dim=DIM,
        rms_norm_eps=EPS,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.model.rotary_emb = Rotary()
    for parent in [model.model, *model.model.layers]:
        for name, module in list(parent.named_children()):
            if "norm" in name:
                setattr(parent, name, nn.RMSNorm(WIDTH, EPS, dtype=dtype))
                assert module.weight.shape == (WIDTH,)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)  # transformers' 0.02 makes every attention nearly uniform
        else:
            nn.init.normal_(parameter, mean=1.0, std=0.1)
    return model.eval()


class Decoder:
    """The same function as `model`, from its weights: ids (B, T) or embeddings (B, T, d) → logits (B, T, V)."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.weights = {name: tensor.detach() for name, tensor in model.state_dict().items() if "foreword" not in name}
        self.groups = model.config.num_key_value_heads

    def __call__(
        self,
        inputs: Tensor,
        positions: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        key_values: KeyValues | None = None,
        prompts: list[tuple[Tensor, Tensor] | None] | None = None,
        rows: list[Tensor] | None = None,
        cache: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Logits of the text.

        Args:
            positions: (T,) or (B, T); counted from 0 unless given.
            mask: (B, T), 0 for padding.
            key_values: keys, in cache space, and values in front of every layer's own.
            prompts: p (l, d) and the factor (H,) on its attention, for each layer or None, as in LLaMA-Adapter.
            rows: p (l, d) in front of every layer's input; `positions` then counts them too.
            cache: filled with the keys (B, G, T, D) and values of each layer if it is empty, else read and extended.
        """
        text = self.weights["model.embed_tokens.weight"][inputs] if inputs.dim() == 2 else inputs
        length = 0 if rows is None else len(rows[0])
        positions = torch.arange(length + text.shape[1]) if positions is None else positions
        filled = bool(cache)
        for layer in range(LAYERS):
            states = text if rows is None else torch.cat([rows[layer].expand(len(text), -1, -1), text], dim=1)
            w = self.layer_weights(layer)
            q, k, v = self.project(layer, rms(states, w["input_layernorm"]), positions)
            if cache is not None:
                if filled:
                    k, v = torch.cat([cache[layer][0], k], dim=2), torch.cat([cache[layer][1], v], dim=2)
                    cache[layer] = (k, v)
                else:
                    cache.append((k, v))
            visible = text_visible(q.shape[2], k.shape[2], mask)
            if key_values is not None:
                k, v, visible = in_front(key_values[layer], k, v, visible)
            heads = attention(q, k, v, visible)
            if prompts is not None and prompts[layer] is not None:
                heads = heads + self.prompted(layer, q, *prompts[layer])
            states = states + heads.transpose(1, 2).flatten(2) @ w["self_attn.o_proj"].T
            normed = rms(states, w["post_attention_layernorm"])
            inner = silu(normed @ w["mlp.gate_proj"].T) * (normed @ w["mlp.up_proj"].T)
            text = (states + inner @ w["mlp.down_proj"].T)[:, length:]
        return rms(text, self.weights["model.norm.weight"]) @ self.weights["lm_head.weight"].T

    def layer_weights(self, layer: int) -> dict[str, Tensor]:
        start = f"model.layers.{layer}."
        return {
            name.removeprefix(start).removesuffix(".weight"): tensor
            for name, tensor in self.weights.items()
            if name.startswith(start)
        }

    def project(self, layer: int, normed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, H, T, D), rotated keys and plain values (B, G, T, D) of normed states (B, T, d)."""
        w = self.layer_weights(layer)
        q, k, v = (
            (normed @ w[f"self_attn.{name}"].T).unflatten(-1, (-1, DIM)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        positions = positions if positions.dim() == 1 else positions[:, None]  # (B, 1, T) beside (B, H, T, D)
        return rotate(q, positions), rotate(k, positions), v

    def prompted(self, layer: int, query: Tensor, prompt: Tensor, factor: Tensor) -> Tensor:
        """factor_h · softmax(q_h (p W_k)ᵀ/√D) (p W_v): no norm, no rotation."""
        _, k, v = self.project(layer, prompt[None], torch.zeros(len(prompt)))
        batch, _, length, _ = query.shape
        everything = torch.ones(batch, length, len(prompt), dtype=torch.bool)
        k, v = (states.expand(batch, -1, -1, -1) for states in (k, v))
        return factor[:, None, None] * attention(query, k, v, everything)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def _angles(positions: Tensor) -> Tensor:
    half = DIM // 2
    return positions[..., None].double() / THETA ** (torch.arange(half, dtype=torch.float64) / half)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x (…, T, D) turned to its positions (…, T): channel i and channel i + D/2 are one complex number."""
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.exp(1j * _angles(positions))
    return torch.cat([turned.real, turned.imag], dim=-1)


def text_visible(length: int, keys: int, mask: Tensor | None) -> Tensor:
    """(B | 1, T, S): whether each query may see each key. A pad sees itself, so that it has something to see."""
    at = torch.arange(keys - length, keys)[:, None]
    visible = (torch.arange(keys) <= at)[None]
    return visible if mask is None else visible & (mask.bool()[:, None] | (torch.arange(keys) == at))


def in_front(prefix: tuple[Tensor, Tensor], k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A prefix (G, l, D) in front of keys and values (B, G, S, D), visible to every query."""
    k, v = (torch.cat([p.expand(len(x), -1, -1, -1), x], dim=2) for p, x in zip(prefix, (k, v), strict=True))
    seen = torch.ones(*visible.shape[:2], prefix[0].shape[1], dtype=torch.bool)
    return k, v, torch.cat([seen, visible], dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """softmax(q kᵀ/√D) v, head by head. q (B, H, T, D), k and v (B, G, S, D), visible (B | 1, T, S)."""
    share = q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // share].mT / q.shape[-1] ** 0.5
        heads.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v[:, head // share])
    return torch.stack(heads, dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# Around the two


def key_values(adapter: fw.Adapter) -> KeyValues:
    """The keys and values that a `prefix-tuning` adapter without MLP holds for each layer."""
    state = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    return [(state[f"0.self.{i}.source.key"], state[f"0.self.{i}.source.value"]) for i in range(LAYERS)]


def prompts(adapter: fw.Adapter) -> list[tuple[Tensor, Tensor] | None]:
    """The prompt and tanh(g) that a `zero-init` adapter holds for each layer, None where it has none."""
    state = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    return [
        (state[f"0.self.{i}.source.prompt"], torch.tanh(state[f"0.self.{i}.combine.gate"]))
        if f"0.self.{i}.source.prompt" in state
        else None
        for i in range(LAYERS)
    ]


def random_ids(batch: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def exactly(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def differs(actual: Tensor, expected: Tensor, by: float = 1e-2) -> None:
    """The negative control: the two are clearly not the same."""
    assert (actual - expected).abs().max() > by
