"""The contents of the page's sections: figures as text, with the terminal's words and rounding."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from fakedist.analysis.layer_table import Fold
from fakedist.analysis.topology import ProcessGroup, ranks_of, read_groups
from fakedist.analysis.typed_tables import rows_of
from fakedist.cost_model.breakdown import fold_times, kind_family_us
from fakedist.report.content.topology import AT_ONCE, CallsText, RunTopology
from fakedist.report.figures.memory_figures import Colouring, most_in_use
from fakedist.report.page.assets import MOST_SEGMENTS
from fakedist.report.page.bars import BarChart, time_bars
from fakedist.report.page.drawings import LAYER_FIGURES, MOST_KERNEL_ROWS, PeakBlock, top_kernels
from fakedist.report.page.switches import Switch
from fakedist.report.text.host_sheets import host_sheets
from fakedist.report.text.memory_sheets import MOMENT_NAMES, HeldLine, unused_sheet
from fakedist.report.text.time_sheets import bound_of, family_columns, path_location, path_words
from fakedist.report.text.trace_sheets import file_sheets
from fakedist.report.text.wording import (
    EXPOSED,
    LAYER_COLUMNS,
    MIN_SHARE,
    accuracy_text,
    advice_text,
    collector_text,
    command_line,
    ending,
    flops_rate,
    gives_text,
    job_command,
    layer_label,
    note_texts,
    num_warnings,
    or_dash,
    peak_moment,
    remedy_text,
    run_facts,
    run_title,
    short_kernel,
    short_time_figures,
    source_word,
    step_remark,
    time_figures,
    top_advice,
    unknown_time,
    us_or_dash,
)
from fakedist.results.run import Run
from fakedist.results.verdict import (
    broke_off,
    communication_word,
    has_room,
    limit_name,
    limit_text,
    limits_text,
    refusal_stack,
    relative_time,
    short_line,
    span_us,
    step_text,
    step_word,
    timed_step_name,
    verdict,
)
from fakedist.rundir.directory import SNAPSHOT_NAME, TRACE_NAME
from fakedist.rundir.finding import Finding
from fakedist.rundir.plain import to_plain
from fakedist.rundir.schema import CATEGORIES, FAMILIES, KINDS
from fakedist.rundir.step_time import KernelSource, KernelTime, LayerTime, StepTime
from fakedist.rundir.summary import CollectiveTotal, PhasePeak, Summary
from fakedist.rundir.table_rows import TABLES
from fakedist.units import format_bytes, format_us


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


_MOST_ROWS = 1_000  # of a table
_HEADINGS = ("generation", "forward", "recompute", "backward", "optimizer", "other", "total", "host late")


def time_section(run: Run, kernels: pd.DataFrame, layers: pd.DataFrame, folds: list[Fold]) -> dict[str, object]:
    """The time of the timed step, by what it is spent on."""
    assert run.summary.timed is not None
    time, source = run.summary.timed
    word = source_word(source)
    names = top_kernels(run)
    num_names = int((run.table("kernel_names", ["family"])["family"] != "communication").sum())
    return {
        "word": source.source,
        "source": word[:1].upper() + word[1:],
        "step": timed_step_name(run.summary, source.step),
        "notes": [text for text in (*(note.text for note in source.notes), accuracy_text(source)) if text],
        "figures": time_figures(time, source),
        "shares": _shares(time),
        "limits": limit_bars(time),
        "kinds": _kinds(kernels),
        "families": _families(time),
        "communication_word": communication_word(time),
        "step_word": step_word(source),
        "path": _path(time),
        "groups": _groups(time),
        "exposed": EXPOSED,
        "gains": [
            (gain.title, (gain.step_us, format_us(gain.step_us)), _change(gain.step_us, time.step_us), gain.option)
            for gain in time.gains
        ],
        "whys": [*dict.fromkeys(filter(None, [*(gain.why for gain in time.gains), collector_text(time)]))],
        "file": file_sheets(source),
        "host": host_sheets(time, run.manifest.cwd, step_word(source)),
        "ranges": _ranges(time),
        "num_more_ranges": max(len(time.ranges) - MOST_KERNEL_ROWS, 0),
        "layers": _layers(run.table("layer_times"), layers, folds, time.kernel_us or 1.0),
        "top": [_top(row, time) for row in rows_of(KernelTime, names)],
        "num_more_names": num_names - len(names),
        "min_share": f"{MIN_SHARE:.1%}",
    }


def _change(step_us: float, before_us: float) -> tuple[float, str]:
    return step_us - before_us, relative_time(step_us, before_us)


def layer_columns(run: Run, folds: list[Fold], source: KernelSource) -> dict[str, object]:
    """The columns of times in the table of layers at the peak, with their cells by number of the fold."""
    table = fold_times(run.table("layer_times"), run.table("layers"), folds)
    used = [name for name in ("generation_us", "forward_us", "recompute_us", "backward_us") if table[name].any()]
    columns = [table[name].tolist() for name in used]
    return {
        "word": source.source,
        "columns": [(name, name.removesuffix("_us")) for name in used],
        "cells": [[(us, us_or_dash(us)) for us in row] for row in zip(*columns, strict=True)] or [[]] * len(table),
    }


def step_figure(summary: Summary) -> dict[str, str] | None:
    """The step's time for the verdict; None if no step was timed."""
    if summary.timed is None:
        return None
    time, source = summary.timed
    return {
        "text": step_text(time),
        "word": source.source,
        "step": timed_step_name(summary, source.step),
        "more": step_remark(time, source) or f"communication {communication_word(time)}",
    }


