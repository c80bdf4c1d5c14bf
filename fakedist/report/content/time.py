"""A step's time: its figures, its tables and charts, and the step with what-ifs.

Reading a table that is missing or damaged raises RunDirectoryError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from fakedist.analysis.memory_tables import fold_layers, fold_table, unfolded
from fakedist.analysis.typed_tables import rows_of
from fakedist.cost_model.breakdown import PEAK_DTYPE, fold_times
from fakedist.cost_model.estimated import launch_bound
from fakedist.errors import RunDirectoryError
from fakedist.report.content.change_sheets import change_columns
from fakedist.report.content.report_blocks import (
    EMPTY_RANK,
    KEY,
    Block,
    Chapter,
    Details,
    Fact,
    Facts,
    Remark,
    Report,
    Sheet,
    SheetColumn,
    SheetRow,
    count_column,
    share_column,
    text_column,
    us_column,
)
from fakedist.report.content.wording import (
    EXPOSED,
    MIN_SHARE,
    accuracy_text,
    bytes_rate,
    collector_text,
    flops_rate,
    layer_label,
    run_title,
    share_of_peak,
    short_kernel,
    sizes_figures,
    source_word,
    time_figures,
    unknown_time,
)
from fakedist.results.compare import changed_times
from fakedist.results.compare.change_tables import ChangeTable
from fakedist.results.run import Run
from fakedist.results.verdict import (
    communication_word,
    limit_text,
    limits_text,
    main_bound,
    relative_time,
    short_line,
    step_word,
    timed_step_name,
    wait_word,
)
from fakedist.rundir.notes import counted
from fakedist.rundir.plain import to_plain
from fakedist.rundir.step_time import (
    PATH_KINDS,
    HostPart,
    KernelSource,
    KernelTime,
    LateLaunches,
    LayerTime,
    PathPart,
    StepTime,
    UncertainPart,
)
from fakedist.units import format_bytes, format_relative, format_us, format_us_change

_NUM_TOP, _NUM_RANGES, _NUM_PATH, _NUM_LINES, _NUM_OPERATIONS = 10, 20, 8, 8, 20
#: Rows of a page's table of layers, and of its tables of kernels and ranges.
MOST_ROWS, MOST_KERNEL_ROWS = 1_000, 200
_NAME_ON_PAGE = 200
_SUMS = "Sums of kernels do not include communication, which is counted apart."


def time_blocks(run: Run, *, all_layers: bool, charts: Callable[[], Sequence[Block]] = tuple) -> list[Block]:
    """The time of the timed step, by what it is spent on. ``charts`` makes those of a page."""
    time, source = timed(run)
    name = timed_step_name(run.summary, source.step)
    texts = [limit_text(time), limits_text(time), *(note.text for note in source.notes), accuracy_text(source)]
    return [
        Chapter("time", "Time", f"Where the time of {name} goes", source.source, _SUMS),
        Facts(
            [*time_figures(time, source), *sizes_figures(run.summary, run.manifest.job, source.step)],
            f"Time of {name}, {source_word(source)}",
        ),
        *(Remark(text) for text in texts if text),
        Details(charts),
        *time_sheets(run, all_layers=all_layers),
    ]


def time_sheets(run: Run, *, all_layers: bool) -> list[Sheet]:
    """Tables of the timed step that are not empty."""
    time, source = timed(run)
    word = source.source
    return [
        *([process_sheet(source)] if source.processes else []),
        *([step_sheet(source)] if source.steps else []),
        layer_time_sheet(run, all_layers=all_layers),
        *([operation_sheet(run)] if source.processes else []),
        family_sheet(time, word),
        top_sheet(run),
        *([group_time_sheet(time, communication_word(time))] if time.by_group else []),
        *host_sheets(time, run.manifest.cwd, step_word(source)),
        *([range_sheet(time, word)] if time.ranges else []),
        *([gain_sheet(time)] if time.gains else []),
        *([path_sheet(time, step_word(source))] if time.critical_path else []),
    ]


def process_sheet(source: KernelSource) -> Sheet:
    """The whole file by process and GPU, whatever its steps."""
    rows = source.processes
    columns = [
        text_column("process", [str(row.process) if row.process >= 0 else "-" for row in rows]),
        text_column("GPU", [" ".join(filter(None, (str(row.device), row.gpu))) for row in rows]),
        count_column("kernels", [row.num_kernels for row in rows], KEY),
        us_column("their time", [row.kernel_us for row in rows], KEY),
        count_column("collectives", [row.num_collectives for row in rows], 2),
        us_column("their time", [row.collective_us for row in rows], 2),
        count_column("copies", [row.num_copies for row in rows], 3),
        count_column("fills", [row.num_fills for row in rows], 4),
        count_column("streams", [row.num_streams for row in rows], 5),
        _shown([row.is_shown for row in rows]),
    ]
    return Sheet("The whole file, by process and GPU", columns, ["kernels: collectives among them"])


def step_sheet(source: KernelSource) -> Sheet:
    """The steps that ranges of the file mark."""
    rows = source.steps
    columns = [
        text_column("step", [str(row.step) for row in rows]),
        us_column("on the host", [row.range_us for row in rows], 2),
        us_column("on the GPU", [row.step_us for row in rows], KEY),
        us_column("GPU busy", [row.busy_us for row in rows], 1),
        count_column("launches", [row.num_kernels for row in rows], 3),
        _shown([row.is_shown for row in rows]),
    ]
    return Sheet("Steps of the file, measured", columns, ["on the GPU: from the end of the step before"])


def _shown(flags: list[bool]) -> SheetColumn:
    return text_column("", ["shown" if flag and len(flags) > 1 else "" for flag in flags], rank=1)


def operation_sheet(run: Run, most: int = _NUM_OPERATIONS) -> Sheet:
    """The operations that launched most kernel time, collectives left out."""
    kernels = run.table("kernels", ["operation", "family", "duration_us"])
    kernels = kernels[kernels["family"].astype(str) != "communication"]
    names = kernels["operation"].astype(str).replace("", "(no operation traced)")
    sums = kernels["duration_us"].groupby(names).agg(["size", "sum"]).sort_values("sum", ascending=False)
    rows = sums.head(most)
    whole = float(sums["sum"].sum()) or 1.0
    columns = [
        text_column("operation", [str(name) for name in rows.index]),
        count_column("launches", rows["size"].tolist(), 2),
        us_column("time", rows["sum"].tolist(), KEY),
        share_column("share", (rows["sum"] / whole).tolist(), 1),
    ]
    left = [f"not shown: {len(sums) - len(rows):,} more operations"] if len(sums) > len(rows) else []
    return Sheet("Time by operation, measured", columns, left)


_PHASES = {
    "generation": ("generation_us", 0),
    "forward": ("forward_us", 0),
    "recompute": ("recompute_us", 1),
    "backward": ("backward_us", 0),
    "optimizer": ("optimizer_us", 3),
    "other": ("other_us", 7),
}
_BLANK = ("blank", "yes")


def layer_time_sheet(run: Run, *, all_layers: bool) -> Sheet:
    """Time by layer, with children; repeated layers share a row."""
    time, source = timed(run)
    times, layers = run.table("layer_times"), run.table("layers", ["name", "class_name", "parent"])
    folded = fold_times(times, layers, unfolded(layers) if all_layers else fold_layers(layers))
    used = folded[(folded["total_us"] > 0) | (folded["num_calls"] > 0)]
    table = used if all_layers else used.loc[used["total_us"].nlargest(MOST_ROWS).index.sort_values()]
    rows, whole, least = rows_of(LayerTime, table), time.kernel_us or 1.0, time.kernel_us * MIN_SHARE
    several, is_small = (
        [row.num_repeats > 1 for row in rows],
        [row.total_us <= (0 if all_layers else least) for row in rows],
    )

    def us(name: str, key: str, rank: int, **look: Any) -> SheetColumn:
        values = [getattr(row, key) or None for row in rows]
        look = {"opened": ("time", key), **look}
        return us_column(name, values, rank if any(values) else EMPTY_RANK, **look)

    rates, bounds = [flops_rate(row.flops, row.total_us) for row in rows], [bound_of(row) for row in rows]
    each = {
        name: [
            getattr(row, f"{name}_us") or None if is_several else None
            for row, is_several in zip(rows, several, strict=True)
        ]
        for name in ("least", "median", "largest")
    }
    calls = [f"{row.num_calls:,}: {unknown_time(row.communication_us, row.num_unknown_calls)}" for row in rows]
    num_calls = [row.num_calls for row in rows]
    columns = [
        text_column("layer", [layer_label(row.name) for row in rows], kind="layer",
                    hovers=[row.class_name for row in rows]),
        us("total", "total_us", KEY, has_bars=True),
        *(us(name, key, rank, has_bars=True) for name, (key, rank) in _PHASES.items()),
        share_column("share", [row.total_us / whole for row in rows], 4, opened=_BLANK),
        us("own", "own_us", 5),
        *(us_column(name, values, 6 if any(values) else EMPTY_RANK, opened=_BLANK) for name, values in each.items()),
        _rate("TFLOP/s", rates, 2, [row.flops / (row.total_us or 1.0) for row in rows], opened=_BLANK),
        text_column("bound", bounds, 1 if any(bounds) else EMPTY_RANK, kind="word", opened=_BLANK),
        us("host late", "launch_gap_us", 3),
        count_column("kernels", [row.num_kernels for row in rows], 8, opened=_BLANK),
        SheetColumn("collectives", [text if num else "-" for text, num in zip(calls, num_calls, strict=True)],
                    values=num_calls, rank=0 if any(num_calls) else EMPTY_RANK, opened=_BLANK, is_detail=True),
    ]  # fmt: skip
    remarks = ["sums over kernels: more than the step if streams overlap; communication is not included"]
    if any(several):
        remarks.append("least, median, largest: of one such layer, with children")
    if len(table) < len(used):
        remarks.append(f"and {len(used) - len(table):,} more, in tables/layer_times.parquet")
    return Sheet(
        f"Time by layer, {source.source}, with children",
        columns,
        remarks,
        name="time-table",
        small=f"not shown: {counted(sum(is_small), 'layer')} below {MIN_SHARE:.1%} of the time (--all-rows shows them)",
        lanes="layer",
        rows=[
            SheetRow(fold, row.num_repeats, is_small=small)
            for fold, row, small in zip(table.index.tolist(), rows, is_small, strict=True)
        ],
    )


def bound_of(row: LayerTime) -> str:
    """The bound that limits most of a folded layer's time."""
    return main_bound(row.bound_compute_us, row.bound_memory_us, row.bound_launch_us)


