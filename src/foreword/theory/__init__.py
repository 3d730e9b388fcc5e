"""Estimation theory of zero-initialised attention, reproduced by simulation; see docs/theory.md.

`rates.rates`, `profile.profile` and `gates.gates` are the three experiments.
"""
