"""Prefix-family fine-tuning of frozen language models."""
