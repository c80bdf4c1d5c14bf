"""The tables of a run's memory as text: at the peak, reserved, and outside the caching allocator."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fakedist.analysis.layer_table import fold_layers, fold_table, unfolded
from fakedist.analysis.stack_lines import IN_TORCH, NO_STACK, forward_line, in_engine, script_lines
from fakedist.report.content.report_blocks import EMPTY_RANK, KEY, Sheet, SheetColumn, us_column
from fakedist.report.text.wording import LAYER_COLUMNS, MIN_SHARE, layer_label, or_dash
from fakedist.results.compare.changed_memory import UNUSED_NAMES
from fakedist.results.run import Run
from fakedist.results.verdict import short_line, short_operation, span_text
from fakedist.rundir.plain import to_plain
from fakedist.rundir.rows import FrameRow
from fakedist.rundir.schema import CATEGORIES
from fakedist.rundir.summary import (
    CollectiveTotal,
    EngineMemory,
    EngineSleep,
    HeldSegment,
    LargeBlock,
    Outside,
    ReservedMoment,
    Summary,
)
from fakedist.units import format_bytes, format_us

MOMENT_NAMES = {"peak_reserved": "at the reserved peak", "peak_allocated": "at the allocated peak"}
_NUM_HELD = 5


def reserved_sheets(run: Run) -> list[Sheet]:
    """Reserved memory without tensors in parts, and the segments with most of it; none if all is used."""
    moments = run.summary.reserved
    if not any(moment.unused for moment in moments):
        return []
    cwd, is_described = run.manifest.cwd, run.by_category is not None
    held = held_sheet(moments[0], cwd, is_described=is_described)
    return [unused_sheet(moments, cwd, is_described=is_described), *([held] if held else [])]


def unused_sheet(moments: list[ReservedMoment], cwd: str, *, is_described: bool) -> Sheet:
    """Reserved memory in parts that add up, at both peaks, or at the one moment that is both."""
    first, last = moments[0], moments[-1]
    is_one = (first.reserved_bytes, first.unused) == (last.reserved_bytes, last.unused)
    shown = moments[:1] if is_one else moments
    columns = [_amounts(moment) for moment in shown]
    names = [name for name in columns[0] if any(column[name] for column in columns)]
    sheet_columns = [SheetColumn("memory", names, is_text=True)]
    for moment, column in zip(shown, columns, strict=True):
        title = "at the peak" if is_one else MOMENT_NAMES[moment.moment]
        sheet_columns.append(SheetColumn(title, [format_bytes(column[name]) for name in names], rank=KEY))
    return Sheet("Reserved and not allocated", sheet_columns, _remarks(shown, cwd, is_described=is_described))


def _amounts(moment: ReservedMoment) -> dict[str, int]:
    parts = {text: moment.unused.get(part, 0) for part, text in UNUSED_NAMES.items()}
    return {"reserved then": moment.reserved_bytes, "allocated then": moment.allocated_bytes, **parts}


def _remarks(moments: list[ReservedMoment], cwd: str, *, is_described: bool) -> list[str]:
    first = moments[0]
    remarks = []
    if is_described:
        positions = [f"{MOMENT_NAMES[moment.moment][3:]}: step {moment.step}, {moment.phase}" for moment in moments]
        remarks.append("; ".join(positions))
    if block := first.taken_for:
        at = f" at {short_line(block.line, cwd)}" if block.line else ""
        remarks.append(f"the last segment was reserved for a block of {format_bytes(block.bytes)}{at}")
    if first.rounding_bytes:
        remarks.append(f"allocated includes {format_bytes(first.rounding_bytes)} that rounding up added to requests")
    return remarks


def held_sheet(moment: ReservedMoment, cwd: str, *, is_described: bool) -> Sheet | None:
    """The segments with the most free memory, and the largest block that keeps each reserved; None without any."""
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


OUTSIDE_TITLE = "Outside the caching allocator, estimated"
_NUM_SHOWN = 12
_NUM_PARTS = 2
_MORE_IN = "--json (estimated_outside)"


def outside_figures(outside: Outside) -> list[tuple[str, str, str]]:
    """Name, figure and details of each amount, including the names of unknown amounts."""
    rows = [(name, format_bytes(size), "measured: the most at one time") for name, size in outside.taken.items()]
    if communicators := outside.communicators:
        low, high = (
            sum(communicator.low_bytes for communicator in communicators),
            sum(communicator.high_bytes for communicator in communicators),
        )
        rows.append(("NCCL", span_text(low, high), _communicators(outside)))
    if outside.context_bytes:
        rows.append(("CUDA context", format_bytes(outside.context_bytes), f"measured, {outside.context_source}"))
    if outside.reserve_bytes:
        rows.append(("--reserve", format_bytes(outside.reserve_bytes), "all of the above, and what others hold"))
    if outside.measured_bytes is not None:
        remark = (
            "measured on this GPU at the end: used minus reserved, other processes included, without other ranks' NCCL"
        )
        rows.append(("on this GPU", format_bytes(outside.measured_bytes), remark))
    rows += [("left out", name, reason) for name, _, reason in (text.partition(": ") for text in outside.left_out)]
    return rows


def _communicators(outside: Outside) -> str:
    number = len(outside.communicators)
    text = f"{number} communicator{'' if number == 1 else 's'}"
    if outside.nccl_version:
        text += f", NCCL {outside.nccl_version}"
    if outside.nccl_environment:
        text += ", " + " ".join(f"{name}={value}" for name, value in sorted(outside.nccl_environment.items()))
    if unused := outside.num_unused_groups:
        text += f"; {unused} group{' has' if unused == 1 else 's have'} none, for lack of calls"
    return text


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
    text = ", ".join(f"{name} {format_bytes(high)}" for name, (_, high) in ordered[:most])
    return text + (", ..." if len(ordered) > most else "")


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


_ENGINE = "vLLM's share of the GPU, estimated"
_NUM_LARGEST = 10
_NUM_STEPS = 4  # of more steps, only the first two, the one with the peak and the last are shown


def run_sheets(run: Run, *, all_layers: bool) -> list[Sheet]:
    """Every table of a run that is not empty.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    summary, cwd = run.summary, run.manifest.cwd
    sheets = []
    if summary.peak_reserved_bytes and run.by_category is not None:
        sheets.append(phase_sheet(summary))
    if summary.named_phases:
        sheets.append(named_phase_sheet(summary))
    if summary.engine is not None:
        sheets.append(engine_sheet(summary.engine, summary.estimated_outside))
    if summary.engine_sleeps:
        sheets.append(engine_sleep_sheet(summary.engine_sleeps))
    if summary.peak_allocated_bytes:
        if run.by_category is not None:
            sheets.append(category_sheet(summary))
            sheets.append(layer_sheet(run.table("layers"), summary, all_layers))
            sheets += filter(None, [line_sheet(run, _NUM_LARGEST)])
        sheet = largest_sheet(summary.largest_blocks, cwd)
        known = [column for column in sheet.columns if run.by_category is not None or column.name in ("bytes", "line")]
        sheets.append(replace(sheet, columns=known))
        sheets += reserved_sheets(run)
    if summary.collectives:
        sheets.append(collective_sheet(summary.collectives))
    return sheets


