"""What P streams cost in memory and time, by the accounting of the ParScale paper.

Memory is weights, KV cache of P·B rows, aggregator, and the larger of one layer's activations (P·B rows) and the head's
(B rows). Time is a roofline: every part of a forward takes as long as its arithmetic or as its memory traffic,
whichever is longer, at fixed shares of the machine's peaks. Weights are read once however many rows there are, which
is why streams are cheap while decoding a row or two, and are not where arithmetic decides: long prompts and large
batches. The paper's script (`cost_analysis.py` in github.com/QwenLM/ParScale) also counts the l prefix tokens as
tokens of the prompt, as its modeling file computes queries for them; `padded` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """Peak arithmetic (operations/s) and memory bandwidth (bytes/s), and the shares of them that a model reaches."""

    name: str
    flops: float
    bandwidth: float
    flops_share: float = 0.7
    bandwidth_share: float = 0.9


A100 = Machine("A100 80 GB", 312e12, 2.039e12)


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with gated feed-forward layers.

    Attributes:
        layers, hidden, intermediate: L, d, width of the feed-forward layer.
        query, key: H·D and G·D.
        vocabulary: words.
        tied: whether the head is the embedding.
    """

    layers: int
    hidden: int
    intermediate: int
    query: int
    key: int
    vocabulary: int
    tied: bool = True

    @classmethod
    def of(cls, config: Any) -> Shape:
        """The shape of a transformers config."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        groups = getattr(text, "num_key_value_heads", None) or heads
        intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        return cls(
            text.num_hidden_layers,
            text.hidden_size,
            intermediate,
            heads * width,
            groups * width,
            text.vocab_size,
            bool(text.tie_word_embeddings),
        )

    def wider(self, factor: float) -> Shape:
        """As deep, with `factor` times the parameters in its layers: every width times √factor."""
        grow = math.sqrt(factor)
        widths = {name: round(getattr(self, name) * grow) for name in ("hidden", "intermediate", "query", "key")}
        return replace(self, **widths)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: projections of queries, keys, values and output, and three feed-forward matrices."""
        return self.hidden * (2 * self.query + 2 * self.key) + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Weights of all layers, without embeddings."""
        return self.layers * self.layer_parameters

    @property
    def embedding(self) -> int:
        """Weights of the embedding, and of the head where it has its own."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)


@dataclass(frozen=True)
class Workload:
    """Generating `new` tokens for `batch` prompts of `prompt` tokens; `length` prefix tokens a stream."""

    batch: int = 1
    prompt: int = 64
    new: int = 64
    length: int = 48


@dataclass(frozen=True)
class Cost:
    """Bytes that a generation holds, and its seconds.

    Attributes:
        weights, aggregator, cache, activations: bytes.
        prefill, decode: seconds until the first new token, and from there to the last.
    """

    weights: float
    aggregator: float
    cache: float
    activations: float
    prefill: float
    decode: float

    @property
    def memory(self) -> float:
        return self.weights + self.aggregator + self.cache + self.activations

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode


def cost(
    shape: Shape,
    streams: int = 1,
    work: Workload = Workload(),
    *,
    machine: Machine = A100,
    bytes_per_number: int = 2,
    padded: bool = True,
) -> Cost:
    """The cost of a generation with P streams; P = 1 is the model without a prefix.

    Args:
        padded: compute l further queries in every layer of the prefill, as the authors' file does; foreword doesn't.
    """
    prefix = work.length if streams > 1 else 0
    rows = work.batch * streams
    queries = work.prompt + (prefix if padded else 0)
    aggregator = streams * shape.hidden * (shape.hidden + 1) if streams > 1 else 0
    key_value = 2 * shape.layers * shape.key  # numbers of one token in the cache
    held = rows * (prefix + work.prompt + work.new)  # tokens in the cache at the end
    layer = rows * queries * max(shape.intermediate, shape.query + 2 * shape.key)
    head = work.batch * queries * shape.vocabulary

    def forward(tokens: int, context: float) -> float:
        """Seconds of a forward of `tokens` new ones a row, each of which attends to `context` on average."""
        read = rows * (context if tokens == 1 else 0) * key_value  # a prefill's keys come out of its own projections
        operations = rows * tokens * (2 * shape.parameters + 4 * shape.layers * shape.query * context)
        layers = _roofline(machine, operations, (shape.parameters + read) * bytes_per_number)
        output = shape.vocabulary * shape.hidden
        return (
            layers
            + _roofline(machine, 2 * work.batch * tokens * output, output * bytes_per_number)
            + _roofline(machine, 2 * work.batch * tokens * aggregator, aggregator * bytes_per_number)
        )

    return Cost(
        weights=(shape.parameters + shape.embedding) * bytes_per_number,
        aggregator=aggregator * bytes_per_number,
        cache=held * key_value * bytes_per_number,
        activations=max(layer, head) * bytes_per_number,
        prefill=forward(queries, prefix + work.prompt / 2),
        decode=work.new * forward(1, prefix + work.prompt + work.new / 2),
    )


def _roofline(machine: Machine, operations: float, traffic: float) -> float:
    """Seconds of arithmetic or of memory traffic (bytes), whichever takes longer."""
    arithmetic = operations / (machine.flops * machine.flops_share)
    return max(arithmetic, traffic / (machine.bandwidth * machine.bandwidth_share))
