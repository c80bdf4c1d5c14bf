"""The contents of the page's sections: figures as text, with the terminal's words and rounding."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from fakedist.analysis.calls import ranks_of
from fakedist.analysis.topology import ProcessGroup, read_groups
from fakedist.report.figures.memory_curve import Colouring
from fakedist.report.page.peak_blocks import PeakBlock, PeakLine
from fakedist.report.page.time_section import step_figure
from fakedist.report.text.facts import run_facts, run_title
from fakedist.report.text.group_sheets import AT_ONCE, CallsText, RunTopology
from fakedist.report.text.wording import (
    LAYER_COLUMNS,
    MIN_SHARE,
    advice_text,
    broke_off,
    command_line,
    ending,
    job_command,
    layer_label,
    note_texts,
    or_dash,
    peak_place,
    short_line,
    top_advice,
    verdict,
)
from fakedist.results.run import Run
from fakedist.run.directory import SNAPSHOT_NAME, TRACE_NAME
from fakedist.run.plain import to_plain
from fakedist.run.schema import CATEGORIES, TABLES
from fakedist.run.summary import CollectiveTotal, PhasePeak, Summary
from fakedist.units import format_bytes, format_us

_STEPS_SHOWN = 8
_MOST_ROWS = 1_000  # of a table
_NUM_LINES = 40


def verdict_section(run: Run, summary: Summary) -> dict[str, object]:
    """The answer: peak, share of the GPU, fits or not, the time of a step, what would help."""
    allocated, reserved = summary.peak_allocated_bytes, summary.peak_reserved_bytes
    capacity = summary.capacity_bytes
    whole = max(capacity, reserved) or 1
    parts = [(name, bytes_) for name, bytes_ in summary.by_category.items() if bytes_]
    return {
        "fits": verdict(summary, run.manifest.cwd),
        "left": _ended_early(run, summary),
        "allocated": format_bytes(allocated) if allocated else "",
        "when": peak_place(summary),
        "reserved": format_bytes(reserved),
        "capacity": format_bytes(capacity) if capacity else "",
        "share": f"{reserved / capacity:.1%}" if capacity else "",
        "limit": _percent(capacity, whole) if 0 < capacity < whole else "",
        "parts": [_part(name, bytes_, whole) for name, bytes_ in parts],
        "reserved_rest": {"text": format_bytes(reserved - allocated), "width": _percent(reserved - allocated, whole)},
        "advice": top_advice(summary, run.manifest.cwd),
        "time": step_figure(summary),
        "steps": [(each.step, format_us(each.wall_us)) for each in summary.steps[-_STEPS_SHOWN:]],
        "num_notes": len(summary.notes),
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
    """How the rank ended, if it ended before its figures were complete."""
    if summary.left_during_init is not None:
        return f"This rank {ending(summary, run.manifest.cwd)}."
    if not broke_off(summary):
        return ""
    return f"The figures are of what ran until the rank ended: {ending(summary, run.manifest.cwd)}."


def _part(name: str, bytes_: int, whole: int) -> dict[str, str]:
    named = name.replace("_", " ")
    return {"name": name, "spoken": named, "text": format_bytes(bytes_), "width": _percent(bytes_, whole)}


def holders(summary: Summary, layers: pd.DataFrame | None, lines: list[PeakLine]) -> list[dict[str, object]]:
    """Who holds most at the peak: the layer, without its children, and the line.

    Args:
        summary: The run's figures.
        layers: The result of :func:`fakedist.analysis.layer_table.fold_table`; None for a snapshot.
        lines: The result of :func:`fakedist.report.page.peak_blocks.by_line`.
    """
    found = []
    if layers is not None and len(layers):
        row = layers.nlargest(1, "peak_own_bytes").to_dict("records")[0]
        found.append(("most, by layer", layer_label(row["name"], row["num_repeats"]), row["peak_own_bytes"]))
    if lines:
        found.append(("most, by line", lines[0].line, lines[0].bytes))
    return [
        {
            "by": by,
            "name": name,
            "text": format_bytes(bytes_),
            "share": f"{bytes_ / summary.peak_allocated_bytes:.1%}",
            "is_code": by == "most, by line",
        }
        for by, name, bytes_ in found
    ]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3f}%"


def facts_section(run: Run, summary: Summary, folder: Path | None) -> dict[str, object]:
    """What ran: command, world, rank and its place in each group, versions, GPU.

    Args:
        run: The run.
        summary: Its figures.
        folder: The directory that the page is for; None if that is not known.
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
    places = [
        {
            "name": group.label,
            "place": f"{group.group_rank:,} of {group.size:,}",
            "ranks": group.ranks,
            "backend": group.backend,
        }
        for group in read_groups(run.table("groups"))
    ]
    told = dict(rows)
    return {
        "title": job_command(job),
        "about": [f"rank {told['rank']}", told["device"], f"torch {summary.torch or 'unknown'}", told["ended"]],
        "command": told["command"],
        "files": _files(run, folder),
        "rows": [row for row in rows if row[1]],
        "places": places,
    }


