"""File names of cells."""

import re


def file_name(*parts: object) -> str:
    """The parts joined by dots, with a dash for what a file name should not hold: trec.lora.1.steps100.seed0"""
    return ".".join(re.sub(r"[^\w.=+-]+", "-", str(part)).strip("-") for part in parts)
