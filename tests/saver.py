"""A process that does nothing but save adapters, for the tests that interrupt it."""

from multiprocessing.synchronize import Event
from pathlib import Path

import torch

import foreword as fw
import zoo


def save_forever(folder: Path, started: Event) -> None:
    """Save an adapter whose every number is 1, then 2, and so on, to one folder; tell when it has been saved once."""
    torch.set_num_threads(1)
    adapter = fw.attach(zoo.make("llama"), fw.PrefixTuning(length=200))
    number = 0
    while True:
        number += 1
        with torch.no_grad():
            for parameter in adapter.trainable_parameters:
                parameter.fill_(number)
        adapter.save(folder)
        started.set()
