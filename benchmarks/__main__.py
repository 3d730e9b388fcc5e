"""Every benchmark of this package at its defaults: `python -m benchmarks [--output FOLDER]`."""

from . import attention, decode, step, training

for benchmark in (attention, decode, training, step):
    benchmark.main()
