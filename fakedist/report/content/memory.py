"""The tables of a run's memory: at the peak, reserved, in use of the GPU, and outside the caching allocator."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fakedist.analysis.memory_tables import Fold, fold_layers, fold_table, owner_names, unfolded
from fakedist.analysis.stack_lines import IN_TORCH, NO_STACK, forward_line, in_engine, script_lines
from fakedist.cost_model.breakdown import fold_times
from fakedist.report.content.report_blocks import (
    EMPTY_RANK,
    KEY,
    Block,
    Chapter,
    Fact,
    Facts,
    Items,
    Sheet,
    SheetColumn,
    SheetRow,
    bytes_column,
    count_column,
    share_column,
    text_column,
    us_column,
)
from fakedist.report.content.wording import LAYER_COLUMNS, MIN_SHARE, layer_label
from fakedist.results.compare.changed_memory import UNUSED_NAMES
from fakedist.results.run import Run
from fakedist.results.verdict import short_line, short_operation, span_text
from fakedist.rundir.notes import counted
from fakedist.rundir.rows import FrameRow
from fakedist.rundir.schema import CATEGORIES
from fakedist.rundir.summary import (
    CollectiveTotal,
    EngineMemory,
    EngineSleep,
    Outside,
    ReservedMoment,
    Summary,
)
from fakedist.units import format_bytes, format_us

MOMENT_NAMES = {"peak_reserved": "at the reserved peak", "peak_allocated": "at the allocated peak"}
_NUM_HELD = 5


def unused_sheet(moments: list[ReservedMoment], cwd: str, *, is_described: bool) -> Sheet:
    """Reserved memory in parts that add up, at both peaks, or at the one moment that is both."""
    first, last = moments[0], moments[-1]
    is_one = (first.reserved_bytes, first.unused) == (last.reserved_bytes, last.unused)
    shown = moments[:1] if is_one else moments
    columns = [_amounts(moment) for moment in shown]
    names = [name for name in columns[0] if any(column[name] for column in columns)]
    sheet_columns = [text_column("memory", names)]
    for moment, column in zip(shown, columns, strict=True):
        title = "at the peak" if is_one else MOMENT_NAMES[moment.moment]
        sheet_columns.append(bytes_column(title, [column[name] for name in names], KEY))
    remarks = _remarks(shown, cwd, is_described=is_described)
    return Sheet("Reserved and not allocated", sheet_columns, remarks, name="unused")


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
    rows = moment.held
    least = MIN_SHARE * moment.reserved_bytes
    if not rows or rows[0].free_bytes < least:
        return None
    shown = min(_NUM_HELD, sum(row.free_bytes >= least for row in rows))
    blocks = [row.block for row in rows]
    columns = [
        bytes_column("free", [row.free_bytes for row in rows]),
        bytes_column("of", [row.bytes for row in rows]),
        bytes_column("largest hole", [row.largest_hole_bytes for row in rows], 3),
        count_column("blocks", [row.num_blocks for row in rows], 4),
        bytes_column("largest block", [block.bytes for block in blocks], 1),
    ]
    if is_described:
        columns += [
            _categories([block.category for block in blocks], 3),
            text_column("layer", [block.layer for block in blocks], 2, kind="layer"),
            text_column("made in", [f"{block.step} {block.phase}" for block in blocks], 5, kind="word"),
        ]
    columns.append(text_column("line", [short_line(block.line, cwd) for block in blocks], KEY, kind="line"))
    title = f"Segments with the most free memory {MOMENT_NAMES[moment.moment]}, and what keeps them"
    others = format_bytes(rows[min(shown, len(rows) - 1)].free_bytes)
    rest = f"others have at most {others} free each; the table segments has all"
    return Sheet(title, columns, name="held-segments", most=shown, rest=rest)


def most_in_use(run: Run) -> int:
    """Most bytes of the virtual GPU that all processes used at once, without contexts; 0 if that is not known."""
    if not run.has("device_use") or not run.num_rows("device_use"):
        return 0
    return int(run.table("device_use", ["change", "bytes"]).groupby("change")["bytes"].sum().max())


def _categories(names: Sequence[str], rank: int) -> SheetColumn:
    texts = [name.replace("_", " ") for name in names]
    return text_column("category", texts, rank, kind="word", chips=[f"k-{name}" for name in names])


_NUM_SHOWN = 12
_NUM_PARTS = 2


def outside_blocks(outside: Outside) -> list[Block]:
    """Each amount, including the names of unknown amounts, and a row for each communicator."""
    rows = [Fact(name, format_bytes(size), "measured: the most at one time") for name, size in outside.taken.items()]
    if communicators := outside.communicators:
        low = sum(communicator.low_bytes for communicator in communicators)
        high = sum(communicator.high_bytes for communicator in communicators)
        rows.append(Fact("NCCL", span_text(low, high), _communicators(outside)))
    if outside.context_bytes:
        rows.append(Fact("CUDA context", format_bytes(outside.context_bytes), f"measured, {outside.context_source}"))
    if outside.reserve_bytes:
        rows.append(Fact("--reserve", format_bytes(outside.reserve_bytes), "all of the above, and what others hold"))
    if outside.measured_bytes is not None:
        remark = (
            "measured on this GPU at the end: used minus reserved, other processes included, without other ranks' NCCL"
        )
        rows.append(Fact("on this GPU", format_bytes(outside.measured_bytes), remark))
    intro = "What the GPU holds in addition to PyTorch's memory. Only the verdict counts it; no other figure does."
    return [
        Chapter("outside", "Outside", "Outside the caching allocator", "estimated", intro),
        *([Facts(rows, "Outside the caching allocator, estimated")] if rows else []),
        *([Items("Outside the caching allocator, left out", outside.left_out)] if outside.left_out else []),
        *([communicator_sheet(outside)] if communicators else []),
    ]


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


def communicator_sheet(outside: Outside) -> Sheet:
    """The memory of each communicator, most first."""
    rows = outside.communicators
    channels = [str(low) if low == high else f"{low}-{high}" for low, high in (row.channels for row in rows)]
    columns = [
        text_column("communicator of", [row.group for row in rows]),
        count_column("ranks", [row.group_size for row in rows], 1),
        count_column("nodes", [row.num_nodes for row in rows], 2),
        SheetColumn("channels", channels, rank=3),
        bytes_column("at least", [row.low_bytes for row in rows]),
        bytes_column("at most", [row.high_bytes for row in rows]),
        text_column("made of, at most", [parts_text(row.parts, _NUM_PARTS) for row in rows], 4),
    ]
    rest = f"and {len(rows) - _NUM_SHOWN} more, in --json (estimated_outside)"
    return Sheet("NCCL by communicator, estimated", columns, name="communicators", most=_NUM_SHOWN, rest=rest)


def parts_text(parts: dict[str, tuple[int, int]], most: int) -> str:
    """The upper ends of a communicator's parts, largest first. Parts after the first ``most`` are shown as dots."""
    ordered = sorted(parts.items(), key=lambda pair: -pair[1][1])
    text = ", ".join(f"{name} {format_bytes(high)}" for name, (_, high) in ordered[:most])
    return text + (", ..." if len(ordered) > most else "")


