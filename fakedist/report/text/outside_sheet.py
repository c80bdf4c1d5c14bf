"""Device memory outside the caching allocator, in words for terminal, Markdown and page. Other figures exclude it."""

from __future__ import annotations

from fakedist.report.text.sheet import Sheet, SheetColumn
from fakedist.report.text.wording import span_text
from fakedist.run.plain import to_plain
from fakedist.run.summary import Outside, Summary
from fakedist.units import format_bytes

OUTSIDE_TITLE = "Outside the caching allocator, estimated"
_NUM_SHOWN = 12
_NUM_PARTS = 2
_MORE_IN = "--json (estimated_outside)"


def outside_figures(outside: Outside) -> list[tuple[str, str, str]]:
    """Name, figure and details of each amount, including the names of unknown amounts."""
    rows = []
    if found := outside.communicators:
        low, high = sum(each.low_bytes for each in found), sum(each.high_bytes for each in found)
        rows.append(("NCCL", span_text(low, high), _communicators(outside)))
    if outside.context_bytes:
        rows.append(("CUDA context", format_bytes(outside.context_bytes), f"measured, {outside.context_source}"))
    if outside.measured_bytes is not None:
        told = (
            "measured on this GPU at the end: used minus reserved, other processes included, without other ranks' NCCL"
        )
        rows.append(("on this GPU", format_bytes(outside.measured_bytes), told))
    rows += [("left out", name, what) for name, _, what in (text.partition(": ") for text in outside.left_out)]
    return rows


def _communicators(outside: Outside) -> str:
    number = len(outside.communicators)
    told = f"{number} communicator{'' if number == 1 else 's'}"
    if outside.nccl_version:
        told += f", NCCL {outside.nccl_version}"
    if outside.nccl_environment:
        told += ", " + " ".join(f"{name}={value}" for name, value in sorted(outside.nccl_environment.items()))
    if unused := outside.num_unused_groups:
        told += f"; {unused} group{' has' if unused == 1 else 's have'} none, for lack of calls"
    return told


def communicator_sheet(outside: Outside) -> Sheet | None:
    """The memory of each communicator, most first; None without communicators."""
    if not outside.communicators:
        return None
    rows = outside.communicators[:_NUM_SHOWN]
    columns = [
        SheetColumn("communicator of", [row.group for row in rows], is_text=True),
        SheetColumn("ranks", [f"{row.group_size:,}" for row in rows], rank=1),
        SheetColumn("nodes", [f"{row.num_nodes:,}" for row in rows], rank=2),
        SheetColumn("channels", [_span(*row.channels) for row in rows], rank=3),
        SheetColumn("at least", [format_bytes(row.low_bytes) for row in rows]),
        SheetColumn("at most", [format_bytes(row.high_bytes) for row in rows]),
        SheetColumn("made of, at most", [parts_text(row.parts, _NUM_PARTS) for row in rows], is_text=True, rank=4),
    ]
    remarks = []
    if more := len(outside.communicators) - len(rows):
        remarks.append(f"and {more} more, in {_MORE_IN}")
    return Sheet("NCCL by communicator, estimated", columns, remarks)


def parts_text(parts: dict[str, tuple[int, int]], most: int) -> str:
    """The upper ends of a communicator's parts, largest first. Parts after the first ``most`` are shown as dots."""
    ordered = sorted(parts.items(), key=lambda pair: -pair[1][1])
    told = ", ".join(f"{name} {format_bytes(high)}" for name, (_, high) in ordered[:most])
    return told + (", ..." if len(ordered) > most else "")


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def outside_section(summary: Summary) -> dict[str, object] | None:
    """The page's panel: the amounts, and a row for each communicator."""
    outside = summary.estimated_outside
    if not outside:
        return None
    sheet = communicator_sheet(outside)
    rows = outside.communicators[:_NUM_SHOWN]
    return {
        "title": OUTSIDE_TITLE.partition(",")[0],
        "figures": outside_figures(outside),
        "rows": [
            to_plain(row)
            | {
                "channels": _span(*row.channels),
                "low": format_bytes(row.low_bytes),
                "high": format_bytes(row.high_bytes),
                "parts": parts_text(row.parts, len(row.parts)),
            }
            for row in rows
        ],
        "remarks": sheet.remarks if sheet else [],
    }
