"""One paper, one file. Importing this package fills the registry."""

from .deep_prompt import DeepPrompt
from .parallel_adapter import ParallelAdapter
from .prefix_tuning import PrefixTuning
from .prompt_tuning import PromptTuning
from .zero_init import RandomInit, ZeroInit, ZeroInitNonlinear

__all__ = [
    "DeepPrompt",
    "ParallelAdapter",
    "PrefixTuning",
    "PromptTuning",
    "RandomInit",
    "ZeroInit",
    "ZeroInitNonlinear",
]
