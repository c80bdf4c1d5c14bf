"""The memory peak: when it was, what it consisted of, and the course of memory by phase and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from fakedist.analysis.blocks import Blocks
from fakedist.analysis.layer_table import owner_names
from fakedist.analysis.recording import Recording
from fakedist.analysis.typed_tables import table_of
from fakedist.rundir import notes
from fakedist.rundir.notes import Note
from fakedist.rundir.records import EngineRecord
from fakedist.rundir.schema import CATEGORIES

_GRANULE = 2 << 20  # of the GPU's memory, and of torch's large segments (kRoundLarge)
_MIN_LARGE, _LARGE = 10 << 20, 20 << 20  # a smaller request has a segment of 20 MiB (kMinLargeAlloc, kLargeBuffer)


LARGEST = 20


def phase_table(recording: Recording, blocks: Blocks, positions: pd.DataFrame) -> pd.DataFrame:
    """The table ``phases``: one row per phase of a step, in the order in which they began.

    A phase that neither allocated nor freed anything has the memory that was held while it ran.
    """
    curve = positions.assign(allocated=blocks.replay.allocated_bytes, reserved=blocks.replay.reserved_bytes)
    curve["event"] = np.arange(len(curve))
    groups = curve.groupby(["step", "phase"], sort=False, observed=True)
    table = groups.agg(
        peak_allocated_bytes=("allocated", "max"),
        peak_reserved_bytes=("reserved", "max"),
        end_allocated_bytes=("allocated", "last"),
        first=("event", "first"),
    ).reset_index()
    if len(others := _without_events(recording, blocks, table)):  # pandas 2 warns of empty ones
        table = pd.concat([table, others], ignore_index=True)
    table = table.astype({"step": "int32", "phase": pd.CategoricalDtype()})
    return table.sort_values("first", kind="stable").drop(columns="first").reset_index(drop=True)


def _without_events(recording: Recording, blocks: Blocks, table: pd.DataFrame) -> pd.DataFrame:
    """Rows for phases that ran operations without changing the device's memory; before training, ``init``."""
    last = np.inf if recording.outcome is None else recording.outcome.last_step
    known = set(zip(table["step"].tolist(), table["phase"].astype(str).tolist(), strict=True))
    missing: dict[tuple[int, str], list[int]] = {}
    for number, scope in enumerate(recording.scopes):
        when = (scope.step, scope.phase if scope.step else "init")
        if when not in known and scope.step <= last:
            missing.setdefault(when, []).append(number)
    allocated, reserved = (
        np.append(0, curve) for curve in (blocks.replay.allocated_bytes, blocks.replay.reserved_bytes)
    )
    event_op = recording.event_ops
    rows = []
    for (step, phase), scopes in missing.items():
        op = np.flatnonzero(np.isin(recording.op_scope, scopes))
        if not len(op):
            continue
        event = np.searchsorted(event_op, op, side="right")  # how many events came before
        rows.append(
            (step, phase, allocated[event].max(), reserved[event].max(), allocated[event[-1]], event[0] - 0.5, op[0])
        )
    rows.sort(key=lambda row: row[-1])
    return pd.DataFrame([row[:-1] for row in rows], columns=list(table.columns)).astype(
        dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "end_allocated_bytes"), "int64")
    )


def named_phase_table(recording: Recording, blocks: Blocks) -> pd.DataFrame:
    """The table ``named_phases``: the phases that the script named, in the order in which they ended."""
    event_op = recording.event_ops
    allocated, reserved = blocks.replay.allocated_bytes, blocks.replay.reserved_bytes
    spans = [(row.first_op, row.end_op) for row in recording.named_phases]
    rows = []
    for at, row in enumerate(recording.named_phases):
        others = [op for span in (*spans[:at], *spans[at + 1 :]) for op in span if op <= row.first_op]
        before, first, end = np.searchsorted(event_op, (max(others, default=0), row.first_op, row.end_op)).tolist()
        handover = slice(max(before - 1, 0), first)  # what is held when it begins counts
        inside = slice(max(first - 1, 0), end)
        most = [int(curve[part].max(initial=0)) for part in (handover, inside) for curve in (allocated, reserved)]
        used = (row.peak_used_bytes, row.backed_bytes, row.outside_bytes, row.others_bytes)
        changes = [np.nan if number < 0 else number for number in (row.first_change, row.end_change)]
        rows.append((row.name, row.step, row.end_step, first, end, *most, *used, *changes))
    return table_of("named_phases", rows)