def family_sheet(time: StepTime, word: str) -> Sheet:
    """Time by family of kernels, and how close each is to the GPU's peaks."""
    rows, peaks = time.by_family, time.peaks
    flops_peak, bytes_peak = (peaks.flops.get(PEAK_DTYPE), peaks.bytes_per_s) if peaks else (None, None)
    bounds = [main_bound(row.compute_us, row.memory_us, row.launch_us) for row in rows]
    flops = [row.flops / (row.flops_us or 1.0) for row in rows]
    moved = [row.moved_bytes / (row.moved_us or 1.0) for row in rows]
    columns = [
        text_column("family", [row.family for row in rows], chips=[f"f-{row.family}" for row in rows]),
        count_column("launches" if time.num_copies else "kernels", [row.num_kernels for row in rows]),
        _time_column("time", rows, "time_us", 0),
        share_column("share", [row.share for row in rows]),
        _rate("TFLOP/s", [flops_rate(row.flops, row.flops_us) for row in rows], 1, flops),
        _rate("of peak", [share_of_peak(row.flops, row.flops_us, flops_peak) for row in rows], 2, flops),
        _rate("TB/s", [bytes_rate(row.moved_bytes, row.moved_us) for row in rows], 1, moved),
        _rate("of bandwidth", [share_of_peak(row.moved_bytes, row.moved_us, bytes_peak) for row in rows], 2, moved),
        *([text_column("bound", bounds, 1, kind="word")] if any(bounds) else []),
    ]
    remarks = ["share: of all kernels except communication"]
    if peaks:
        remarks.append(
            f"of peak: of dense {PEAK_DTYPE}, whatever dtype the kernels use; rates: of kernels whose work is known"
        )
    if communication_word(time) == "simulated" and any(row.family == "communication" and row.time_us for row in rows):
        remarks.append(
            "communication: local copies that stand for collectives, simulated; not the time of the real job"
        )
    return Sheet(f"Time by family of kernels, {word}", columns, remarks, name="families")