_ENGINE = "vLLM's share of the GPU, estimated"
_NUM_LARGEST, _LINES_ON_PAGE = 10, 40
#: Rows of a page's table of layers.
MOST_ROWS = 1_000
#: Of more than twice as many steps, a page has so many of the first and of the last.
_PAGE_STEPS = 200
_NUM_STEPS = 4  # of more steps, only the first two, the one with the peak and the last are shown


def phase_sheet(summary: Summary) -> Sheet:
    """The phases; elsewhere than on a page those of the first steps, of the step with the peak and of the last.

    Of very many steps, a page has the first and the last, too.
    """
    steps = sorted({row.step for row in summary.by_phase})
    on_page = {*steps[:_PAGE_STEPS], summary.peak_step, *steps[-_PAGE_STEPS:]}
    rows = [row for row in summary.by_phase if row.step in on_page]
    shown = steps if len(steps) <= _NUM_STEPS else [*steps[:2], summary.peak_step, steps[-1]]
    peak = (summary.peak_step, summary.peak_phase)
    phases = [row.phase + (" <- peak" if (row.step, row.phase) == peak else "") for row in rows]
    columns = [
        SheetColumn("step", [str(row.step) for row in rows], values=[row.step for row in rows]),
        text_column("phase", phases, kind="word"),
        bytes_column("peak allocated", [row.peak_allocated_bytes for row in rows], KEY),
        bytes_column("peak reserved", [row.peak_reserved_bytes for row in rows], 2),
        bytes_column("allocated at end", [row.end_allocated_bytes for row in rows], 1),
    ]
    left_out = [number for number in steps if number not in shown]
    several = f"{len(left_out)} of the steps {min(left_out, default=0)} to {max(left_out, default=0)} are"
    times = [f"{row.step}: {format_us(row.wall_us)}" for row in summary.steps if row.step in shown]
    where = " on this machine" if summary.world_size else ""
    remarks = [f"wall time of steps{where}, recording included: {', '.join(times)}"] if times else []
    if len(on_page) < len(steps):
        remarks.append(f"of {len(steps):,} steps, {len(steps) - len(on_page):,} are only in --json")
    return Sheet(
        "By phase",
        columns,
        remarks,
        name="phases",
        rows=[SheetRow(is_marked=(row.step, row.phase) == peak, is_small=row.step not in shown) for row in rows],
        small=f"{f'step {left_out[0]} is' if len(left_out) == 1 else several} only in --json",
        is_narrow=True,
    )


