"""Three models written from their equations, with a place for every term that a method of the family adds.

`Llama` (grouped queries, rotary positions, RMS norms, a gated FFN), `GPT2` (all heads, learned positions, one fused
projection) and `Bart` (an encoder-decoder whose norms stand behind the residual sums). They share with the library
and with transformers only the weights. A method is a subclass of `Terms`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, silu

NEGATIVE = -1e30


class Terms:
    """The frozen model: every place gives back what it got. Sites have their names in files: "self.0", "ffn.1", …"""

    first_position = 0  # of the text, where positions are learned

    def linear(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        return y

    def prefix(self, site: str) -> tuple[Tensor, Tensor] | None:
        """Keys and values (H | G, l, D) in front of the tokens' own."""
        return None

    def heads(self, site: str, x: Tensor, raw: Tensor, query: Tensor, out: Tensor) -> Tensor:
        """x (B, T, d), queries before and after rotation and out (B, H, T, D) → out."""
        return out

    def output(self, site: str, x: Tensor, h: Tensor) -> Tensor:
        return h

    def ffn(self, site: str, x: Tensor, h: Tensor) -> Tensor:
        return h

    def before_last_norm(self, site: str, s: Tensor, norm) -> Tensor:
        return s

    def norm(self, name: str, x: Tensor, y: Tensor, norm) -> Tensor:
        return y


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, H, T, D)


def join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


def repeat(x: Tensor, heads: int) -> Tensor:
    """(…, G, l, D) → (…, H, l, D)."""
    return x.repeat_interleave(heads // x.shape[-3], dim=-3)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, prefix=None) -> Tensor:
    """One softmax over [prefix; tokens] (B, H, T, D); a causal mask never hides the prefix."""
    heads, length = q.shape[1], 0
    k, v = repeat(k, heads), repeat(v, heads)
    if prefix is not None:
        length = prefix[0].shape[-2]
        pk, pv = (repeat(t, heads).expand(len(q), -1, -1, -1) for t in prefix)
        k, v = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None] - length
        scores = scores.masked_fill(columns > rows, NEGATIVE)
    return scores.softmax(-1) @ v


