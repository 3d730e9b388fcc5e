"""One tiny server for the tests that only read from it."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
pytest.importorskip("fastapi", reason="pip install 'foreword[serve]'")
torch.set_num_threads(1)

from harness import Alone, running, save_adapters  # noqa: E402

METHODS = ["prefix-tuning", "zero-init", "deep-prompt", "prompt-tuning", "random-init", "parallel-adapter", "lora"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Adapters a0 … a6, one of each method."""
    path = tmp_path_factory.mktemp("adapters")
    save_adapters(path, METHODS)
    return path


@pytest.fixture(scope="session")
def alone(folder):
    return Alone(folder)


@pytest.fixture(scope="session")
def server(folder):
    with running(folder) as one:
        yield one
