"""Foreword: the prefix family of parameter-efficient fine-tuning for frozen transformers models."""

from . import combines, sources
from .base import base
from .checkpoint import load
from .errors import ForewordError
from .join import join
from .methods import (
    IA3,
    BitFit,
    Cartridge,
    DeepPrompt,
    Full,
    LlamaAdapterV2,
    Lora,
    Mam,
    MultiheadAdapter,
    ParallelAdapter,
    ParScale,
    PrefixMemory,
    PrefixTuning,
    PromptTuning,
    RandomInit,
    SequentialAdapter,
    UngatedPrefix,
    UniPELT,
    Vera,
    ZeroInit,
    ZeroInitNonlinear,
)
from .model.adapter import Adapter
from .model.attach import adapters, attach, detach, set_active
from .model.prompt import known_prompt
from .model.rows import rows, set_streams
from .space import Method, Point, methods

__all__ = [
    "IA3",
    "Adapter",
    "BitFit",
    "Cartridge",
    "DeepPrompt",
    "ForewordError",
    "Full",
    "LlamaAdapterV2",
    "Lora",
    "Mam",
    "Method",
    "MultiheadAdapter",
    "ParScale",
    "ParallelAdapter",
    "Point",
    "PrefixMemory",
    "PrefixTuning",
    "PromptTuning",
    "RandomInit",
    "SequentialAdapter",
    "UngatedPrefix",
    "UniPELT",
    "Vera",
    "ZeroInit",
    "ZeroInitNonlinear",
    "adapters",
    "attach",
    "base",
    "combines",
    "detach",
    "join",
    "known_prompt",
    "load",
    "methods",
    "rows",
    "set_active",
    "set_streams",
    "sources",
]

__version__ = "0.1.0"
