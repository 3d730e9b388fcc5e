"""Studies: methods × tasks × data × seeds at equal budgets, resumable and parallel, with statements and a report."""

from .comparison import compare
from .study import READY, Study, read_study

__all__ = ["READY", "Study", "compare", "read_study"]