def _rate(name: str, cells: list[str], rank: int, values: Sequence[float], **look: Any) -> SheetColumn:
    return SheetColumn(name, cells, rank=rank if set(cells) != {"-"} else EMPTY_RANK, values=values, **look)


def _time_column(name: str, rows: Sequence[Any], key: str, rank: int) -> SheetColumn:
    """Times of which a part may be unknown."""
    values = [getattr(row, key) for row in rows]
    cells = [unknown_time(us, row.num_unknown) for row, us in zip(rows, values, strict=True)]
    return SheetColumn(name, cells, rank=rank, values=values, unit="us")


def top_kernels(run: Run) -> pd.DataFrame:
    """The rows of the table of kernels that a page shows."""
    names = run.table("kernel_names")
    return names[names["family"] != "communication"].head(MOST_KERNEL_ROWS)


def top_sheet(run: Run) -> Sheet:
    """The kernels that take the most time, by name, shape and layer."""
    time, source = timed(run)
    rows = rows_of(KernelTime, top_kernels(run))
    whole = time.kernel_us or 1.0
    num_more = int((run.table("kernel_names", ["family"])["family"] != "communication").sum()) - len(rows)
    flops, moved = ([getattr(row, name) / (getattr(row, us) or 1.0) for row in rows]
                    for name, us in (("flops", "flops_us"), ("moved_bytes", "moved_us")))  # fmt: skip
    bounds = [row.bound for row in rows]
    columns = [
        text_column(
            "kernel",
            [short_kernel(row.name) for row in rows],
            kind="code",
            whole=[short_kernel(row.name, _NAME_ON_PAGE) for row in rows],
        ),
        text_column("shape", [row.shape for row in rows], 1),
        text_column("layer", [layer_label(row.layer, row.num_layers) for row in rows], 2, kind="layer"),
        text_column(
            "family",
            [row.family for row in rows],
            kind="word",
            chips=[f"f-{row.family}" for row in rows],
            is_detail=True,
        ),
        count_column("times", [row.num_kernels for row in rows], 3),
        _time_column("total", rows, "time_us", KEY),
        share_column("share", [row.time_us / whole for row in rows], 2),
        us_column("median", [row.median_us for row in rows], 4),
        _rate("TFLOP/s", [flops_rate(row.flops, row.flops_us) for row in rows], 3, flops),
        _rate("TB/s", [bytes_rate(row.moved_bytes, row.moved_us) for row in rows], 4, moved),
        text_column("bound", bounds, 3 if any(bounds) else EMPTY_RANK, kind="word"),
    ]
    more = f"And {num_more:,} more. " if num_more else ""
    return Sheet(
        f"Kernels that take the most time, {source.source}",
        columns,
        name="top-kernels",
        intro="By name, shape and layer; repeated layers share a row. Where the shape is not known, the grid stands "
        f"for it. {more}All of them are in tables/kernel_names.parquet, and on a time axis in trace.json.gz.",
        most=_NUM_TOP,
        lanes="kernel",
    )


