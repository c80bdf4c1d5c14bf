"""Where a job reads values that its sizes or decisions follow.

On a real GPU they are there. On the virtual one somebody has to compute them, and what does so must not be near the
rest of the job: with a dispatch mode on, torch itself allocates otherwise in places (``at::isTensorSubclassLike``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

_compute: Callable[[], AbstractContextManager[object]] = nullcontext


def computed_by(compute: Callable[[], AbstractContextManager[object]]) -> None:
    """From now on ``reading()`` is ``compute()``."""
    global _compute
    _compute = compute


def reading() -> AbstractContextManager[object]:
    """Within it, small tensors hold values on every device."""
    return _compute()