def _shares(time: StepTime) -> list[dict[str, str]]:
    step_us = time.step_us or 1.0
    parts = {
        "busy": ("computes", time.busy_us),
        "communication": ("only communicates", time.communication_us),
        "launch_gap": ("host late", time.launch_gap_us),
        "wait": ("waits", time.wait_us),
    }
    return [
        {"key": key, "name": name, "text": format_us(us), "width": _percent(us, step_us)}
        for key, (name, us) in parts.items()
        if us
    ]


_LIMIT_STYLES = {
    "step": "t-wait",
    "kernels": "t-busy",
    "collectives": "t-communication",
    "nics": "t-communication",
    "host": "t-launch_gap",
}


def limit_bars(time: StepTime) -> BarChart | None:
    """The step, and what it would be if all but one of its parts took no time; None if that is not known."""
    if not time.limits:
        return None
    rows: list[tuple[str, Mapping[str, float], str, str]]
    rows = [("the step", {"step": time.step_us}, *_with_interval(step_text(time)))]
    for limit in time.limits:
        text = span_us(limit.step_us, limit.low_us, limit.high_us)
        rows.append((limit_name(limit), {limit.kind: limit.step_us}, *_with_interval(text)))
    chart = time_bars(rows, _LIMIT_STYLES, max(time.step_us, time.limits[0].step_us))
    return replace(chart, legend=[])


def _with_interval(text: str) -> tuple[str, str]:
    time, _, interval = text.partition(" (")
    return time, f"({interval}" if interval else ""


def _kinds(kernels: pd.DataFrame) -> list[dict[str, object]]:
    sums = kind_family_us(kernels)
    most = sums.sum(axis=1).max() or 1.0
    return [
        {
            "name": kind,
            "text": format_us(float(of_kind.sum())),
            "width": _percent(float(of_kind.sum()), most),
            "parts": [
                {"family": family, "text": format_us(float(us)), "width": _percent(float(us), float(of_kind.sum()))}
                for family, us in zip(FAMILIES, of_kind, strict=True)
                if us
            ],
        }
        for kind, of_kind in zip(KINDS, sums, strict=True)
        if of_kind.sum()
    ]


def _families(time: StepTime) -> dict[str, object]:
    columns = [column for column in family_columns(time) if set(column.cells) != {"-"}]
    rows = []
    for row, cells in zip(time.by_family, zip(*(column.cells for column in columns), strict=True), strict=True):
        figures = [(_number(cell), cell) for cell in cells[1:]]
        figures[1] = (row.time_us, cells[2])
        rows.append({"family": cells[0], "cells": figures})
    return {"columns": [column.name for column in columns], "rows": rows}


