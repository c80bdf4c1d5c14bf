"""Lets commands print where the terminal's encoding lacks a character: ``us`` instead of an error for ``µs``."""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_HANDLER = "fakedist.plain"
_PLAIN = {"µ": "u", "…": "...", "→": "->"}
_LOW_BYTE = range(0xDC80, 0xDD00)  # a byte of a file name that is not text, as Python keeps it


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """What stands for characters that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    if ord(letter) in _LOW_BYTE:
        return bytes([ord(letter) - 0xDC00]), error.start + 1
    return _PLAIN.get(letter, "?"), error.start + 1


codecs.register_error(_HANDLER, _plain)


@contextmanager
def plain_where_needed() -> Iterator[None]:
    """Print on stdout and stderr what their encoding has, and ASCII for what it lacks."""
    changed = [(stream, stream.errors) for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    for stream, _ in changed:
        stream.reconfigure(errors=_HANDLER)
    try:
        yield
    finally:
        for stream, errors in changed:
            if not stream.closed:
                stream.reconfigure(errors=errors)