def _files(run: Run, folder: Path | None) -> list[dict[str, str]]:
    """The run's files for other programs, if the page is in its directory."""
    if folder is None or folder.resolve() != run.path:
        return []
    opens_in = {TRACE_NAME: "ui.perfetto.dev", SNAPSHOT_NAME: "pytorch.org/memory_viz"}
    return [{"name": name, "opens_in": program} for name, program in opens_in.items() if (run.path / name).exists()]


def _versions(summary: Summary, versions: dict[str, str], own: str) -> str:
    named = [("torch", summary.torch), ("CUDA", versions.get("cuda")), ("Python", versions.get("python"))]
    return ", ".join([*(f"{name} {version}" for name, version in named if version), f"fakedist {own}"])


def memory_section(summary: Summary, colouring: Colouring) -> dict[str, object]:
    """Memory over the step: the table of phases and the drawing's legend.

    Args:
        summary: The run's figures.
        colouring: What the colours of the drawing mean.
    """
    peak = (summary.peak_step, summary.peak_phase)
    found = summary.by_phase if summary.peak_reserved_bytes else []
    half = _MOST_ROWS // 2
    is_shown = [at < half or at >= len(found) - half or row.step == peak[0] for at, row in enumerate(found)]
    rows = [row for row, shown in zip(found, is_shown, strict=True) if shown]
    steps = sorted({row.step for row in rows if row.step > 0})
    return {
        "steps": steps if len(steps) <= _STEPS_SHOWN else [*steps[:3], *steps[-3:]],
        "num_more": len(found) - len(rows),
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


def peak_section(summary: Summary, largest: list[PeakBlock], lines: list[PeakLine]) -> dict[str, object]:
    """The peak by category, by line and block by block.

    Args:
        summary: The run's figures.
        largest: The result of :func:`fakedist.report.page.peak_blocks.largest_blocks`.
        lines: The result of :func:`fakedist.report.page.peak_blocks.by_line`.
    """
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
        "lines": [
            to_plain(row) | {"text": format_bytes(row.bytes), "share": f"{row.bytes / peak:.1%}"}
            for row in lines[:_NUM_LINES]
        ],
        "num_more_lines": max(len(lines) - _NUM_LINES, 0),
    }


def layers_section(summary: Summary, folded: pd.DataFrame, times: dict[str, object] | None) -> dict[str, object]:
    """Every layer with the memory it holds. Repeated layers share a row that can be expanded.

    Args:
        summary: The run's figures.
        folded: The result of :func:`fakedist.analysis.layer_table.fold_table`.
        times: The columns of times; None if no step was timed.
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
    """A column of the table of layers.

    Attributes:
        name: Its heading.
        kind: What the page adds up for one layer of a folded row: sum (with children), own or most.
        of: The categories of a sum.
    """

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
        "streams": _with_texts(topology.told()[:_MOST_ROWS]),
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


def advice_section(summary: Summary, cwd: str) -> list[dict[str, str]]:
    """What would help, as text."""
    return [advice_text(each) | {"line": short_line(each.line, cwd).partition(" (")[0]} for each in summary.advice]


def reading_section(run: Run, summary: Summary) -> dict[str, object]:
    """What a reader must know: notes, unanswered functions, made-up values."""
    return {
        "notes": note_texts(summary.notes, run.manifest.cwd),
        "provenance": list(run.manifest.provenance.items()),
        "invented": [
            {**row, "line": short_line(str(row["line"]), run.manifest.cwd)}
            for row in run.table("invented").to_dict("records")
        ],
        "unanswered": run.table("unanswered").to_dict("records"),
        "path": str(run.path),
        "tables": ", ".join(sorted(TABLES)),
    }