def _groups(time: StepTime) -> list[dict[str, object]]:
    return [
        {
            "group": row.group,
            "operation": row.operation,
            "ranks": (row.group_size, f"{row.group_size:,} on {row.num_nodes:,}"),
            "num_calls": row.num_calls,
            "bytes": (row.moved_bytes, format_bytes(row.moved_bytes)),
            "time": (row.time_us, unknown_time(row.time_us, row.num_unknown)),
            "hidden": (row.hidden_us, format_us(row.hidden_us)),
            "exposed": (row.exposed_us, format_us(row.exposed_us)),
            "share": (row.exposed_us, f"{row.exposed_us / (time.step_us or 1.0):.1%}"),
        }
        for row in time.by_group
    ]


_PATH_CHIPS = {
    "kernels": "t-busy",
    "collectives": "t-communication",
    "host": "t-launch_gap",
    "launch": "t-launch_gap",
    "idle": "t-wait",
}


def _path(time: StepTime) -> list[dict[str, object]]:
    return [
        {
            "what": path_words(row),
            "place": path_location(row),
            "lane": row.lane,
            "chip": _PATH_CHIPS[row.kind],
            "time": (row.time_us, format_us(row.time_us)),
            "share": (row.time_us, f"{row.time_us / (time.step_us or 1.0):.1%}"),
            "num_launches": row.num_launches,
        }
        for row in time.critical_path
    ]


def _ranges(time: StepTime) -> list[dict[str, object]]:
    return [
        {
            "name": row.name,
            "num_ranges": row.num_ranges,
            "num_kernels": row.num_kernels,
            "time": (row.kernel_us, unknown_time(row.kernel_us, row.num_unknown)),
            "share": (row.kernel_us, f"{row.kernel_us / (time.kernel_us or 1.0):.1%}"),
            "gpu": (row.gpu_us, us_or_dash(row.gpu_us)),
            "num_calls": row.num_calls,
        }
        for row in time.ranges[:MOST_KERNEL_ROWS]
    ]


def _number(text: str) -> float:
    digits = text.replace(",", "").rstrip("%")
    try:
        return float(digits)
    except ValueError:
        return 0.0


def _layers(times: pd.DataFrame, layers: pd.DataFrame, folds: list[Fold], whole: float) -> dict[str, object]:
    table = fold_times(times, layers, folds)
    timed = table[(table["total_us"] > 0) | (table["num_calls"] > 0)]
    shown = timed.loc[timed["total_us"].nlargest(_MOST_ROWS).index.sort_values()]
    used = [(name, title) for name, title in zip(LAYER_FIGURES, _HEADINGS, strict=True) if shown[name].any()]
    used.sort(key=lambda column: column[0] != "total_us")  # the most important column first
    most = {name: float(shown[name].max()) or 1.0 for name, _ in used}
    rows = rows_of(LayerTime, shown)
    return {
        "columns": used,
        "rows": [
            {
                "fold": fold,
                "label": layer_label(row.name),
                "class_name": row.class_name,
                "num_repeats": row.num_repeats,
                "is_small": row.total_us <= whole * MIN_SHARE,
                "figures": [(us := getattr(row, name), us_or_dash(us), _percent(us, most[name])) for name, _ in used],
                "own": (row.own_us, us_or_dash(row.own_us)),
                "each": _each(row),
                "rate": (row.flops / (row.total_us or 1.0), flops_rate(row.flops, row.total_us)),
                "bound": bound_of(row),
                "calls": (row.num_calls, _calls(row)),
            }
            for fold, row in zip(shown.index.tolist(), rows, strict=True)
        ],
        "has_bound": any(bound_of(row) for row in rows),
        "has_rate": any(row.flops for row in rows),
        "has_calls": any(row.num_calls for row in rows),
        "num_small": sum(row.total_us <= whole * MIN_SHARE for row in rows),
        "num_more": len(timed) - len(shown),
    }


