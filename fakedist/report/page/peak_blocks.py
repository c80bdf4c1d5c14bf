"""The peak block by block: the largest blocks with their Python stacks, and all blocks by allocating line."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from fakedist.analysis.layer_table import owner_names
from fakedist.report.text.wording import short_line, short_operation
from fakedist.results.run import Run

_NUM_BLOCKS = 50


@dataclass(frozen=True, slots=True)
class PeakBlock:
    """One of the largest blocks at the peak.

    Attributes:
        number: Its row in the table ``blocks``.
        bytes: Bytes.
        category: What it is for; empty for a snapshot.
        layer: The layer that owns it; of several, how many.
        made_in: Step and phase that allocated it; empty for a snapshot.
        operation: The operation that allocated it.
        line: The job's line that allocated it; empty without one.
        stack: Its stack, innermost first, each line with whether it is ``line``.
    """

    number: int
    bytes: int
    category: str
    layer: str
    made_in: str
    operation: str
    line: str
    stack: list[tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class PeakLine:
    """All blocks at the peak that one line allocated.

    Attributes:
        line: The line; of blocks without one, their operation.
        bytes: Bytes of all of them.
        num: Their number.
        categories: What they are for, most bytes first.
    """

    line: str
    bytes: int
    num: int
    categories: list[str]


def largest_blocks(run: Run, blocks: pd.DataFrame, lines: list[str], cwd: str) -> list[PeakBlock]:
    """The largest blocks at the peak in the order of the table ``largest``, with their stacks, innermost first."""
    alive = blocks[blocks["at_peak"]].sort_values(["bytes", "alloc_event"], ascending=[False, True]).head(_NUM_BLOCKS)
    names, owners = block_owners(run)
    stacks = _stacks(run, sorted(set(alive["stack"])), cwd)
    found = []
    for number, row in zip(alive.index, alive.to_dict("records"), strict=True):
        line = lines[row["stack"]] if row["stack"] >= 0 else ""
        found.append(
            PeakBlock(
                number=int(number),
                bytes=int(row["bytes"]),
                category="" if run.by_category is None else str(row["category"]),
                layer=owners.get(int(number), names[row["layer"]]),
                made_in="" if run.by_category is None else f"{row['step']} {row['phase']}",
                operation=short_operation(str(row["operation"])),
                line=line,
                stack=[(text, text == line) for text in stacks.get(row["stack"], [])],
            )
        )
    return found


def block_owners(run: Run) -> tuple[list[str], dict[int, str]]:
    """Names of all layers, and for blocks that several layers own, the text shown instead of a name."""
    layers = run.table("layers", ["name", "parent"])
    names = layers["name"].astype(str).tolist()
    return names, owner_names(run.table("shares"), names, layers["parent"].tolist())


def _stacks(run: Run, wanted: list[int], cwd: str) -> dict[int, list[str]]:
    """Stacks as text, one line per frame."""
    rows = [number for number in wanted if number >= 0]
    if not rows:
        return {}
    frames = run.table("stacks")["frames"]
    told = run.table("frames")
    texts: dict[int, str] = {}
    for number in {frame for row in rows for frame in frames[row]}:
        frame = told.iloc[int(number)]
        texts[number] = f"{short_line(str(frame['filename']), cwd)}:{frame['line']} ({frame['function']})"
    return {row: [texts[number] for number in frames[row]] for row in rows}


def by_line(blocks: pd.DataFrame, lines: list[str]) -> list[PeakLine]:
    """Blocks alive at the peak, summed by the line that allocated them, most bytes first.

    Blocks without a line come from C++ (autograd, a reducer). They are summed by operation.
    """
    alive = blocks[blocks["at_peak"]]
    texts = pd.Series([*lines, ""])
    table = pd.DataFrame(
        {
            "line": texts.iloc[alive["stack"].to_numpy()].to_numpy(),  # stack -1 (none) is the empty line
            "operation": alive["operation"].astype(str).map(short_operation).to_numpy(),
            "category": alive["category"].astype(str).to_numpy(),
            "bytes": alive["bytes"].to_numpy(),
        }
    )
    table["operation"] = table["operation"].where(table["line"] == "", "")
    sums = table.groupby(["line", "operation", "category"])["bytes"].agg(["sum", "size"]).reset_index()
    rows: dict[str, list[tuple[str, int, int]]] = {}
    for line, operation, category, bytes_, num in sums.sort_values("sum", ascending=False, kind="stable").itertuples(
        index=False
    ):
        what = line or f"(no Python line) {operation}".rstrip()
        rows.setdefault(what, []).append((category.replace("_", " "), int(bytes_), int(num)))
    found = [
        PeakLine(
            line=line,
            bytes=sum(bytes_ for _, bytes_, _ in parts),
            num=sum(num for *_, num in parts),
            categories=[category for category, _, _ in parts],
        )
        for line, parts in rows.items()
    ]
    return sorted(found, key=lambda row: -row.bytes)
