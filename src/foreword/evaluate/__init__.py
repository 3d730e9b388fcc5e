"""Evaluation: choices, label words, generation, lm-evaluation-harness; speed; and how sure a score is."""

from .evaluation import Result, evaluate, write_records
from .intervals import Difference, Interval, paired
from .tasks import Task, read_task

__all__ = ["Difference", "Interval", "Result", "Task", "evaluate", "paired", "read_task", "write_records"]
