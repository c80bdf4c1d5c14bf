"""Files of real GPUs, which are too large for the checkout: they are in ``../shared/real``, where that exists."""

from __future__ import annotations

from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[2].parent / "shared/real"


def real_file(name: str) -> Path:
    """The path of one of these files. A test is skipped where it is not there."""
    for folder in (_FOLDER, Path(__file__).parents[3].parent / "shared/real"):
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"../shared/real/{name} is not there")
