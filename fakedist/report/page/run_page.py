"""The report as one self-contained page: it fetches nothing and runs no script but its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from fakedist.analysis.layer_table import fold_layers, fold_table
from fakedist.report.figures.look import STYLE_NAMES, load_plotly
from fakedist.report.figures.memory_figures import MemoryCurve, read_curve
from fakedist.report.figures.run_figures import read_calls
from fakedist.report.figures.time_figures import read_kernels
from fakedist.report.page import assets, drawings, sections
from fakedist.report.page.assets import joined, page_scripts, plotly_text
from fakedist.report.page.bars import phase_bars
from fakedist.report.page.drawings import Pack
from fakedist.report.page.sections import layer_columns, reserved_section, time_section
from fakedist.report.page.stacks import add_stacks
from fakedist.report.page.switches import add_switches
from fakedist.report.text.host_memory_sheets import host_memory_section
from fakedist.report.text.memory_sheets import (
    engine_sheet,
    engine_sleep_sheet,
    held_lines,
    named_phase_sheet,
    outside_section,
)
from fakedist.report.writing import replace_text
from fakedist.results.run import Run
from fakedist.rundir.schema import SCHEMA_VERSION
from fakedist.rundir.step_time import StepTime
from fakedist.visible import visible_lines

_MINUS = re.compile(r"(?<![\w.)\]-])-(?=\d[\d,.]*(?: ?(?:[KMGT]?i?B|µs|ms|s|min|%))\b|\d[\d,.]*%)")
_ARROWS = (("<-", "\u2190"), ("->", "\u2192"))
_PARTS = re.compile(r"[^.]+\.*|\.+")
_LONG = 40  # letters of one part of a name, which is then broken anywhere


def signs(text: str) -> str:
    """Our own text with minus signs and arrows: "-3.00 MiB", "2 -> 4". Not for commands, where a minus is typed."""
    for typed, arrow in _ARROWS:
        text = text.replace(f" {typed} ", f" {arrow} ")
    return _MINUS.sub("\u2212", text)


def layer_name(text: str) -> Markup:
    """A layer's name that breaks after a dot and nowhere else."""
    parts = _PARTS.findall(text)
    if not parts or max(map(len, parts)) > _LONG:
        return escape(text)
    kept = (Markup('<span class="name">{}</span>').format(part) if "-" in part else escape(part) for part in parts)
    return Markup("<wbr>").join(kept)


def command(text: str) -> Markup:
    """A command that breaks between its words, not after the dashes of an option."""
    words = (
        Markup('<span class="name">{}</span>').format(word) if "-" in word and len(word) <= _LONG else escape(word)
        for word in text.split(" ")
    )
    return Markup(" ").join(words)


def source_line(text: str) -> Markup:
    """A file, line and function that break after a folder: "examples/train.py:7 (main)"."""
    return Markup("/<wbr>").join(escape(part) for part in text.split("/"))


def step_time(text: str) -> Markup:
    """A step's time with its interval in lighter letters: "2.71 s (2.50 to 3.00)"."""
    time, _, interval = text.partition(" (")
    return escape(time) + (Markup(' <span class="interval">({}</span>').format(interval) if interval else "")


FILTERS: dict[str, Callable[[str], str]] = {
    "signs": signs,
    "layer_name": layer_name,
    "command": command,
    "source_line": source_line,
    "step_time": step_time,
}


_TEMPLATES = Path(__file__).parent / "templates"


def write_page(run: Run, path: Path) -> None:
    """Write the page of a run. An existing file is replaced atomically.

    Raises:
        RunDirectoryError: A table is missing or damaged.
        JobError: The file cannot be written.
        OSError: The disk is full.
    """
    replace_text(path, page(run, path.parent))


def page(run: Run, folder: Path | None = None, *, plotly_file: str = "") -> str:
    """The page as text. It links to the run's files if ``folder``, where the page goes, is the run's own directory.

    ``plotly_file``, next to the page, has plotly.js for pages that share it; empty to have it in the page.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    return template_text("page.html.j2", "page", _context(run.keeping_tables(), folder), plotly_file)


def template_text(template: str, entry: str, context: dict[str, object], plotly_file: str = "") -> str:
    """Render a page as text, with its style and its scripts inline. ``plotly_file`` is as in :func:`page`."""
    style = (_TEMPLATES / "style.css").read_text("utf-8")
    own = {"scripts": page_scripts(entry, style, plotly_file), "style": style}
    return _environment().get_template(template).render(schema_version=SCHEMA_VERSION, **own, **context)


def _in_its_own_direction(value: object) -> object:
    """Text with its control characters written out: one that turns the direction would turn the sentence around it."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else visible_lines(value)


