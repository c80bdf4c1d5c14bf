"""Nsight Systems: finding it, running a program under it, and exporting its report to SQLite."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from fakedist.errors import FakedistError, ReportError, SetupError
from fakedist.options import Job
from fakedist.rank.reporter import Ended
from fakedist.rundir.directory import KERNELS_NAME, NSYS_NAME, JournalWriter
from fakedist.rundir.notes import nsys_failed
from fakedist.rundir.records import NoteRecord
from fakedist.rundir.trace_records import CAPTURE_RANGE, HostRecord, KernelsRecord
from fakedist.temporary import FRESH_PREFIX

#: Where NVIDIA's packages install it if it is not on PATH.
_PLACES = ("/opt/nvidia/nsight-systems*/*/bin/nsys", "/usr/local/cuda*/bin/nsys", "/usr/lib/nsight-systems/bin/nsys")
_EVENT_TRACE = "--cuda-event-trace"
_HELP_S = 60.0
#: By default nsys compares only registered strings with a capture range, and torch does not register its ranges.
ENVIRONMENT = {"NSYS_NVTX_PROFILER_REGISTER_ONLY": "0"}


def find_nsys(places: Iterable[str] = _PLACES, instead: str = "profile without --nsys") -> Path:
    """Find the ``nsys`` program, on PATH or at one of the places. ``instead`` is what can be done without it.

    Raises:
        SetupError: Nsight Systems is not installed.
    """
    if found := shutil.which("nsys"):
        return Path(found)
    for pattern in places:
        if there := sorted(Path("/").glob(pattern[1:])):
            return there[-1]
    raise SetupError(
        "nsys, the program of NVIDIA Nsight Systems, is neither on PATH nor in the directories of its packages",
        f"install it (developer.nvidia.com/nsight-systems; Debian: nsight-systems), or {instead}",
    )


def traces_events(nsys: Path) -> bool:
    """Return whether this version can trace where CUDA events are recorded, which tells what streams wait for."""
    try:
        done = subprocess.run([nsys, "profile", "--help"], capture_output=True, timeout=_HELP_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return _EVENT_TRACE.encode() in done.stdout


def profile_command(
    nsys: Path, report: Path, *, traces_cuda: bool, arguments: Iterable[str], has_events: bool = False
) -> list[str]:
    """The command prefix that runs a program under nsys and captures the timed step.

    ``report`` has no suffix. ``arguments`` override the ones set here. ``has_events`` needs :func:`traces_events`.
    """
    return [
        os.fspath(nsys),
        "profile",
        f"--trace={'cuda,nvtx' if traces_cuda else 'nvtx'}",
        "--sample=none",  # some versions hang if the kernel allows no sampling
        "--cpuctxsw=none",
        "--capture-range=nvtx",
        f"--nvtx-capture={CAPTURE_RANGE}",
        "--capture-range-end=stop",
        "--kill=none",
        *(["--cuda-graph-trace=node"] if traces_cuda else []),
        *([f"{_EVENT_TRACE}=true"] if traces_cuda and has_events else []),
        "--force-overwrite=true",
        f"--output={report}",
        *arguments,
    ]


def finished_report(nsys: Path, report: Path, timeout_s: float) -> Path:
    """The report that ``nsys profile`` wrote. Older packages leave a stream, which this converts to a report.

    Raises:
        ReportError: nsys wrote no report, or its stream cannot be converted within ``timeout_s``.
    """
    made, stream = report.with_name(f"{report.name}.nsys-rep"), report.with_name(f"{report.name}.qdstrm")
    if made.exists():
        return made
    if not stream.exists():
        raise ReportError(
            "nsys wrote no report: the timed step was never captured", "nsys's own messages are above; try --nsys-args"
        )
    importer = _importer(nsys)
    libraries = os.pathsep.join(filter(None, (os.fspath(importer.parent), os.environ.get("LD_LIBRARY_PATH"))))
    command = [os.fspath(importer), "--input-file", os.fspath(stream)]
    _run(command, timeout_s, {"LD_LIBRARY_PATH": libraries}, "QdstrmImporter", shlex.join(command))
    if not made.exists():
        raise ReportError(f"QdstrmImporter made no report from {stream}", shlex.join(command))
    stream.unlink()
    return made


def export_sqlite(report: Path, to: Path, timeout_s: float) -> None:
    """Export a report to SQLite. A failed export leaves no files.

    Raises:
        SetupError: nsys is not installed.
        ReportError: The export failed or took too long.
    """
    hint = "check that the file is complete and not from a newer nsys"
    options = ["--type=sqlite", "--force-overwrite=true", f"--output={to}"]
    elsewhere = f"where it is: nsys export --type sqlite {shlex.quote(str(report))}, and give the .sqlite here"
    command = [os.fspath(find_nsys(instead=elsewhere)), "export", *options, os.fspath(report)]
    try:
        _run(command, timeout_s, {}, f"nsys export of {report}", hint)
        if not to.exists():
            raise ReportError(f"nsys exported nothing from {report}", hint)
    except BaseException:
        for path in (to, to.with_name(f"{to.name}-journal")):
            path.unlink(missing_ok=True)
        raise


def _importer(nsys: Path) -> Path:
    """Find QdstrmImporter, in a host directory next to nsys's target directory."""
    # Debian: /usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys, /usr/lib/nsight-systems/host-linux-x64
    for above in nsys.resolve().parents:
        for pattern in ("host-linux-*/QdstrmImporter", "nsight-systems/host-linux-*/QdstrmImporter"):
            if found := sorted(above.glob(pattern)):
                return found[0]
    raise ReportError(
        "nsys left a stream (.qdstrm), and its QdstrmImporter was not found next to it",
        "install the package that has nsys-ui (Debian: nsight-systems), or a newer nsys",
    )


