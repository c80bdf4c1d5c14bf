"""Changes of peak, phases, categories, layers, blocks, lines and segments between two runs or snapshots."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from fakedist.analysis.replay import Ints
from fakedist.analysis.stack_lines import IN_TORCH, NO_STACK, is_of_backward
from fakedist.results.compare.change_tables import by_effect, figures_by_name, side_by_side, with_change, without_empty
from fakedist.results.compare.layer_matching import OUTSIDE, layer_patterns, paths_of_matches
from fakedist.rundir.schema import CATEGORIES, MOMENTS, SEGMENT_STATES
from fakedist.rundir.summary import Summary

#: Columns of the table `blocks` that a comparison of blocks needs.
BLOCK_COLUMNS = ("bytes", "operation", "phase", "layer", "category", "stack", "at_peak")


def figure_changes(*summaries: Summary) -> pd.DataFrame:
    """Peaks, capacity and headroom of runs: columns name, a_bytes, b_bytes, ..., change_bytes, what."""
    return figures_by_name(
        [
            {
                "peak allocated": summary.peak_allocated_bytes,
                "peak reserved": summary.peak_reserved_bytes,
                "capacity": summary.capacity_bytes,
                "headroom": summary.capacity_bytes - summary.peak_reserved_bytes,
            }
            for summary in summaries
        ]
    )


def category_changes(*sides: Mapping[str, int]) -> pd.DataFrame:
    """Bytes at the peak by category, largest change first. Of two runs, they add up to the change of the peak."""
    rows = figures_by_name([{name: side.get(name, 0) for name in CATEGORIES} for side in sides], key="category")
    return by_effect(without_empty(rows))


def phase_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Peak of each phase of each step: step, phase, a_bytes, b_bytes, change_bytes, what, in the order of b."""
    peaks = [
        {
            (int(step), str(phase)): int(bytes_)
            for step, phase, bytes_ in zip(table["step"], table["phase"], table["peak_allocated_bytes"], strict=True)
        }
        for table in (a, b)
    ]
    moments = [*peaks[1], *(moment for moment in peaks[0] if moment not in peaks[1])]
    rows = [(*moment, peaks[0].get(moment, 0), peaks[1].get(moment, 0)) for moment in moments]
    changes = with_change(pd.DataFrame(rows, columns=["step", "phase", "a_bytes", "b_bytes"]))
    sides = [[moment in side for moment in moments] for side in peaks]
    changes.loc[[not here for here in sides[0]], "what"] = "appeared"
    changes.loc[[not here for here in sides[1]], "what"] = "gone"
    return changes


def layer_parts(a: pd.DataFrame, b: pd.DataFrame, matches: pd.DataFrame) -> pd.DataFrame:
    """Own bytes at the peak of every layer of two tables ``layers``. The changes add up to the change of the peak.

    Returns:
        One row for each layer and category that is not empty: a, b (rows or -1), how, category, a_bytes, b_bytes, name
        (b's, or a's if the layer is gone), was (a's name), before (a's pattern), path (the pattern in terms of b).
    """
    paths = paths_of_matches(a, b, matches)
    frames = []
    for category in CATEGORIES:
        column = f"peak_{category}_bytes"
        sides = {"a_bytes": _taken(a, matches["a"], column), "b_bytes": _taken(b, matches["b"], column)}
        part = matches.assign(**sides, category=category, **paths)
        frames.append(part[(part["a_bytes"] != 0) | (part["b_bytes"] != 0)])
    return with_change(pd.concat(frames, ignore_index=True))


def layer_changes(parts: pd.DataFrame) -> pd.DataFrame:
    """Changes by layer and category, largest first; repeated layers are one row. They add up to the peak's change.

    Columns name, was (empty if the name stayed), category, num_layers (changed), a_bytes, b_bytes, change_bytes, what
    (appeared, gone, grew, shrank).
    """
    changed = parts[parts["change_bytes"] != 0]
    only = changed["how"].where(changed["how"].isin(("gone", "appeared")), "both")
    keys = [changed["path"], changed["before"], only.rename("only"), changed["category"]]
    rows = []
    for (path, was, side, category), group in changed.groupby(keys, sort=False):
        alone = len(group) == 1
        rows.append(
            {
                "name": str(group["name"].iloc[0]) if alone else path,
                "was": _former(group, str(was)) if side == "both" else "",
                "category": category,
                "num_layers": len(group),
                "a_bytes": int(group["a_bytes"].sum()),
                "b_bytes": int(group["b_bytes"].sum()),
                "layer_is": side,
            }
        )
    columns = ["name", "was", "category", "num_layers", "a_bytes", "b_bytes", "layer_is"]
    changes = with_change(pd.DataFrame(rows, columns=columns))
    is_new_or_gone = changes["layer_is"] != "both"
    changes["what"] = changes["what"].where(~is_new_or_gone, changes["layer_is"])
    return by_effect(changes.drop(columns="layer_is"))


