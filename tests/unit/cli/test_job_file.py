"""Jobs in files that another process wrote, and the program that runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from fakedist.cli import job_file, task_program
from fakedist.cli.job_file import run_job_file
from fakedist.launcher.launching import Streams
from fakedist.options import Job
from fakedist.rundir.outcome import Ending, Outcome


def job_at(directory: Path, script: str = "train.py") -> tuple[Job, Path]:
    """A job, and the file that has it."""
    job = Job(world_size=8, rank=3, target=script, device="virtual")
    path = directory / "job.json"
    path.write_text(json.dumps({"job": job.to_dict(), "directory": str(directory / "run")}))
    return job, path


def test_a_job_runs_into_its_directory_as_if_it_had_been_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, path = job_at(tmp_path)
    ran: list[tuple[Job, Path, bool]] = []

    def run_one(job: Job, directory: Path, force: bool, streams: Streams) -> tuple[Path, Ending]:
        ran.append((job, directory, force))
        assert streams.child_stdout == job_file.STDERR  # stdout is the caller's
        return directory, Ending(Outcome.EXIT, 7)

    monkeypatch.setattr(job_file, "run_one", run_one)
    monkeypatch.setattr(job_file, "check", lambda job: None)
    monkeypatch.setattr(job_file, "nothing_left", nullcontext)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert run_job_file(str(path)) == 7
    assert ran == [(job, tmp_path / "run", True)]
    assert sys.argv[:2] == ["fakedist", "profile"]
    assert {"--rank=3", "train.py"} <= set(sys.argv)
    captured = capsys.readouterr()
    assert (captured.out, "exit 7: the script's own exit code" in captured.err) == ("", True)


def test_the_program_runs_its_own_fakedist_and_says_why_a_job_cannot_run(tmp_path: Path) -> None:
    _, path = job_at(tmp_path, "absent.py")
    for name in ("fakedist", "click"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    command = [sys.executable, task_program.__file__, "run", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "no such script: absent.py" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "run").exists()
