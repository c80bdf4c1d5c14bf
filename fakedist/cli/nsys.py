"""``fakedist nsys``."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.output import (
    JSON,
    MARKDOWN,
    TEXT,
    all_rows_option,
    chosen_output,
    format_options,
    length_options,
    print_report,
    reading,
    run_directory_options,
)
from fakedist.errors import ReportError
from fakedist.temporary import scratch_directory

_EXPORT_S = 3600.0


@click.command()
@click.argument("report", type=click.Path(path_type=Path))
@run_directory_options
@click.option("--step", type=int, metavar="N", help="The step, by its range.  [default: the last complete one]")
@click.option("--process", type=int, metavar="PID", help="The process.  [default: the one with most kernels]")
@click.option("--gpu-index", type=int, metavar="N", help="The GPU.  [default: the one with most kernels]")
@format_options(TEXT, JSON, MARKDOWN)
@all_rows_option()
@length_options
def nsys(
    report: Path,
    *,
    directory: Path | None,
    force: bool,
    step: int | None,
    process: int | None,
    gpu_index: int | None,
    form: str | None,
    as_json: bool,
    all_rows: bool,
    full: bool,
    section: str | None,
) -> int:
    """Show time by layer from any report of Nsight Systems.

    REPORT is a .nsys-rep, which this machine's nsys exports, or the output of `nsys export --type sqlite`. Its NVTX
    ranges mark steps, phases and layers (docs/nsys.md). This needs neither torch nor a GPU.
    """
    from fakedist.launcher.nsight import export_sqlite
    from fakedist.results.building import write_run
    from fakedist.rundir.directory import create_run_directory, new_unnamed
    from fakedist.traces.foreign_files import kind_of
    from fakedist.traces.nsys_report import read_report
    from fakedist.traces.one_step import StepChoice

    output = chosen_output(form, as_json)
    _check_readable(report)
    with scratch_directory("nsys") as scratch:
        exported = report
        if report.suffix != ".sqlite" and kind_of(report) != "sqlite":
            exported = scratch / "report.sqlite"
            export_sqlite(report, exported, _EXPORT_S)
        with reading(report):
            imported = read_report(exported, report, StepChoice(step, process, gpu_index))
    where = directory or new_unnamed(report.stem)
    with create_run_directory(where, force) as run_directory, reading(report):
        write_run(imported, run_directory)
    with reading(report):
        print_report(run_directory, output, all_layers=all_rows, full=full, section=section)
    return 0


def _check_readable(report: Path) -> None:
    from fakedist.traces.foreign_files import kind_of

    if report.is_dir():
        raise ReportError(f"{report} is a directory", "give the file: fakedist nsys REPORT.nsys-rep")
    if not report.exists():
        raise ReportError(f"{report} does not exist", "nsys profile --trace=cuda,nvtx -o REPORT ... makes one")
    if report.suffix == ".py":
        hint = f"nsys profile --trace=cuda,nvtx -o REPORT python {report}   makes one"
        raise ReportError(f"{report} is a script, not a report", hint)
    if report.suffix == ".qdstrm":
        hint = f"QdstrmImporter --input-file {report}   makes it a .nsys-rep"
        raise ReportError(f"{report} is a stream of nsys that is not yet a report", hint)
    if report.suffix in (".pickle", ".pkl") or kind_of(report) == "json":
        hint = f"fakedist report {report}   reads traces of torch.profiler and memory snapshots"
        raise ReportError(f"{report} is not a report of Nsight Systems", hint)
    if not report.stat().st_size:
        raise ReportError(f"{report} is empty", "was nsys ended while it wrote it? profile again")