def named_phase_sheet(summary: Summary) -> Sheet:
    """The phases that the script named, each with its peaks and with what is in use of the GPU at its end."""
    rows = summary.named_phases
    figures = [
        bytes_column(name, [getattr(row, key) or None for row in rows], rank)
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
        if any(getattr(row, key) for row in rows)
    ]
    where = [text_column("phase", [row.phase for row in rows])]
    where.append(SheetColumn("step", [str(row.step) for row in rows]))
    if any(times := _phase_times(summary)):
        where.append(us_column("time", times))
    remarks = ["hand-over: the most from where the phase before it began or ended, or the run began, to its begin"]
    if any(row.peak_used_bytes for row in rows):
        remarks += [
            "in use: by all processes, without their contexts; what sleeps is allocated and reserved, but not in use",
            "end: in use when the phase ended, behind the allocator's segments, outside of it and by other processes",
        ]
    if any(times) and summary.kernels is not None:
        word = summary.kernels.source
        remarks.append(f"time, {word}: in the timed step, from the first kernel to the last; several of one name: mean")
    return Sheet("By the script's phases", [*where, *figures], remarks, name="named-phases")


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
        text_column("vLLM's engine", [row[0] for row in rows]),
        SheetColumn("gpu_memory_utilization", ["-" if row[1] is None else f"{row[1]:g}" for row in rows]),
        count_column("KV cache blocks", [row[2] or None for row in rows]),
        bytes_column("KV cache", [row[3] or None for row in rows]),
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
    return Sheet(_ENGINE, columns, remarks, name="engine")


def engine_sleep_sheet(sleeps: list[EngineSleep]) -> Sheet:
    """Memory of the GPU that the process of each engine kept when it slept last."""
    kept = [sum(row.kept.values()) for row in sleeps]
    names = [f"{row.process}: {row.how}" if row.process else row.how for row in sleeps]
    parts = [
        ", ".join(f"{format_bytes(size)} {kind}" for kind, size in sorted(row.kept.items(), key=lambda part: -part[1]))
        for row in sleeps
    ]
    columns = [
        text_column("asleep", names),
        count_column("times", [row.times for row in sleeps]),
        bytes_column("freed", [row.freed_bytes or None for row in sleeps]),
        bytes_column("kept", [size or None for size in kept]),
        text_column("of it", parts),
    ]
    remarks = ["kept: what the engine's process had in use of the GPU the last time, without its CUDA context"]
    if any(not row.process for row in sleeps):
        remarks.append("other tensors: of the script, in whose process the engine is")
    return Sheet("What engines keep asleep", columns, remarks, name="engine-sleeps")


