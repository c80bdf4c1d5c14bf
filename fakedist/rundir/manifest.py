"""run.json: what the run was, how it ended, and its figures. It is always replaced atomically."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from fakedist._version import __version__
from fakedist.bounded import UnreadableError, read_json
from fakedist.errors import JobError, RunDirectoryError
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options import Job
from fakedist.rundir.directory import DAMAGED, MANIFEST_NAME
from fakedist.rundir.notes import Note
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.plain import PlainValueError, from_plain, to_plain
from fakedist.rundir.schema import SCHEMA_VERSION
from fakedist.rundir.summary import Summary
from fakedist.temporary import replacing

_PROVENANCE = {
    "memory": "measured: the caching allocator's own history and statistics",
    "collectives": "simulated: the other ranks do not exist, and hold what this rank holds",
    "estimated_outside": "estimated: a model of NCCL's buffers by its sources, from groups, calls and environment",
    "wall_us": "measured on this machine, recording included",
}


@dataclass(frozen=True, slots=True)
class Imported:
    """The report of another program that the run was made from.

    Attributes:
        report: Path of the report.
        tool: The program.
    """

    report: str
    tool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A run and how it ended.

    Attributes:
        schema_version: Version of this layout; a newer one than the reader's is refused.
        fakedist: Version that wrote it.
        command: The command line.
        cwd: Directory it was given in.
        git_commit: Commit of the directory's repository, with `+` if the tree was changed; empty without one.
        created: When, ISO 8601 with time zone.
        imported: The report that `fakedist nsys` read; None for a run of fakedist's own.
        job: The job as it was asked for: world size, rank, script, arguments, device and the rest; None if imported.
        gpu_model: The GPU model, on the virtual GPU with its power limit; None for an unknown one, and while the
            rank runs.
        exit: How the rank ended.
        versions: Of `python`, `torch` and `cuda` where the rank ran; empty while it runs.
        provenance: Which figures are measured, simulated or estimated.
        dropped: What of the run is not in the recording; these are among the notes too.
        notes: What limits what these figures mean.
        summary: The object that `--json` prints; None while the rank runs.
    """

    schema_version: int = SCHEMA_VERSION
    fakedist: str = __version__
    command: list[str]
    cwd: str
    git_commit: str
    created: str
    imported: Imported | None = None
    job: Job | None
    gpu_model: GpuSpec | None = None
    exit: Ending
    versions: dict[str, str]
    provenance: dict[str, str]
    dropped: list[Note] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    summary: Summary | None = None


def new_manifest(run_directory: Path, job: Job) -> Manifest:
    """Write the manifest of a run that is about to start: outcome ``running``. Returns it."""
    manifest = _made_here(job, None, Ending(Outcome.RUNNING, None), _PROVENANCE)
    write_manifest(run_directory, manifest)
    return manifest


def import_manifest(run_directory: Path, report: Path, tool: str) -> None:
    """Write the manifest of a run that another program, ``tool``, recorded in its report."""
    write_manifest(run_directory, imported_manifest(report, tool))


def imported_manifest(report: Path, tool: str) -> Manifest:
    """The manifest of a run that another program, ``tool``, recorded in its report."""
    imported = Imported(os.fspath(report.resolve()), tool)
    return _made_here(None, imported, Ending(Outcome.FINISHED, 0), {"kernels": f"measured: {tool}"})


def _made_here(job: Job | None, imported: Imported | None, ending: Ending, provenance: dict[str, str]) -> Manifest:
    return Manifest(
        command=list(sys.argv),
        cwd=os.getcwd(),
        git_commit=_git_commit(),
        created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        imported=imported,
        job=job,
        exit=ending,
        versions={},
        provenance=provenance,
    )


def load_manifest(run_directory: Path) -> Manifest:
    """Load the manifest of a run directory.

    Raises:
        RunDirectoryError: It is missing, damaged or not fakedist's, or a newer fakedist wrote it.
    """
    path = run_directory / MANIFEST_NAME
    try:
        values = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        problem = "is not a run directory: it has no run.json" if run_directory.is_dir() else "does not exist"
        if run_directory.is_file():
            problem = "is a file, and a run directory is needed here"
        raise RunDirectoryError(f"{run_directory} {problem}", "fakedist profile -o RUN ... makes one") from None
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}", DAMAGED) from error
    except UnreadableError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}", DAMAGED) from error
    version = values.get("schema_version") if isinstance(values, dict) and "job" in values else None
    if not isinstance(version, int):
        raise RunDirectoryError(f"{path} was not written by fakedist", "give a directory that fakedist profile made")
    if version > SCHEMA_VERSION:
        raise RunDirectoryError(
            f"{run_directory} has schema version {version}; this fakedist reads up to {SCHEMA_VERSION}",
            "pip install --upgrade fakedist",
        )
    job = values["job"] if isinstance(values, dict) else None
    if isinstance(job, dict) and job.get("gpu_lag") == "estimated":
        job["gpu_lag"] = "full"  # earlier versions had a value in between
    try:
        manifest = from_plain(Manifest, values)
    except (PlainValueError, JobError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {str(error).splitlines()[0]}", DAMAGED) from error
    if manifest.job is None and manifest.imported is None:
        raise RunDirectoryError(f"{path} cannot be read: job is missing", DAMAGED)
    return manifest


def load_job(run_directory: Path) -> Job:
    """The job of a run directory.

    Raises:
        RunDirectoryError: See :func:`load_manifest`; or another program recorded the run.
    """
    manifest = load_manifest(run_directory)
    if manifest.job is None:
        raise RunDirectoryError(
            f"{run_directory} was imported by fakedist nsys, and has no job", "fakedist profile -o RUN ... makes one"
        )
    return manifest.job


def write_manifest(run_directory: Path, manifest: Manifest) -> None:
    """Write the manifest, in place of the one that the run directory has."""
    with replacing(run_directory / MANIFEST_NAME) as path:
        path.write_text(json.dumps(to_plain(manifest), indent=1, allow_nan=False) + "\n")


def _git_commit() -> str:
    """The commit, with "+" appended if tracked files are modified."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        if head.returncode:
            return ""
        status = ["git", "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
