"""How a prefix meets the tokens' attention: the equation is the docstring of each."""

from .joint import Joint
from .ungated import Ungated
from .zero_gate import ZeroGate

__all__ = ["Joint", "Ungated", "ZeroGate"]