def asleep_table(recording: Recording, blocks: Blocks) -> pd.DataFrame:
    """The table ``asleep``."""
    event_op = recording.event_ops
    bounds = np.append(np.searchsorted(event_op, [each.op for each in recording.asleep]), len(event_op)).astype("i8")
    frame = blocks.frame
    address, made, freed = (frame[name].to_numpy() for name in ("address", "alloc_event", "free_event"))
    stretches = []
    for each, (first, end) in zip(recording.asleep, pairwise(bounds), strict=True):
        starts, sizes = (np.frombuffer(column, "u8") for column in (each.address, each.size))
        order = np.argsort(starts)
        ends = np.append(np.uint64(0), (starts + sizes)[order])
        is_within = address < ends[np.searchsorted(starts[order], address, side="right")]  # the last to begin before it
        inside = is_within & (made < end) & (freed > first)
        number = np.flatnonzero(inside)
        stretches.append(np.stack([number, np.maximum(made[inside], first), np.minimum(freed[inside], end)]))
    rows = np.concatenate([np.zeros((3, 0), "i8"), *stretches], axis=1)
    return table_of("asleep", rows.T)


def device_use_table(recording: Recording) -> pd.DataFrame:
    """The table ``device_use``: for each change its parts, this process's first."""
    use = recording.device_use
    if use is None:
        return table_of("device_use")
    names = _numbered(use.processes)
    of_engine = _engine_of(recording)
    rows = []
    for row in use.rows:
        held = [("", "allocator", row.backed_bytes), ("", "outside", row.outside_bytes)]
        held += [(name, "all", bytes_) for name, bytes_ in zip(names, row.others_bytes, strict=True)]
        for process, part, bytes_ in held:
            cache = 0
            if (process, part) == of_engine:
                cache = _kv_cache_bytes(recording, row.change)
                cache = cache if cache <= bytes_ else 0  # the engine goes to sleep piece by piece
                rows.append((row.change, process, "KV cache", cache))
            rows.append((row.change, process, part, bytes_ - cache))
    return table_of("device_use", rows)


def _engine_of(recording: Recording) -> tuple[str, str] | None:
    """The process and the part, as in ``device_use``, that have the KV cache of vLLM's engine; None without one, or if
    there were several engines.
    """
    if len(recording.engines) != 1 or not recording.engine_caches:
        return None
    process = recording.engines[0].process
    return process, "all" if process else "allocator"


def _kv_cache_bytes(recording: Recording, change: int) -> int:
    """Memory behind the KV cache of vLLM's engine after a change."""
    ends: dict[int, int] = {}
    for each in recording.engine_caches:  # the end of each comes after its begin
        ends[each.first_change] = each.end_change
    if not any(first <= change and (end < 0 or change < end) for first, end in ends.items()):
        return 0
    return cache_bytes(recording.engines[0], recording.engines[0].num_blocks)


