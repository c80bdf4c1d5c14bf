from pathlib import Path

import pytest

from tests.unit.analysis.recorded import HandMade


@pytest.fixture
def made(tmp_path: Path) -> HandMade:
    """A recording to be written by hand."""
    return HandMade(directory=tmp_path)
