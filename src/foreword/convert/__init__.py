"""Adapters of other libraries, and for them: `foreword.convert.registry` names the formats, a file each."""

from .registry import FORMATS, Format, detect, export_adapter, import_adapter
from .source import Source

__all__ = ["FORMATS", "Format", "Source", "detect", "export_adapter", "import_adapter"]
