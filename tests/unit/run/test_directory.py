import os
from pathlib import Path

import pytest

from fakedist.errors import RunDirectoryError
from fakedist.job import Job
from fakedist.run.directory import create_run_directory, default_name, is_in_use
from fakedist.run.tables import read_table, write_table
from fakedist.temporary import replacing


def make_run(path: Path) -> None:
    with create_run_directory(path, force=False) as made:
        (made / "run.json").write_text("{}")
        (made / "journal.bin").write_bytes(b"FDJ1")
        (made / "tables").mkdir()


def test_parents_are_made(tmp_path: Path) -> None:
    make_run(tmp_path / "deep" / "run")
    assert (tmp_path / "deep" / "run" / "run.json").exists()


def test_a_run_is_not_overwritten_without_force(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="holds a run already") as caught:
        make_run(tmp_path / "run")
    assert "--force" in caught.value.hint


def test_force_empties_the_run_directory(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with create_run_directory(tmp_path / "run", force=True) as path:
        assert [entry.name for entry in path.iterdir()] == [".lock"]


def test_force_empties_a_run_directory_whose_run_was_killed_while_it_wrote(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with replacing(tmp_path / "run/run.json") as fresh:
        (tmp_path / "run" / f"{fresh.name}0").write_text("half")  # as a process leaves it that is killed here
        fresh.write_text("whole")
    (tmp_path / "run/.tables-new-1").mkdir()
    with create_run_directory(tmp_path / "run", force=True) as path:
        assert [entry.name for entry in path.iterdir()] == [".lock"]


def test_force_touches_nothing_that_fakedist_did_not_write(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "run" / "thesis.tex").write_text("three years")
    with pytest.raises(RunDirectoryError, match=r"thesis\.tex"), create_run_directory(tmp_path / "run", force=True):
        pass
    assert (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_that_is_no_run_is_refused(tmp_path: Path, force: bool) -> None:
    (tmp_path / "precious").write_text("x")
    with (
        pytest.raises(RunDirectoryError, match="neither empty nor a run directory"),
        create_run_directory(tmp_path, force),
    ):
        pass


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(RunDirectoryError, match="is a file"):
        make_run(tmp_path / "run")


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert (tmp_path / "run.json").exists()


def test_two_runs_never_share_a_directory(tmp_path: Path) -> None:
    with create_run_directory(tmp_path / "run", force=False) as path:
        (path / "run.json").write_text("{}")
        assert is_in_use(path)
        with pytest.raises(RunDirectoryError, match="in use"), create_run_directory(path, force=True):
            pass
        assert (path / "run.json").exists()
    assert not is_in_use(tmp_path / "run")
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        make_run(tmp_path / "run")


def test_the_default_name_says_script_and_rank_and_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(world_size=1024, rank=3, target="jobs/train.py")
    assert default_name(job) == Path("fakedist-train-rank3of1024")
    Path("fakedist-train-rank3of1024").mkdir()
    assert default_name(job) == Path("fakedist-train-rank3of1024-2")
    assert default_name(Job(world_size=8, rank=0, target="package.train", is_module=True)) == Path(
        "fakedist-train-rank0of8"
    )


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("file/run", "Not a directory"),
        ("a" * 300, "File name too long"),
        ("link", "is a link to nothing"),
        ("link/run", "cannot be written"),
    ],
)
def test_a_place_that_cannot_be_is_told(tmp_path: Path, place: str, said: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(RunDirectoryError, match=said):
        make_run(tmp_path / place)


def test_a_path_that_is_not_utf_8_is_a_path(tmp_path: Path) -> None:
    run = tmp_path / "\udcff"
    make_run(run)
    write_table(run, "unanswered", {"function": ["cuFoo"], "num_calls": [3]})
    assert read_table(run, "unanswered").num_rows == 1
