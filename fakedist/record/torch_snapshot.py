"""Takes the snapshot of torch's caching allocator, and imports no more of torch for it than the script has."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_INDUCTOR = "torch._inductor"


def take_snapshot() -> dict[str, Any]:  # torch's own dict; its readers say what they read of it
    """Take torch's snapshot. CUDA must be initialised."""
    with without_inductor():
        taken: dict[str, Any] = torch._C._cuda_memorySnapshot(None)
    return taken


@contextmanager
def without_inductor() -> Iterator[None]:
    """While torch names the frames of stacks, keep it from importing Inductor."""
    package, _, attribute = _INDUCTOR.rpartition(".")
    known = sys.modules[package].__dict__
    if attribute in known or _INDUCTOR in sys.modules:
        yield
        return
    placeholder = known[attribute] = _NotImported()
    try:
        yield
    finally:
        if known.get(attribute) is placeholder:  # else another thread has imported it
            del known[attribute]


class _NotImported:
    """Stands for ``torch._inductor``, and imports it for whoever asks but the snapshot.

    To name the frames of a stack, torch looks for ``torch._inductor.codecache`` (``py_symbolize`` in
    torch/csrc/profiler/python/combined_traceback.cpp). Looking alone imports Inductor, which takes 2 s.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> object:
        if name == "codecache" and threading.get_ident() == self._thread:
            raise AttributeError(name)
        return getattr(importlib.import_module(_INDUCTOR), name)
