"""One paper, one file. Importing this package fills the registry with the methods of every file in it."""

from importlib import import_module
from pkgutil import iter_modules

from .adapter import SequentialAdapter
from .cartridge import Cartridge
from .deep_prompt import DeepPrompt
from .ia3 import IA3
from .llama_adapter_v2 import LlamaAdapterV2
from .lora import Lora
from .mam import Mam
from .multihead_adapter import MultiheadAdapter
from .own_weights import BitFit, Full
from .parallel_adapter import ParallelAdapter
from .parscale import ParScale
from .prefix_memory import PrefixMemory
from .prefix_tuning import PrefixTuning
from .prompt_tuning import PromptTuning
from .ungated_prefix import UngatedPrefix
from .unipelt import UniPELT
from .vera import Vera
from .zero_init import RandomInit, ZeroInit, ZeroInitNonlinear

__all__ = [
    "IA3",
    "BitFit",
    "Cartridge",
    "DeepPrompt",
    "Full",
    "LlamaAdapterV2",
    "Lora",
    "Mam",
    "MultiheadAdapter",
    "ParScale",
    "ParallelAdapter",
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
]

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