def _each(row: LayerTime) -> tuple[float, str]:
    if row.num_repeats < 2:
        return row.total_us, ""
    return row.median_us, " / ".join(map(us_or_dash, (row.least_us, row.median_us, row.largest_us)))


def _calls(row: LayerTime) -> str:
    if not row.num_calls:
        return "-"
    return f"{row.num_calls:,}: {unknown_time(row.communication_us, row.num_unknown_calls)}"


def _top(row: KernelTime, time: StepTime) -> dict[str, object]:
    return {
        "name": short_kernel(row.name, 200),
        "family": row.family,
        "num": row.num_kernels,
        "time": (row.time_us, unknown_time(row.time_us, row.num_unknown)),
        "share": f"{row.time_us / (time.kernel_us or 1.0):.1%}",
        "median": (row.median_us or 0.0, "-" if row.median_us is None else format_us(row.median_us)),
        "shape": row.shape,
        "layer": layer_label(row.layer, row.num_layers),
        "rate": (row.flops / (row.flops_us or 1.0), flops_rate(row.flops, row.flops_us)),
        "bound": row.bound,
    }


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / (whole or 1.0):.3f}%"


_STEPS_SHOWN = 8
_NUM_LINES = 40


def verdict_section(run: Run, summary: Summary) -> dict[str, object]:
    """The answer: peak, share of the GPU, fits or not, the time of a step, what would help."""
    allocated, reserved = summary.peak_allocated_bytes, summary.peak_reserved_bytes
    capacity = summary.capacity_bytes
    whole = max(capacity, reserved) or 1
    parts = [(name, bytes_) for name, bytes_ in summary.by_category.items() if bytes_]
    return {
        "fits": verdict(summary, run.manifest.cwd),
        "called_by": refusal_stack(summary, run.manifest.cwd),
        "left": _ended_early(run, summary),
        "allocated": format_bytes(allocated) if allocated else "",
        "others": "" if allocated or not (used := most_in_use(run)) else format_bytes(used),
        "when": peak_moment(summary),
        "reserved": format_bytes(reserved),
        "capacity": format_bytes(capacity) if capacity else "",
        "share": f"{reserved / capacity:.1%}" if capacity else "",
        "limit": _percent(capacity, whole) if 0 < capacity < whole else "",
        "parts": [_part(name, bytes_, whole) for name, bytes_ in parts],
        "reserved_rest": {"text": format_bytes(reserved - allocated), "width": _percent(reserved - allocated, whole)},
        "advice": top_advice(summary, run.manifest.cwd),
        "remedy": remedy_text(summary),
        "time": step_figure(summary),
        "limited": limit_text(summary.timed[0]) if summary.timed else "",
        "steps": [(step.step, format_us(step.wall_us)) for step in summary.steps[-_STEPS_SHOWN:]],
        "rates": short_time_figures(*summary.timed)[1:] if summary.timed else [],
        "limits": limits_text(summary.timed[0]) if summary.timed else "",
        "num_notes": len(summary.notes),
        "num_warnings": num_warnings(summary.notes),
        "time_first": has_room(summary),
        "provenance": [
            (
                name.replace("wall_us", "wall time").replace("_", " "),
                text.partition(": ")[0] if ": " in text else "measured",
                text,
            )
            for name, text in run.manifest.provenance.items()
        ],
    }


def _ended_early(run: Run, summary: Summary) -> str:
    if summary.left_during_init is not None:
        return f"This rank {ending(summary, run.manifest.cwd)}."
    if not broke_off(summary):
        return ""
    return f"The figures are of what ran until the rank ended: {ending(summary, run.manifest.cwd)}."


def _part(name: str, bytes_: int, whole: int) -> dict[str, str]:
    named = name.replace("_", " ")
    return {"name": name, "spoken": named, "text": format_bytes(bytes_), "width": _percent(bytes_, whole)}


