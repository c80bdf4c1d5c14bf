"""A step's time as text, Markdown and an object: its tables, its interval and its what-ifs.

Reading a table that is missing or damaged raises RunDirectoryError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from rich.console import Console
from rich.text import Text

from fakedist.analysis.layer_table import fold_layers, unfolded
from fakedist.analysis.typed_tables import rows_of
from fakedist.cost_model.breakdown import PEAK_DTYPE, fold_times
from fakedist.errors import RunDirectoryError
from fakedist.report.content.change_sheets import change_columns
from fakedist.report.content.report_blocks import EMPTY_RANK, KEY, Sheet, SheetColumn
from fakedist.report.render.markdown import escaped, sheet_markdown
from fakedist.report.render.terminal import (
    print_facts,
    print_figures,
    print_heading,
    print_remark,
    print_sheets,
    print_words,
)
from fakedist.report.text.host_sheets import host_sheets
from fakedist.report.text.trace_sheets import file_sheets, operation_sheet
from fakedist.report.text.wording import (
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
    source_word,
    time_figures,
    unknown_time,
    us_or_dash,
)
from fakedist.results.compare import changed_times
from fakedist.results.compare.side_by_side import ChangeTable
from fakedist.results.run import Run
from fakedist.results.verdict import (
    communication_word,
    limit_text,
    limits_text,
    main_bound,
    relative_time,
    step_word,
    timed_step_name,
)
from fakedist.rundir.plain import to_plain
from fakedist.rundir.step_time import PATH_KINDS, KernelSource, LayerTime, PathPart, StepTime, UncertainPart
from fakedist.units import format_bytes, format_relative, format_us, format_us_change

_NUM_TOP = 10
_NUM_RANGES = 20
_NUM_PATH = 8


def time_sheets(run: Run, *, all_layers: bool) -> list[Sheet]:
    """Tables of the timed step's kernels; empty if nothing was timed."""
    if run.summary.timed is None:
        return []
    time, source = run.summary.timed
    times, layers = run.table("layer_times"), run.table("layers", ["name", "class_name", "parent"])
    word = source.source
    is_imported = bool(source.processes)
    return [
        *file_sheets(source),
        layer_time_sheet(times, layers, time, word, all_layers=all_layers),
        *([operation_sheet(run)] if is_imported else []),
        family_sheet(time, word),
        top_sheet(time, word),
        *([group_time_sheet(time, communication_word(time))] if time.by_group else []),
        *host_sheets(time, run.manifest.cwd, step_word(source)),
        *([range_sheet(time, word)] if time.ranges else []),
        *([gain_sheet(time)] if time.gains else []),
        *(_path_sheets(time, source) if is_imported else []),
    ]


def layer_time_sheet(
    times: pd.DataFrame, layers: pd.DataFrame, time: StepTime, word: str, *, all_layers: bool
) -> Sheet:
    """Time by layer, with children."""
    folded = fold_times(times, layers, unfolded(layers) if all_layers else fold_layers(layers))
    least = 0.0 if all_layers else time.kernel_us * MIN_SHARE
    rows = rows_of(LayerTime, folded[folded["total_us"] > least])
    columns = [SheetColumn("layer", [layer_label(row.name, row.num_repeats) for row in rows], is_text=True)]
    for name, key, rank in (
        *([("generation", "generation_us", 0)] if time.generation_us else []),
        ("forward", "forward_us", 0),
        ("recompute", "recompute_us", 1),
        ("backward", "backward_us", 0),
        ("optimizer", "optimizer_us", 3),
        ("other", "other_us", 7),
        ("total", "total_us", KEY),
    ):
        columns.append(_times(name, rows, key, rank))
    whole = time.kernel_us or 1.0
    columns.append(SheetColumn("share", [f"{row.total_us / whole:.1%}" for row in rows], rank=4))
    columns.append(_times("own", rows, "own_us", 5))
    columns += [_times(name, rows, f"{name}_us", 6, several=True) for name in ("least", "median", "largest")]
    rates = [flops_rate(row.flops, row.total_us) for row in rows]
    columns.append(SheetColumn("TFLOP/s", rates, rank=2 if set(rates) != {"-"} else EMPTY_RANK))
    bounds = [bound_of(row) for row in rows]
    columns.append(SheetColumn("bound", bounds, is_text=True, rank=1 if any(bounds) else EMPTY_RANK))
    columns.append(_times("host late", rows, "launch_gap_us", 3))
    columns.append(SheetColumn("kernels", [f"{row.num_kernels:,}" for row in rows], rank=8))
    remarks = ["sums over kernels: more than the step if streams overlap; communication is not included"]
    if any(row.num_repeats > 1 for row in rows):
        remarks.append("least, median, largest: of one such layer, with children")
    if left_out := int((folded["total_us"] > 0).sum()) - len(rows):
        num = f"{left_out} layer{'' if left_out == 1 else 's'}"
        remarks.append(f"not shown: {num} below {MIN_SHARE:.1%} of the time (--all-rows shows them)")
    return Sheet(f"Time by layer, {word}, with children", columns, remarks)