def phase_sheet(summary: Summary) -> Sheet:
    """The phases of the first steps, of the step with the peak and of the last."""
    rows = summary.by_phase if summary.peak_reserved_bytes else []
    steps = sorted({row.step for row in rows})
    shown = steps if len(steps) <= _NUM_STEPS else [*steps[:2], summary.peak_step, steps[-1]]
    rows = [row for row in rows if row.step in shown]
    peak = (summary.peak_step, summary.peak_phase)
    phases = [row.phase + (" <- peak" if (row.step, row.phase) == peak else "") for row in rows]
    figures = [
        SheetColumn(name, [format_bytes(getattr(row, key)) for row in rows], rank=rank)
        for name, key, rank in (
            ("peak allocated", "peak_allocated_bytes", KEY),
            ("peak reserved", "peak_reserved_bytes", 2),
            ("allocated at end", "end_allocated_bytes", 1),
        )
    ]
    step = SheetColumn("step", [str(row.step) for row in rows])
    remarks = []
    if left_out := [number for number in steps if number not in shown]:
        several = f"{len(left_out)} of the steps {left_out[0]} to {left_out[-1]} are"
        remarks.append(f"{f'step {left_out[0]} is' if len(left_out) == 1 else several} only in --json")
    if times := [f"{row.step}: {format_us(row.wall_us)}" for row in summary.steps if row.step in shown]:
        remarks.append(f"wall time of steps on this machine, recording included: {', '.join(times)}")
    return Sheet("By phase", [step, SheetColumn("phase", phases, is_text=True), *figures], remarks)


