"""One tiny server for the tests that only read from it."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
torch.set_num_threads(1)
if find_spec("fastapi") is None:  # pip install 'foreword[serve]'
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Adapters a0 … a6, one of each of `METHODS`."""
    from harness import METHODS, save_adapters

    path = tmp_path_factory.mktemp("adapters")
    save_adapters(path, METHODS)
    return path


@pytest.fixture(scope="session")
def alone(folder):
    from harness import Alone

    return Alone(folder)


@pytest.fixture(scope="session")
def server(folder):
    from harness import running

    with running(folder) as one:
        yield one
