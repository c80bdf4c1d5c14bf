"""How the memory of two runs changed by source line, block size and segment: what a snapshot of torch knows too."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from fakedist.results.compare.changed_memory import by_effect, with_change
from fakedist.rundir.schema import MOMENTS, SEGMENT_STATES
from fakedist.rundir.summary import Summary

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


#: Blocks without a line of the script.
IN_TORCH, NO_STACK = "(no line outside of torch)", "(no stack recorded)"
#: What a line can have become, in the order of tables.
_CHANGES = ("appeared", "grew", "shrank", "gone", "same")
#: The parts of what is reserved and not allocated.
UNUSED_PARTS = (*SEGMENT_STATES, "waiting")


def lines_at_peak(blocks: pd.DataFrame, lines: Sequence[str]) -> pd.DataFrame:
    """The blocks of one run that were alive at its peak: columns line, bytes.

    Args:
        blocks: The table ``blocks``; columns bytes, stack, at_peak.
        lines: Column ``line`` of the table ``stacks``.
    """
    alive = blocks[blocks["at_peak"]]
    told = np.array([*(line or IN_TORCH for line in lines), NO_STACK], dtype=object)  # stack -1 indexes the last
    return pd.DataFrame({"line": told[alive["stack"].to_numpy()], "bytes": alive["bytes"].to_numpy()})


def blocks_by_line(a: pd.DataFrame, b: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The blocks at both peaks with a column ``key``, which is the same for the same line.

    Args:
        a: :func:`lines_at_peak` of one run.
        b: :func:`lines_at_peak` of the other.
    """
    bytes_a, bytes_b = ({str(line): int(held) for line, held in _held(side).items()} for side in (a, b))
    same = same_lines(bytes_a, bytes_b)
    keys = {line: key for key, line in enumerate(bytes_b)}
    in_a = {line: keys[same[line]] if line in same else len(keys) + at for at, line in enumerate(bytes_a)}
    return a.assign(key=a["line"].map(in_a).astype("int64")), b.assign(key=b["line"].map(keys).astype("int64"))


def _held(side: pd.DataFrame) -> pd.Series:
    return side.groupby("line", sort=False)["bytes"].sum()


