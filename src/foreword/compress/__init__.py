"""Compress a document into a prefix (Eyuboglu et al. 2025): `foreword compress`."""

from .dialogue import Dialogue
from .documents import read_document, read_documents
from .pipeline import Compression, compress, init_ids
from .self_study import SelfStudy, study

__all__ = ["Compression", "Dialogue", "SelfStudy", "compress", "init_ids", "read_document", "read_documents", "study"]