def group_time_sheet(time: StepTime, word: str) -> Sheet:
    """Collectives by group and operation, and how much of them the step waits for."""
    rows = time.by_group
    step_us = time.step_us or 1.0
    nodes = [f"{row.group_size:,} on {row.num_nodes:,}" if row.group_size else "-" for row in rows]
    moved = [format_bytes(row.moved_bytes) if row.moved_bytes else "-" for row in rows]
    is_named = any(row.group for row in rows)
    return Sheet(
        f"Communication by group, {word}",
        [
            *([text_column("group", [row.group for row in rows])] if is_named else []),
            text_column("operation", [row.operation for row in rows]),
            us_column("exposed", [row.exposed_us for row in rows], KEY),
            share_column("of the step", [row.exposed_us / step_us for row in rows], 1),
            us_column("hidden", [row.hidden_us for row in rows], 3),
            _time_column("time", rows, "time_us", 2),
            count_column("calls", [row.num_calls for row in rows], 4),
            SheetColumn("bytes", moved, rank=6 if any(row.moved_bytes for row in rows) else EMPTY_RANK,
                        values=[row.moved_bytes for row in rows], unit="bytes"),
            SheetColumn("ranks on nodes", nodes, rank=5 if is_named else EMPTY_RANK,
                        values=[row.group_size for row in rows]),
        ],
        [EXPOSED[:1].lower() + EXPOSED[1:]],
        name="group-times",
        intro="The step waits for what is exposed: the time of a collective in which nothing computes. Of collectives "
        "that overlap, it is the one whose end lets the next kernel begin.",
        lanes="call" if is_named else "",
    )  # fmt: skip