def bound_of(row: LayerTime) -> str:
    """The bound that limits most of a folded layer's time."""
    return main_bound(row.bound_compute_us, row.bound_memory_us, row.bound_launch_us)


def _times(name: str, rows: list[LayerTime], key: str, rank: int, several: bool = False) -> SheetColumn:
    values = [getattr(row, key) if not several or row.num_repeats > 1 else 0.0 for row in rows]
    return SheetColumn(name, [us_or_dash(value) for value in values], rank=rank if any(values) else EMPTY_RANK)


def family_sheet(time: StepTime, word: str) -> Sheet:
    """Time by family of kernels, and how close each is to the GPU's peaks."""
    rows = time.by_family
    remarks = ["share: of all kernels except communication"]
    if time.peaks:
        remarks.append(
            f"of peak: of dense {PEAK_DTYPE}, whatever dtype the kernels use; rates: of kernels whose work is known"
        )
    if communication_word(time) == "simulated" and any(row.family == "communication" and row.time_us for row in rows):
        remarks.append(
            "communication: local copies that stand for collectives, simulated; not the time of the real job"
        )
    return Sheet(f"Time by family of kernels, {word}", family_columns(time), remarks)


def family_columns(time: StepTime) -> list[SheetColumn]:
    """The columns of that table. The first is the family."""
    rows, peaks = time.by_family, time.peaks
    flops_peak, bytes_peak = (peaks.flops.get(PEAK_DTYPE), peaks.bytes_per_s) if peaks else (None, None)
    columns = [
        SheetColumn("family", [row.family for row in rows], is_text=True),
        SheetColumn("kernels", [f"{row.num_kernels:,}" for row in rows]),
        SheetColumn("time", [unknown_time(row.time_us, row.num_unknown) for row in rows]),
        SheetColumn("share", ["-" if row.share is None else f"{row.share:.1%}" for row in rows]),
        _rate("TFLOP/s", [flops_rate(row.flops, row.flops_us) for row in rows], 1),
        _rate("of peak", [share_of_peak(row.flops, row.flops_us, flops_peak) for row in rows], 2),
        _rate("TB/s", [bytes_rate(row.moved_bytes, row.moved_us) for row in rows], 1),
        _rate("of bandwidth", [share_of_peak(row.moved_bytes, row.moved_us, bytes_peak) for row in rows], 2),
    ]
    bounds = [main_bound(row.compute_us, row.memory_us, row.launch_us) for row in rows]
    return [*columns, SheetColumn("bound", bounds, is_text=True, rank=1)] if any(bounds) else columns


def _rate(name: str, cells: list[str], rank: int) -> SheetColumn:
    return SheetColumn(name, cells, rank=rank if set(cells) != {"-"} else EMPTY_RANK)


