"""run.json: what the run was, how it ended, and its figures. It is always replaced atomically."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fakedist._version import __version__
from fakedist.errors import RunDirectoryError
from fakedist.job import Job
from fakedist.run.directory import MANIFEST_NAME
from fakedist.run.outcome import Ending, Outcome
from fakedist.run.plain import to_plain
from fakedist.run.schema import SCHEMA_VERSION

_PROVENANCE = {
    "memory": "measured: the caching allocator's own history and statistics",
    "collectives": "simulated: the other ranks do not exist, and hold what this rank holds",
    "estimated_outside": "estimated: a model of NCCL's buffers by its sources, from groups, calls and environment",
    "wall_us": "measured on this machine, recording included",
}


def new_manifest(run_directory: Path, job: Job) -> None:
    """Write the manifest of a run that is about to start: outcome ``running``."""
    _write(
        run_directory,
        {
            **_made_here(),
            "job": job.to_dict(),
            "exit": to_plain(Ending(Outcome.RUNNING, None)),
            "versions": {},
            "provenance": _PROVENANCE,
            "dropped": [],
            "notes": [],
        },
    )


def import_manifest(run_directory: Path, report: Path, tool: str) -> None:
    """Write the manifest of a run that another program recorded.

    Args:
        run_directory: The run directory.
        report: The program's report.
        tool: The program's name.
    """
    unknown: dict[str, Any] = {"world_size": None, "rank": None, "gpus_per_node": 1, "gpu_memory_bytes": None}
    job = {"target": report.name, "is_module": False, "arguments": [], "device": "cuda"}
    _write(
        run_directory,
        {
            **_made_here(),
            "imported": {"report": os.fspath(report.resolve()), "tool": tool},
            "job": {**unknown, **job},
            "exit": to_plain(Ending(Outcome.FINISHED, 0)),
            "versions": {},
            "provenance": {"kernels": f"measured: {tool}"},
            "dropped": [],
            "notes": [],
        },
    )


def _made_here() -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "fakedist": __version__,
        "command": list(sys.argv),
        "cwd": os.getcwd(),
        "git_commit": _git_commit(),
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def update_manifest(run_directory: Path, **fields: Any) -> None:
    """Replace some keys of the manifest.

    Raises:
        RunDirectoryError: See :func:`load_manifest`.
    """
    _write(run_directory, {**load_manifest(run_directory), **fields})


def load_manifest(run_directory: Path) -> dict[str, Any]:
    """Load the manifest of a run directory.

    Raises:
        RunDirectoryError: It is missing or unreadable, or a newer fakedist wrote it.
    """
    path = run_directory / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        what = "is not a run directory: it has no run.json" if run_directory.is_dir() else "does not exist"
        raise RunDirectoryError(f"{run_directory} {what}", "fakedist profile -o RUN ... makes one") from None
    except (ValueError, OSError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}", "the run directory is damaged; run again") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("schema_version"), int) or "job" not in manifest:
        raise RunDirectoryError(f"{path} was not written by fakedist", "give a directory that fakedist profile made")
    if manifest["schema_version"] > SCHEMA_VERSION:
        newer = manifest["schema_version"]
        raise RunDirectoryError(
            f"{run_directory} has schema version {newer}; this fakedist reads up to {SCHEMA_VERSION}",
            "pip install --upgrade fakedist",
        )
    return manifest


def _write(run_directory: Path, manifest: dict[str, Any]) -> None:
    scratch = run_directory / f".{MANIFEST_NAME}.{os.getpid()}"
    try:
        scratch.write_text(json.dumps(manifest, indent=1) + "\n")
        scratch.replace(run_directory / MANIFEST_NAME)
    finally:
        scratch.unlink(missing_ok=True)


def _git_commit() -> str:
    """Commit of the working directory's repository, with "+" appended if tracked files are modified."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        if head.returncode:
            return ""
        status = ["git", "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