def gain_sheet(time: StepTime) -> Sheet:
    """The step with each change that applies, the shortest first."""
    rows, step_us = time.gains, time.step_us
    changes = [relative_time(gain.step_us, step_us) for gain in rows]
    return Sheet(
        "What would help, time: estimated, each on its own, and the best two",
        [
            text_column("change", [gain.title for gain in rows]),
            us_column("step", [gain.step_us for gain in rows], 1),
            SheetColumn("changes by", changes, rank=KEY, values=[gain.step_us - step_us for gain in rows], unit="us"),
            text_column("fakedist time RUN ...", [gain.option for gain in rows], 2, kind="code"),
        ],
        [*dict.fromkeys(filter(None, [*(gain.why for gain in rows), collector_text(time)]))],
        name="gains",
    )


_PATH_CHIPS = {
    "kernels": "t-busy",
    "collectives": "t-communication",
    "host": "t-launch_gap",
    "launch": "t-launch_gap",
    "idle": "t-wait",
}


def path_sheet(time: StepTime, word: str) -> Sheet:
    """The longest parts of the step's critical path."""
    rows = time.critical_path
    rest = time.critical_path[_NUM_PATH:]
    step_us = time.step_us or 1.0
    has_lanes = any(row.lane for row in rows)
    words = [row.operation if row.kind == "collectives" and not row.lane else row.kind for row in rows]
    columns = [
        text_column("what", words, chips=[_PATH_CHIPS[row.kind] for row in rows]),
        text_column("of", [_path_location(row) for row in rows], kind="layer"),
        *([text_column("on", [row.lane for row in rows], 3)] if has_lanes else []),
        count_column("launches", [row.num_launches or None for row in rows], 1),
        us_column("time", [row.time_us for row in rows], KEY),
        share_column("of the step", [row.time_us / step_us for row in rows], 2),
    ]
    remarks = ["a faster kernel, collective or host shortens the step only where it is on this path"]
    if has_lanes:
        sums = {kind: sum(row.time_us for row in rows if row.kind == kind) for kind in PATH_KINDS}
        remarks.insert(0, ", ".join(f"{kind} {us / step_us:.1%}" for kind, us in sums.items() if us))
    more = format_us(sum(row.time_us for row in rest))
    return Sheet(
        f"Critical path of the step, {word}",
        columns,
        remarks,
        name="critical-path",
        intro="What makes the step as long as it is, from its end back to its beginning; the parts add up to the step.",
        most=_NUM_PATH,
        rest=f"and {len(rest):,} more, {more}, in --json (time.critical_path)",
    )


def _path_location(row: PathPart) -> str:
    if row.kind == "collectives":
        return row.group or row.operation
    if row.lane and row.operation:
        return row.operation
    return "" if row.kind == "idle" else layer_label(row.layer, row.num_layers)


def range_sheet(time: StepTime, word: str) -> Sheet:
    """The script's own ranges by name, most time first."""
    rows = time.ranges[:MOST_KERNEL_ROWS]
    whole = time.kernel_us or 1.0
    columns = [
        text_column("range", [row.name for row in rows]),
        count_column("times", [row.num_ranges for row in rows], 2),
        count_column("kernels", [row.num_kernels for row in rows], 1),
        _time_column("kernel time", rows, "kernel_us", KEY),
        share_column("share", [row.kernel_us / whole for row in rows], 1),
        us_column("on the GPU", [row.gpu_us or None for row in rows], 2),
        count_column("calls", [row.num_calls for row in rows], 3 if any(row.num_calls for row in rows) else EMPTY_RANK),
    ]
    remarks = ["ranges may lie in others, so shares do not add up; on the GPU: from a range's first kernel to its last"]
    return Sheet(
        f"Time by your ranges (NVTX, record_function), {word}",
        columns,
        remarks,
        name="ranges",
        most=_NUM_RANGES,
        rest=f"and {len(time.ranges) - _NUM_RANGES:,} more names, in --json (time.ranges)",
    )


_LOADING = "of these, data loading"