def category_sheet(summary: Summary) -> Sheet:
    """Bytes at the peak by category, most first."""
    peak = summary.peak_allocated_bytes
    rows = sorted(((name, bytes_) for name, bytes_ in summary.by_category.items() if bytes_), key=lambda row: -row[1])
    columns = [
        _categories([name for name, _ in rows], 0),
        bytes_column("bytes", [bytes_ for _, bytes_ in rows]),
        share_column("share", [bytes_ / peak for _, bytes_ in rows]),
    ]
    return Sheet("By category at the peak", columns, is_open=True, name="categories", is_narrow=True)


#: The parts of a step that the table of layers at the peak has the time of.
_TIMES = {name: f"{name}_us" for name in ("generation", "forward", "recompute", "backward")}


def layer_sheet(run: Run, *, all_layers: bool) -> Sheet:
    """Bytes at the peak by layer, with children; repeated layers share a row unless ``all_layers``."""
    summary = run.summary
    layers = run.table("layers")
    peak = summary.peak_allocated_bytes
    folds = unfolded(layers) if all_layers else fold_layers(layers)
    folded = fold_table(layers, folds)
    sizes = folded[["peak_total_bytes", "most_total_bytes"]].max(axis=1)
    shown = sizes.nlargest(len(sizes) if all_layers else MOST_ROWS).index.sort_values()
    table = folded.loc[shown]
    least = 0 if all_layers else peak * MIN_SHARE
    rows = table.to_dict("records")
    is_small = (sizes[shown] <= least).tolist()
    parts = {}
    for name, (categories, rank) in LAYER_COLUMNS.items():
        sums = [sum(row[f"peak_{category}_bytes"] for category in categories) or None for row in rows]
        opened = ("sum", " ".join(categories))
        parts[name] = bytes_column(name, sums, rank if any(sums) else EMPTY_RANK, opened=opened, has_bars=True)
    empty = [name for name, column in parts.items() if column.rank == EMPTY_RANK]
    own = [
        bytes_column(name, [row[key] or None for row in rows], rank, opened=opened, has_bars=True)
        for name, key, rank, opened in (
            ("total", "peak_total_bytes", KEY, ("sum", " ".join(CATEGORIES))),
            ("most", "most_total_bytes", 1, ("most", "yes")),
            ("own", "peak_own_bytes", 5, ("own", "yes")),
        )
    ]
    names = [row["name"] or layer_label("") for row in rows]
    classes = [str(row["class_name"]) for row in rows]
    when = f"in step {summary.steps[-1].step}" if summary.steps else "in the run"
    remarks = [f"most: the most that one such layer held, with children, {when}"]
    remarks += [f"no layer holds {' or '.join(empty)} at the peak"] if empty else []
    remarks += [f"and {len(folded) - len(table):,} more, in tables/layers.parquet"] if len(table) < len(folded) else []
    why = "without memory" if all_layers else f"below {MIN_SHARE:.1%} of the peak (--all-rows shows them)"
    return Sheet(
        "By layer at the peak, with children",
        [
            text_column("layer", names, kind="layer", hovers=classes),
            *own,
            *parts.values(),
            *_layer_times(run, folds, shown),
        ],
        remarks,
        name="layer-table",
        rows=[
            SheetRow(number, row["num_repeats"], is_small=small)
            for number, row, small in zip(shown.tolist(), rows, is_small, strict=True)
        ],
        small=f"not shown: {counted(sum(is_small), 'layer')} {why}",
    )