def named_phase_sheet(summary: Summary) -> Sheet:
    """The phases that the script named, each with its peaks and with what is in use of the GPU at its end."""
    rows = summary.named_phases
    figures = [
        SheetColumn(name, [or_dash(value) for value in values], rank=rank, values=values, unit="bytes")
        for name, key, rank in (
            ("hand-over: allocated", "handover_allocated_bytes", 7),
            ("hand-over: reserved", "handover_reserved_bytes", 6),
            ("peak in use", "peak_used_bytes", KEY),
            ("peak allocated", "peak_allocated_bytes", 2),
            ("peak reserved", "peak_reserved_bytes", 1),
            ("end: allocator", "end_backed_bytes", 5),
            ("end: outside", "end_outside_bytes", 4),
            ("end: others", "end_others_bytes", 3),
        )
        for values in ([getattr(row, key) for row in rows],)
    ]
    where = [SheetColumn("phase", [row.phase for row in rows], is_text=True)]
    where.append(SheetColumn("step", [str(row.step) for row in rows]))
    if any(times := _phase_times(summary)):
        where.append(us_column("time", times))
    remarks = [
        "hand-over: the most from where the phase before it began or ended, or the run began, to its begin",
        "in use: by all processes, without their contexts; what sleeps is allocated and reserved, but not in use",
        "end: in use when the phase ended, behind the allocator's segments, outside of it and by other processes",
    ]
    if any(times) and summary.kernels is not None:
        word = summary.kernels.source
        remarks.append(f"time, {word}: in the timed step, from the first kernel to the last; several of one name: mean")
    return Sheet("By the script's phases", [*where, *figures], remarks)


def _phase_times(summary: Summary) -> list[float | None]:
    """Microseconds on the GPU of each named phase; None outside of the timed step, and without kernels.

    A step begins with the first forward that its phase runs, so it is the step in which the phase ends.
    """
    if summary.timed is None:
        return [None] * len(summary.named_phases)
    time, source = summary.timed
    means = {span.name: span.gpu_us / span.num_ranges for span in time.ranges}
    return [(row.end_step == source.step and means.get(row.phase)) or None for row in summary.named_phases]


def engine_sheet(engine: EngineMemory, outside: Outside | None) -> Sheet:
    """VLLM's engine as it ran, and with the least and the largest share of the GPU."""
    rows: list[tuple[str, float | None, int, int]] = [
        ("this run", engine.utilization, engine.num_blocks, engine.cache_bytes),
        ("largest that fits", engine.largest_utilization, engine.largest_num_blocks, engine.largest_cache_bytes),
    ]
    columns = [
        SheetColumn("vLLM's engine", [row[0] for row in rows], is_text=True),
        SheetColumn("gpu_memory_utilization", ["-" if row[1] is None else f"{row[1]:g}" for row in rows]),
        SheetColumn("KV cache blocks", [f"{row[2]:,}" if row[2] else "-" for row in rows]),
        SheetColumn("KV cache", [or_dash(row[3]) for row in rows], values=[row[3] for row in rows], unit="bytes"),
    ]
    held = [(engine.weights_bytes, "weights"), (engine.activations_bytes, "activations")]
    held.append((engine.graphs_bytes, "CUDA graphs"))
    parts = ", ".join(f"{format_bytes(size)} of {name}" for size, name in held if size)
    remarks = [f"the engine measured {parts}; its KV cache is in {engine.cache_dtype}"]
    if engine.unknown_because:
        return Sheet(_ENGINE, columns, [*remarks, f"the largest share is not known: {engine.unknown_because}"])
    where = f" in {engine.peak_phase}" if engine.peak_phase else ""
    more, least = engine.largest_in_addition, engine.least_utilization
    remarks.append(
        f"with the KV cache at most {format_bytes(engine.peak_awake_bytes)} was in use{where}, without it "
        f"{format_bytes(engine.peak_asleep_bytes)}"
    )
    remarks.append(f"from {least:g} on it starts with room for one request of {engine.max_model_len:,} tokens")
    knows_context = outside is not None and outside.context_bytes is not None
    taken = "CUDA's context and NCCL may take" if knows_context else "NCCL may take (CUDA's context is not known)"
    fitting = "no share fits" if more is None else f"{more:g} fits"
    remarks.append(f"{fitting} in addition to the most that {taken}")
    return Sheet(_ENGINE, columns, remarks)