def holders(summary: Summary, layers: pd.DataFrame | None, lines: list[HeldLine]) -> list[dict[str, object]]:
    """The layer, without its children, and the line that hold most at the peak.

    ``layers`` is the result of :func:`fakedist.analysis.layer_table.fold_table`; None for a snapshot.
    """
    rows = []
    if layers is not None and len(layers):
        row = layers.nlargest(1, "peak_own_bytes").to_dict("records")[0]
        rows.append(("most, by layer, own", layer_label(row["name"], row["num_repeats"]), row["peak_own_bytes"]))
    if lines:
        rows.append(("most, by line", lines[0].label, lines[0].bytes))
    return [
        {
            "by": by,
            "name": name,
            "text": format_bytes(bytes_),
            "share": f"{bytes_ / summary.peak_allocated_bytes:.1%}",
            "is_code": by == "most, by line",
        }
        for by, name, bytes_ in rows
    ]


def facts_section(run: Run, summary: Summary, folder: Path | None) -> dict[str, object]:
    """The job that ran: command, world, rank and its number in each group, versions, GPU.

    ``folder`` is the directory that the page is for; None if that is not known.
    """
    manifest, job = run.manifest, run.manifest.job
    if job is None:  # another program recorded it
        rows = run_facts(run)
        about = [value for name, value in rows if name in ("device", "history")]
        return {"title": run_title(run), "about": about, "command": "", "files": [], "rows": rows, "places": []}
    versions = manifest.versions
    rows = [
        ("command", command_line(manifest.command)),
        ("in", manifest.cwd),
        ("job", job_command(job)),
        ("ended", ending(summary, manifest.cwd)),
        ("rank", f"{summary.rank:,} of {summary.world_size:,} ({job.gpus_per_node} GPUs a node)"),
        ("device", f"{summary.device}: {summary.gpu or 'never reached'}"),
        ("versions", _versions(summary, versions, manifest.fakedist)),
        ("git commit", manifest.git_commit),
        ("when", manifest.created),
    ]
    groups = [
        {
            "name": group.label,
            "place": f"{group.group_rank:,} of {group.size:,}",
            "ranks": group.ranks,
            "backend": group.backend,
        }
        for group in read_groups(run.table("groups"))
    ]
    values = dict(rows)
    return {
        "title": job_command(job),
        "about": [f"rank {values['rank']}", values["device"], f"torch {summary.torch or 'unknown'}", values["ended"]],
        "command": values["command"],
        "files": _files(run, folder),
        "rows": [row for row in rows if row[1]],
        "places": groups,
    }


def _files(run: Run, folder: Path | None) -> list[dict[str, str]]:
    if folder is None or folder.resolve() != run.path:
        return []
    opens_in = {TRACE_NAME: "ui.perfetto.dev", SNAPSHOT_NAME: "pytorch.org/memory_viz"}
    return [{"name": name, "opens_in": program} for name, program in opens_in.items() if (run.path / name).exists()]


def _versions(summary: Summary, versions: dict[str, str], own: str) -> str:
    named = [("torch", summary.torch), ("CUDA", versions.get("cuda")), ("Python", versions.get("python"))]
    return ", ".join([*(f"{name} {version}" for name, version in named if version), f"fakedist {own}"])


def memory_section(summary: Summary, colouring: Colouring) -> dict[str, object]:
    """Memory over the step: the table of phases and the drawing's legend."""
    peak = (summary.peak_step, summary.peak_phase)
    phases = summary.by_phase if summary.peak_reserved_bytes else []
    half = _MOST_ROWS // 2
    is_shown = [at < half or at >= len(phases) - half or row.step == peak[0] for at, row in enumerate(phases)]
    rows = [row for row, shown in zip(phases, is_shown, strict=True) if shown]
    steps = sorted({row.step for row in rows if row.step > 0})
    return {
        "steps": steps if len(steps) <= _STEPS_SHOWN else [*steps[:3], *steps[-3:]],
        "num_more": len(phases) - len(rows),
        "phases": [
            {
                "step": row.step,
                "phase": row.phase,
                "is_peak": (row.step, row.phase) == peak,
                "figures": [(bytes_, format_bytes(bytes_)) for bytes_ in _phase_bytes(row)],
            }
            for row in rows
        ],
        "legend": [
            {"colour": colour, "name": name}
            for at, (colour, name) in enumerate(zip(colouring.colours, colouring.names, strict=True))
            if (colouring.of_block == at).any()
        ],
    }


