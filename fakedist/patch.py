"""Replaces an attribute of torch temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from fakedist.errors import RecordingError


@dataclass(frozen=True, slots=True, eq=False)
class Replaced:
    """An attribute that is replaced now."""

    owner: object
    name: str
    original: object


_replaced: list[Replaced] = []


def replacements() -> tuple[Replaced, ...]:
    """The present replacements, oldest first."""
    return tuple(_replaced)


def present(owner: object, name: str) -> Any:  # torch's own attribute, of any type
    """Return ``owner.name``. RecordingError if there is no such attribute, so this torch works in a different way."""
    missing = object()
    value = getattr(owner, name, missing)
    if value is missing:
        where = getattr(owner, "__name__", repr(owner))
        raise RecordingError(f"torch {version('torch')} has no {where}.{name}", "pip install torch==2.15.0")
    return value


@contextmanager
def patched(owner: object, name: str, replacement: object) -> Iterator[Any]:  # as present()
    """Replace ``owner.name``, restore the original on exit, and yield it. RecordingError as :func:`present`."""
    original = present(owner, name)
    setattr(owner, name, replacement)
    _replaced.append(replaced := Replaced(owner, name, original))
    try:
        yield original
    finally:
        _replaced.remove(replaced)
        setattr(owner, name, original)
