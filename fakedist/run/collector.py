"""Keeps the cycle collector out of work that makes millions of objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """Turn the cycle collector off while a recording is read, or a snapshot is built or decoded.

    All make one object per row, in no cycles. The collector would walk them again and again: half of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