def _phase_bytes(row: PhasePeak) -> tuple[int, int, int]:
    return row.peak_allocated_bytes, row.peak_reserved_bytes, row.end_allocated_bytes


def peak_section(summary: Summary, largest: list[PeakBlock], lines: list[HeldLine]) -> dict[str, object]:
    """The peak by category, by line and block by block."""
    peak = summary.peak_allocated_bytes
    categories = sorted(
        ((name, bytes_) for name, bytes_ in summary.by_category.items() if bytes_), key=lambda row: -row[1]
    )
    return {
        "total": format_bytes(peak),
        "categories": [
            _part(name, bytes_, peak) | {"bytes": bytes_, "share": f"{bytes_ / peak:.1%}"}
            for name, bytes_ in categories
        ],
        "blocks": [
            to_plain(row) | {"text": format_bytes(row.bytes), "spoken": row.category.replace("_", " ")}
            for row in largest
        ],
        "lines": [_peak_line(row, peak) for row in lines[:_NUM_LINES]],
        "has_backward": any(row.backward for row in lines[:_NUM_LINES]),
        "num_more_lines": max(len(lines) - _NUM_LINES, 0),
    }


def _peak_line(line: HeldLine, peak: int) -> dict[str, object]:
    return {
        "line": line.label,
        "bytes": (line.bytes, format_bytes(line.bytes)),
        "share": (round(100 * line.bytes / peak, 1), f"{line.bytes / peak:.1%}"),
        "backward": (line.backward, or_dash(line.backward)),
        "num": (line.num, f"{line.num:,}"),
        "categories": line.categories,
        "inner": [_peak_line(inner, peak) for inner in line.inner[:_NUM_LINES]],
    }


def layers_section(summary: Summary, folded: pd.DataFrame, times: dict[str, object] | None) -> dict[str, object]:
    """Every layer with the memory it holds. Repeated layers share a row that can be expanded.

    ``times`` has the columns of times; None if no step was timed.
    """
    folds = folded.to_dict("records")
    sizes = [max(fold["peak_total_bytes"], fold["most_total_bytes"]) for fold in folds]
    shown = _largest_rows(sizes)
    columns, empty = _layer_columns(folds)
    figures = [[_layer_figure(folds[number], column) for column in columns] for number in shown]
    largest = [max(column) or 1 for column in zip(*figures, strict=True)]
    least = summary.peak_allocated_bytes * MIN_SHARE
    return {
        "columns": [column._asdict() for column in columns],
        "empty": empty,
        "rows": [
            {
                "fold": number,
                "label": layer_label(folds[number]["name"]),
                "class_name": folds[number]["class_name"],
                "num_repeats": folds[number]["num_repeats"],
                "is_small": sizes[number] <= least,
                "figures": [
                    (bytes_, or_dash(bytes_), _percent(bytes_, most)) for bytes_, most in zip(row, largest, strict=True)
                ],
            }
            for number, row in zip(shown, figures, strict=True)
        ],
        "times": times,
        "num_small": sum(sizes[number] <= least for number in shown),
        "num_more": len(folds) - len(shown),
        "when": f"in step {summary.steps[-1].step}" if summary.steps else "in the run",
        "min_share": f"{MIN_SHARE:.1%}",
    }


class _LayerColumn(NamedTuple):
    """A column of the table of layers. The page sums for one layer by ``kind``: sum (with children), own or most."""

    name: str
    kind: str
    of: str


def _layer_columns(folds: Sequence[Mapping[Hashable, int]]) -> tuple[list[_LayerColumn], str]:
    """The columns that any layer has something in, the most important ones first, and the names of the others."""
    whole = _LayerColumn("total", "sum", " ".join(CATEGORIES))
    parts = [_LayerColumn(name, "sum", " ".join(categories)) for name, (categories, _) in LAYER_COLUMNS.items()]
    used = [column for column in parts if any(_layer_figure(fold, column) for fold in folds)]
    empty = [column.name for column in parts if column not in used]
    words = f"{', '.join(empty[:-1])} or {empty[-1]}" if len(empty) > 1 else "".join(empty)
    return [whole, _LayerColumn("most", "most", "yes"), _LayerColumn("own", "own", "yes"), *used], words


