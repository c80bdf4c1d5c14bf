"""Reads the events of a Chrome trace one by one, without building all of its objects at once."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

from fakedist.bounded import UnreadableError, open_file
from fakedist.errors import ReportError
from fakedist.units import format_bytes

_GZIP = b"\x1f\x8b"
#: The most that a trace may have, unpacked. A step of a large model takes some 100 MB.
_MAX_BYTES = 2 << 30
#: The most that a byte of a compressed trace may unpack to, and what any may. Traces of torch have 10 to 30.
_MAX_UNPACKED, _UNPACKED_AT_LEAST = 200, 16 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_EVENTS = "traceEvents"
_EXPORT = "profiler.export_chrome_trace(FILE) writes one"


class JsonEvents:
    """The objects in the list ``traceEvents`` of a trace, or of a trace that is only the list.

    Args:
        path: The file, plain or compressed.

    Attributes:
        header: The trace's other values; complete after the events were read.

    Raises:
        ReportError: The file cannot be read. Iterating raises it if the file is cut off or no JSON.
    """

    def __init__(self, path: Path) -> None:
        self.header: dict[str, object] = {}
        self._path = path
        self._text = _text(path)
        # strict: torch writes the names of Python frames without escaping control characters.
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def __iter__(self) -> Iterator[object]:
        num_events = 0
        try:
            for event in self._events():
                num_events += 1
                yield event
        except (IndexError, ValueError, RecursionError) as error:
            # ValueError: json's own, and Python's for a number with thousands of digits.
            if self._path_is_no_trace(num_events):
                raise ReportError(f"{self._path} is not a Chrome trace", _EXPORT) from error
            raise ReportError(
                f"{self._path} is damaged or cut off after {num_events:,} events", "export the trace again"
            ) from error
        if not num_events:
            raise ReportError(f"{self._path} is not a Chrome trace: it has no events", _EXPORT)

    def _path_is_no_trace(self, num_events: int) -> bool:
        return not num_events and f'"{_EVENTS}"' not in self._text[:1_000_000]

    def _events(self) -> Iterator[object]:
        at = self._skip(0)
        if self._text[at] == "[":
            yield from self._list(at)
            return
        if self._text[at] != "{":
            raise ValueError
        at = self._skip(at + 1)
        while self._text[at] != "}":
            name, at = self._decode(self._text, at)
            at = self._skip(at)
            if not isinstance(name, str) or self._text[at] != ":":
                raise ValueError
            at = self._skip(at + 1)
            if name == _EVENTS and self._text[at] == "[":
                at = yield from self._list(at)
            else:
                self.header[name], at = self._decode(self._text, at)
            at = self._after(at, "}")

    def _list(self, at: int) -> Generator[object, None, int]:
        at = self._skip(at + 1)
        while self._text[at] != "]":
            event, at = self._decode(self._text, at)
            yield event
            at = self._after(at, "]")
        return at + 1

    def _after(self, at: int, end: str) -> int:
        """The next element after a comma, or the end."""
        at = self._skip(at)
        if self._text[at] == ",":
            return self._skip(at + 1)
        if self._text[at] != end:
            raise ValueError
        return at

    def _skip(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        assert found is not None
        return found.end()


def _text(path: Path) -> str:
    try:
        with open_file(path) as raw:
            is_compressed = raw.read(2) == _GZIP
            raw.seek(0)
            size = os.fstat(raw.fileno()).st_size
            most = min(_MAX_BYTES, max(_MAX_UNPACKED * size, _UNPACKED_AT_LEAST)) if is_compressed else _MAX_BYTES
            content = b""
            if is_compressed or size <= most:
                with gzip.open(raw) if is_compressed else nullcontext(raw) as file:
                    content = file.read(most + 1)
                size = len(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ReportError(f"{path} is damaged or cut off: {error}", "export or copy the trace again") from error
    except (OSError, UnreadableError) as error:
        raise ReportError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", _EXPORT) from error
    if size > most:
        raise ReportError(f"{path} has more than {format_bytes(most)}, unpacked", "trace fewer steps")
    return content.decode("utf-8", "replace")
