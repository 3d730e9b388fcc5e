"""Reports: one self-contained HTML file of charts, tables and samples, drawn with the core install alone."""

from .page import Report

__all__ = ["Report"]