def most_changes(a: pd.DataFrame, b: pd.DataFrame, matches: pd.DataFrame) -> pd.DataFrame:
    """The most that one layer held in the last step, with children, largest change first; the largest of repeats.

    Columns name, num_a, num_b, a_bytes, b_bytes, change_bytes, what.
    """
    sides = {
        "a_bytes": _taken(a, matches["a"], "most_total_bytes"),
        "b_bytes": _taken(b, matches["b"], "most_total_bytes"),
    }
    layers = matches.assign(**sides, **paths_of_matches(a, b, matches))
    layers = layers[~((layers["a"] == 0) | (layers["b"] == 0))].assign(in_a=layers["a"] >= 0, in_b=layers["b"] >= 0)
    changes = layers.groupby("path", sort=False).agg(
        num_a=("in_a", "sum"), num_b=("in_b", "sum"), a_bytes=("a_bytes", "max"), b_bytes=("b_bytes", "max")
    )
    changes = with_change(changes.rename_axis("name").reset_index())
    return by_effect(changes[changes["change_bytes"] != 0])


def _taken(table: pd.DataFrame, rows: pd.Series, column: str) -> Ints:
    values = table[column].to_numpy()
    index = rows.to_numpy()
    return np.where(index >= 0, values[np.maximum(index, 0)], 0).astype("int64")


def _former(group: pd.DataFrame, was: str) -> str:
    if len(group) == 1:
        former = str(group["was"].iloc[0])
        return "" if former == group["name"].iloc[0] else former
    return "" if was == group["path"].iloc[0] else was


def peak_blocks(blocks: pd.DataFrame, stacks: pd.DataFrame, paths: dict[int, str], *, cwd: str) -> pd.DataFrame:
    """The blocks of one run that were alive at its peak, in the form that :func:`block_changes` compares.

    Args:
        blocks: Columns bytes, operation, phase, layer, category, stack, at_peak.
        stacks: Column line.
        cwd: The working directory of the job, which lines are relative to.

    Returns:
        Columns bytes, operation, phase, category, path, line.
    """
    alive = blocks[blocks["at_peak"]]
    cwd = cwd.rstrip("/") + "/"
    lines = [*stacks["line"].astype(str), ""]  # stack -1 (none) indexes the last
    peak = alive[["bytes"]].assign(
        **{name: alive[name].astype(str) for name in ("operation", "phase", "category")},
        path=[paths.get(layer, "") or OUTSIDE for layer in alive["layer"].tolist()],
        line=np.array([line.removeprefix(cwd) for line in lines])[alive["stack"].to_numpy()],
    )
    return peak.reset_index(drop=True)


