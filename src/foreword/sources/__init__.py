"""Where a prefix's keys and values come from: the equation is the docstring of each."""

from .bottleneck import HeadBottleneck
from .direct import Direct
from .hidden import Hidden
from .memory import Memory
from .mlp import Mlp
from .nonlinear import NonLinear
from .projected import Projected
from .soft_prompt import SoftPrompt

__all__ = ["Direct", "HeadBottleneck", "Hidden", "Memory", "Mlp", "NonLinear", "Projected", "SoftPrompt"]
