"""Generated answers against given ones: exact match and F1 over words, as SQuAD counts them (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter


def normalised(text: str) -> list[str]:
    """The words of an answer, in lower case, without articles and punctuation."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def exact(said: str, right: str) -> float:
    """1 where the words are the same in the same order, else 0."""
    return float(normalised(said) == normalised(right))


def f1(said: str, right: str) -> float:
    """2·P·R / (P + R) of the words in common; 1 where both have none."""
    ours, theirs = normalised(said), normalised(right)
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)
