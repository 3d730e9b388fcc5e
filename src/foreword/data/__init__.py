"""Training and evaluation data."""

from .examples import split, to_text
from .formats import FORMATS, detect, load
from .prompts import read_prompts

__all__ = ["FORMATS", "detect", "load", "read_prompts", "split", "to_text"]