def block_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Changes of :func:`peak_blocks` by layer, category, operation and line, greatest first, which add up.

    A line that moved is the same (:func:`same_lines`).

    Columns path, category, phase, operation, line (in b, else in a), num_a, num_b, a_bytes, b_bytes, change_bytes,
    what.
    """
    a, b = _comparable(a, b, "")
    held = [{str(line): int(sum_) for line, sum_ in table.groupby("line")["bytes"].sum().items()} for table in (a, b)]
    same = same_lines(held[0], held[1])
    keys = ["path", "category", "phase", "operation", "key"]
    both = _both(a.assign(key=[same.get(line, f"gone: {line}") for line in a["line"]]), b.assign(key=b["line"]), keys)
    both = with_change(both.reset_index())
    both["line"] = both["line_b"].where(both["line_b"].notna(), both["line_a"])
    columns = ["path", "category", "phase", "operation", "line", "num_a", "num_b", "a_bytes", "b_bytes"]
    return by_effect(both[both["change_bytes"] != 0][[*columns, "change_bytes", "what"]])


def pattern_parts(layers: pd.DataFrame) -> pd.DataFrame:
    """Own bytes at the peak: columns path (numbers of repeated layers as ``*``), category, bytes. They add up to it."""
    path = pd.Series([pattern or OUTSIDE for pattern in layer_patterns(layers)], name="path")
    frames = [pd.DataFrame({"path": path, "category": c, "bytes": layers[f"peak_{c}_bytes"]}) for c in CATEGORIES]
    sums = pd.concat(frames).groupby(["path", "category"], sort=True)["bytes"].sum().reset_index()
    return sums[sums["bytes"] != 0].reset_index(drop=True)


def path_changes(*sides: pd.DataFrame, unit: Literal["bytes", "us"] = "bytes") -> pd.DataFrame:
    """Changes of layers' own bytes or times, largest first, from columns path, category, and bytes or us.

    Columns path, name (equal to path), category, a_bytes, b_bytes, ..., change_bytes, what; or likewise of us.
    """
    named = [side.rename(columns={unit: f"{{}}_{unit}"}) for side in sides]
    rows = side_by_side(named, ["path", "category"], unit)
    rows.insert(1, "name", rows["path"])
    return by_effect(rows, unit)


#: A line as runs name it: ``file:line (function)``.
LINE = re.compile(r"(?P<file>.*):(?P<number>\d+) \((?P<function>.*)\)", re.DOTALL)
#: Folders at the end of a path that are looked at to recognize a file of a checkout that moved.
_MOST_PARTS = 8
#: Names that say nothing without their folder.
_UNTOLD = ("__init__.py", "__main__.py")
#: Pairs of lines of one function that are tried. More keep their numbers.
_MOST_PAIRS = 10_000


class _Line(NamedTuple):
    """A line's text and the bytes at the peak that it allocated."""

    text: str
    bytes: int


#: A function's lines by number, each by its kind: "", or "backward" for what its backward allocated.
_Lines = dict[int, dict[str, _Line]]
_ByFunction = dict[tuple[str, str], _Lines]


def same_lines(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, str]:
    """The line of ``b`` that each line of ``a`` is (bytes at the peak by line); without those that have no counterpart.

    A file is the same if its path is, or else the longest end of a path that only one file of each has. A function's
    lines keep their order, and as many bytes of both coincide as can; of several such pairings, the one in which lines
    move most alike. The lines of its backward move with it.
    """
    sides = _by_function(a), _by_function(b)
    files = same_files(*({file for file, _ in side} for side in sides))
    same = {text: text for text in a if text in b and not LINE.fullmatch(text)}
    for (file, function), mine in sides[0].items():
        theirs = sides[1].get((files[file], function), {}) if file in files else {}
        for number, at in _aligned(mine, theirs).items():
            same |= {text: theirs[at][kind].text for kind, (text, _) in mine[number].items() if kind in theirs[at]}
    return same


def _by_function(lines: Mapping[str, int]) -> _ByFunction:
    by_function: _ByFunction = defaultdict(lambda: defaultdict(dict))
    for text, bytes_ in lines.items():
        if parts := LINE.fullmatch(text):
            function, _, kind = parts["function"].partition(", ")
            by_function[parts["file"], function][int(parts["number"])][kind] = _Line(text, bytes_)
    return by_function


def _aligned(mine: _Lines, theirs: _Lines) -> dict[int, int]:
    """The line of ``theirs`` that each line of ``mine`` is, by number."""
    if len(mine) * len(theirs) > _MOST_PAIRS:
        return {number: number for number in mine if number in theirs}
    shared = {(number, at): _shared(mine[number], theirs[at]) for number in mine for at in theirs}
    by_move: dict[int, int] = defaultdict(int)
    for (number, at), bytes_ in shared.items():
        by_move[at - number] += bytes_
    usual = max(by_move, key=lambda by: (by_move[by], -abs(by), by), default=0)
    # The longest common subsequence, with the bytes in common for its length.
    columns = sorted(theirs)
    best: list[tuple[int, int, dict[int, int]]] = [(0, 0, {})] * (len(columns) + 1)
    for number in sorted(mine):
        row = [best[0]]
        for place, at in enumerate(columns):
            pairs = max(best[place + 1], row[place], key=lambda way: way[:2])
            if bytes_ := shared[number, at]:
                before, apart, paired = best[place]
                way = (before + bytes_, apart - abs(at - number - usual))
                pairs = (*way, {**paired, number: at}) if way > pairs[:2] else pairs
            row.append(pairs)
        best = row
    return best[-1][2]


def _shared(mine: Mapping[str, _Line], theirs: Mapping[str, _Line]) -> int:
    return sum(min(line.bytes, theirs[kind].bytes) for kind, line in mine.items() if kind in theirs)


