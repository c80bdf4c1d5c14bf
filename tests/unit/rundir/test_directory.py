import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fakedist.errors import RunDirectoryError
from fakedist.options import Job
from fakedist.rundir.directory import (
    create_run_directory,
    default_name,
    is_in_use,
    keep_named,
    last_run,
    prune,
    why_kept,
)
from fakedist.rundir.tables import read_table, write_table
from fakedist.temporary import replacing

MANIFEST = '{"schema_version": 1, "job": null}'


def make_run(path: Path) -> None:
    with create_run_directory(path, force=False) as made:
        (made / "run.json").write_text(MANIFEST)
        (made / "journal.bin").write_bytes(b"FDJ1")
        (made / "tables").mkdir()


def is_empty(path: Path) -> bool:
    """Whether a run directory has nothing but its lock."""
    return [entry.name for entry in path.iterdir()] == [".lock"]


def refuse(path: Path, message: str, *, force: bool = True) -> str:
    """The hint of the refusal to make a run here."""
    with pytest.raises(RunDirectoryError, match=message) as caught, create_run_directory(path, force):
        pass
    return caught.value.hint


@pytest.mark.parametrize("name", [".", "deep/run"])
def test_an_empty_directory_is_used_and_a_run_in_it_is_not_overwritten_without_force(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / name)
    assert "--force" in refuse(tmp_path / name, "holds a run already", force=False)
    assert (tmp_path / name / "run.json").exists()


def test_force_empties_the_run_directory_also_of_what_a_kill_leaves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run)
    with replacing(run / "run.json") as fresh:
        (run / f"{fresh.name}0").write_text("half")  # as a process leaves it that is killed here
        fresh.write_text(MANIFEST)
    for left in (".fakedist-17", ".lock", ".tables-new-18"):
        (run / left).write_text("")
    (run / ".tables-new-1").mkdir()
    with create_run_directory(run, force=True) as path:
        assert is_empty(path)
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / ".lock").write_text("")
    make_run(tmp_path / "locked")


def test_force_touches_nothing_that_fakedist_did_not_write(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "run" / "thesis.tex").write_text("three years")
    refuse(tmp_path / "run", r"thesis\.tex")
    assert (tmp_path / "run" / "run.json").exists()
    (other := tmp_path / "other").mkdir()
    (other / "run.json").write_text('{"epochs": 3}')
    refuse(other, "was not written by fakedist")
    assert (other / "run.json").read_text() == '{"epochs": 3}'


def test_a_run_replaces_those_of_several_ranks_if_it_may(tmp_path: Path) -> None:
    for rank in (0, 31):
        make_run(tmp_path / f"rank{rank}")
    hint = refuse(tmp_path, "holds the runs of 2 ranks", force=False)
    assert hint == "add --force to replace all of it, or choose another -o"
    with create_run_directory(tmp_path, force=True) as path:
        assert is_empty(path)


@pytest.mark.parametrize("name", ["thesis.tex", "rank0/thesis.tex", "rank2/thesis.tex", "rank0/rank1/run.json"])
def test_nothing_is_replaced_next_to_something_of_the_users(tmp_path: Path, name: str) -> None:
    for rank in (0, 31):
        make_run(tmp_path / f"rank{rank}")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(MANIFEST)
    before = sorted(tmp_path.rglob("*"))
    refuse(tmp_path, ".")
    assert sorted(tmp_path.rglob("*")) == before


def test_no_link_to_a_run_is_replaced_with_several(tmp_path: Path) -> None:
    make_run(tmp_path / "elsewhere")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "rank0").symlink_to(tmp_path / "elsewhere")
    refuse(tmp_path / "runs", "rank0 is not")
    assert (tmp_path / "elsewhere" / "run.json").exists()


def test_no_rank_is_replaced_while_one_is_in_use(tmp_path: Path) -> None:
    for rank in (0, 31):
        make_run(tmp_path / f"rank{rank}")
    with create_run_directory(tmp_path / "rank31", force=True) as path:
        (path / "run.json").write_text(MANIFEST)
        refuse(tmp_path, "in use")
        assert (tmp_path / "rank0" / "run.json").exists()
        assert is_in_use(path)


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
    refuse(tmp_path, "neither empty nor a run directory", force=force)


def test_two_runs_never_share_a_directory(tmp_path: Path) -> None:
    with create_run_directory(tmp_path / "run", force=False) as path:
        (path / "run.json").write_text(MANIFEST)
        assert is_in_use(path)
        refuse(path, "in use")
        assert (path / "run.json").exists()
    assert not is_in_use(tmp_path / "run")
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    refuse(tmp_path / "run", "cannot be written")


