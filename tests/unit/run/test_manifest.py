import json
import subprocess
from pathlib import Path

import pytest

from fakedist.errors import RunDirectoryError
from fakedist.job import Job
from fakedist.run.manifest import import_manifest, load_manifest, new_manifest, update_manifest
from fakedist.run.schema import MANIFEST, SCHEMA_VERSION

JOB = Job(world_size=8, rank=1, target="train.py")


def test_a_new_manifest_says_that_the_run_is_running(tmp_path: Path) -> None:
    new_manifest(tmp_path, JOB)
    manifest = load_manifest(tmp_path)
    assert manifest["exit"] == {"outcome": "running", "code": None, "message": ""}
    assert Job.from_dict(manifest["job"]) == JOB


def test_every_key_is_documented(tmp_path: Path) -> None:
    new_manifest(tmp_path, JOB)
    update_manifest(tmp_path, summary={})
    assert set(load_manifest(tmp_path)) == set(MANIFEST) - {"imported"}


def test_every_key_of_an_imported_run_is_documented(tmp_path: Path) -> None:
    import_manifest(tmp_path, Path("report.nsys-rep"), "nsys")
    update_manifest(tmp_path, summary={})
    assert set(load_manifest(tmp_path)) == set(MANIFEST)


def test_updates_keep_the_other_keys_and_leave_no_scratch_file(tmp_path: Path) -> None:
    new_manifest(tmp_path, JOB)
    update_manifest(tmp_path, notes=["a note"])
    assert load_manifest(tmp_path)["notes"] == ["a note"]
    assert load_manifest(tmp_path)["job"]["rank"] == 1
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
    assert load_manifest(run)["git_commit"] == git("rev-parse", "HEAD")
    (tmp_path / "train.py").write_text("changed")
    new_manifest(run, JOB)
    assert load_manifest(run)["git_commit"] == git("rev-parse", "HEAD") + "+"


def test_a_missing_directory_is_told_from_one_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="does not exist"):
        load_manifest(tmp_path / "nowhere")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("text", ['{"schema_version": 1, "jo', "", "[]", '{"name": "package.json"}'])
def test_truncated_and_foreign_manifests_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunDirectoryError):
        load_manifest(tmp_path)


def test_a_newer_schema_is_refused_and_says_what_to_type(tmp_path: Path) -> None:
    new_manifest(tmp_path, JOB)
    manifest = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**manifest, "schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(RunDirectoryError, match=f"schema version {SCHEMA_VERSION + 1}") as caught:
        load_manifest(tmp_path)
    assert "upgrade" in caught.value.hint