def same_files(a: Iterable[str], b: Iterable[str]) -> dict[str, str]:
    """The file of ``b`` that each file of ``a`` is; files without a counterpart are left out."""
    left, right = set(a), set(b)
    same = {file: file for file in left & right}
    for length in range(_MOST_PARTS, 0, -1):
        ends = [_by_end(side - set(taken), length) for side, taken in ((left, same), (right, same.values()))]
        for end in ends[0].keys() & ends[1].keys():
            if len(ends[0][end]) == len(ends[1][end]) == 1:
                same[ends[0][end][0]] = ends[1][end][0]
    return same


def _by_end(files: Iterable[str], length: int) -> dict[tuple[str, ...], list[str]]:
    by_end: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for file in files:
        parts = tuple(file.rsplit("/", length)[-length:])
        if len(parts) == length and not (length == 1 and parts[0] in _UNTOLD):
            by_end[parts].append(file)
    return by_end


#: What a line can have become, in the order of tables.
_CHANGES = ("appeared", "grew", "shrank", "gone", "same")
#: Parts of what is reserved but not allocated, in words.
UNUSED_NAMES = {
    "pinned": "free in half-empty segments",
    "used": "free in other segments",
    "small": "free in segments of small blocks",
    "expandable": "free in expandable segments",
    "private": "free in private pools",
    "empty": "empty segments, cached",
    "waiting": "freed, but in use on a stream",
    "unknown": "free at unknown addresses",
}


def lines_at_peak(blocks: pd.DataFrame, lines: Sequence[str]) -> pd.DataFrame:
    """Columns line, bytes of the blocks that were alive at a run's peak, from columns bytes, stack, at_peak."""
    alive = blocks[blocks["at_peak"]]
    line_of = np.array([*(line or IN_TORCH for line in lines), NO_STACK], dtype=object)  # stack -1 indexes the last
    return pd.DataFrame({"line": line_of[alive["stack"].to_numpy()], "bytes": alive["bytes"].to_numpy()})


