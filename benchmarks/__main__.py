"""Every benchmark of this package at its defaults: `python -m benchmarks [--output FOLDER]`."""

from . import attention, decode, step

for benchmark in (attention, decode, step):
    benchmark.main()
