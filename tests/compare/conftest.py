"""Study files in the test's own folder."""

import pytest
from small_study import write_study


@pytest.fixture
def study_file(tmp_path):
    return lambda **changes: write_study(tmp_path, **changes)