def blocks_by_line(
    a: pd.DataFrame, b: pd.DataFrame, renamed: Mapping[str, str] | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The blocks of two :func:`lines_at_peak` with a column ``key``, which is the same for the same line.

    ``renamed`` are lines of ``b`` by those of ``a`` that are the same under another name.
    """
    a, b = _comparable(a, b, IN_TORCH)
    held = (side.groupby("line", sort=False)["bytes"].sum() for side in (a, b))
    bytes_a, bytes_b = ({str(line): int(num) for line, num in sums.items()} for sums in held)
    same = same_lines(bytes_a, bytes_b)
    taken = {*same.values()}
    more = (renamed or {}).items()
    same |= {one: other for one, other in more if one not in same and other in bytes_b and other not in taken}
    keys = {line: key for key, line in enumerate(bytes_b)}
    in_a = {line: keys[same[line]] if line in same else len(keys) + at for at, line in enumerate(bytes_a)}
    return a.assign(key=a["line"].map(in_a).astype("int64")), b.assign(key=b["line"].map(keys).astype("int64"))


def _comparable(a: pd.DataFrame, b: pd.DataFrame, without: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Both sides' blocks. If only one knows the forward of what a backward allocates, those lines are ``without``."""
    are_backward = [side["line"].astype(str).map(is_of_backward).astype(bool) for side in (a, b)]
    if are_backward[0].any() == are_backward[1].any():
        return a, b
    sides = zip((a, b), are_backward, strict=True)
    first, second = (side.assign(line=side["line"].mask(is_backward, without)) for side, is_backward in sides)
    return first, second


def line_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Changes of :func:`blocks_by_line` by line, largest first. They add up to the change of the peak.

    Columns line (b's; a's if b has none), was (a's, if it is another), num_a, num_b, a_bytes, b_bytes, change_bytes,
    what (appeared, grew, shrank, gone, same).
    """
    both = _both(a, b, ["key"]).reset_index()
    moved = both["line_a"].notna() & both["line_b"].notna() & (both["line_a"] != both["line_b"])
    both = both.assign(line=both["key"].map(_shown_lines(a, b)), was=both["line_a"].where(moved, ""))
    columns = ["line", "was", "num_a", "num_b", "a_bytes", "b_bytes"]
    return by_effect(with_change(both[columns]))


def size_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Blocks of :func:`blocks_by_line` that only one run has, by line and size, largest change first.

    Columns line, block_bytes, num_a, num_b, a_bytes, b_bytes, change_bytes, what. The changes add up to the peak's.
    """
    keys = ["key", "block_bytes"]
    sides = [side.assign(block_bytes=side["bytes"]) for side in (a, b)]
    both = _both(sides[0], sides[1], keys).reset_index()
    both["line"] = both["key"].map(_shown_lines(a, b))
    columns = ["line", "block_bytes", "num_a", "num_b", "a_bytes", "b_bytes"]
    return by_effect(with_change(both.loc[both["num_a"] != both["num_b"], columns]))


def _shown_lines(a: pd.DataFrame, b: pd.DataFrame) -> dict[int, str]:
    return dict(zip([*a["key"], *b["key"]], [*a["line"], *b["line"]], strict=True))


def _both(a: pd.DataFrame, b: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    sides = []
    for side, table in (("a", a), ("b", b)):
        sums = table.groupby(keys, sort=False).agg(
            bytes=("bytes", "sum"), num=("bytes", "size"), line=("line", "first")
        )
        sides.append(sums.set_axis([f"{side}_bytes", f"num_{side}", f"line_{side}"], axis=1))
    both = sides[0].join(sides[1], how="outer")
    numbers = ["a_bytes", "b_bytes", "num_a", "num_b"]
    both[numbers] = both[numbers].fillna(0).astype("int64")
    return both


def line_kinds(lines: pd.DataFrame) -> pd.DataFrame:
    """Lines that appeared, grew, shrank, are gone and are the same.

    Columns what, num_lines, num_a, num_b, a_bytes, b_bytes, change_bytes. The changes add up to the peak's.
    """
    names = ["num_a", "num_b", "a_bytes", "b_bytes", "change_bytes"]
    sums = lines.groupby("what")[names].sum()
    sums.insert(0, "num_lines", lines.groupby("what").size())
    return sums.reindex([name for name in _CHANGES if name in sums.index]).rename_axis("what").reset_index()


def reserved_changes(a: Summary, b: Summary) -> pd.DataFrame:
    """The parts of the reserved peak that a run has: name, a_bytes, b_bytes, change_bytes, what.

    Names are reserved, allocated, and those of :data:`UNUSED_NAMES`, which with allocated add up to reserved.
    """
    amounts: list[dict[str, int]] = []
    for summary in (a, b):
        moment = next((reserved for reserved in summary.reserved if reserved.moment == MOMENTS[0]), None)
        held = (0, 0, {}) if moment is None else (moment.reserved_bytes, moment.allocated_bytes, moment.unused)
        amounts.append({"reserved": held[0], "allocated": held[1], **held[2]})
    names = ("reserved", "allocated", *SEGMENT_STATES, "waiting")
    return without_empty(figures_by_name([{name: held.get(name, 0) for name in names} for held in amounts]))


def segment_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Changes between tables ``segments`` when most was reserved, by pool and size, largest first.

    Columns kind (small, large, unknown, private, expandable), segment_bytes (0 for expandable ones, whose sizes
    differ), num_a, num_b, a_bytes, b_bytes, a_free_bytes, b_free_bytes, change_bytes (of a_bytes), what.
    """
    sides = []
    for side, table in (("a", a), ("b", b)):
        then = table[table["moment"].astype(str) == MOMENTS[0]]
        is_expandable = then["is_expandable"].to_numpy(bool)
        pool = np.where(then["private_pool"].astype(str) != "", "private", then["pool"].astype(str))
        bytes_, free = (then[name].to_numpy("int64") for name in ("bytes", "free_bytes"))
        kind, size = np.where(is_expandable, "expandable", pool), np.where(is_expandable, 0, bytes_)
        rows = pd.DataFrame({"kind": kind, "segment_bytes": size, "bytes": bytes_, "free_bytes": free})
        sums = rows.groupby(["kind", "segment_bytes"]).agg(
            num=("bytes", "size"), bytes=("bytes", "sum"), free=("free_bytes", "sum")
        )
        sides.append(sums.set_axis([f"num_{side}", f"{side}_bytes", f"{side}_free_bytes"], axis=1))
    both = sides[0].join(sides[1], how="outer").fillna(0).astype("int64").reset_index()
    both = with_change(both)
    moved = (both["what"] == "same") & (both["a_free_bytes"] != both["b_free_bytes"])
    both["what"] = both["what"].where(~moved, "other contents")
    return by_effect(both)
