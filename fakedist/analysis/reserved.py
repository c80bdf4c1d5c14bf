"""Why more is reserved than allocated: the free memory by what it is, and the segments with the most of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from fakedist.analysis.memory_tables import described_blocks
from fakedist.analysis.times.totals import rows_of
from fakedist.run.schema import MOMENTS, SEGMENT_STATES
from fakedist.run.summary import HeldSegment, LargeBlock, ReservedMoment

NUM_HELD = 10
_OF_SEGMENT = [field.name for field in dataclasses.fields(HeldSegment) if field.name != "block"]


def reserved_moments(tables: dict[str, pd.DataFrame]) -> list[ReservedMoment]:
    """What was reserved but not allocated, at the moments of the table ``segments``.

    Args:
        tables: Tables by name: segments, blocks, shares, layers, stacks, spans.
    """
    return [_moment(str(name), rows, tables) for name, rows in tables["segments"].groupby("moment", sort=False)]


def _moment(name: str, rows: pd.DataFrame, tables: dict[str, pd.DataFrame]) -> ReservedMoment:
    event = int(rows["event"].iloc[0])
    spans = tables["spans"]
    step, phase = spans[["step", "phase"]].iloc[int(np.searchsorted(spans["first_event"], event, "right")) - 1]
    free = rows.groupby("state")["free_bytes"].sum()
    parts = {state: int(free[state]) for state in SEGMENT_STATES if free.get(state, 0)}
    if waiting := int(rows["waiting_bytes"].sum()):
        parts["waiting"] = waiting
    held = rows[rows["state"].isin(("pinned", "used"))].head(NUM_HELD)
    held = held[held["free_bytes"] > 0]
    blocks = tables["blocks"]
    taken_for = blocks.index[(blocks["alloc_event"] == event) & (name == MOMENTS[0])].tolist()
    described = _described([*held["block"].tolist(), *taken_for], tables)
    return ReservedMoment(
        moment=name,
        step=int(step),
        phase=str(phase),
        reserved_bytes=int(rows["bytes"].sum()),
        allocated_bytes=int(rows["allocated_bytes"].sum()),
        rounding_bytes=int((rows["allocated_bytes"] - rows["requested_bytes"]).sum()),
        unused=parts,
        num_segments=len(rows),
        held=[
            HeldSegment(**{str(key): value for key, value in row.items()}, block=block)
            for row, block in zip(held[_OF_SEGMENT].to_dict("records"), described, strict=False)
        ],
        taken_for=described[-1] if taken_for else None,
    )


def _described(numbers: list[int], tables: dict[str, pd.DataFrame]) -> list[LargeBlock]:
    """Blocks by their rows in the table ``blocks``: what each is, what allocated it and where."""
    layers = tables["layers"]
    lines = tables["stacks"]["line"].tolist()
    found = described_blocks(
        tables["blocks"].loc[numbers], tables["shares"], layers["name"].tolist(), layers["parent"].tolist(), lines=lines
    )
    return rows_of(LargeBlock, found)
