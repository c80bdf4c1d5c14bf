"""``fakedist report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fakedist.cli.output import (
    CSV,
    DEFAULT_TABLE,
    HTML,
    JSON,
    MARKDOWN,
    TEXT,
    RunPath,
    all_rows_option,
    chosen_output,
    file_option,
    format_options,
    is_sweep,
    length_options,
    print_report,
    reading,
    run_or_last,
)
from fakedist.errors import ReportError
from fakedist.rundir.directory import rank_directories
from fakedist.temporary import scratch_directory

if TYPE_CHECKING:
    from fakedist.results.run import Run


@click.command()
@click.argument("run", type=RunPath(), required=False)
@file_option
@format_options(TEXT, JSON, MARKDOWN, HTML, CSV)
@click.option("--table", metavar="NAME", help=f"The table for --format csv.  [default: {DEFAULT_TABLE}]")
@click.option("--step", type=int, metavar="N", help="Of a trace, the step.  [default: the last complete one]")
@click.option("--process", type=int, metavar="PID", help="Of a trace, the process.  [default: that with most kernels]")
@click.option("--gpu-index", type=int, metavar="N", help="Of a file with several GPUs, the GPU.  [default: likewise]")
@all_rows_option()
@length_options
def report(
    run: Path | None,
    *,
    file: Path | None,
    form: str | None,
    as_json: bool,
    table: str | None,
    step: int | None,
    process: int | None,
    gpu_index: int | None,
    all_rows: bool,
    full: bool,
    section: str | None,
) -> int:
    """Print the report of a finished run.

    RUN is a run directory, or a file from a real GPU: a memory snapshot, a trace of torch.profiler, a report of Nsight
    Systems (docs/real-files.md). It may also be a directory of several ranks' runs, or a sweep's. Without RUN, the last
    of these in the current directory is taken. Markdown fits a comment on a pull request, HTML is one page, CSV is one
    table. This needs no torch.
    """
    output = chosen_output(form, as_json, file)
    if table is not None and output.format != CSV:
        raise click.UsageError("--table is for --format csv")
    run = run_or_last(run, is_single=bool(table or all_rows or full or section))
    is_several = is_sweep(run) or bool(rank_directories(run))
    if is_several and (table or all_rows or full or section):
        raise click.UsageError("--table, --all-rows, --full and --section are for one run")
    with reading(run):
        opened = _opened_file(run, (step, process, gpu_index))
        print_report(opened, output, all_layers=all_rows, table=table or DEFAULT_TABLE, full=full, section=section)
    return 0


_EXPORT_S = 3600.0


def _opened_file(path: Path, chosen: tuple[int | None, int | None, int | None]) -> Path | Run:
    """The part of a file that was chosen, or a report of nsys, as a run; any other path as it is."""
    is_report = path.name.endswith((".nsys-rep", ".qdrep"))
    if not is_report and not any(part is not None for part in chosen):
        return path
    from fakedist.launcher.nsight import export_sqlite
    from fakedist.results.building import open_imported
    from fakedist.results.opening import open_snapshot
    from fakedist.traces.foreign_files import kind_of
    from fakedist.traces.one_step import StepChoice

    if not path.exists():
        raise ReportError(f"{path} does not exist", "fakedist runs lists the runs here")
    if not path.is_file():
        raise click.UsageError("--step, --process and --gpu-index are for a file from a real GPU")
    if not is_report and kind_of(path) == "other":
        if chosen[0] is not None or chosen[1] is not None:
            raise click.UsageError("--step and --process are for a trace, and this is a memory snapshot")
        return open_snapshot(path, chosen[2])
    with scratch_directory("nsys") as scratch:
        exported = path
        if is_report and kind_of(path) != "sqlite":
            exported = scratch / "report.sqlite"
            export_sqlite(path, exported, _EXPORT_S)
        return open_imported(path, StepChoice(*chosen), exported)