def test_the_default_name_says_script_and_rank_and_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(world_size=1024, rank=3, target="jobs/train.py")
    assert default_name(job) == Path(".fakedist/train-rank3of1024")
    assert default_name(job) == Path(".fakedist/train-rank3of1024-2")
    assert Path(".fakedist/.gitignore").read_text() == "*\n"
    module = Job(world_size=8, rank=0, target="package.train", is_module=True)
    assert default_name(module) == Path(".fakedist/train-rank0of8")


def test_a_default_name_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".fakedist").write_text("x")
    with pytest.raises(RunDirectoryError, match=r"\.fakedist cannot be written: File exists"):
        default_name(Job(world_size=8, rank=0, target="train.py"))


def unnamed(name: str) -> Path:
    """A run without a name of the user's, of a process that has ended."""
    made = subprocess.run(
        [sys.executable, "-c", f"from fakedist.rundir.directory import new_unnamed; print(new_unnamed({name!r}))"],
        capture_output=True,
        text=True,
        check=True,
    )
    path = Path(made.stdout.strip())
    (path / "run.json").write_text(MANIFEST)
    (path / "report.html").write_text("page")
    return path


def test_only_what_is_ours_alone_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = unnamed("made")
    ranks = tmp_path / ".fakedist/ranks"
    for name in ("named", "foreign", "damaged", "linked", "ranks"):
        shutil.copytree(made, made.with_name(name))
    (ranks / "run.json").unlink()
    make_run(ranks / "rank0")
    keep_named(made.with_name("named"))
    made.with_name("foreign").joinpath("notes.txt").write_text("mine")
    made.with_name("damaged").joinpath("run.json").write_text("{}")
    made.with_name("linked").rename("elsewhere")
    made.with_name("linked").symlink_to(tmp_path / "elsewhere")
    assert {path.name: why_kept(path) for path in Path(".fakedist").iterdir() if path.is_dir()} == {
        "made": "",
        "ranks": "",
        "named": "named with -o",
        "foreign": "holds something that fakedist did not write: notes.txt",
        "damaged": ".fakedist/damaged/run.json is damaged, or was not written by fakedist",
        "linked": "a link",
    }
    assert why_kept(Path("elsewhere")) == "not in .fakedist"
    prune(made)
    prune(Path(".fakedist/ranks"))
    assert not made.exists()
    assert not ranks.exists()
    with pytest.raises(RunDirectoryError, match="named stays: named with -o"):
        prune(Path(".fakedist/named"))
    assert Path(".fakedist/named/report.html").exists()
    Path(".fakedist").rename("home")
    Path(".fakedist").symlink_to("home")
    assert why_kept(Path(".fakedist/foreign")) == "a link"


def test_a_run_that_goes_on_is_not_pruned_not_even_between_two_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(world_size=8, rank=0, target="train.py")
    between = default_name(job, (0, 1))
    make_run(between / "rank0")
    assert why_kept(between) == "still runs"
    running = unnamed("running")
    assert why_kept(running) == ""
    with (running / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert why_kept(running) == "still runs"


def test_a_run_that_replaces_another_is_named_and_one_that_keeps_nothing_leaves_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with create_run_directory(unnamed("made"), force=True) as path:
        (path / "run.json").write_text(MANIFEST)
    assert why_kept(Path(".fakedist/made")) == "named with -o"
    with create_run_directory(default_name(Job(world_size=8, rank=0, target="train.py")), force=False) as path:
        pass
    assert not path.exists()


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
    refuse(tmp_path / name, message)


def test_a_path_that_is_not_utf_8_is_a_path(tmp_path: Path) -> None:
    run = tmp_path / "\udcff"
    make_run(run)
    write_table(run, "unanswered", {"function": ["cuFoo"], "num_calls": [3]})
    assert read_table(run, "unanswered").num_rows == 1


def test_the_last_run_of_a_folder_is_the_one_written_last(tmp_path: Path) -> None:
    for place, modified in (("older", 10), ("ranks/rank1", 30), ("newer", 20)):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "run.json").touch()
        os.utime(tmp_path / place / "run.json", (modified, modified))
    (tmp_path / "notes").mkdir()
    assert last_run(tmp_path) == tmp_path / "ranks/rank1"
    with pytest.raises(RunDirectoryError, match=r"no run in .*notes"):
        last_run(tmp_path / "notes")
