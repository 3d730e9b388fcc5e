"""How a prefix meets the tokens' attention: the equation is the docstring of each."""

from .activation import Activation
from .joint import Joint
from .kernel import Kernel
from .ungated import Ungated
from .zero_gate import ZeroGate

__all__ = ["Activation", "Joint", "Kernel", "Ungated", "ZeroGate"]
