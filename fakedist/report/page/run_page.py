"""The report as one self-contained page: it fetches nothing and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

import jinja2
import pandas as pd

from fakedist.analysis.layer_table import fold_layers, fold_table
from fakedist.report.page import memory_drawings, peak_blocks, sections, time_drawings
from fakedist.report.page.pack import Pack
from fakedist.report.page.reserved_section import reserved_section
from fakedist.report.page.time_section import layer_columns, time_section
from fakedist.report.page.typography import FILTERS
from fakedist.report.text.outside_sheet import outside_section
from fakedist.report.writing import replace_text
from fakedist.results.run import Run
from fakedist.run.schema import SCHEMA_VERSION
from fakedist.run.step_time import StepTime

_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = (
    "base",
    "timeline",
    "memory_plot",
    "memory_plot_pointer",
    "treemap",
    "tables",
    "copying",
    "groups",
    "kernels",
    "roofline",
    "theme",
    "page",
)
_BLOCK_COLUMNS = (
    "bytes",
    "alloc_event",
    "free_event",
    "category",
    "layer",
    "operation",
    "stack",
    "step",
    "phase",
    "at_peak",
)


def write_page(run: Run, path: Path) -> None:
    """Write the page of a run. An existing file is replaced atomically.

    Raises:
        RunDirectoryError: A table is missing or damaged.
        JobError: The file cannot be written.
        OSError: The disk is full.
    """
    replace_text(path, page(run, path.parent))


def page(run: Run, folder: Path | None = None) -> str:
    """The page as text.

    Args:
        run: The run.
        folder: The directory that the page is for. If it is the run's own, the page links to the files in it.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    return template_text("page.html.j2", _SCRIPTS, _context(run, folder))


def template_text(template: str, scripts: Sequence[str], context: dict[str, object]) -> str:
    """Render a page as text, with its style and its single script inline.

    Args:
        template: Name of the template.
        scripts: Names of the parts of its script.
        context: The template's variables.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    script = "\n".join((_TEMPLATES / f"{name}.js").read_text("utf-8") for name in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = {"script": script, "script_digest": digest, "style": (_TEMPLATES / "style.css").read_text("utf-8")}
    return environment.get_template(template).render(schema_version=SCHEMA_VERSION, **own, **context)


def _context(run: Run, folder: Path | None) -> dict[str, object]:
    """The page's contents as text, by section; None for an empty section."""
    summary, cwd = run.summary, run.manifest.cwd
    pack = Pack()
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
        "advice": sections.advice_section(summary, cwd),
        "reading": sections.reading_section(run, summary),
    }
    if summary.peak_allocated_bytes:
        blocks = run.table("blocks", _BLOCK_COLUMNS)
        lines = peak_blocks.job_lines(run, cwd)
        colouring = (
            memory_drawings.by_largest_lines(blocks, lines)
            if run.by_category is None
            else memory_drawings.by_category(blocks)
        )
        _pack_memory(pack, run, blocks, lines, colouring)
        table = run.table("layers")
        folds = fold_layers(table)
        memory_drawings.add_layers(pack, table, folds)
        context["memory"] = sections.memory_section(summary, colouring)
        folded = None
        if run.by_category is not None:
            times = layer_columns(run, folds, summary.timed[1]) if summary.timed else None
            folded = fold_table(table, folds)
            context["layers"] = sections.layers_section(summary, folded, times)
        held = peak_blocks.by_line(blocks, lines)
        context["holders"] = sections.holders(summary, folded, held)
        context["peak"] = sections.peak_section(summary, peak_blocks.largest_blocks(run, blocks, lines, cwd), held)
    if summary.timed:
        context |= _time(pack, run, summary.timed[0])
    pack.meta |= {"capacity": summary.capacity_bytes, "num_moves": pack.meta.get("num_moves", 0)}
    job = run.manifest.job
    per_node = 1 if job is None else job.gpus_per_node
    pack.meta["world"] = {"worldSize": summary.world_size, "perNode": per_node, "rank": summary.rank}
    pack.meta["groups"] = memory_drawings.group_objects(run.table("groups"))
    return context | {"numbers": pack.text()}


def _time(pack: Pack, run: Run, time: StepTime) -> dict[str, object]:
    """The section of times, and the data for its drawings."""
    kernels, layers = time_drawings.read_kernels(run), run.table("layers")
    folds = fold_layers(layers)
    time_drawings.add_kernels(pack, run, kernels, layers, time)
    time_drawings.add_layer_times(pack, run.table("layer_times"), layers)
    memory_drawings.add_folds(pack, folds)
    pack.meta["roofline"] = time_drawings.roofline(run, time.peaks)
    return {"time": time_section(run, kernels, layers, folds)}


def _pack_memory(
    pack: Pack, run: Run, blocks: pd.DataFrame, lines: list[str], colouring: memory_drawings.Colouring
) -> None:
    moves = memory_drawings.add_timeline(pack, run, blocks, lines, colouring)
    memory_drawings.add_reserved(pack, run, moves)
    memory_drawings.add_spans(pack, run, moves)
    memory_drawings.add_calls(pack, run, moves)
