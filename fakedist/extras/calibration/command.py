"""``fakedist calibrate``."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.output import JSON, TEXT, RunPath, chosen_output, force_option, format_options, output_option, reading
from fakedist.errors import JobError, ReportError
from fakedist.temporary import scratch_directory

_EXPORT_S = 3600.0


@click.command()
@click.argument("run", type=RunPath())
@click.option(
    "--from-trace",
    "trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    required=True,
    help="A trace of the same job on a GPU: torch.profiler's, or a report of Nsight Systems.",
)
@output_option("file", "FILE", "The calibration table to write.  [default: RUN.times.json]", is_file=True)
@force_option("table")
@click.option("--process", type=int, metavar="PID", help="The process.  [default: the one with most kernels]")
@format_options(TEXT, JSON)
def calibrate(
    run: Path, *, trace: Path, file: Path | None, force: bool, process: int | None, form: str | None, as_json: bool
) -> int:
    """Measure the kernels of a run in a trace from your own GPU.

    RUN is a run directory of the job on the virtual GPU. The trace is what torch.profiler's export_chrome_trace wrote
    (.json or .json.gz), a .nsys-rep, or the output of `nsys export --type sqlite`. The calibration table
    overrides all other times: fakedist time RUN --times FILE, fakedist profile --times FILE (docs/calibrate.md).
    """
    from fakedist.cost_model.kernels.calibration_table import calibration_table_text
    from fakedist.extras.calibration.calibrating import calibrate_run, calibration_report, open_timed_run
    from fakedist.launcher.nsight import export_sqlite
    from fakedist.report.writing import replace_text, see_that_it_can_be_written
    from fakedist.traces.foreign_files import kind_of

    output = chosen_output(form, as_json)
    with reading(run):
        opened = open_timed_run(run)
    target = file or Path(f"{run.resolve().name}.times.json")
    if target.exists() and not force:
        raise JobError(f"{target} exists", "--force replaces it, -o FILE writes another")
    see_that_it_can_be_written(target)
    _check(trace)
    with scratch_directory("calibrate") as scratch:
        exported = trace
        if trace.suffix == ".nsys-rep" and kind_of(trace) != "sqlite":
            exported = scratch / "report.sqlite"
            export_sqlite(trace, exported, _EXPORT_S)
        with reading(trace, run):
            result = calibrate_run(opened, exported, trace, process)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_text(target, calibration_table_text(result.calibrated.table))
    rank = opened.job.rank if opened.job is not None else -1
    output.write(calibration_report(result, rank, run_directory=run, trace_file=trace, table_file=target))
    return 0


def _check(trace: Path) -> None:
    if not trace.is_file():
        why = "is a directory" if trace.is_dir() else "does not exist"
        raise ReportError(f"{trace} {why}", "give the file: --from-trace trace.json")
    if not trace.stat().st_size:
        raise ReportError(f"{trace} is empty", "was the program ended while it wrote the trace? trace again")


COMMAND = calibrate
