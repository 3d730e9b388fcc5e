"""A small task that this project made: the listings of a restaurant guide with a house style.

A record like

    name: Copper Heron | price: low | area: harbour | food: Basque | near: Rope Works | rating: 4 | family: no

becomes

    Down by the harbour, two steps from Rope Works, Copper Heron keeps a Basque kitchen for small change: four
    spoons, but grown-ups only. Book ahead.

The style is what there is to learn, since no model can guess it: the order of the facts whatever their order
in the record, the house word of each value, the fronted place, "but" where rating and family policy pull
apart, and the closing advice. A record has one right listing, so exact match means what it says. No name of
the test part occurs in training, nor do some of its kitchens and landmarks.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ForewordError
from .conversations import message

if TYPE_CHECKING:
    from datasets import Dataset

Record = dict[str, str]  # slot -> value

INSTRUCTION = "Write the guide's listing for this restaurant."
SIZES = {"train": 400, "test": 100}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


_FIRST = _words("""Amber, Brass, Cinder, Clover, Copper, Crooked, Ember, Gilded, Hazel, Hollow, Ivory,
    Juniper, Linden, Marble, Mossy, Plum, Quiet, Russet, Salted, Velvet""")
_SECOND = _words("""Anchor, Badger, Barrel, Bellows, Compass, Fiddle, Heron, Kettle, Ladle, Lantern, Magpie,
    Oar, Otter, Pepperpot, Plough, Quill, Sparrow, Thimble, Trout, Wren""")
_NAMES = [f"{first} {second}" for first, second in product(_FIRST, _SECOND)]
_FOODS = _words("""Alsatian, Armenian, Basque, Breton, Catalan, Cretan, Danish, Ethiopian, Georgian, Indian,
    Lebanese, Maltese, Peruvian, Umbrian, Welsh""")
_LANDMARKS = _words("""Bell Tower, Candle Row, Cooper Bridge, Dyers Yard, Fenwick Mill, Ferry Landing,
    Glass Arcade, Heath Chapel, Mason Steps, Orchard Gate, Rope Works, Salt Stairs, Tanner Square, Toll House,
    Weaver Hall""")
_HELD_OUT = {  # test values: a quarter of the names, whose two words do occur in training, apart
    "name": [name for n, name in enumerate(_NAMES) if (n + n // len(_SECOND)) % 4 == 0],
    "food": ["Armenian", "Maltese", "Welsh"],
    "near": ["Ferry Landing", "Glass Arcade", "Heath Chapel"],
}
_PHRASES: dict[str, dict[str, str]] = {  # slot -> value -> the words of the listing that say it, in its order
    "area": {
        "harbour": "down by the harbour",
        "hill": "up the long steps",
        "market": "among the stalls",
        "old town": "under the arches",
        "park": "past the bandstand",
        "river": "on the green bank",
    },
    "near": {landmark: f"two steps from {landmark}" for landmark in _LANDMARKS},
    "name": {name: name for name in _NAMES},
    "food": {food: f"{food} kitchen" for food in _FOODS},
    "price": {"low": "for small change", "medium": "at an honest price", "high": "for a rare evening"},
    "rating": {
        "1": "one spoon",
        "2": "two spoons",
        "3": "three spoons",
        "4": "four spoons",
        "5": "five spoons",
    },
    "family": {"yes": "children welcome", "no": "grown-ups only"},
}
_OPTIONAL = ("area", "near", "rating", "family")  # each in 60 % of the records


def restaurants(
    split: Literal["train", "test"] = "train", n: int | None = None, seed: int = 0, *, chat: bool = True
) -> "Dataset":
    """`n` different listings of the restaurant guide, the same ones for the same arguments.

    Args:
        split: "train" or "test"; the two share no name, whatever their seeds and sizes.
        n: how many; 400 to train on and 100 to test with by default.
        seed: of the draw.
        chat: prompts and completions as lists of messages, or as plain strings.

    Returns:
        A dataset with the columns `prompt`, `completion` and `record` (the line of slots and values).
    """
    from datasets import Dataset

    if split not in SIZES:
        raise ForewordError(f"the restaurant task has no split {split!r}; it has train and test")
    count = SIZES[split] if n is None else n
    if not 1 <= count <= 100_000:
        raise ForewordError(f"can't draw n={count} restaurant listings; n is from 1 to 100000")
    draw = random.Random(f"{split} {seed}")
    values = {slot: _values(slot, split) for slot in _PHRASES}
    records: dict[frozenset[tuple[str, str]], str] = {}  # in order, without duplicates
    while len(records) < count:
        record = _draw(values, draw)
        records.setdefault(frozenset(record.items()), _line(record))
    return Dataset.from_list([_example(line, chat) for line in records.values()])


def listing(record: Mapping[str, str]) -> str:
    """The guide's sentence for a record: place, name, kitchen and price; then spoons and family; then advice.

    Area and landmark stand in front. "but" joins a good rating (3 and up) to grown-ups only, or a bad one to
    children welcome; else "and". The advice follows the rating from 4 up, else a low price, else neither.
    """
    says = {slot: _PHRASES[slot][value] for slot, value in record.items()}
    article = "an" if record["food"][0] in "AEIOU" else "a"
    facts = [says[slot] for slot in ("area", "near") if slot in record]
    facts.append(f"{says['name']} keeps {article} {says['food']} {says['price']}")
    verdict = [says[slot] for slot in ("rating", "family") if slot in record]
    apart = len(verdict) == 2 and (int(record["rating"]) >= 3) != (record["family"] == "yes")
    sentence = ", ".join(facts) + (": " if verdict else "") + (", but " if apart else ", and ").join(verdict)
    loved, cheap = int(record.get("rating", 0)) >= 4, record["price"] == "low"
    advice = "Book ahead." if loved else "Just walk in." if cheap else "Worth a look."
    return f"{sentence[0].upper()}{sentence[1:]}. {advice}"


def parse(line: str) -> Record:
    """The record in a line "slot: value | slot: value"."""
    return dict(field.split(": ", 1) for field in line.split(" | "))


def score(predictions: Sequence[str], examples: "Dataset | Sequence[Mapping[str, Any]]") -> dict[str, float]:
    """How well `predictions` render the records of `examples`, each measure in [0, 1].

    Returns:
        `slot_accuracy`: facts said / (facts of the records + facts said that aren't theirs), where a fact is
        said by its house phrase; `exact_match`: the share of predictions that are the listing, but for space
        around it; `rouge_l`: the mean of `rouge_l` against the listing.
    """
    if len(predictions) != len(examples) or not predictions:
        raise ForewordError(f"there are {len(predictions)} predictions for {len(examples)} examples")
    right = total = 0
    exact, overlap = 0, 0.0
    for prediction, example in zip(predictions, examples, strict=True):
        record = parse(example["record"])
        gold, facts, said = listing(record), set(record.items()), set(facts_in(prediction))
        right += len(facts & said)
        total += len(facts | said)
        exact += prediction.strip() == gold
        overlap += rouge_l(prediction, gold)
    count = len(predictions)
    return {"slot_accuracy": right / total, "exact_match": exact / count, "rouge_l": overlap / count}


def facts_in(text: str) -> Iterator[tuple[str, str]]:
    """The (slot, value) pairs whose house phrase occurs in `text`, whatever its case and punctuation."""
    spoken = " ".join(["", *_tokens(text), ""])
    for slot, phrases in _PHRASES.items():
        for value, phrase in phrases.items():
            if " ".join(["", *_tokens(phrase), ""]) in spoken:
                yield slot, value


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L (Lin 2004, section 3.1) with β = 1, on lower-case runs of letters and digits.

    With L the length of the longest common subsequence of m predicted and n reference words, precision is L/m
    and recall L/n; their harmonic mean is 2L / (m + n).
    """
    predicted, wanted = _tokens(prediction), _tokens(reference)
    best = [0] * (len(wanted) + 1)  # best[j]: the LCS of the words so far and wanted[:j]
    for word in predicted:
        diagonal = 0
        for j, other in enumerate(wanted, start=1):
            diagonal, best[j] = best[j], diagonal + 1 if word == other else max(best[j], best[j - 1])
    return 2 * best[-1] / (len(predicted) + len(wanted)) if wanted else 0.0


def _tokens(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _values(slot: str, split: str) -> list[str]:
    held_out = _HELD_OUT.get(slot, [])
    if slot == "name" and split == "test":
        return held_out
    return [value for value in _PHRASES[slot] if split == "test" or value not in held_out]


def _draw(values: Mapping[str, Sequence[str]], draw: random.Random) -> Record:
    slots = [slot for slot in values if slot not in _OPTIONAL or draw.random() < 0.6]
    draw.shuffle(slots)
    return {slot: draw.choice(values[slot]) for slot in slots}


def _line(record: Record) -> str:
    return " | ".join(f"{slot}: {value}" for slot, value in record.items())


def _example(line: str, chat: bool) -> dict[str, Any]:
    prompt, completion = f"{INSTRUCTION}\n{line}", listing(parse(line))
    if chat:
        turns = {"prompt": [message("user", prompt)], "completion": [message("assistant", completion)]}
        return turns | {"record": line}
    return {"prompt": f"{prompt}\nListing:", "completion": f" {completion}", "record": line}