def line_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Blocks at the peak by line, largest change first. The changes add up to the change of the peak.

    Args:
        a: The first result of :func:`blocks_by_line`.
        b: The second.

    Returns:
        Columns line (b's; a's if b has none), was (a's, if it is another), num_a, num_b, a_bytes, b_bytes,
        change_bytes, what (appeared, grew, shrank, gone, same).
    """
    found = _both(a, b, ["key"]).reset_index()
    found["line"] = found["key"].map(_shown_lines(a, b))
    moved = found["line_a"].notna() & found["line_b"].notna() & (found["line_a"] != found["line_b"])
    found["was"] = found["line_a"].where(moved, "")
    columns = ["line", "was", "num_a", "num_b", "a_bytes", "b_bytes"]
    return by_effect(with_change(found[columns]))


def size_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Blocks at the peak that only one run has, by line and size, largest change first.

    Args:
        a: The first result of :func:`blocks_by_line`.
        b: The second.

    Returns:
        Columns line, block_bytes, num_a, num_b, a_bytes, b_bytes, change_bytes, what. The changes add up to the change
        of the peak.
    """
    keys = ["key", "block_bytes"]
    sides = [side.assign(block_bytes=side["bytes"]) for side in (a, b)]
    found = _both(sides[0], sides[1], keys).reset_index()
    found["line"] = found["key"].map(_shown_lines(a, b))
    columns = ["line", "block_bytes", "num_a", "num_b", "a_bytes", "b_bytes"]
    return by_effect(with_change(found.loc[found["num_a"] != found["num_b"], columns]))


def _shown_lines(a: pd.DataFrame, b: pd.DataFrame) -> dict[int, str]:
    """The line of every key: b's, or a's if b has none."""
    return dict(zip([*a["key"], *b["key"]], [*a["line"], *b["line"]], strict=True))


def _both(a: pd.DataFrame, b: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    sides = []
    for side, table in (("a", a), ("b", b)):
        sums = table.groupby(keys, sort=False).agg(
            bytes=("bytes", "sum"), num=("bytes", "size"), line=("line", "first")
        )
        sides.append(sums.set_axis([f"{side}_bytes", f"num_{side}", f"line_{side}"], axis=1))
    found = sides[0].join(sides[1], how="outer")
    numbers = ["a_bytes", "b_bytes", "num_a", "num_b"]
    found[numbers] = found[numbers].fillna(0).astype("int64")
    return found


def line_kinds(lines: pd.DataFrame) -> pd.DataFrame:
    """How many lines appeared, grew, shrank, are gone and are the same.

    Args:
        lines: The result of :func:`line_changes`.

    Returns:
        Columns what, num_lines, num_a, num_b, a_bytes, b_bytes, change_bytes. The changes add up to that of the peak.
    """
    names = ["num_a", "num_b", "a_bytes", "b_bytes", "change_bytes"]
    sums = lines.groupby("what")[names].sum()
    sums.insert(0, "num_lines", lines.groupby("what").size())
    return sums.reindex([name for name in _CHANGES if name in sums.index]).rename_axis("what").reset_index()


def reserved_changes(a: Summary, b: Summary) -> pd.DataFrame:
    """What was reserved when most was: name, a_bytes, b_bytes, change_bytes, what.

    The names are reserved, allocated, and :data:`UNUSED_PARTS`, which with allocated add up to reserved. A part that
    neither run has is left out.
    """
    amounts: list[dict[str, int]] = []
    for summary in (a, b):
        moment = next((each for each in summary.reserved if each.moment == MOMENTS[0]), None)
        held = (0, 0, {}) if moment is None else (moment.reserved_bytes, moment.allocated_bytes, moment.unused)
        amounts.append({"reserved": held[0], "allocated": held[1], **held[2]})
    names = [name for name in ("reserved", "allocated", *UNUSED_PARTS) if any(each.get(name) for each in amounts)]
    rows = [(name, amounts[0].get(name, 0), amounts[1].get(name, 0)) for name in names]
    return with_change(pd.DataFrame(rows, columns=["name", "a_bytes", "b_bytes"]))


def segment_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """The segments when most was reserved, by pool and size, largest change first.

    Args:
        a: The table ``segments`` of one run.
        b: The table ``segments`` of the other.

    Returns:
        Columns kind (small, large, unknown, private, expandable), segment_bytes (0 for expandable ones, whose sizes
        differ), num_a, num_b, a_bytes, b_bytes, a_free_bytes, b_free_bytes, change_bytes (of a_bytes), what.
    """
    sides = []
    for side, table in (("a", a), ("b", b)):
        then = table[table["moment"].astype(str) == MOMENTS[0]]
        is_expandable = then["is_expandable"].to_numpy(bool)
        pool = np.where(then["private_pool"].astype(str) != "", "private", then["pool"].astype(str))
        bytes_, free = (then[name].to_numpy("int64") for name in ("bytes", "free_bytes"))
        kind, each = np.where(is_expandable, "expandable", pool), np.where(is_expandable, 0, bytes_)
        rows = pd.DataFrame({"kind": kind, "segment_bytes": each, "bytes": bytes_, "free_bytes": free})
        sums = rows.groupby(["kind", "segment_bytes"]).agg(
            num=("bytes", "size"), bytes=("bytes", "sum"), free=("free_bytes", "sum")
        )
        sides.append(sums.set_axis([f"num_{side}", f"{side}_bytes", f"{side}_free_bytes"], axis=1))
    found = sides[0].join(sides[1], how="outer").fillna(0).astype("int64").reset_index()
    found = with_change(found)
    moved = (found["what"] == "same") & (found["a_free_bytes"] != found["b_free_bytes"])
    found["what"] = found["what"].where(~moved, "other contents")
    return by_effect(found)
