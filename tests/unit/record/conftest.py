"""The recorder searches all objects that are alive: here those of the test, not of the thousands of tests before it."""

import gc

import pytest


# Of a module, so that it runs before the modules' own fixtures, which record too.
@pytest.fixture(autouse=True, scope="module")
def only_its_own_objects() -> None:
    gc.freeze()
