"""The values of a memory snapshot, which any program may have written: each is what torch writes, or is refused."""

from __future__ import annotations

import numpy as np

from fakedist.run.rows import FrameRow

#: An event, a segment, a block or a frame.
Entry = dict[str, object]

#: The most that an address, a stream or a time may be.
_MOST = (1 << 63) - 1
#: The most bytes of one block or segment: 1 PiB.
MOST_BYTES = 1 << 50
#: The most bytes that all events of a history may move: 200 times those of 10,000,000 events of 1 GiB.
_MOST_MOVED = 1 << 61
#: The largest number of a device.
MOST_DEVICES = 1023
#: The most blocks of all segments. Those of a GPU of 80 GB have some hundred thousand.
_MOST_BLOCKS = 20_000_000
#: Longer texts are cut. A path of Linux has at most so many characters.
_LONGEST = 4096


class NoSnapshotError(Exception):
    """A value is none that torch writes. The message goes after "is not a memory snapshot:"."""


def listed(value: object, what: str) -> list[object]:
    """A list."""
    if not isinstance(value, list):
        raise NoSnapshotError(f"{what} is no list")
    return value


def entries(value: object, what: str) -> list[Entry]:
    """A list of entries."""
    found = listed(value, f"what should list {what}")
    if not all(isinstance(each, dict) for each in found):
        raise NoSnapshotError(f"{what} is no dict")
    return found  # type: ignore[return-value]


def whole(value: object, what: str, most: int = _MOST) -> int:
    """A whole number from 0; 0 for None."""
    if value is None:
        return 0
    if not isinstance(value, int) or not 0 <= value <= most:
        raise NoSnapshotError(f"{what} is no whole number from 0 to {most:,}")
    return value


def address(entry: Entry, key: str) -> int:
    """The address under a key of an entry; 0 if it is missing. torch writes it as a signed number."""
    value = entry.get(key)
    if isinstance(value, int) and -_MOST <= value < 0:
        return value + (1 << 64)
    return whole(value, f"{key!r} of an entry")


def number(entry: Entry, key: str, most: int = _MOST) -> int:
    """The number under a key of an entry; 0 if it is missing, as older versions of torch leave some out."""
    return whole(entry.get(key), f"{key!r} of an entry", most)


def name_of(value: object, what: str) -> str:
    """A text, cut, with lone surrogates written out, which no table can hold."""
    if not isinstance(value, str):
        raise NoSnapshotError(f"{what} is no text")
    value = value[:_LONGEST]
    return value if value.isascii() else value.encode(errors="backslashreplace").decode()


def frame_row(frame: object) -> FrameRow:
    """A frame of a stack."""
    if not isinstance(frame, dict):
        raise NoSnapshotError("a frame is neither a dict nor a text")
    names = (name_of(frame.get(key, ""), f"{key!r} of a frame") for key in ("filename", "name"))
    filename, function = names
    return FrameRow(filename, whole(frame.get("line"), "a line", (1 << 31) - 1), function)


def check_blocks(segments: list[Entry]) -> None:
    """Check how many blocks segments have. A file of a megabyte can name one list of blocks a million times."""
    number_of = sum(len(listed(segment.get("blocks", []), "'blocks' of a segment")) for segment in segments)
    if number_of > _MOST_BLOCKS:
        raise NoSnapshotError(f"its segments have {number_of:,} blocks")


def check_sizes(trace: list[Entry]) -> None:
    """Check that sizes are those of a GPU's memory, and that all of them together are a figure."""
    sizes = np.array([entry.get("size") for entry in trace], object)
    try:
        bytes_ = sizes.astype("i8")  # fast; None, a text or a number of more bits is none
        moved = bytes_.astype(float).sum()
        is_fine = bool(((bytes_ >= 0) & (bytes_ <= MOST_BYTES)).all())
    except (TypeError, ValueError, OverflowError):
        is_fine = False
    if not is_fine:
        moved = sum(number(entry, "size", MOST_BYTES) for entry in trace)
    if moved > _MOST_MOVED:
        raise NoSnapshotError(f"its events move {moved:,.0f} bytes")
