import fcntl
import os
from pathlib import Path

import pytest

from fakedist.errors import RunDirectoryError
from fakedist.options import Job
from fakedist.rundir.directory import create_run_directory, default_name, is_in_use
from fakedist.rundir.tables import read_table, write_table
from fakedist.temporary import replacing

MANIFEST = '{"schema_version": 1, "job": null}'


def make_run(path: Path) -> None:
    with create_run_directory(path, force=False) as made:
        (made / "run.json").write_text(MANIFEST)
        (made / "journal.bin").write_bytes(b"FDJ1")
        (made / "tables").mkdir()


@pytest.mark.parametrize("name", [".", "deep/run"])
def test_an_empty_directory_is_used_and_parents_are_made(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / name)
    assert (tmp_path / name / "run.json").exists()


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
        fresh.write_text(MANIFEST)
    (tmp_path / "run/.tables-new-1").mkdir()
    with create_run_directory(tmp_path / "run", force=True) as path:
        assert [entry.name for entry in path.iterdir()] == [".lock"]


def test_force_touches_nothing_that_fakedist_did_not_write(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "run" / "thesis.tex").write_text("three years")
    with pytest.raises(RunDirectoryError, match=r"thesis\.tex"), create_run_directory(tmp_path / "run", force=True):
        pass
    assert (tmp_path / "run" / "run.json").exists()


def test_force_touches_no_run_json_of_another_program(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"epochs": 3}')
    with pytest.raises(RunDirectoryError, match="was not written by fakedist"), create_run_directory(tmp_path, True):
        pass
    assert (tmp_path / "run.json").read_text() == '{"epochs": 3}'


def test_a_run_replaces_those_of_several_ranks_if_it_may(tmp_path: Path) -> None:
    for rank in (0, 31):
        make_run(tmp_path / f"rank{rank}")
    with pytest.raises(RunDirectoryError, match="holds the runs of 2 ranks") as caught:
        make_run(tmp_path)
    assert caught.value.hint == "add --force to replace all of it, or choose another -o"
    with create_run_directory(tmp_path, force=True) as path:
        assert [entry.name for entry in path.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["thesis.tex", "rank0/thesis.tex", "rank2/thesis.tex", "rank0/rank1/run.json"])
def test_nothing_is_replaced_next_to_something_of_the_users(tmp_path: Path, name: str) -> None:
    for rank in (0, 31):
        make_run(tmp_path / f"rank{rank}")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(MANIFEST)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunDirectoryError), create_run_directory(tmp_path, force=True):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_no_link_to_a_run_is_replaced_with_several(tmp_path: Path) -> None:
    make_run(tmp_path / "elsewhere")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "rank0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match="rank0 is not"), create_run_directory(tmp_path / "runs", force=True):
        pass
    assert (tmp_path / "elsewhere" / "run.json").exists()


def test_no_rank_is_replaced_while_one_is_in_use(tmp_path: Path) -> None:
    for rank in (0, 31):
        make_run(tmp_path / f"rank{rank}")
    with create_run_directory(tmp_path / "rank31", force=True) as path:
        (path / "run.json").write_text(MANIFEST)
        with pytest.raises(RunDirectoryError, match="in use"), create_run_directory(tmp_path, force=True):
            pass
        assert (tmp_path / "rank0" / "run.json").exists()
        assert is_in_use(path)


def test_what_a_kill_leaves_is_replaced(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    for left in (".fakedist-17", ".lock", ".tables-new-18"):
        (tmp_path / "run" / left).write_text("")
    with create_run_directory(tmp_path / "run", force=True) as path:
        assert [entry.name for entry in path.iterdir()] == [".lock"]
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / ".lock").write_text("")
    make_run(tmp_path / "locked")


def test_a_run_that_ends_never_takes_the_lock_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run opens the lock, the first ends and removes it, and the next locks the file that it has opened."""
    first = create_run_directory(tmp_path / "run", force=False)
    first.__enter__()
    flock = fcntl.flock

    def after_the_first(lock: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (tmp_path / "run" / "run.json").write_text(MANIFEST)
        first.__exit__(None, None, None)
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", after_the_first)
    with create_run_directory(tmp_path / "run", force=True) as path:
        assert is_in_use(path)


def test_a_run_that_is_killed_while_it_is_emptied_is_still_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run")
    for name in ("memory_snapshot.pickle", "report.html", "trace.json.gz", "tape.bin"):
        (tmp_path / "run" / name).write_text("")
    removed = []
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: removed.append(path.name))
    with create_run_directory(tmp_path / "run", force=True):
        assert removed[-1] == "run.json"


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_that_is_no_run_is_refused(tmp_path: Path, force: bool) -> None:
    (tmp_path / "precious").write_text("x")
    with (
        pytest.raises(RunDirectoryError, match="neither empty nor a run directory"),
        create_run_directory(tmp_path, force),
    ):
        pass


def test_two_runs_never_share_a_directory(tmp_path: Path) -> None:
    with create_run_directory(tmp_path / "run", force=False) as path:
        (path / "run.json").write_text(MANIFEST)
        assert is_in_use(path)
        with pytest.raises(RunDirectoryError, match="in use"), create_run_directory(path, force=True):
            pass
        assert (path / "run.json").exists()
    assert not is_in_use(tmp_path / "run")
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
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
    ("name", "message"),
    [
        ("file", "is a file"),
        ("file/run", "Not a directory"),
        ("a" * 300, "File name too long"),
        ("link", "is a link to nothing"),
        ("link/run", "cannot be written"),
    ],
)
def test_a_path_that_cannot_be_a_run_directory_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(RunDirectoryError, match=message):
        make_run(tmp_path / name)


def test_a_path_that_is_not_utf_8_is_a_path(tmp_path: Path) -> None:
    run = tmp_path / "\udcff"
    make_run(run)
    write_table(run, "unanswered", {"function": ["cuFoo"], "num_calls": [3]})
    assert read_table(run, "unanswered").num_rows == 1
