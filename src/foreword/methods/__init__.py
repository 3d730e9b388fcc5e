"""One paper, one file. Importing this package fills the registry."""

from .deep_prompt import DeepPrompt
from .ia3 import IA3
from .lora import Lora
from .parallel_adapter import ParallelAdapter
from .prefix_tuning import PrefixTuning
from .prompt_tuning import PromptTuning
from .vera import Vera
from .zero_init import RandomInit, ZeroInit, ZeroInitNonlinear

__all__ = [
    "IA3",
    "DeepPrompt",
    "Lora",
    "ParallelAdapter",
    "PrefixTuning",
    "PromptTuning",
    "RandomInit",
    "Vera",
    "ZeroInit",
    "ZeroInitNonlinear",
]
