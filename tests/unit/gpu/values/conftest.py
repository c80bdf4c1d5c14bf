from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.idle_device import kernels_kept


@pytest.fixture(scope="module")
def kept_kernels() -> Iterator[None]:
    """For modules with many tests that each have a device."""
    with kernels_kept():
        yield