def _layer_figure(fold: Mapping[Hashable, int], column: _LayerColumn) -> int:
    if column.kind != "sum":
        return fold["peak_own_bytes" if column.kind == "own" else "most_total_bytes"]
    return sum(fold[f"peak_{name}_bytes"] for name in column.of.split())


def _largest_rows(sizes: list[int]) -> list[int]:
    """As many of the largest rows as a browser can handle, in their order."""
    if len(sizes) <= _MOST_ROWS:
        return [*range(len(sizes))]
    least = sorted(sizes, reverse=True)[_MOST_ROWS]
    return [number for number, size in enumerate(sizes) if size > least]


def communication_section(run: Run, summary: Summary) -> dict[str, object] | None:
    """Groups and calls; None without groups."""
    groups, job = read_groups(run.table("groups")), run.manifest.job
    if not groups or job is None:
        return None
    topology = RunTopology(run)
    return {
        "groups": [_group(group, job.gpus_per_node) for group in groups],
        "calls": _with_texts(summary.collectives[:_MOST_ROWS]),
        "streams": _with_texts(topology.rows()[:_MOST_ROWS]),
        "when": topology.when,
        "at_once": AT_ONCE,
        "num_more": max(len(summary.collectives) - _MOST_ROWS, 0),
        "world": f"{job.world_size:,}",
        "num_nodes": job.num_nodes,
        "per_node": job.gpus_per_node,
    }


def _with_texts(rows: Iterable[CollectiveTotal | CallsText]) -> list[dict[str, object]]:
    return [
        to_plain(row) | {"bytes_in_text": format_bytes(row.bytes_in), "bytes_out_text": format_bytes(row.bytes_out)}
        for row in rows
    ]


def _group(group: ProcessGroup, per_node: int) -> dict[str, str]:
    nodes = {rank // per_node for rank in ranks_of(group.ranks)}
    where = "within one node" if len(nodes) == 1 else f"across {len(nodes):,} nodes"
    text = f"{group.size:,} ranks {where}; this one is {group.group_rank:,}"
    return {"name": group.label, "ranks": group.ranks, "text": text}


def findings_section(findings: Sequence[Finding], cwd: str) -> list[dict[str, object]]:
    """Findings as text."""
    return [
        {
            "code": finding.code,
            "text": finding.text,
            "change": finding.change,
            "gives": gives_text(finding),
            "line": short_line(finding.line, cwd).partition(" (")[0],
            "is_certain": finding.is_certain,
        }
        for finding in findings
    ]


def advice_section(summary: Summary, cwd: str, switches: Sequence[Switch] = ()) -> list[dict[str, object]]:
    """Advice as text, then changes that only the remedy names; with the number of the switch of each, or -1."""
    numbers = {switch.advice.title: number for number, switch in enumerate(switches)}
    advised = {advice.title for advice in summary.advice}
    further = [switch.advice for switch in switches if switch.advice.title not in advised]
    return [
        {
            **advice_text(advice, summary),
            "line": short_line(advice.line, cwd).partition(" (")[0],
            "switch": numbers.get(advice.title, -1),
        }
        for advice in [*summary.advice, *further]
    ]


def reading_section(run: Run, summary: Summary) -> dict[str, object]:
    """The limits of the figures: notes, unanswered functions, made-up values."""
    notes, num = note_texts(summary.notes, run.manifest.cwd), num_warnings(summary.notes)
    return {
        "notes": notes[:num],
        "harmless": notes[num:],
        "provenance": list(run.manifest.provenance.items()),
        "invented": [
            {**row, "line": short_line(str(row["line"]), run.manifest.cwd)}
            for row in run.table("invented").to_dict("records")
        ],
        "unanswered": run.table("unanswered").to_dict("records"),
        "path": str(run.path),
        "tables": ", ".join(sorted(TABLES)),
    }
