"""Write the pages that follow from the registry: docs/methods/*.md, docs/design-space.md, their pictures, and a table.

    python docs/make.py            # `make docs`

Everything on them comes from the methods themselves: docstring, fields and defaults, counts by formula, and a picture
of where the method's modules really sit after attaching it to a small model.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import foreword as fw
from foreword.convert.registry import table
from foreword.errors import ForewordError
from foreword.files import write_text
from foreword.model.host import host_of
from foreword.model.layout import Site

DOCS = Path(__file__).parent
GENERATED = "<!-- written by docs/make.py from the registry -->"


def llama(bias: bool = True, **sizes: int) -> LlamaForCausalLM:
    """A llama with random weights; by default a small one with every kind of parameter, biases too."""
    small = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**(small | sizes), attention_bias=bias, mlp_bias=bias)).eval()


SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


# ---------------------------------------------------------------------------------------------------------------------
# Where a method sits

PLACES = {  # place → (x, y of its box, text)
    "embedding": (20, 430, "soft prompt"),
    "joint": (20, 262, "K, V in the softmax"),
    "gated": (20, 262, "K, V, own softmax, gate"),
    "ungated": (20, 262, "K, V, own softmax"),
    "heads": (20, 222, "on each head's query"),
    "attention-in": (20, 222, "beside the attention"),
    "attention-out": (20, 182, "behind the attention"),
    "ffn-beside": (20, 60, "beside the FFN"),
    "ffn-behind": (20, 24, "behind the FFN"),
    "linears": (400, 300, "in the linear layers"),
    "norms": (400, 340, "in the norms"),
    "weights": (400, 182, "the model's own weights"),
}
COMBINES = {"JointSoftmax": "joint", "GatedSoftmax": "gated", "AddedSoftmax": "ungated"}


def places_of(adapter: fw.Adapter) -> list[str]:
    """The names in `PLACES` at which an attached adapter has modules."""
    found: list[str] = []
    for part in adapter.parts:
        for place, module in part.modules.items():
            if isinstance(place, Site):
                combine = type(getattr(module, "combine", None)).__name__
                found.append(COMBINES.get(combine, "heads" if combine != "NoneType" else "attention-in"))
            elif place.kind.endswith("ffn"):
                found.append("ffn-behind" if module.order == 2 else "ffn-beside")
            elif place.kind.endswith("output"):
                found.append("attention-out" if module.order == 2 else "attention-in")
            elif place.kind.endswith("linear"):
                found.append("linears")
            elif place.kind.endswith("norm"):
                found.append("norms")
        if type(part.shared).__name__ == "PromptForward":
            found = ["embedding"]
        if type(part).__name__ == "WeightsPart":
            found.append("weights")
    return list(dict.fromkeys(found))


def picture(places: list[str], title: str) -> str:
    """An SVG of one decoder layer with the places of a method marked."""
    boxes = [
        (200, 430, "token embeddings"),
        (200, 340, "norm"),
        (200, 300, "W_q  W_k  W_v"),
        (200, 262, "attention"),
        (200, 182, "W_o"),
        (200, 100, "norm"),
        (200, 60, "FFN"),
    ]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 580 480" font-family="system-ui, sans-serif" '
        f'font-size="13" role="img" aria-label="{title}">',
        '<rect width="580" height="480" fill="#ffffff"/>',
        '<path d="M280 430V18" stroke="#9aa3ad" stroke-width="1.5" marker-end="url(#a)"/>',
        '<defs><marker id="a" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#9aa3ad"/></marker></defs>',
        '<path d="M280 392H372V150H292M280 138H372V26H292" fill="none" stroke="#c9ced4" stroke-width="1.2"/>',
    ]
    for x, y, text in boxes:
        parts.append(f'<rect x="{x}" y="{y}" width="160" height="28" rx="5" fill="#f3f5f7" stroke="#9aa3ad"/>')
        parts.append(f'<text x="{x + 80}" y="{y + 18.5}" text-anchor="middle" fill="#2b3138">{text}</text>')
    for y in (150, 26):
        parts.append(f'<circle cx="280" cy="{y}" r="9" fill="#ffffff" stroke="#9aa3ad"/>')
        parts.append(f'<text x="280" y="{y + 4.5}" text-anchor="middle" fill="#2b3138">+</text>')
    for place in places:
        x, y, text = PLACES[place]
        width = 162
        start, end = (x + width, 198) if x < 200 else (x, 362)
        box = f'x="{x}" y="{y}" width="{width}" height="28" rx="5"'
        parts.append(f'<rect {box} fill="#e8542f" fill-opacity="0.13" stroke="#e8542f"/>')
        parts.append(f'<text x="{x + width / 2}" y="{y + 18.5}" text-anchor="middle" fill="#a5330f">{text}</text>')
        parts.append(f'<path d="M{start} {y + 14}H{end}" stroke="#e8542f" stroke-width="1.5"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Pages


def sections(method: type[fw.Method]) -> tuple[str, str, dict[str, str]]:
    """A docstring as its first line, its body, and the text of each field."""
    text = inspect.getdoc(method) or ""
    body, _, arguments = text.partition("\nArgs:\n")
    first, _, rest = body.partition("\n")
    fields: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + textwrap.dedent(arguments).replace("\n", "\n    ").rstrip()):
        name, _, description = entry.strip().partition(": ")
        if name:
            fields[name] = " ".join(description.split())
    return first.rstrip("."), rest.strip("\n").rstrip(), fields


def fenced(body: str) -> str:
    """Indented equations as code blocks."""
    blocks = re.split(r"\n\s*\n", body)
    return "\n\n".join(f"```\n{textwrap.dedent(b)}\n```" if b.startswith("    ") else b for b in blocks)


def page(name: str, method: type[fw.Method]) -> tuple[str, str]:
    """The Markdown page and the picture of a method."""
    first, body, _ = sections(method)
    described = {field: text for base in reversed(method.__mro__[:-1]) for field, text in sections(base)[2].items()}
    model = llama()
    adapter = fw.attach(model, name)
    rows = [
        f"| `{field.name}` | `{field.default!r}` | {described.get(field.name, '')} |"
        for field in dataclasses.fields(method)
    ]
    lines = [
        GENERATED,
        f"# {name}",
        f"{first}.",
        fenced(body),
        f"![where {name} sits in a layer](figures/{name}.svg)",
        "## Parameters",
        counts(method),
        "## Fields",
        "\n".join(["| field | default | meaning |", "|---|---|---|", *rows]) if rows else "It has none.",
        "## Use",
        f"```python\nadapter = fw.attach(model, fw.{method.__name__}())\n```",
        f"```\nforeword train data.jsonl --output_dir out/mine --method {name}\n```",
        f"The default learning rate is {method.learning_rate:g}.",
        f"## Source\n\n{method.citation}." if method.citation else "",
    ]
    return "\n\n".join(line for line in lines if line) + "\n", picture(places_of(adapter), f"{name} in a layer")


def counts(method: type[fw.Method]) -> str:
    with torch.device("meta"):
        meta = llama(bias=False, **SMOLLM2)
    model = meta.to_empty(device="cpu")
    model.tie_weights()
    try:
        count = method().count(host_of(model).layout)
    except ForewordError as error:
        return f"On SmolLM2-135M: {error}."
    return f"At its defaults on SmolLM2-135M it trains {count.trainable:,} numbers and stores {count.stored:,}."


def design_space() -> str:
    """The page with every method on the four axes."""
    rows = []
    for name, method in fw.methods().items():
        for one in method().compose():
            try:
                point = one.point()
            except NotImplementedError:
                continue
            label = name if one.name == name else f"{name} (its {one.name})"
            where = f"{point.attention} attention, {'every layer' if point.layers is None else point.layers}"
            rows.append((type(point.source).__name__, type(point.combine).__name__, label, where))
    sources = list(dict.fromkeys(row[0] for row in rows))
    combines = list(dict.fromkeys(row[1] for row in rows))
    grid = ["| source ↓ · combine → | " + " | ".join(combines) + " |", "|---|" + "---|" * len(combines)]
    for source in sources:
        cells = [
            "<br>".join(f"[{r[2]}](methods/{r[2].split(' ')[0]}.md)" for r in rows if r[:2] == (source, combine))
            for combine in combines
        ]
        grid.append(f"| **{source}** | " + " | ".join(cells) + " |")
    others = [
        f"* [{name}](methods/{name}.md): {sections(method)[0]}"
        for name, method in fw.methods().items()
        if name not in {label.split(" ")[0] for _, _, label, _ in rows}
    ]
    sites = ["| method | where |", "|---|---|", *(f"| {label} | {where} |" for _, _, label, where in rows)]
    return (
        "\n\n".join(
            [
                GENERATED,
                "# The design space",
                "A method that reads extra keys and values is a source and a combine, at chosen attention. An empty "
                "cell is a method that no paper named: `fw.Point(fw.sources.X(…), fw.combines.Y(…))` is that method.",
                "\n".join(grid),
                "## Where, at their defaults",
                "\n".join(sites),
                "## Streams",
                "A fourth axis is how many streams a row has and what joins them: one and nothing, but for "
                "[parscale](methods/parscale.md), which reads P copies of a row behind P prefixes, in the tokens' "
                "softmax, and joins them before the head.",
                "## Methods that are more, or other, than a source and a combine",
                "\n".join(others),
            ]
        )
        + "\n"
    )


def interop() -> str:
    """The page of other libraries, with its table as the registry of formats has it."""
    before, opening, rest = (DOCS / "interop.md").read_text(encoding="utf-8").partition("<!-- table")
    comment, arrow, rest = rest.partition("-->")
    _, closing, after = rest.partition("<!-- end of table -->")
    return f"{before}{opening}{comment}{arrow}\n\n{table()}\n\n{closing}{after}"


def write(folder: Path = DOCS) -> list[Path]:
    """Write every generated page below `folder` and return their paths."""
    torch.manual_seed(0)
    written = []
    index = [GENERATED, "# Methods", "\n".join(["| method | what it is |", "|---|---|"])]
    for name, method in sorted(fw.methods().items()):
        text, figure = page(name, method)
        written.append(write_text(folder / "methods" / f"{name}.md", text))
        written.append(write_text(folder / "methods" / "figures" / f"{name}.svg", figure))
        index[-1] += f"\n| [{name}]({name}.md) | {sections(method)[0]} |"
    written.append(write_text(folder / "methods" / "index.md", "\n\n".join(index) + "\n"))
    written.append(write_text(folder / "design-space.md", design_space()))
    written.append(write_text(folder / "interop.md", interop()))
    return written


if __name__ == "__main__":
    print(f"{len(write())} files written")