def top_sheet(time: StepTime, word: str) -> Sheet:
    """The kernels that take the most time, by name, shape and layer."""
    rows = time.top_kernels[:_NUM_TOP]
    whole = time.kernel_us or 1.0
    bounds = [row.bound for row in rows]
    columns = [
        SheetColumn("kernel", [short_kernel(row.name) for row in rows], is_text=True),
        SheetColumn("shape", [row.shape for row in rows], is_text=True, rank=1),
        SheetColumn("layer", [layer_label(row.layer, row.num_layers) for row in rows], is_text=True, rank=2),
        SheetColumn("times", [f"{row.num_kernels:,}" for row in rows], rank=3),
        SheetColumn("total", [unknown_time(row.time_us, row.num_unknown) for row in rows], rank=KEY),
        SheetColumn("share", [f"{row.time_us / whole:.1%}" for row in rows], rank=2),
        SheetColumn("median", ["-" if row.median_us is None else format_us(row.median_us) for row in rows], rank=4),
        _rate("TFLOP/s", [flops_rate(row.flops, row.flops_us) for row in rows], 3),
        _rate("TB/s", [bytes_rate(row.moved_bytes, row.moved_us) for row in rows], 4),
    ]
    if any(bounds):
        columns.append(SheetColumn("bound", bounds, is_text=True, rank=3))
    return Sheet(f"Kernels that take the most time, {word}", columns)


def group_time_sheet(time: StepTime, word: str) -> Sheet:
    """Collectives by group and operation, and how much of them the step waits for."""
    rows, step_us = time.by_group, time.step_us or 1.0
    nodes = [f"{row.group_size:,} on {row.num_nodes:,}" if row.group_size else "-" for row in rows]
    moved = [format_bytes(row.moved_bytes) if row.moved_bytes else "-" for row in rows]
    is_named = any(row.group for row in rows)
    return Sheet(
        f"Communication by group, {word}",
        [
            *([SheetColumn("group", [row.group for row in rows], is_text=True)] if is_named else []),
            SheetColumn("operation", [row.operation for row in rows], is_text=True),
            SheetColumn("ranks on nodes", nodes, rank=5 if is_named else EMPTY_RANK),
            SheetColumn("calls", [f"{row.num_calls:,}" for row in rows], rank=4),
            SheetColumn("bytes", moved, rank=6 if any(row.moved_bytes for row in rows) else EMPTY_RANK),
            SheetColumn("time", [unknown_time(row.time_us, row.num_unknown) for row in rows], rank=2),
            SheetColumn("hidden", [format_us(row.hidden_us) for row in rows], rank=3),
            SheetColumn("exposed", [format_us(row.exposed_us) for row in rows], rank=KEY),
            SheetColumn("of the step", [f"{row.exposed_us / step_us:.1%}" for row in rows], rank=1),
        ],
        [EXPOSED[:1].lower() + EXPOSED[1:]],
    )


def gain_sheet(time: StepTime, most: int | None = None) -> Sheet:
    """The step with each change that applies, the shortest first; with ``most``, only as many that shorten it."""
    rows = time.gains if most is None else [gain for gain in time.gains if gain.step_us < time.step_us][:most]
    return Sheet(
        "What would help, time: estimated, each on its own, and the best two",
        [
            SheetColumn("change", [gain.title for gain in rows], is_text=True),
            SheetColumn("step", [format_us(gain.step_us) for gain in rows], rank=1),
            SheetColumn("changes by", [relative_time(gain.step_us, time.step_us) for gain in rows], rank=KEY),
            SheetColumn("fakedist time RUN ...", [gain.option for gain in rows], is_text=True, rank=2),
        ],
        [*dict.fromkeys(filter(None, [*(gain.why for gain in rows), collector_text(time)]))],
    )


