"""Adapters of other libraries and papers, to and from their file layouts."""