def rotate(x: Tensor, theta: float) -> Tensor:
    """Half-split rotation of (B, H, T, D) at positions 0 … T−1."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def llama(model, ids: Tensor, terms: Terms) -> Tensor:
    config = model.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    theta = config.rope_parameters["rope_theta"]

    def linear(name, module, x):
        return terms.linear(name, x, x @ module.weight.T)

    def rms(name, module, x):
        def plain(x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)

        return terms.norm(name, x, plain(x) * module.weight, plain)

    x = model.model.embed_tokens.weight[ids]
    for i, layer in enumerate(model.model.layers):
        a = layer.self_attn
        u = rms(f"{i}.input_layernorm", layer.input_layernorm, x)
        q, k, v = (linear(f"{i}.self_attn-{name}", getattr(a, name), u) for name in ("q_proj", "k_proj", "v_proj"))
        raw, k, v = split(q, heads), rotate(split(k, groups), theta), split(v, groups)
        query = rotate(raw, theta)
        out = terms.heads(f"self.{i}", u, raw, query, attend(query, k, v, True, terms.prefix(f"self.{i}")))
        h = linear(f"{i}.self_attn-o_proj", a.o_proj, join(out))
        x = x + terms.output(f"self.{i}", u, h)
        u = rms(f"{i}.post_attention_layernorm", layer.post_attention_layernorm, x)
        m = layer.mlp
        gate = silu(linear(f"{i}.mlp-gate_proj", m.gate_proj, u))
        h = linear(f"{i}.mlp-down_proj", m.down_proj, gate * linear(f"{i}.mlp-up_proj", m.up_proj, u))
        x = x + terms.ffn(f"ffn.{i}", u, h)
    return rms("norm", model.model.norm, x) @ model.lm_head.weight.T


def gpt2(model, ids: Tensor, terms: Terms) -> Tensor:
    config, stack = model.config, model.transformer

    def conv(name, module, x):
        return terms.linear(name, x, x @ module.weight + module.bias)

    def norm(name, module, x):
        def plain(x):
            return layer_norm(x, x.shape[-1:], eps=config.layer_norm_epsilon)

        return terms.norm(name, x, plain(x) * module.weight + module.bias, plain)

    x = stack.wte.weight[ids] + stack.wpe.weight[terms.first_position :][: ids.shape[1]]
    for i, block in enumerate(stack.h):
        u = norm(f"{i}.ln_1", block.ln_1, x)
        q, k, v = (split(t, config.n_head) for t in conv(f"{i}.attn-c_attn", block.attn.c_attn, u).chunk(3, -1))
        out = terms.heads(f"self.{i}", u, q, q, attend(q, k, v, True, terms.prefix(f"self.{i}")))
        x = x + terms.output(f"self.{i}", u, conv(f"{i}.attn-c_proj", block.attn.c_proj, join(out)))
        u = norm(f"{i}.ln_2", block.ln_2, x)
        inner = gelu(conv(f"{i}.mlp-c_fc", block.mlp.c_fc, u), approximate="tanh")
        x = x + terms.ffn(f"ffn.{i}", u, conv(f"{i}.mlp-c_proj", block.mlp.c_proj, inner))
    return norm("ln_f", stack.ln_f, x) @ model.lm_head.weight.T


def bart(model, ids: Tensor, terms: Terms) -> Tensor:
    """The decoder's logits with `ids` on both sides."""
    config = model.config
    heads = config.decoder_attention_heads

    def linear(name, module, x):
        return terms.linear(name, x, x @ module.weight.T + module.bias)

    def norm(name, module, x):
        def plain(x):
            return layer_norm(x, x.shape[-1:], eps=module.eps)

        return terms.norm(name, x, plain(x) * module.weight + module.bias, plain)

    def attention(site, name, module, u, source, causal):
        q = split(linear(f"{name}-q_proj", module.q_proj, u), heads)
        k = split(linear(f"{name}-k_proj", module.k_proj, source), heads)
        v = split(linear(f"{name}-v_proj", module.v_proj, source), heads)
        out = terms.heads(site, u, q, q, attend(q, k, v, causal, terms.prefix(site)))
        return terms.output(site, u, linear(f"{name}-out_proj", module.out_proj, join(out)))

    def feed_forward(prefix, i, layer, x):
        h = linear(f"{prefix}{i}.fc2", layer.fc2, gelu(linear(f"{prefix}{i}.fc1", layer.fc1, x)))
        s = x + terms.ffn(f"{prefix}ffn.{i}", x, h)

        def plain(s):
            return layer_norm(s, s.shape[-1:], layer.final_layer_norm.weight, layer.final_layer_norm.bias)

        s = terms.before_last_norm(f"{prefix}norm.{i}", s, plain)
        return norm(f"{prefix}{i}.final_layer_norm", layer.final_layer_norm, s)

    def embed(stack, name):
        positions = stack.embed_positions.weight[2 : 2 + ids.shape[1]]
        return norm(name, stack.layernorm_embedding, model.model.shared.weight[ids] + positions)

    source = embed(model.model.encoder, "encoder-layernorm_embedding")
    for i, layer in enumerate(model.model.encoder.layers):
        h = attention(f"encoder.{i}", f"encoder-{i}.self_attn", layer.self_attn, source, source, causal=False)
        source = norm(f"encoder-{i}.self_attn_layer_norm", layer.self_attn_layer_norm, source + h)
        source = feed_forward("encoder-", i, layer, source)
    x = embed(model.model.decoder, "decoder-layernorm_embedding")
    for i, layer in enumerate(model.model.decoder.layers):
        h = attention(f"self.{i}", f"{i}.self_attn", layer.self_attn, x, x, causal=True)
        x = norm(f"{i}.self_attn_layer_norm", layer.self_attn_layer_norm, x + h)
        h = attention(f"cross.{i}", f"{i}.encoder_attn", layer.encoder_attn, x, source, causal=False)
        x = norm(f"{i}.encoder_attn_layer_norm", layer.encoder_attn_layer_norm, x + h)
        x = feed_forward("", i, layer, x)
    return x @ model.lm_head.weight.T + model.final_logits_bias