def path_sheet(time: StepTime, word: str) -> Sheet:
    """The longest parts of the step's critical path."""
    rows, rest = time.critical_path[:_NUM_PATH], time.critical_path[_NUM_PATH:]
    step_us = time.step_us or 1.0
    has_lanes = any(row.lane for row in rows)
    columns = [
        SheetColumn("what", [path_words(row) for row in rows], is_text=True),
        SheetColumn("of", [path_location(row) for row in rows], is_text=True),
        *([SheetColumn("on", [row.lane for row in rows], is_text=True, rank=3)] if has_lanes else []),
        SheetColumn("launches", [f"{row.num_launches:,}" if row.num_launches else "" for row in rows], rank=1),
        SheetColumn("time", [format_us(row.time_us) for row in rows], rank=KEY),
        SheetColumn("of the step", [f"{row.time_us / step_us:.1%}" for row in rows], rank=2),
    ]
    remarks = ["a faster kernel, collective or host shortens the step only where it is on this path"]
    if has_lanes:
        sums = {kind: sum(row.time_us for row in time.critical_path if row.kind == kind) for kind in PATH_KINDS}
        remarks.insert(0, ", ".join(f"{kind} {us / step_us:.1%}" for kind, us in sums.items() if us))
    if rest:
        more = sum(row.time_us for row in rest)
        remarks.insert(0, f"and {len(rest):,} more, {format_us(more)}, in --json (time.critical_path)")
    return Sheet(f"Critical path of the step, {word}", columns, remarks)


def path_words(row: PathPart) -> str:
    """A part of the critical path in a word or two."""
    return row.operation if row.kind == "collectives" and not row.lane else row.kind


def path_location(row: PathPart) -> str:
    """The layer or group of a part of the critical path."""
    if row.kind == "collectives":
        return row.group or row.operation
    if row.lane and row.operation:
        return row.operation
    return "" if row.kind == "idle" else layer_label(row.layer, row.num_layers)


def range_sheet(time: StepTime, word: str) -> Sheet:
    """The script's own ranges by name, most time first."""
    rows = time.ranges[:_NUM_RANGES]
    whole = time.kernel_us or 1.0
    columns = [
        SheetColumn("range", [row.name for row in rows], is_text=True),
        SheetColumn("times", [f"{row.num_ranges:,}" for row in rows], rank=2),
        SheetColumn("kernels", [f"{row.num_kernels:,}" for row in rows], rank=1),
        SheetColumn("kernel time", [unknown_time(row.kernel_us, row.num_unknown) for row in rows], rank=KEY),
        SheetColumn("share", [f"{row.kernel_us / whole:.1%}" for row in rows], rank=1),
        SheetColumn("on the GPU", [us_or_dash(row.gpu_us) for row in rows], rank=2),
    ]
    if any(row.num_calls for row in rows):
        columns.append(SheetColumn("calls", [f"{row.num_calls:,}" for row in rows], rank=3))
    remarks = ["ranges may lie in others, so shares do not add up; on the GPU: from a range's first kernel to its last"]
    if more := len(time.ranges) - len(rows):
        remarks.append(f"and {more:,} more names, in --json (time.ranges)")
    return Sheet(f"Time by your ranges (NVTX, record_function), {word}", columns, remarks)


def print_time(console: Console, time: StepTime, source: KernelSource, step: str) -> None:
    """Print the time of a step, named ``step``, and how it is spent."""
    print_heading(console, f"Time of {step}, {source_word(source)}")
    print_figures(console, time_figures(time, source), is_right=True)
    print_limits(console, time)
    for text in (*(note.text for note in source.notes), accuracy_text(source)):
        if text:
            print_remark(console, text)


def print_limits(console: Console, time: StepTime) -> None:
    """Print what limits a step, and its limits side by side."""
    for text in filter(None, (limit_text(time), limits_text(time))):
        print_words(console, Text(text), 2)


