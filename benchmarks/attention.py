"""One attention, forward and backward: what a prefix adds, beside the least that it could add.

    python -m benchmarks.attention --output out/benchmarks

The shapes are SmolLM2's. The prefix needs 2·B·H·T·l·D operations for each of seven matrix products: scores and output,
and in the backward the scores again and four gradients. "least ms" is that at the speed of a large matrix product here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foreword.attention.fused import joint_attention, prefix_attention
from foreword.attention.merge import Scoring, attend, causal_mask, merge

from .measuring import CLOCKS, Report, interleave

HEADS, GROUPS, WIDTH = 9, 3, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 30, 128, 512], help="prefix lengths l")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512], help="tokens T of each row")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    report = Report({"rows": options.rows, "clock": options.clock, "repetitions": options.repetitions})
    for dtype in options.dtypes:
        speed = flops(getattr(torch, dtype), options.clock)
        for tokens in options.tokens:
            rows = []
            for length in options.lengths:
                arms = make(options.rows, tokens, length, getattr(torch, dtype))
                seconds = interleave(arms, options.repetitions, options.clock, warmup=3)
                best = {name: 1000 * min(s) for name, s in seconds.items()}
                products = 7 * 2 * options.rows * HEADS * tokens * length * WIDTH
                base = best.pop("base")
                rows.append([length, base, *(ms - base for ms in best.values()), 1000 * products / speed])
            report.table(
                f"Attention, {options.rows}×{tokens} tokens, {dtype}: ms added by a prefix of l (forward and backward)",
                ["l", "base ms", *best, "least ms"],
                rows,
            )
    report.save(options.output, "attention")


def make(rows: int, tokens: int, length: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    def draw(batch: int, size: int, heads: int) -> Tensor:
        return torch.randn(batch, size, heads, WIDTH).to(dtype).transpose(1, 2).requires_grad_()

    query, key, value = draw(rows, tokens, HEADS), draw(rows, tokens, GROUPS), draw(rows, tokens, GROUPS)
    prefix_key, prefix_value = draw(1, length, GROUPS), draw(1, length, GROUPS)
    grad_out = torch.randn(rows, tokens, HEADS, WIDTH).to(dtype)
    scaling, inputs = WIDTH**-0.5, (query, key, value, prefix_key, prefix_value)
    visible = torch.cat([torch.ones(tokens, length, dtype=torch.bool), causal_mask(tokens, tokens, query.device)], 1)

    def own() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)

    def concatenated() -> Tensor:
        keys, values = (
            torch.cat([p.expand(rows, -1, -1, -1), x], 2) for p, x in ((prefix_key, key), (prefix_value, value))
        )
        return scaled_dot_product_attention(query, keys, values, visible, enable_gqa=True).transpose(1, 2)

    def reference() -> Tensor:
        tokens_part = attend(query, key, value, Scoring(scaling), visible[:, length:])
        return merge(*tokens_part[:2], *attend(query, prefix_key, prefix_value, Scoring(scaling))[:2])[0].transpose(
            1, 2
        )

    def backward(forward: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            torch.autograd.grad(forward(), inputs, grad_out, allow_unused=True)

        return run

    return {
        "base": backward(own),
        "joint, fused": backward(lambda: joint_attention(*inputs, scaling, causal=True)),
        "own softmax, fused": backward(lambda: own() + prefix_attention(query, prefix_key, prefix_value, scaling)),
        "concatenated": backward(concatenated),
        "joint, reference": backward(reference),
    }


def flops(dtype: torch.dtype, clock: str) -> float:
    """Operations a second of a large matrix product."""
    size = 1536
    matrix = torch.randn(size, size).to(dtype)
    now, best = CLOCKS[clock], float("inf")
    for _ in range(5):
        start = now()
        matrix @ matrix
        best = min(best, now() - start)
    return 2 * size**3 / best


if __name__ == "__main__":
    main()
