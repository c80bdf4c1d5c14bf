"""Keeps the key by which Triton names what it compiles: it hashes 500 MB of its own, which takes up to two seconds.

The key depends on the installed files alone. So it is kept, under a digest of their paths, sizes and times of change.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType

from fakedist.importing import when_imported
from fakedist.patch import patched

_MODULE, _NAME = "triton.runtime.cache", "triton_key"
_replace = os.replace  # not what watches the script's calls of it


@contextmanager
def kept_triton_key(directory: Path) -> Iterator[None]:
    """Have Triton's key, which Inductor asks for too, computed once for all ranks on this machine.

    Args:
        directory: Where keys are kept.
    """
    with ExitStack() as stack:

        def is_imported(module: ModuleType) -> None:
            compute, file = getattr(module, _NAME, None), getattr(module, "__file__", None)
            if callable(compute) and file:
                key = functools.cache(lambda: _kept(directory, Path(file).parents[1], compute))
                stack.enter_context(patched(module, _NAME, key))

        stack.enter_context(when_imported(_MODULE.__eq__, is_imported))
        yield


def _kept(directory: Path, installed: Path, compute: Callable[[], str]) -> str:
    """The key of the package in ``installed``, from the file that has it, else computed."""
    try:
        place = directory / f"{_digest(installed)}.txt"
    except OSError:  # a link that leads nowhere, or a file that has just been removed
        return compute()
    with suppress(OSError, UnicodeDecodeError):
        if key := place.read_text():
            return key
    key = compute()
    with suppress(OSError):  # no room: the next rank computes it again
        directory.mkdir(parents=True, exist_ok=True)
        draft = place.with_suffix(f".{os.getpid()}")
        draft.write_text(key)
        _replace(draft, place)
    return key


def _digest(installed: Path) -> str:
    """A digest of what tells one installation from another."""
    digest = hashlib.sha256()
    for at, directories, files in os.walk(installed):
        directories[:] = sorted(name for name in directories if name != "__pycache__")
        for name in sorted(files):
            stat = os.stat(os.path.join(at, name))
            digest.update(f"{at}/{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()
