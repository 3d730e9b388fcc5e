"""Training and evaluation data."""

from .examples import split, to_text
from .formats import FORMATS, detect, load

__all__ = ["FORMATS", "detect", "load", "split", "to_text"]