def cache_bytes(engine: EngineRecord, blocks: int) -> int:
    """Memory of the GPU behind a KV cache, which is one segment."""
    size = blocks * engine.block_bytes
    return _LARGE if 0 < size < _MIN_LARGE else -(-size // _GRANULE) * _GRANULE


def _numbered(names: Sequence[str]) -> list[str]:
    """Names with a number behind those that repeat an earlier one: "worker.py", "worker.py (2)"."""
    earlier = [names[:at].count(name) for at, name in enumerate(names)]
    return [f"{name} ({count + 1})" if count else name for name, count in zip(names, earlier, strict=True)]


def span_table(positions: pd.DataFrame) -> pd.DataFrame:
    """The table ``spans``: one row per run of consecutive events in one phase of a step."""
    step, phase = positions["step"].to_numpy(), pd.factorize(positions["phase"])[0]
    begins = np.ones(len(positions), bool)
    begins[1:] = (step[1:] != step[:-1]) | (phase[1:] != phase[:-1])
    table = positions[begins].reset_index(drop=True)
    table["first_event"] = np.flatnonzero(begins)
    return table


def step_table(recording: Recording, blocks: Blocks, positions: pd.DataFrame) -> pd.DataFrame:
    """The table ``steps``: one row per step that ended, in order.

    A step that allocated nothing (it only replayed CUDA graphs) has the memory that was held when it began.
    """
    table = pd.DataFrame(
        [(row.step, row.start_us, row.wall_us) for row in recording.steps], columns=["step", "start_us", "wall_us"]
    ).astype("int64")
    having, which = np.unique(positions["step"].to_numpy(), return_inverse=True)
    last = np.zeros(len(having), "int64")
    last[which] = np.arange(len(which))
    index = np.searchsorted(having, table["step"], side="right") - 1
    has_events = (index >= 0) & (np.append(having, -1)[index] == table["step"])
    for name, curve in (("allocated", blocks.replay.allocated_bytes), ("reserved", blocks.replay.reserved_bytes)):
        peaks = np.zeros(len(having) + 1, "int64")  # the last is for steps before every event
        np.maximum.at(peaks, which, curve)
        held = np.append(curve[np.maximum.accumulate(last)], 0)[index]
        table[f"peak_{name}_bytes"] = np.where(has_events, peaks[index], held)
    table["samples"] = np.array([row.samples for row in recording.steps], "int64")
    for name in ("sample_shape", "name"):
        table[name] = pd.Series([getattr(row, name) for row in recording.steps], dtype="object")
    return table


def by_category(blocks: Blocks) -> dict[str, int]:
    """Bytes at the peak by category. They add up to the peak."""
    alive = blocks.frame[blocks.at_peak]
    sums = alive.groupby("category", observed=False)["bytes"].sum()
    return {name: int(sums.get(name, 0)) for name in CATEGORIES}


@dataclass(frozen=True)
class Peak:
    """The peaks of a run. ``by_category`` has the bytes at the allocated peak, which they add up to."""

    allocated_bytes: int
    reserved_bytes: int
    step: int
    phase: str
    by_category: dict[str, int]


def find_peak(blocks: Blocks, positions: pd.DataFrame) -> Peak:
    """The peaks of the run, with the position and the categories of the allocated peak."""
    allocated, reserved = blocks.replay.allocated_bytes, blocks.replay.reserved_bytes
    step, phase = positions[["step", "phase"]].iloc[blocks.peak_event] if blocks.peak_event >= 0 else (0, "init")
    return Peak(
        int(allocated.max(initial=0)),
        int(reserved.max(initial=0)),
        step=int(step),
        phase=str(phase),
        by_category=by_category(blocks),
    )


def differences(recording: Recording, blocks: Blocks) -> list[Note]:
    """Where the replay disagrees with the allocator's own statistics. Empty if it is exact."""
    statistics = recording.statistics.get(recording.device)
    notes_made = [notes.allocated_before(unknown)] if (unknown := blocks.replay.unknown_frees) else []
    if statistics is None:
        return notes_made
    for name, curve, own in (
        ("allocated", blocks.replay.allocated_bytes, statistics.allocated_peak_bytes),
        ("reserved", blocks.replay.reserved_bytes, statistics.reserved_peak_bytes),
    ):
        bytes_ = int(curve.max(initial=0))
        if bytes_ < own or (bytes_ > own and not statistics.peaks_were_reset):
            notes_made.append(notes.peak_differs(name, bytes_, own))
    return notes_made


def largest_blocks(recording: Recording, blocks: Blocks, lines: list[str]) -> pd.DataFrame:
    """The table ``largest``: the largest blocks at the peak, largest first."""
    alive = blocks.frame[blocks.at_peak].sort_values(["bytes", "alloc_event"], ascending=[False, True]).head(LARGEST)
    parents = [row.parent for row in recording.layers] or [-1]
    return described_blocks(alive, blocks.shares, layer_names(recording), parents, lines=lines)


def described_blocks(
    chosen: pd.DataFrame, shares: pd.DataFrame, names: list[str], parents: list[int], *, lines: list[str]
) -> pd.DataFrame:
    """Blocks in words, with the columns of the table ``largest``.

    ``chosen`` are of the table ``blocks``; ``names`` and ``parents`` columns of ``layers``; ``lines`` of ``stacks``.
    """
    table = chosen[["bytes", "category", "phase", "step", "operation"]].astype({"category": str, "phase": str})
    table["operation"] = table["operation"].astype(str)
    owners = owner_names(shares[shares["block"].isin(chosen.index)], names, parents)
    numbered = zip(chosen.index.tolist(), chosen["layer"].tolist(), strict=True)
    table["layer"] = [owners.get(block, names[layer]) for block, layer in numbered]
    table["line"] = [lines[stack] if stack >= 0 else "" for stack in chosen["stack"]]
    order = ["bytes", "category", "layer", "phase", "step", "operation", "line"]
    return table[order].reset_index(drop=True)


def layer_names(recording: Recording) -> list[str]:
    """Names of layers by number. Layer 0, outside of any module, has an empty name."""
    return [row.name for row in recording.layers] or [""]
