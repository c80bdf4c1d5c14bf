"""Where a job reads values that its sizes or decisions depend on.

On a real GPU kernels computed them. On the virtual one fakedist has to, and must not do it around the rest of the job:
under a dispatch mode, torch itself allocates differently in places (``at::isTensorSubclassLike``).
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