def engine_sleep_sheet(sleeps: list[EngineSleep]) -> Sheet:
    """Memory of the GPU that the process of each engine kept when it slept last."""
    kept = [sum(row.kept.values()) for row in sleeps]
    names = [f"{row.process}: {row.how}" if row.process else row.how for row in sleeps]
    parts = [
        ", ".join(f"{format_bytes(size)} {kind}" for kind, size in sorted(row.kept.items(), key=lambda part: -part[1]))
        for row in sleeps
    ]
    columns = [
        SheetColumn("asleep", names, is_text=True),
        SheetColumn("times", [f"{row.times:,}" for row in sleeps]),
        SheetColumn("freed", [or_dash(row.freed_bytes) for row in sleeps], unit="bytes"),
        SheetColumn("kept", [or_dash(size) for size in kept], values=kept, unit="bytes"),
        SheetColumn("of it", parts, is_text=True),
    ]
    remarks = ["kept: what the engine's process had in use of the GPU the last time, without its CUDA context"]
    if any(not row.process for row in sleeps):
        remarks.append("other tensors: of the script, in whose process the engine is")
    return Sheet("What engines keep asleep", columns, remarks)


def category_sheet(summary: Summary) -> Sheet:
    """Bytes at the peak by category, most first."""
    peak = summary.peak_allocated_bytes
    rows = sorted(((name, bytes_) for name, bytes_ in summary.by_category.items() if bytes_), key=lambda row: -row[1])
    columns = [
        SheetColumn("category", [name.replace("_", " ") for name, _ in rows], is_text=True),
        SheetColumn("bytes", [format_bytes(bytes_) for _, bytes_ in rows]),
        SheetColumn("share", [f"{bytes_ / peak:.1%}" for _, bytes_ in rows]),
    ]
    return Sheet("By category at the peak", columns, is_open=True)


def layer_sheet(layers: pd.DataFrame, summary: Summary, all_layers: bool) -> Sheet:
    """Bytes at the peak by layer. ``terminal.render`` documents ``all_layers``."""
    peak = summary.peak_allocated_bytes
    folded = fold_table(layers, unfolded(layers) if all_layers else fold_layers(layers))
    kept = folded[["peak_total_bytes", "most_total_bytes"]].max(axis=1) > (0 if all_layers else peak * MIN_SHARE)
    rows = folded[kept].to_dict("records")
    names = [layer_label(row["name"], row["num_repeats"]) for row in rows]
    columns = [SheetColumn("layer", names, is_text=True)]
    for name, (categories, rank) in LAYER_COLUMNS.items():
        sums = [sum(row[f"peak_{category}_bytes"] for category in categories) for row in rows]
        columns.append(SheetColumn(name, [or_dash(bytes_) for bytes_ in sums], rank=rank if any(sums) else EMPTY_RANK))
    for name, key, rank in (
        ("total", "peak_total_bytes", KEY),
        ("own", "peak_own_bytes", 5),
        ("most", "most_total_bytes", 0),
    ):
        columns.append(SheetColumn(name, [or_dash(row[key]) for row in rows], rank=rank))
    when = f"in step {summary.steps[-1].step}" if summary.steps else "in the run"
    remarks = [f"most: the most that one such layer held, with children, {when}"]
    if left_out := len(folded) - len(rows):
        num = f"{left_out} layer{'' if left_out == 1 else 's'}"
        reason = "without memory" if all_layers else f"below {MIN_SHARE:.1%} of the peak (--all-rows shows them)"
        remarks.append(f"not shown: {num} {reason}")
    return Sheet("By layer at the peak, with children", columns, remarks)


