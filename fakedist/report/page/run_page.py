"""The report as one self-contained page: it fetches nothing and runs no script but its own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2
import pandas as pd

from fakedist.analysis.layer_table import fold_layers, fold_table
from fakedist.report.figures.call_figures import read_calls
from fakedist.report.figures.kernel_figures import read_kernels
from fakedist.report.figures.look import STYLE_NAMES, load_plotly
from fakedist.report.figures.memory_curve import MemoryCurve, read_curve
from fakedist.report.page import memory_drawings, page_figures, peak_blocks, sections, time_drawings
from fakedist.report.page.pack import Pack
from fakedist.report.page.reserved_section import reserved_section
from fakedist.report.page.scripts import joined, page_scripts, plotly_text
from fakedist.report.page.time_section import layer_columns, time_section
from fakedist.report.page.typography import FILTERS
from fakedist.report.text.outside_sheet import outside_section
from fakedist.report.writing import replace_text
from fakedist.results.run import Run
from fakedist.run.schema import SCHEMA_VERSION
from fakedist.run.step_time import StepTime

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
    """The page as text.

    Args:
        run: The run.
        folder: The directory that the page is for. If it is the run's own, the page links to the files in it.
        plotly_file: Name of a file next to the page that has plotly.js, for pages that share it; empty to have it in
            the page.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    return template_text("page.html.j2", "page", _context(run.keeping_tables(), folder), plotly_file)


def template_text(template: str, entry: str, context: dict[str, object], plotly_file: str = "") -> str:
    """Render a page as text, with its style and its scripts inline.

    Args:
        template: Name of the template.
        entry: Name of the module that puts the page together.
        context: The template's variables.
        plotly_file: As in :func:`page`.
    """
    style = (_TEMPLATES / "style.css").read_text("utf-8")
    own = {"scripts": page_scripts(entry, style, plotly_file), "style": style}
    return _environment().get_template(template).render(schema_version=SCHEMA_VERSION, **own, **context)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    return environment


def load_page() -> None:
    """Load what the first page needs: templates are compiled, and plotly imports what figures are made of."""
    environment = _environment()
    for name in environment.list_templates(extensions=["j2"]):
        environment.get_template(name)
    joined("page")
    plotly_text()
    load_plotly()


def _context(run: Run, folder: Path | None) -> dict[str, object]:
    """The page's contents as text, by section; None for an empty section."""
    summary = run.summary
    pack = Pack()
    pack.meta["figures"] = figures = page_figures.run_figures(run)
    pack.meta["style"] = STYLE_NAMES
    context: dict[str, object] = {
        "verdict": sections.verdict_section(run, summary),
        "facts": sections.facts_section(run, summary, folder),
        "holders": [],
        "memory": None,
        "peak": None,
        "segments": reserved_section(run),
        "layers": None,
        "time": None,
        "communication": sections.communication_section(run, summary),
        "outside": outside_section(summary),
        "advice": sections.advice_section(summary, run.manifest.cwd),
        "reading": sections.reading_section(run, summary),
    }
    if summary.peak_allocated_bytes:
        curve = read_curve(run)
        figures |= _pack_memory(pack, run, curve)
        context |= _memory(pack, run, curve)
    if summary.timed:
        kernels = read_kernels(run)
        figures["kernels"] = page_figures.kernels_figure(run, kernels)
        context |= _time(pack, run, kernels, summary.timed[0])
    job = run.manifest.job
    per_node = 1 if job is None else job.gpus_per_node
    pack.meta["capacity"] = summary.capacity_bytes
    pack.meta["world"] = {"worldSize": summary.world_size, "perNode": per_node, "rank": summary.rank}
    return context | {"figures": sorted(figures), "numbers": pack.text()}


def _memory(pack: Pack, run: Run, curve: MemoryCurve) -> dict[str, object]:
    """The sections of memory, the peak and the layers."""
    summary, cwd = run.summary, run.manifest.cwd
    table = run.table("layers")
    folds = fold_layers(table)
    memory_drawings.add_layers(pack, table, folds)
    largest = peak_blocks.largest_blocks(run, curve.blocks, curve.lines, cwd)
    held = peak_blocks.by_line(curve.blocks, curve.lines)
    found: dict[str, object] = {
        "memory": sections.memory_section(summary, curve.colouring),
        "peak": sections.peak_section(summary, largest, held),
    }
    folded = None
    if run.by_category is not None:
        times = layer_columns(run, folds, summary.timed[1]) if summary.timed else None
        folded = fold_table(table, folds)
        found["layers"] = sections.layers_section(summary, folded, times)
    return found | {"holders": sections.holders(summary, folded, held)}


def _time(pack: Pack, run: Run, kernels: pd.DataFrame, time: StepTime) -> dict[str, object]:
    """The section of times, and the data for its charts."""
    layers = run.table("layers")
    folds = fold_layers(layers)
    time_drawings.add_kernels(pack, run, kernels, layers, time)
    time_drawings.add_layer_times(pack, run.table("layer_times"), layers)
    memory_drawings.add_folds(pack, folds)
    return {"time": time_section(run, kernels, layers, folds)}


def _pack_memory(pack: Pack, run: Run, curve: MemoryCurve) -> dict[str, object]:
    """The data for the charts of memory and of calls over time, and their figures."""
    memory_drawings.add_timeline(pack, run, curve)
    memory_drawings.add_reserved(pack, curve)
    memory_drawings.add_spans(pack, run, curve)
    memory_drawings.add_times(pack, run, curve)
    calls = read_calls(run, curve)
    memory_drawings.add_calls(pack, calls)
    return page_figures.memory_figures_of(run, curve, calls)