def time_markdown(run: Run, time: StepTime, source: KernelSource, *, all_layers: bool) -> list[str]:
    """The step's time, and its tables, each collapsed under its title."""
    sheets = time_sheets(run, all_layers=all_layers)
    name = timed_step_name(run.summary, source.step)
    return ["\n".join(_time(time, source, name)), *("\n".join(sheet_markdown(sheet)) for sheet in sheets)]


def _time(time: StepTime, source: KernelSource, step: str) -> list[str]:
    lines = [f"**Time of {step}**, {source_word(source)}", ""]
    lines += [
        f"- {name}: **{figure}**{', ' if more else ''}{escaped(more)}"
        for name, figure, more in time_figures(time, source)
    ]
    texts = [limit_text(time), limits_text(time), *(note.text for note in source.notes), accuracy_text(source)]
    return [*lines, *(f"- {escaped(text)}" for text in texts if text)]


_CALIBRATE = "a trace of your GPU: fakedist calibrate RUN --from-trace TRACE"
_CALIBRATED = "calibration table"


def uncertainty_sheets(source: KernelSource) -> list[Sheet]:
    """A table of the largest parts of the interval; none without an interval."""
    parts, step_us = source.uncertain, source.step_us or 1.0
    if not parts:
        return []
    widths = [f"+{part.half_width_us / step_us:.1%}" for part in parts]
    return [
        Sheet(
            "What makes the step's interval wide, estimated",
            [
                SheetColumn("estimate of", [_named(part) for part in parts], is_text=True),
                SheetColumn("alone", widths, rank=KEY),
                SheetColumn("of the variance", [f"{part.share:.0%}" for part in parts], rank=1),
                SheetColumn("narrower with", [_measurement(part) for part in parts], is_text=True),
            ],
            ["alone: how much longer the step may be because of this estimate only"],
        )
    ]


def _named(part: UncertainPart) -> str:
    return f"{part.name} on {part.group}" if part.kind == "collectives" else part.name


def _measurement(part: UncertainPart) -> str:
    if part.kind == "kernels":
        return "a trace of more steps" if part.name == _CALIBRATED else _CALIBRATE
    if part.kind == "host":
        return "a profile of the job: how long the GPU waits for launches"
    if part.kind == "allocator":
        return "a lower peak: fakedist report RUN says what would lower it"
    if part.num_nodes > 1:
        return f"nccl-tests over {part.num_nodes:,} of your nodes: --fabric my_fabric.toml with spread"
    return "nccl-tests in one of your nodes, to compare with the time by group"


@dataclass(frozen=True)
class WhatIfStep:
    """A step with a change, which ``--what-if`` takes as ``what_if``."""

    what_if: str
    before: StepTime
    after: StepTime

    @property
    def change_us(self) -> float:
        """Change of the step in microseconds; negative if it gets shorter."""
        return self.after.step_us - self.before.step_us


def what_if_sheets(steps: Sequence[WhatIfStep]) -> list[Sheet]:
    """A table of all changes, each on its own, and for each a table of where the step's change comes from."""
    if not steps:
        return []
    overview = [
        SheetColumn("what if", [step.what_if for step in steps], is_text=True),
        SheetColumn("step", [format_us(step.after.step_us) for step in steps]),
        SheetColumn("change", [format_us_change(step.change_us) for step in steps]),
        SheetColumn("%", [format_relative(step.change_us, step.before.step_us) for step in steps]),
    ]
    as_it_is = f"the step as it is: {format_us(steps[0].before.step_us)}"
    return [Sheet("What if, estimated, each on its own", overview, [as_it_is]), *map(_change_sheet, steps)]


def what_if_markdown(steps: Sequence[WhatIfStep]) -> list[str]:
    """The same as Markdown."""
    return ["\n".join(sheet_markdown(sheet)) for sheet in what_if_sheets(steps)]