def line_sheet(run: Run, most: int, *, has_inner: bool = True) -> Sheet | None:
    """The script's lines whose blocks hold most at the peak, and how much of it was allocated in a backward.

    Below a line that calls several lines of libraries are those that hold most, if ``has_inner``. None without blocks.
    """
    if run.memory is None or not run.peak_allocated_bytes:
        return None
    rows: list[HeldLine] = []
    for line in held_lines(run)[:most]:
        inner = line.inner[:most] if has_inner else []
        rows += [line, *(replace(row, label=f"  {row.label}") for row in inner)]
    has_backward = any(row.backward for row in rows)
    return Sheet(
        "By line at the peak",
        [
            SheetColumn("line", [row.label for row in rows], is_text=True),
            SheetColumn("bytes", [format_bytes(row.bytes) for row in rows], rank=KEY),
            SheetColumn("share", [f"{row.bytes / run.peak_allocated_bytes:.1%}" for row in rows]),
            *([SheetColumn("in backward", [or_dash(row.backward) for row in rows], rank=2)] if has_backward else []),
            SheetColumn("blocks", [f"{row.num:,}" for row in rows], rank=1),
        ],
    )


@dataclass(frozen=True)
class HeldLine:
    """Blocks at the peak of one line of the script.

    Attributes:
        label: The line, relative to the working directory; with the library's line if it calls only one. Blocks
            without a line have their operation's name.
        backward: How many of the bytes a backward allocated.
        categories: Their categories, most bytes first.
        inner: The lines of libraries that it calls, most bytes first; empty if there is only one.
    """

    label: str
    bytes: int
    backward: int
    num: int
    categories: list[str]
    inner: list[HeldLine]


def held_lines(run: Run) -> list[HeldLine]:
    """The script's lines whose blocks are held at the peak, most bytes first."""
    cwd, keys = run.manifest.cwd, ["script", "line", "category"]
    sums = _blocks_by_line(run).groupby(keys, sort=False).sum().reset_index().to_dict("records")
    lines = []
    for script, parts in _grouped(sums, "script"):
        inner = [_held_line(short_line(line, cwd), of_line) for line, of_line in _grouped(parts, "line")]
        label, innermost = short_line(script, cwd), str(parts[0]["line"])
        if len(inner) == 1 and innermost != script:
            label = f"{short_line(innermost, cwd)}, from {label}"
        lines.append(_held_line(label, parts, inner if len(inner) > 1 else []))
    return _largest(lines)


_Sums = dict[Hashable, Any]


def _grouped(sums: list[_Sums], key: str) -> Iterable[tuple[str, list[_Sums]]]:
    groups: dict[str, list[_Sums]] = {}
    for row in sums:
        groups.setdefault(row[key], []).append(row)
    return groups.items()


def _held_line(label: str, parts: list[_Sums], inner: Sequence[HeldLine] = ()) -> HeldLine:
    of_category = {category: sum(row["bytes"] for row in rows) for category, rows in _grouped(parts, "category")}
    bytes_, backward, num = (sum(row[name] for row in parts) for name in ("bytes", "backward", "num"))
    largest = sorted(of_category, key=lambda category: -of_category[category])
    categories = [category.replace("_", " ") for category in largest]
    return HeldLine(label, bytes_, backward, num, categories, _largest(inner))


def _largest(lines: Iterable[HeldLine]) -> list[HeldLine]:
    return sorted(lines, key=lambda line: -line.bytes)


