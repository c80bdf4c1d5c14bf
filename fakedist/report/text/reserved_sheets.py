"""Why more is reserved than allocated, as tables for a terminal and for Markdown."""

from __future__ import annotations

from fakedist.report.text.sheet import KEY, Sheet, SheetColumn
from fakedist.report.text.wording import MIN_SHARE, short_line
from fakedist.results.run import Run
from fakedist.run.summary import HeldSegment, ReservedMoment
from fakedist.units import format_bytes

#: Parts of what is reserved but not allocated, in words.
UNUSED_NAMES = {
    "pinned": "free in half-empty segments",
    "used": "free in other segments",
    "small": "free in segments of small blocks",
    "expandable": "free in expandable segments",
    "private": "free in private pools",
    "empty": "empty segments, cached",
    "waiting": "freed, but in use on a stream",
    "unknown": "free before the history began",
}
MOMENT_NAMES = {"peak_reserved": "at the reserved peak", "peak_allocated": "at the allocated peak"}
_NUM_HELD = 5


def reserved_sheets(run: Run) -> list[Sheet]:
    """What is reserved but not allocated, in parts, and the segments with the most free memory; none if all is used."""
    moments = run.summary.reserved
    if not any(moment.unused for moment in moments):
        return []
    cwd, is_described = run.manifest.cwd, run.by_category is not None
    held = held_sheet(moments[0], cwd, is_described=is_described)
    return [unused_sheet(moments, cwd, is_described=is_described), *([held] if held else [])]


def unused_sheet(moments: list[ReservedMoment], cwd: str, *, is_described: bool) -> Sheet:
    """Reserved memory in parts that add up, at both peaks, or at the one moment that is both.

    Args:
        moments: The moments.
        cwd: The run's working directory.
        is_described: Whether steps and phases are known.
    """
    first, last = moments[0], moments[-1]
    is_one = (first.reserved_bytes, first.unused) == (last.reserved_bytes, last.unused)
    shown = moments[:1] if is_one else moments
    columns = [_amounts(moment) for moment in shown]
    names = [name for name in columns[0] if any(column[name] for column in columns)]
    found = [SheetColumn("memory", names, is_text=True)]
    for moment, column in zip(shown, columns, strict=True):
        title = "at the peak" if is_one else MOMENT_NAMES[moment.moment]
        found.append(SheetColumn(title, [format_bytes(column[name]) for name in names], rank=KEY))
    return Sheet("Reserved and not allocated", found, _remarks(shown, cwd, is_described=is_described))


def _amounts(moment: ReservedMoment) -> dict[str, int]:
    parts = {text: moment.unused.get(part, 0) for part, text in UNUSED_NAMES.items()}
    return {"reserved then": moment.reserved_bytes, "allocated then": moment.allocated_bytes, **parts}


def _remarks(moments: list[ReservedMoment], cwd: str, *, is_described: bool) -> list[str]:
    first = moments[0]
    remarks = []
    if is_described:
        places = [f"{MOMENT_NAMES[each.moment][3:]}: step {each.step}, {each.phase}" for each in moments]
        remarks.append("; ".join(places))
    if block := first.taken_for:
        at = f" at {short_line(block.line, cwd)}" if block.line else ""
        remarks.append(f"the last segment was reserved for a block of {format_bytes(block.bytes)}{at}")
    if first.rounding_bytes:
        remarks.append(f"allocated includes {format_bytes(first.rounding_bytes)} that rounding up added to requests")
    return remarks


def held_sheet(moment: ReservedMoment, cwd: str, *, is_described: bool) -> Sheet | None:
    """The segments with the most free memory, and the largest block that keeps each reserved; None without any.

    Args:
        moment: The moment.
        cwd: The run's working directory.
        is_described: Whether layers, phases and categories are known.
    """
    rows = [row for row in moment.held if row.free_bytes >= MIN_SHARE * moment.reserved_bytes]
    if not rows:
        return None
    shown = rows[:_NUM_HELD]
    blocks = [row.block for row in shown]
    columns = [
        SheetColumn("free", [format_bytes(row.free_bytes) for row in shown]),
        SheetColumn("of", [format_bytes(row.bytes) for row in shown]),
        SheetColumn("largest hole", [format_bytes(row.largest_hole_bytes) for row in shown], rank=3),
        SheetColumn("blocks", [f"{row.num_blocks:,}" for row in shown], rank=4),
        SheetColumn("largest block", [format_bytes(block.bytes) for block in blocks], rank=1),
    ]
    if is_described:
        columns += [
            SheetColumn("category", [block.category.replace("_", " ") for block in blocks], is_text=True, rank=3),
            SheetColumn("layer", [block.layer for block in blocks], is_text=True, rank=2),
            SheetColumn("made in", [f"{block.step} {block.phase}" for block in blocks], is_text=True, rank=5),
        ]
    columns.append(SheetColumn("line", [short_line(block.line, cwd) for block in blocks], is_text=True, rank=KEY))
    title = f"Segments with the most free memory {MOMENT_NAMES[moment.moment]}, and what keeps them"
    return Sheet(title, columns, _others(moment, len(shown)))


def _others(moment: ReservedMoment, num_shown: int) -> list[str]:
    rest: list[HeldSegment] = moment.held[num_shown:]
    if not rest:
        return []
    return [f"others have at most {format_bytes(rest[0].free_bytes)} free each; the table segments has all"]