def what_if_objects(steps: Sequence[WhatIfStep]) -> list[dict[str, object]]:
    """The same as plain objects: the step, its change, its parts, and communication by group."""
    return [
        {
            "what_if": step.what_if,
            "step_us": step.after.step_us,
            "change_us": step.change_us,
            "parts": changed_times.part_changes(step.before, step.after).to_dict("records"),
            "groups": changed_times.group_changes(step.before, step.after).to_dict("records"),
        }
        for step in steps
    ]


def _change_sheet(step: WhatIfStep) -> Sheet:
    groups = changed_times.group_changes(step.before, step.after)
    parts = changed_times.part_changes(step.before, step.after)
    changed = [
        f"{name} {format_us_change(change)}"
        for name, change in zip(parts["name"], parts["change_us"], strict=True)
        if change and name not in ("step", "all kernels")
    ]
    remark = f"the step changes by {format_us_change(step.change_us)}"
    remarks = [f"{remark}: {', '.join(changed)}" if changed else remark]
    title = f"Exposed communication with {step.what_if} (B), and in the run (A)"
    keys, calls = {"group": "group", "operation": "operation"}, {"calls": "num_{}", "time": "whole_{}_us"}
    return Sheet(title, change_columns(ChangeTable(title, keys, groups, "us", calls), 2), remarks)


def render_priced(run: Run, console: Console, *, all_layers: bool, what_ifs: Sequence[WhatIfStep] = ()) -> None:
    """Print the step's time and its tables."""
    time, source = _timed(run)
    print_facts(console, _facts(run, source))
    print_time(console, time, source, timed_step_name(run.summary, source.step))
    print_sheets(console, [*time_sheets(run, all_layers=all_layers), *_path_sheets(time, source)])
    print_sheets(console, [*what_if_sheets(what_ifs), *uncertainty_sheets(source)])


def priced_markdown(run: Run, *, all_layers: bool, what_ifs: Sequence[WhatIfStep] = ()) -> str:
    """The same as Markdown."""
    time, source = _timed(run)
    facts = [f"- {name}: {escaped(value)}" for name, value in _facts(run, source)]
    pieces = ["\n".join(["### fakedist: " + escaped(run_title(run)[:300]), "", *facts])]
    pieces += [*time_markdown(run, time, source, all_layers=all_layers), *what_if_markdown(what_ifs)]
    sheets = [*_path_sheets(time, source), *uncertainty_sheets(source)]
    pieces += ["\n".join(sheet_markdown(sheet)) for sheet in sheets]
    return "\n\n".join(pieces) + "\n"


def priced_object(run: Run, what_ifs: Sequence[WhatIfStep] = ()) -> dict[str, object]:
    """The object of ``--json``: ``kernels`` and ``time`` as in the summary, ``run_directory``, and what-ifs if any."""
    time, source = _timed(run)
    plain = {"run_directory": str(run.path), "kernels": to_plain(source), "time": to_plain(time)}
    return plain | ({"what_ifs": what_if_objects(what_ifs)} if what_ifs else {})


def what_if_steps(run: Run, changed: Mapping[str, Run]) -> list[WhatIfStep]:
    """The steps of a run with changes."""
    before = _timed(run)[0]
    return [WhatIfStep(text, before, _timed(changed_run)[0]) for text, changed_run in changed.items()]


def _path_sheets(time: StepTime, source: KernelSource) -> list[Sheet]:
    return [path_sheet(time, step_word(source))] if time.critical_path else []


def _facts(run: Run, source: KernelSource) -> list[tuple[str, str]]:
    made_for = run.summary.gpu
    priced = f"priced for {source.gpu}"
    if made_for != source.gpu:
        priced += f", run for {made_for}; its memory and its choice of kernels stay those of the run"
    return [("job", run_title(run)), ("GPU", priced), ("run", str(run.path))]


def _timed(run: Run) -> tuple[StepTime, KernelSource]:
    if run.summary.timed is None:
        raise RunDirectoryError(f"{run.path} has no times", "fakedist profile -o RUN ... makes a run with times")
    return run.summary.timed
