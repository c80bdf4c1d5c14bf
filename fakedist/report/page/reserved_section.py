"""The page's panels about memory that is reserved but not allocated, in the terminal's words."""

from __future__ import annotations

from fakedist.report.page.page_figures import MOST_SEGMENTS
from fakedist.report.text.reserved_sheets import MOMENT_NAMES, unused_sheet
from fakedist.report.text.wording import short_line
from fakedist.results.run import Run
from fakedist.units import format_bytes


def reserved_section(run: Run) -> dict[str, object] | None:
    """The parts at both peaks, and the segments with the most free memory; None if everything is allocated."""
    moments, cwd, is_described = run.summary.reserved, run.manifest.cwd, run.by_category is not None
    if not any(moment.unused for moment in moments):
        return None
    sheet = unused_sheet(moments, cwd, is_described=is_described)
    return {
        "columns": [column.name for column in sheet.columns],
        "rows": list(zip(*(column.cells for column in sheet.columns), strict=True)),
        "remarks": sheet.remarks,
        "is_described": is_described,
        "when": MOMENT_NAMES[moments[0].moment],
        "num_more": max(moments[0].num_segments - MOST_SEGMENTS, 0),
        "held": [
            {
                "figures": [
                    (bytes_, format_bytes(bytes_)) for bytes_ in (row.free_bytes, row.bytes, row.largest_hole_bytes)
                ],
                "num_blocks": row.num_blocks,
                "block": (row.block.bytes, format_bytes(row.block.bytes)),
                "category": row.block.category,
                "spoken": row.block.category.replace("_", " "),
                "layer": row.block.layer,
                "made_in": f"{row.block.step} {row.block.phase}",
                "line": short_line(row.block.line, cwd),
            }
            for row in moments[0].held
        ],
    }
