"""The recorder searches all objects that are alive: here those of the test, not of the thousands of tests before it."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def only_its_own_objects() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()
