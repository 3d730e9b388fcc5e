"""foreword bench"""

from __future__ import annotations


def run(
    method: str = "prefix-tuning",
    model: str = "smollm2",
    kernels: bool = False,
    rows: int = 4,
    tokens: int = 128,
    rounds: int = 8,
    dtype: str = "auto",
    json: bool = False,
) -> None:
    """Measure a training step and a decoding step with a method on a model, beside the frozen model.

    Examples:
        foreword bench --method prefix-tuning --method.length 128
        foreword bench --model mistralai/Mistral-7B-v0.1 --method zero-init --kernels

    A step is forward and backward of the loss; the frozen model's is differentiable in its input embeddings only.
    The arms take turns, and ratios are medians over the rounds.

    Args:
        model: a Hub id, a local folder, or "smollm2".
        kernels: print the path that each attention module takes, and why, instead of measuring.
        rows: of a batch.
        tokens: of a row.
        rounds: measurements of each arm.
        dtype: of the frozen model: "auto", "float32", "bfloat16", "float16".
        json: print JSON.
    """
    from dataclasses import asdict

    from ..base import base
    from ..bench import bench, kernel_paths
    from ..devices import to_fastest
    from .output import show_json, show_table

    network, _ = base(model, dtype=dtype)
    to_fastest(network)
    if kernels:
        paths = kernel_paths(network, [method])
        show_json(paths) if json else show_table(paths)
        return
    costs = bench(network, [method], rows=rows, tokens=tokens, rounds=rounds)
    if json:
        show_json({name: asdict(cost) for name, cost in costs.items()})
        return
    show_table(
        [
            {
                "": name,
                "training step (s)": cost.step,
                "ratio": f"{cost.step_ratio:.3f}",
                "decoding a token (s)": cost.decode,
                "ratio ": f"{cost.decode_ratio:.3f}",
            }
            for name, cost in costs.items()
        ]
    )
