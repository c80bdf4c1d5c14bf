"""Which source line of one memory history is which line of another, whose code may have moved since."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_LINE = re.compile(r"(?P<file>.*):(?P<number>\d+) \((?P<function>.*)\)", re.DOTALL)
#: Folders at the end of a path that are looked at to recognize a file of a checkout that moved.
_MOST_PARTS = 8
#: Names that say nothing without their folder.
_UNTOLD = ("__init__.py", "__main__.py")
#: Pairs of lines of one function that are tried. More keep their numbers.
_MOST_PAIRS = 10_000


class _Line(NamedTuple):
    """A line's text, its number and the bytes at the peak that it allocated."""

    text: str
    number: int
    bytes: int


_ByFunction = dict[tuple[str, str], list[_Line]]


def same_lines(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, str]:
    """The line of ``b`` that each line of ``a`` is; lines without a counterpart are left out.

    A file is the same if its path is, or else if the longest end of a path that only one file of each has is. Lines
    of a function may all have moved by the same number: by the one with which most bytes of both coincide.

    Args:
        a: Bytes at the peak by line: ``file:line (function)``, or a text without a line.
        b: The same of the other.
    """
    sides = _by_function(a), _by_function(b)
    files = same_files(*({file for file, _ in side} for side in sides))
    found = {text: text for text in a if text in b and not _LINE.fullmatch(text)}
    for (file, function), mine in sides[0].items():
        if file not in files:
            continue
        theirs = {line.number: line for line in sides[1].get((files[file], function), ())}
        moved_by = _moved_by(mine, theirs)
        found |= {line.text: theirs[at].text for line in mine if (at := line.number + moved_by) in theirs}
    return found


def _by_function(lines: Mapping[str, int]) -> _ByFunction:
    found: _ByFunction = defaultdict(list)
    for text, bytes_ in lines.items():
        if parts := _LINE.fullmatch(text):
            found[parts["file"], parts["function"]].append(_Line(text, int(parts["number"]), bytes_))
    return found


def _moved_by(mine: list[_Line], theirs: dict[int, _Line]) -> int:
    if len(mine) * len(theirs) > _MOST_PAIRS:
        return 0
    shared: dict[int, int] = defaultdict(int)
    for line in mine:
        for number, other in theirs.items():
            shared[number - line.number] += min(line.bytes, other.bytes)
    return max(shared, key=lambda by: (shared[by], -abs(by), by), default=0)


def same_files(a: Iterable[str], b: Iterable[str]) -> dict[str, str]:
    """The file of ``b`` that each file of ``a`` is; files without a counterpart are left out."""
    left, right = set(a), set(b)
    found = {file: file for file in left & right}
    for length in range(_MOST_PARTS, 0, -1):
        ends = [_by_end(side - set(taken), length) for side, taken in ((left, found), (right, found.values()))]
        for end in ends[0].keys() & ends[1].keys():
            if len(ends[0][end]) == len(ends[1][end]) == 1:
                found[ends[0][end][0]] = ends[1][end][0]
    return found


def _by_end(files: Iterable[str], length: int) -> dict[tuple[str, ...], list[str]]:
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for file in files:
        parts = tuple(file.rsplit("/", length)[-length:])
        if len(parts) == length and not (length == 1 and parts[0] in _UNTOLD):
            found[parts].append(file)
    return found
