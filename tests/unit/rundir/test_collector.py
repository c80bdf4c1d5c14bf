"""Collections are rare during imports, and as the modules leave them afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fakedist.rundir.collector import rare_collections


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield before
    gc.set_threshold(*before)


def test_collections_are_rare_inside_also_when_nested() -> None:
    with rare_collections():
        rare = gc.get_threshold()
        with rare_collections():
            assert gc.get_threshold() == rare > (10_000, 10, 10)
        assert gc.get_threshold() == rare
    assert gc.get_threshold() == (700, 10, 10)


def test_what_a_module_sets_stays() -> None:
    with rare_collections():
        gc.set_threshold(1234, 5, 6)
    assert gc.get_threshold() == (1234, 5, 6)
    with rare_collections():
        gc.disable()
    try:
        assert not gc.isenabled()
    finally:
        gc.enable()