def _of_visible(made: Callable[[str], str], text: str) -> str:
    return made(visible_lines(text))


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_in_its_own_direction,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({name: partial(_of_visible, made) for name, made in FILTERS.items()})
    return environment


def load_page() -> None:
    """Compile templates and import what plotly makes figures of, as the first page needs them."""
    environment = _environment()
    for name in environment.list_templates(extensions=["j2"]):
        environment.get_template(name)
    joined("page")
    plotly_text()
    load_plotly()


def _context(run: Run, folder: Path | None) -> dict[str, object]:
    summary = run.summary
    pack = Pack()
    pack.meta["figures"] = figures = assets.run_figures(run)
    pack.meta["style"] = STYLE_NAMES
    pack.meta["run"] = run.path.name
    context: dict[str, object] = {
        "verdict": sections.verdict_section(run, summary),
        "facts": sections.facts_section(run, summary, folder),
        "holders": [],
        "memory": None,
        "peak": None,
        "device": _device(run, figures),
        "segments": reserved_section(run),
        "layers": None,
        "time": None,
        "communication": sections.communication_section(run, summary),
        "outside": outside_section(summary),
        "host_memory": host_memory_section(summary.host_memory, run.manifest.cwd),
        "findings": sections.findings_section(run.findings, run.manifest.cwd),
        "advice": sections.advice_section(summary, run.manifest.cwd),
        "has_switches": False,
        "stacks": False,
        "reading": sections.reading_section(run, summary),
    }
    if summary.peak_allocated_bytes:
        curve = read_curve(run)
        figures |= _pack_memory(pack, run, curve)
        context |= _memory(pack, run, curve)
    if summary.timed:
        kernels = read_kernels(run)
        figures["kernels"] = assets.kernels_figure(run, kernels)
        context |= _time(pack, run, kernels, summary.timed[0])
    job = run.manifest.job
    per_node = 1 if job is None else job.gpus_per_node
    pack.meta["capacity"] = summary.capacity_bytes
    pack.meta["world"] = {"worldSize": summary.world_size, "perNode": per_node, "rank": summary.rank}
    return context | {"figures": sorted(figures), "numbers": pack.text()}


def _device(run: Run, figures: Mapping[str, object]) -> dict[str, object] | None:
    """Use of the GPU by processes, phases and engines; None where that says no more than the allocator's memory."""
    summary, sheets = run.summary, {}
    if summary.named_phases:
        sheets["named-phases"] = named_phase_sheet(summary)
    if summary.engine is not None:
        sheets["engine"] = engine_sheet(summary.engine, summary.estimated_outside)
    if summary.engine_sleeps:
        sheets["engine-sleeps"] = engine_sleep_sheet(summary.engine_sleeps)
    return {"bars": phase_bars(summary), "sheets": sheets} if sheets or "device" in figures else None


def _memory(pack: Pack, run: Run, curve: MemoryCurve) -> dict[str, object]:
    summary, cwd = run.summary, run.manifest.cwd
    table = run.table("layers")
    folds = fold_layers(table)
    drawings.add_layers(pack, table, folds)
    largest, num_more = drawings.largest_blocks(run, curve, folds)
    held = held_lines(run)
    switches = add_switches(pack, run, curve)
    figures: dict[str, object] = {
        "advice": sections.advice_section(summary, cwd, switches),
        "has_switches": bool(switches),
        "stacks": add_stacks(pack, run, curve),
        "memory": sections.memory_section(summary, curve.colouring)
        | {"refusal": drawings.add_refusal(pack, run, curve)},
        "peak": sections.peak_section(summary, largest, held) | {"num_more_blocks": num_more},
    }
    folded = None
    if run.by_category is not None:
        times = layer_columns(run, folds, summary.timed[1]) if summary.timed else None
        folded = fold_table(table, folds)
        figures["layers"] = sections.layers_section(summary, folded, times)
    return figures | {"holders": sections.holders(summary, folded, held)}


def _time(pack: Pack, run: Run, kernels: pd.DataFrame, time: StepTime) -> dict[str, object]:
    layers = run.table("layers")
    folds = fold_layers(layers)
    drawings.add_kernels(pack, run, kernels, layers, time)
    drawings.add_layer_times(pack, run.table("layer_times"), layers)
    drawings.add_folds(pack, folds)
    return {"time": time_section(run, kernels, layers, folds)}


def _pack_memory(pack: Pack, run: Run, curve: MemoryCurve) -> dict[str, object]:
    drawings.add_timeline(pack, run, curve)
    drawings.add_reserved(pack, curve)
    drawings.add_spans(pack, run, curve)
    drawings.add_named_phases(pack, run, curve)
    drawings.add_times(pack, run, curve)
    calls = read_calls(run, curve)
    drawings.add_calls(pack, calls)
    return assets.memory_figures_of(run, curve, calls)
