"""The parallel scaling law: fitting it, and what streams cost against parameters."""

from .cost import A100, GIB, Cost, Machine, Shape, Workload, cost
from .law import Bootstrap, Fit, HeldOut, Law, bootstrap, fit, held_out
from .rows import Row, published, read_rows

__all__ = [
    "A100",
    "GIB",
    "Bootstrap",
    "Cost",
    "Fit",
    "HeldOut",
    "Law",
    "Machine",
    "Row",
    "Shape",
    "Workload",
    "bootstrap",
    "cost",
    "fit",
    "held_out",
    "published",
    "read_rows",
]