def host_sheets(time: StepTime, cwd: str, word: str) -> list[Sheet]:
    """Tables of the host by phase, line and layer; none if the GPU hardly waits for it."""
    step_us = time.step_us or 1.0
    if time.launch_gap_us < MIN_SHARE * time.step_us or not time.host:
        return []
    parts = [*time.host, *([HostPart(_LOADING, time.loading_us)] if time.loading_us else [])]
    waits = [row for row in time.host_waits if row.idle_us >= MIN_SHARE * step_us][:_NUM_LINES]
    late = [row for row in time.late_launches if row.late_us >= MIN_SHARE * step_us][:_NUM_LINES]
    layers = launch_bound(time.layers)
    sheets = [
        Sheet(
            f"Time of the host, {word}",
            [
                text_column("for", [row.name for row in parts]),
                us_column("time", [row.time_us for row in parts], KEY),
                share_column("of the step", [row.time_us / step_us for row in parts], 1),
            ],
            ["data loading: in DataLoaders' iterators, in the main thread"] if time.loading_us else [],
        ),
        Sheet(
            f"Where the host waits for the GPU, {word}",
            [
                text_column("line", [f"{'after ' * row.is_after}{_line(row.line, cwd)}" for row in waits]),
                count_column("times", [row.num_waits for row in waits], 1),
                us_column("host waits", [row.wait_us for row in waits], 3),
                us_column("GPU idle", [row.idle_us for row in waits], KEY),
                share_column("of the step", [row.idle_us / step_us for row in waits], 1),
                text_column("waits in", [wait_word(row) for row in waits], 2),
                text_column("layer", [layer_label(row.layer) for row in waits], 4),
            ],
            ["GPU idle: behind the late launches that follow; a part of host late"],
        ),
        Sheet(
            f"Host late by line, {word}",
            [
                text_column("line", [_line(row.line, cwd) for row in late]),
                count_column("late launches", [row.num_launches for row in late], 2),
                us_column("GPU idle", [row.late_us for row in late], KEY),
                share_column("of the step", [row.late_us / step_us for row in late], 1),
                text_column("layer", [_layers_of(row) for row in late], 3),
            ],
            ["the GPU is idle until the host launches what these lines run"],
        ),
        Sheet(
            f"Layers whose kernels are shorter than their launches, {word}, with children",
            [
                text_column("layer", [layer_label(row.name, row.num_repeats) for row in layers]),
                count_column("kernels", [row.num_kernels for row in layers], 3),
                us_column("time of kernels", [row.total_us for row in layers], 1),
                us_column("time of the host", [row.host_us for row in layers], 1),
                us_column("host late", [row.launch_gap_us for row in layers], KEY),
                share_column("of the step", [row.launch_gap_us / step_us for row in layers], 2),
            ],
        ),
    ]  # fmt: skip
    return [sheet for sheet in sheets if sheet.columns[0].cells]


def _layers_of(row: LateLaunches) -> str:
    more = f" and {row.num_layers - 1:,} more" if row.num_layers > 1 else ""
    return layer_label(row.layer) + more


def _line(line: str, cwd: str) -> str:
    return short_line(line, cwd) or "(no line)"


_CALIBRATE = "a trace of your GPU: fakedist calibrate RUN --from-trace TRACE"
_CALIBRATED = "calibration table"


def uncertainty_sheets(source: KernelSource) -> list[Sheet]:
    """A table of the largest parts of the interval; none without an interval."""
    parts = source.uncertain
    step_us = source.step_us or 1.0
    names = [f"{part.name} on {part.group}" if part.kind == "collectives" else part.name for part in parts]
    columns = [
        text_column("estimate of", names),
        SheetColumn("alone", [f"+{part.half_width_us / step_us:.1%}" for part in parts], rank=KEY),
        SheetColumn("of the variance", [f"{part.share:.0%}" for part in parts], rank=1),
        text_column("narrower with", [_measurement(part) for part in parts]),
    ]
    remark = "alone: how much longer the step may be because of this estimate only"
    return [Sheet("What makes the step's interval wide, estimated", columns, [remark])] if parts else []


def _measurement(part: UncertainPart) -> str:
    match part.kind:
        case "kernels":
            return "a trace of more steps" if part.name == _CALIBRATED else _CALIBRATE
        case "host":
            return "a profile of the job: how long the GPU waits for launches"
        case "cpu":
            return "a profile of the job: how long these operations take"
        case "allocator":
            return "a lower peak: fakedist report RUN says what would lower it"
    if part.num_nodes > 1:
        return f"nccl-tests over {part.num_nodes:,} of your nodes: --fabric my_fabric.toml with spread"
    return "nccl-tests in one of your nodes, to compare with the time by group"