def _run(command: list[str], timeout_s: float, more: dict[str, str], what: str, hint: str) -> None:
    """Run one of nsys's programs, or raise ReportError with ``what`` and ``hint`` if it fails or takes too long."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **more}
    ) as process:
        try:
            output = process.communicate(timeout=timeout_s)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            process.kill()
            raise ReportError(f"{what} did not end within {timeout_s:.0f} s", hint) from None
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        said = next((line.strip() for line in reversed(output.replace("\r", "\n").splitlines()) if line.strip()), "")
        raise ReportError(f"{what} failed with exit code {process.returncode}: {said}", hint)


#: Seconds that nsys may take to write its report after the rank has ended.
FINISH_S = 600.0


def around(job: Job, run_directory: Path, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The prefix of the rank's command, and the rank's environment."""
    nsys, traces_cuda = find_nsys(), job.device == "cuda"
    command = profile_command(
        nsys,
        run_directory.resolve() / NSYS_NAME,
        traces_cuda=traces_cuda,
        arguments=job.nsys_args,
        has_events=traces_cuda and traces_events(nsys),
    )
    return command, {**ENVIRONMENT, **environment}


def code_of_rank(code: int, told: Ended | None) -> int:
    """The rank's exit code, from its own message or else from nsys's code, where 128 + n means signal n."""
    if told is not None:
        return told.code
    return 128 - code if code > 128 else code


def join_report(run_directory: Path) -> None:
    """Fill in a run's kernels from the report that nsys left in it. If that fails, a note gives the reason."""
    journal = JournalWriter(run_directory / KERNELS_NAME)
    report = run_directory / f"{NSYS_NAME}.nsys-rep"
    try:
        try:
            report = finished_report(find_nsys(), run_directory / NSYS_NAME, FINISH_S)
            for record in _step(run_directory, report):
                journal.append(record)
        except FakedistError as error:
            kept = f"; {report.name} is kept" if report.exists() else ""
            journal.append(NoteRecord(nsys_failed(error.message, kept)))
        except KeyboardInterrupt:
            again = f": fakedist nsys {report}   joins its report" if report.exists() else ""
            journal.append(NoteRecord(nsys_failed("interrupted", again)))
    finally:
        journal.close()


def _step(run_directory: Path, report: Path) -> tuple[KernelsRecord, HostRecord]:
    from fakedist.traces.nsys_report import recorded_step

    with tempfile.TemporaryDirectory(dir=run_directory, prefix=FRESH_PREFIX) as scratch:
        exported = Path(scratch) / "report.sqlite"
        export_sqlite(report, exported, FINISH_S)
        return recorded_step(run_directory, exported, report)
