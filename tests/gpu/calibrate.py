"""Measure kernels of many shapes on the GPU of this machine: ``make calibrate``.

    python -m tests.gpu.calibrate [--out FILE] [--gpu MODEL] [--rehearse] [--short]

The job ``tests/gpu/shapes.py`` runs twice: on the virtual GPU, where fakedist records what each launch has to do, and
on the GPU, where torch.profiler times its kernels. Both are matched as ``fakedist calibrate`` does it, and the table
that this makes overrides all other times: ``fakedist profile --times FILE``.

Without a GPU it refuses. ``--rehearse`` traces the job on the virtual GPU, whose kernels take no time: the figures mean
nothing, are written to --out alone, and the table is marked so that it cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fakedist.cost_model.kernels.calibration_table import CalibrationTable, calibration_table_text
from fakedist.errors import FakedistError, JobError, ScriptError
from fakedist.extras.calibration.calibrating import CalibrationResult, calibrate_run, calibration_report, open_timed_run
from fakedist.extras.confirm.pieces import driver_version
from fakedist.gpu.models.catalogue import GPUS, find_gpu
from fakedist.gpu.models.spec import GpuSpec
from fakedist.launcher.machine import count_real_gpus
from fakedist.report.render.terminal import render
from fakedist.report.writing import replace_text, see_that_it_can_be_written

ROOT = Path(__file__).parents[2]
SHAPES = Path(__file__).with_name("shapes.py")
REHEARSAL_GPU = "h100-80g"
#: Steps that fakedist records; the last one's launches count.
_STEPS = 2
_TIMEOUT_S = 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure kernels of many shapes on this machine's GPU.")
    parser.add_argument("--out", type=Path, help="file to write  [default: GPU.times.json]")
    parser.add_argument("--gpu", help="model of the GPU, or a GPU file  [default: the model of its name]")
    parser.add_argument("--rehearse", action="store_true", help="on the virtual GPU; figures mean nothing")
    parser.add_argument("--short", action="store_true", help="only a few shapes")
    options = parser.parse_args(argv)
    try:
        written = calibrate(options.out, options.gpu, rehearse=options.rehearse, short=options.short)
    except FakedistError as error:
        print(f"calibrate: {error.message}: {error.hint}", file=sys.stderr)
        return error.exit_code
    print(f"written: {written}")
    return 0


def calibrate(out: Path | None, gpu: str | None, *, rehearse: bool, short: bool = False) -> Path:
    """Measure, and write the table.

    Raises:
        JobError: There is no GPU, or fakedist does not know it; a rehearsal has no file to write to.
        ScriptError: The job failed.
    """
    if not rehearse and not count_real_gpus():
        raise JobError("there is no GPU here to measure", "--rehearse --out FILE runs it on the virtual GPU")
    if rehearse and out is None:
        raise JobError("a rehearsal's figures are not measured", "give --out FILE")
    spec = find_gpu(gpu or REHEARSAL_GPU) if gpu or rehearse else model_named(real_name())
    target = out or Path(f"{spec.name}.times.json")
    see_that_it_can_be_written(target)
    arguments = ["--short"] if short else []
    with tempfile.TemporaryDirectory(prefix="fakedist-calibrate-") as scratch:
        run, trace = Path(scratch, "run"), Path(scratch, "trace.json")
        virtual = ["-m", "fakedist", "profile", "--world-size=1", "--rank=0", "--device=virtual", f"--steps={_STEPS}"]
        virtual += [f"--gpu={gpu or spec.name}"]
        _python(*virtual, "-o", str(run), str(SHAPES), *arguments)
        on_gpu = [*virtual, "--until=end", "-o", str(Path(scratch, "traced"))] if rehearse else []
        on_gpu = [each for each in on_gpu if not each.startswith("--steps")]
        _python(*on_gpu, str(SHAPES), "--trace", str(trace), *arguments)
        found = calibrate_run(open_timed_run(run), trace, trace, is_rehearsal=rehearse)
    render(calibration_report(found, 0, run_directory=run, trace_file=trace, table_file=target), Console())
    replace_text(target, calibration_table_text(_told(found)))
    return target


def model_named(name: str) -> GpuSpec:
    """The GPU model of this name.

    Raises:
        JobError: fakedist does not know it.
    """
    found = next((spec for spec in GPUS.values() if spec.product == name), None)
    if found is None:
        raise JobError(f"fakedist does not know {name}", f'--gpu my_gpu.toml, with product = "{name}"')
    return found


def real_name() -> str:
    """The GPU's name, as CUDA reports it."""
    return _python("-c", "import torch; print(torch.cuda.get_device_name())").strip().splitlines()[-1]


def _told(found: CalibrationResult) -> CalibrationTable:
    """The table, with where it comes from."""
    table = found.calibrated.table
    origin = dataclasses.replace(
        table.origin,
        tool="make calibrate",
        torch=importlib.metadata.version("torch"),
        driver=driver_version() or table.origin.driver,
        file=SHAPES.name,
    )
    return dataclasses.replace(table, origin=origin)


def _python(*arguments: str) -> str:
    """Run Python with these arguments and return what it printed.

    Raises:
        ScriptError: It failed.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S)
    if done.returncode:
        raise ScriptError(
            f"{shlex.join(arguments)} ended with exit code {done.returncode}", done.stderr.strip()[-2000:], done.stderr
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
