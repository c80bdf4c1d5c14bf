import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fakedist.errors import RunDirectoryError
from fakedist.options import Job
from fakedist.rundir.directory import Imported, import_manifest, load_job, load_manifest, new_manifest, write_manifest
from fakedist.rundir.notes import Note
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.schema import SCHEMA_VERSION

JOB = Job(world_size=8, rank=1, target="train.py")


def test_a_new_manifest_says_that_the_run_is_running_and_has_every_option_of_its_job(tmp_path: Path) -> None:
    names = {"world_size": 64, "rank": 3, "target": "module", "is_module": True, "arguments": ("--lr", "1")}
    several = {"environment": (("A", "b=c"),), "nccl_environment": (("NCCL_ALGO", "Ring"),), "tapes": ("a", "b")}
    limits = {"steps": 3, "until": "save", "timeout_s": 2.5, "gpu_memory_bytes": 1 << 30}
    job = Job(**names, **several, **limits, nsys=True, nsys_args=("--trace=cuda",))  # type: ignore[arg-type]
    new_manifest(tmp_path, job)
    manifest = load_manifest(tmp_path)
    assert manifest.exit == Ending(Outcome.RUNNING, None)
    assert manifest.job == load_job(tmp_path) == job
    assert manifest.summary is manifest.imported is None


def test_a_run_that_lagged_by_an_estimate_opens(tmp_path: Path) -> None:
    new_manifest(tmp_path, replace(JOB, device="virtual", gpu_lag="full"))
    written = tmp_path / "run.json"
    written.write_text(written.read_text().replace('"gpu_lag": "full"', '"gpu_lag": "estimated"'))
    assert "estimated" in written.read_text()
    assert load_job(tmp_path).gpu_lag == "full"


def test_an_imported_run_has_its_report_and_no_job(tmp_path: Path) -> None:
    import_manifest(tmp_path, Path("report.nsys-rep"), "nsys")
    manifest = load_manifest(tmp_path)
    assert manifest.imported == Imported(str(Path("report.nsys-rep").resolve()), "nsys")
    assert manifest.exit == Ending(Outcome.FINISHED, 0)
    with pytest.raises(RunDirectoryError, match="was imported by fakedist nsys"):
        load_job(tmp_path)


def test_a_change_keeps_the_rest_and_leave_no_scratch_file(tmp_path: Path) -> None:
    new_manifest(tmp_path, JOB)
    write_manifest(tmp_path, replace(load_manifest(tmp_path), notes=[Note("a", "a note")]))
    assert load_manifest(tmp_path).notes == [Note("a", "a note")]
    assert load_job(tmp_path).rank == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_the_commit_of_the_users_tree_is_kept_with_a_plus_if_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "train.py").write_text("pass")
    git("add", "train.py")
    git("commit", "-qm", "x")
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    new_manifest(run, JOB)
    assert load_manifest(run).git_commit == git("rev-parse", "HEAD")
    (tmp_path / "train.py").write_text("changed")
    new_manifest(run, JOB)
    assert load_manifest(run).git_commit == git("rev-parse", "HEAD") + "+"


def test_what_is_no_run_is_told_from_what_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "a.pickle").write_bytes(b"x")
    for name, message in (
        ("nowhere", "does not exist"),
        (".", "not a run directory"),
        ("a.pickle", r"a\.pickle is a file, and a run directory is needed here"),
    ):
        with pytest.raises(RunDirectoryError, match=message):
            load_manifest(tmp_path / name)
    for text in ('{"schema_version": 1, "jo', "", "[]", '{"name": "package.json"}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(RunDirectoryError):
            load_manifest(tmp_path)


@pytest.mark.parametrize(
    ("where", "value", "reason"),
    [
        (("job",), None, "job is missing"),
        (("job",), "train.py", "job is 'train.py', not an object"),
        (("job", "world_size"), "8", "job.world_size is '8', not an integer"),
        (("job", "rank"), 8, "rank 8 does not exist in a world of 8"),
        (("job", "device"), "tpu", "job.device is 'tpu', not one of ('cuda', 'virtual')"),
        (("exit", "outcome"), "asleep", "exit.outcome is 'asleep', not one of running, finished"),
        (("exit",), [], "exit is '[]', not an object"),
        (("cwd",), 1, "cwd is '1', not a text"),
        (("summary",), {}, "summary.world_size is missing"),
    ],
)
def test_a_damaged_manifest_is_told_in_one_line(
    tmp_path: Path, where: tuple[str, ...], value: object, reason: str
) -> None:
    new_manifest(tmp_path, JOB)
    manifest = json.loads((tmp_path / "run.json").read_text())
    inner = manifest
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    (tmp_path / "run.json").write_text(json.dumps(manifest))
    with pytest.raises(RunDirectoryError) as error:
        load_manifest(tmp_path)
    assert error.value.message.startswith(f"{tmp_path / 'run.json'} cannot be read: {reason}")
    assert "\n" not in error.value.message
    assert error.value.hint == "the run directory is damaged; profile the job again"


def test_a_newer_schema_is_refused_and_says_what_to_type(tmp_path: Path) -> None:
    new_manifest(tmp_path, JOB)
    manifest = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**manifest, "schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(RunDirectoryError, match=f"schema version {SCHEMA_VERSION + 1}") as caught:
        load_manifest(tmp_path)
    assert "upgrade" in caught.value.hint
