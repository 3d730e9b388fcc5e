"""What joins several rows of a batch into one: the equation is the docstring of each."""

from .streams import StreamAggregator

__all__ = ["StreamAggregator"]