def priced_report(
    run: Run,
    changed: Mapping[str, Run],
    added: Sequence[Report] = (),
    *,
    all_rows: bool = False,
    table: str = "layer_times",
) -> Report:
    """The step of a run that was priced for a GPU, what each change makes of it, and what extras add.

    Args:
        run: The priced run.
        changed: The run with each change, by what ``--what-if`` takes.
        added: Reports of extras, such as an engine's rollout on that GPU.
        all_rows: Show small layers too, and do not fold repeated ones.
        table: The table of its CSV.

    Raises:
        RunDirectoryError: No step was timed, or a table is missing or damaged.
    """
    time, source = timed(run)
    made_for = run.summary.gpu
    steps = {text: timed(after)[0] for text, after in changed.items()}
    priced = f"priced for {source.gpu}"
    if made_for != source.gpu:
        priced += f", run for {made_for}; its memory and its choice of kernels stay those of the run"
    facts = [Fact("job", run_title(run)), Fact("GPU", priced), Fact("run", str(run.path))]
    sheets = [*what_if_sheets(time, steps), *uncertainty_sheets(source)]
    blocks = [Facts(facts, kind="about"), *time_blocks(run, all_layers=all_rows), *sheets]

    def data() -> dict[str, object]:
        plain: dict[str, object] = {"run_directory": str(run.path), "kernels": to_plain(source), "time": to_plain(time)}
        if steps:
            plain["what_ifs"] = [
                {
                    "what_if": text,
                    "step_us": after.step_us,
                    "change_us": after.step_us - time.step_us,
                    "parts": changed_times.part_changes(time, after).to_dict("records"),
                    "groups": changed_times.group_changes(time, after).to_dict("records"),
                }
                for text, after in steps.items()
            ]
        return plain | {report.title: report.data() for report in added}

    rows = partial(table_rows, run, table, all_layers=all_rows)
    return Report("time", [*blocks, *(block for report in added for block in report.blocks)], data, rows)


def what_if_sheets(before: StepTime, steps: Mapping[str, StepTime]) -> list[Sheet]:
    """A table of all changes, each on its own, and for each a table of where the step's change comes from."""
    if not steps:
        return []
    changes = [after.step_us - before.step_us for after in steps.values()]
    overview = [
        text_column("what if", list(steps)),
        us_column("step", [after.step_us for after in steps.values()]),
        SheetColumn("change", [format_us_change(us) for us in changes]),
        SheetColumn("%", [format_relative(us, before.step_us) for us in changes]),
    ]
    as_it_is = f"the step as it is: {format_us(before.step_us)}"
    whole = Sheet("What if, estimated, each on its own", overview, [as_it_is])
    return [whole, *(_change_sheet(text, before, after) for text, after in steps.items())]


def _change_sheet(text: str, before: StepTime, after: StepTime) -> Sheet:
    groups, parts = changed_times.group_changes(before, after), changed_times.part_changes(before, after)
    changed = [
        f"{name} {format_us_change(change)}"
        for name, change in zip(parts["name"], parts["change_us"], strict=True)
        if change and name not in ("step", "all kernels")
    ]
    remark = f"the step changes by {format_us_change(after.step_us - before.step_us)}"
    remarks = [f"{remark}: {', '.join(changed)}" if changed else remark]
    title = f"Exposed communication with {text} (B), and in the run (A)"
    keys, calls = {"group": "group", "operation": "operation"}, {"calls": "num_{}", "time": "whole_{}_us"}
    return Sheet(title, change_columns(ChangeTable(title, keys, groups, "us", calls), 2), remarks)


def table_rows(run: Run, name: str, *, all_layers: bool = False) -> pd.DataFrame:
    """One table. Rows of ``layers`` and ``layer_times`` are the report's: folded, with children.

    Raises:
        JobError: No table has this name.
        RunDirectoryError: It is missing or damaged.
    """
    table = run.table(name)
    if name == "layers":
        table = fold_table(table, unfolded(table) if all_layers else fold_layers(table))
    if name == "layer_times" and run.time is not None:
        table = run.time.layers(fold=not all_layers)
    return table


def timed(run: Run) -> tuple[StepTime, KernelSource]:
    """The step's time and where it is from.

    Raises:
        RunDirectoryError: No step was timed.
    """
    if run.summary.timed is None:
        raise RunDirectoryError(f"{run.path} has no times", "fakedist profile -o RUN ... makes a run with times")
    return run.summary.timed