def _layer_times(run: Run, folds: list[Fold], shown: pd.Index) -> list[SheetColumn]:
    """The layers' times, which a page has next to their memory."""
    if run.summary.timed is None:
        return []
    table = fold_times(run.table("layer_times"), run.table("layers"), folds).loc[shown]
    word = run.summary.timed[1].source
    return [
        us_column(f"{name}, {word}", [us or None for us in table[key]], opened=("time", key), is_detail=True)
        for name, key in _TIMES.items()
        if table[key].any()
    ]


def line_sheet(run: Run) -> Sheet | None:
    """The script's lines whose blocks hold most at the peak, and how much of it was allocated in a backward.

    Within a line that calls several lines of libraries are those that hold most. None without blocks.
    """
    if run.memory is None or not run.peak_allocated_bytes:
        return None
    lines = held_lines(run)
    rows = list[tuple[HeldLine, SheetRow]]()
    for line in lines[:_LINES_ON_PAGE]:
        rows.append((line, SheetRow()))
        inner = line.inner[:_LINES_ON_PAGE]
        rows += [(row, SheetRow(is_inner=True, is_small=at >= _NUM_LARGEST)) for at, row in enumerate(inner)]
    held = [line for line, _ in rows]
    has_backward = any(row.backward for row in held)
    return Sheet(
        "By line at the peak",
        [
            text_column("line", [row.label for row in held], kind="line"),
            bytes_column("bytes", [row.bytes for row in held], KEY),
            share_column("share", [row.bytes / run.peak_allocated_bytes for row in held]),
            *([bytes_column("in backward", [row.backward or None for row in held], 2)] if has_backward else []),
            count_column("blocks", [row.num for row in held], 1),
            text_column("what", [", ".join(row.categories) for row in held], is_detail=True),
        ],
        [f"and {len(lines) - _LINES_ON_PAGE} lines with less"] if len(lines) > _LINES_ON_PAGE else [],
        name="lines",
        rows=[row for _, row in rows],
        most=_NUM_LARGEST,
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
    cwd = run.manifest.cwd
    keys = ["script", "line", "category"]
    sums = _blocks_by_line(run).groupby(keys, sort=False).sum().reset_index().to_dict("records")
    lines = []
    for script, parts in _grouped(sums, "script"):
        inner = [_held_line(short_line(line, cwd), of_line) for line, of_line in _grouped(parts, "line")]
        label = short_line(script, cwd)
        innermost = str(parts[0]["line"])
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


_BLOCK_COLUMNS = (*("bytes", "alloc_event", "category", "layer", "operation", "stack", "step", "phase", "at_peak"),)
_BLOCKS_ON_PAGE = 50
_MOST_EACH = 200  # numbers of equal blocks that a row carries


def largest_sheet(run: Run) -> Sheet:
    """The largest blocks at the peak with their stacks, innermost first.

    Blocks of the same size, category, phase, operation and stack share a row if their layers share one of the folds.
    """
    cwd = run.manifest.cwd
    layers = run.table("layers")
    folds, (names, owners) = fold_layers(layers), block_owners(run)
    blocks = run.table("blocks", _BLOCK_COLUMNS)
    alive = blocks[blocks["at_peak"]].sort_values(["bytes", "alloc_event"], ascending=[False, True], kind="stable")
    fold_of = np.zeros(len(names), "i8")
    for number, fold in enumerate(folds):
        fold_of[list(fold.layers)] = number
    owner = pd.Series(owners, dtype="object").reindex(alive.index).fillna("")
    keys = ["bytes", "category", "step", "phase", "operation", "stack", "fold", "owner"]
    alive = alive.assign(fold=fold_of[alive["layer"].to_numpy()], owner=owner)
    of_row = alive.groupby(keys, sort=False, observed=True, dropna=False)
    groups = [alive.loc[index] for index in list(of_row.groups.values())[:_BLOCKS_ON_PAGE]]
    firsts = [group.iloc[0] for group in groups]
    lines = [short_line(str(line), cwd) for line in run.table("stacks")["line"]]
    line_of = [lines[first["stack"]] if first["stack"] >= 0 else "" for first in firsts]
    texts = _stack_texts(run, {int(first["stack"]) for first in firsts})
    rows = []
    for group, first, line in zip(groups, firsts, line_of, strict=True):
        stack = [(text, text == line) for text in texts.get(int(first["stack"]), [])]
        rows.append(SheetRow(repeats=len(group), blocks=[int(at) for at in group.index[:_MOST_EACH]], stack=stack))
    layer_of = [
        owners.get(row.blocks[0])
        or _folded_name(group["layer"].unique().tolist(), folds[fold_of[first["layer"]]], names)
        for group, first, row in zip(groups, firsts, rows, strict=True)
    ]
    described = [
        text_column("layer", layer_of, kind="layer"),
        _categories([str(first["category"]) for first in firsts], 0),
        text_column("made in", [f"{first['step']} {first['phase']}" for first in firsts], 1, kind="word"),
        text_column("operation", [short_operation(str(first["operation"])) for first in firsts], 2),
    ]
    if run.by_category is None:  # a snapshot whose stacks tell nothing
        described = [column for column in (described[0], described[-1]) if any(column.cells)]
    more = of_row.ngroups - len(rows)
    smaller = f" {more:,} smaller rows are in tables/blocks.parquet." if more else ""
    return Sheet(
        "Largest blocks at the peak",
        [
            bytes_column("bytes", [int(first["bytes"]) for first in firsts]),
            *described,
            text_column("line", line_of, KEY, kind="line"),
        ],
        name="blocks",
        intro=f"Equal blocks of repeated layers share a row; open it to see each.{smaller}",
        rows=rows,
        most=_NUM_LARGEST,
    )


def _folded_name(layers: list[int], fold: Fold, names: list[str]) -> str:
    if len(layers) == 1:
        return names[layers[0]]
    return fold.name if len(layers) == len(fold.layers) else f"{len(layers)} of {fold.name}"


def block_owners(run: Run) -> tuple[list[str], dict[int, str]]:
    """Names of all layers, and for blocks that several layers own, the text shown instead of a name."""
    layers = run.table("layers", ["name", "parent"])
    names = layers["name"].astype(str).tolist()
    return names, owner_names(run.table("shares"), names, layers["parent"].tolist())


def _stack_texts(run: Run, wanted: set[int]) -> dict[int, list[str]]:
    frames = run.table("stacks")["frames"]
    numbers = sorted({int(number) for row in wanted if row >= 0 for number in frames[row]})
    texts = dict(zip(numbers, frame_texts(run.table("frames").iloc[numbers], run.manifest.cwd), strict=True))
    return {row: [texts[int(number)] for number in frames[row]] for row in wanted if row >= 0}


def frame_texts(frames: pd.DataFrame, cwd: str) -> list[str]:
    """Rows of the table ``frames`` as ``file:line (function)``, relative to the working directory."""
    columns = (frames[name].tolist() for name in ("filename", "line", "function"))
    return [f"{short_line(str(file), cwd)}:{line} ({function})" for file, line, function in zip(*columns, strict=True)]


def collective_sheet(rows: list[CollectiveTotal], *, has_lanes: bool) -> Sheet:
    """This rank's collective calls."""
    columns = [
        text_column("group", [row.group for row in rows]),
        text_column("operation", [row.operation for row in rows]),
        count_column("ranks", [row.group_size for row in rows], 1),
        count_column("calls", [row.num_calls for row in rows]),
        bytes_column("bytes in", [row.bytes_in for row in rows]),
        bytes_column("bytes out", [row.bytes_out for row in rows]),
    ]
    title = "Collectives, simulated: this rank's calls"
    return Sheet(title, columns, name="calls", lanes="call" if has_lanes else "")


assert {category for of, _ in LAYER_COLUMNS.values() for category in of} == set(CATEGORIES)