def _blocks_by_line(run: Run) -> pd.DataFrame:
    """Blocks at the peak: line, script (the script's line that called it), category, bytes, backward, num (1 each).

    ``backward`` are the bytes of blocks that a backward allocated. A block without a line has its operation's name, if
    that is known.
    """
    blocks = run.table("blocks", ["bytes", "operation", "category", "phase", "stack", "at_peak"])
    blocks = blocks[blocks["at_peak"]]
    frames = [FrameRow(*row) for row in run.table("frames").itertuples(index=False)]
    stacks = run.table("stacks")
    own, is_engine = script_lines(frames, stacks["frames"]), in_engine(frames, stacks["frames"])
    stack = blocks["stack"].to_numpy()  # -1 (none) is the last
    held = pd.DataFrame({"bytes": blocks["bytes"].to_numpy(), "category": blocks["category"].astype(str).to_numpy()})
    for name, texts in (("line", stacks["line"]), ("script", own)):
        held[name] = np.array([*texts, ""], dtype=object)[stack]
    operations = blocks["operation"].astype(str).map(short_operation).to_numpy()
    held["line"] = held["line"].where(held["line"] != "", operations)
    held["line"] = held["line"].where(held["line"] != "", np.where(stack < 0, NO_STACK, IN_TORCH))
    held["script"] = held["script"].where(held["script"] != "", held["line"])
    is_backward = (blocks["phase"] == "backward").to_numpy() | np.array([*is_engine, False])[stack]
    held = held.assign(line=held["line"].map(forward_line), script=held["script"].map(forward_line), num=1)
    return held.assign(backward=held["bytes"].where(is_backward, 0))


def most_layers(sheet: Sheet, layers: pd.DataFrame, most: int) -> Sheet:
    """The rows of a table of layers that hold most by themselves, in their order."""
    own = fold_table(layers, fold_layers(layers))
    kept = own.assign(label=[layer_label(*row) for row in zip(own["name"], own["num_repeats"], strict=True)])
    first = set(kept.sort_values("peak_own_bytes", ascending=False, kind="stable")["label"].head(most))
    rows = [at for at, label in enumerate(sheet.columns[0].cells) if label in first]
    kept_columns = [column for column in sheet.columns if column.name not in _ONLY_IN_FULL]
    return replace(
        sheet,
        columns=[replace(column, cells=[column.cells[at] for at in rows]) for column in kept_columns],
        remarks=[],
    )


#: Columns of the table of layers that the short report leaves out.
_ONLY_IN_FULL = ("grads", "other")


def largest_sheet(blocks: list[LargeBlock], cwd: str) -> Sheet:
    """The largest blocks at the peak."""
    blocks = blocks[:_NUM_LARGEST]
    columns = [
        SheetColumn("bytes", [format_bytes(row.bytes) for row in blocks]),
        SheetColumn("category", [row.category.replace("_", " ") for row in blocks], is_text=True),
        SheetColumn("layer", [row.layer for row in blocks], is_text=True),
        SheetColumn("made in", [f"{row.step} {row.phase}" for row in blocks], is_text=True, rank=1),
        SheetColumn("operation", [short_operation(row.operation) for row in blocks], is_text=True, rank=2),
        SheetColumn("line", [short_line(row.line, cwd) for row in blocks], is_text=True, rank=KEY),
    ]
    return Sheet("Largest blocks at the peak", columns)


def collective_sheet(rows: list[CollectiveTotal]) -> Sheet:
    """This rank's collective calls."""
    columns = [
        SheetColumn("group", [row.group for row in rows], is_text=True),
        SheetColumn("operation", [row.operation for row in rows], is_text=True),
        SheetColumn("ranks", [f"{row.group_size:,}" for row in rows], rank=1),
        SheetColumn("calls", [f"{row.num_calls:,}" for row in rows]),
        SheetColumn("bytes in", [format_bytes(row.bytes_in) for row in rows]),
        SheetColumn("bytes out", [format_bytes(row.bytes_out) for row in rows]),
    ]
    return Sheet("Collectives, simulated: this rank's calls", columns)


assert {category for of, _ in LAYER_COLUMNS.values() for category in of} == set(CATEGORIES)
