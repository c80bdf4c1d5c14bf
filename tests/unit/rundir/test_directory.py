"""NCCL's variables: which count, and how NCCL reads them."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fakedist.errors import JobError, RunDirectoryError
from fakedist.options import Job
from fakedist.rundir.directory import (
    MAGIC,
    Imported,
    JournalReader,
    JournalWriter,
    create_run_directory,
    default_name,
    import_manifest,
    is_in_use,
    keep_named,
    last_run,
    load_job,
    load_manifest,
    new_manifest,
    prune,
    read_journal,
    why_kept,
    write_manifest,
)
from fakedist.rundir.environment import check_variable, nccl_variables, number
from fakedist.rundir.notes import Note
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.records import NoteRecord, OperationsRecord
from fakedist.rundir.schema import SCHEMA_VERSION
from fakedist.rundir.tables import read_table, write_table
from fakedist.rundir.tape import TAPE_RECORDS, StoredRecord
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


@pytest.mark.parametrize(
    "name", ["thesis.tex", "rank0/thesis.tex", "rank0/tables/my.csv", "rank2/thesis.tex", "rank0/rank1/run.json"]
)
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


RECORDS = [NoteRecord(Note("first", "the first")), OperationsRecord(0, b"\x01\x00\x00\x00", bytes(4))]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    writer = JournalWriter(tmp_path / "journal.bin")
    for record in RECORDS:
        writer.append(record)
    writer.close()
    return tmp_path / "journal.bin"


def test_a_record_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "journal.bin")
    writer.append(RECORDS[0])
    assert list(read_journal(tmp_path / "journal.bin")) == RECORDS[:1]
    writer.close()


def test_cut_off_anywhere_the_whole_records_before_the_cut_are_read(journal: Path) -> None:
    whole = journal.read_bytes()
    first_end = len(MAGIC) + 8 + struct.unpack_from("<I", whole, len(MAGIC))[0]
    for length in range(len(whole)):
        journal.write_bytes(whole[:length])
        reader = read_journal(journal)
        assert list(reader) == RECORDS[: int(length >= first_end)]
        assert reader.truncated == (length not in (len(MAGIC), first_end))


def test_what_is_written_during_the_reading_is_left_for_the_next(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "tape.bin")
    records = [StoredRecord("key", bytes([number]) * number) for number in range(1, 5)]
    writer.append(records[0])
    reading = read_journal(tmp_path / "tape.bin", TAPE_RECORDS)
    begun = iter(reading)
    assert next(begun) == records[0]
    for record in records[1:]:
        writer.append(record)
    assert list(begun) == []
    assert list(JournalReader(tmp_path / "tape.bin", TAPE_RECORDS, reading.position)) == records[1:]


@pytest.mark.parametrize(
    ("change", "num_read"),
    [
        (lambda data: data, 2),
        (lambda data: data[:-1] + bytes([data[-1] ^ 0xFF]), 1),
        (lambda data: data + bytes(300), 2),  # zeros that a crashed machine leaves
        (lambda data: MAGIC + struct.pack("<II", 0xFFFFFFF0, 0) + b"x", 0),  # a length beyond the file
    ],
    ids=["whole", "damaged", "zeros", "length"],
)
def test_the_reading_ends_where_the_end_is_cut_or_damaged(
    journal: Path, change: Callable[[bytes], bytes], num_read: int
) -> None:
    before = journal.read_bytes()
    journal.write_bytes(change(before))
    reader = read_journal(journal)
    assert list(reader) == RECORDS[:num_read]
    assert reader.truncated == (journal.read_bytes() != before)


def test_a_broken_record_before_whole_ones_is_damage(journal: Path) -> None:
    data = bytearray(journal.read_bytes())
    for at in range(len(MAGIC), len(MAGIC) + 12):  # its length, its checksum, its first words
        broken = data.copy()
        broken[at] ^= 0x55
        journal.write_bytes(broken)
        with pytest.raises(RunDirectoryError, match=r"the recording is damaged: \S+journal\.bin is broken at byte 4"):
            list(read_journal(journal))


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("never",)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (pickle.dumps(Hostile(), protocol=4), r"builtins\.print"),
        (b"no pickle", r"journal\.bin is not a journal of fakedist"),
        (pickle.dumps([1, 2], protocol=4), r"journal\.bin is not a journal of fakedist"),
        (pickle.dumps({"what": 1}, protocol=4), r"journal\.bin is not a journal of fakedist"),
        (None, "not a journal"),
    ],
)
def test_what_fakedist_did_not_write_is_refused(tmp_path: Path, body: bytes | None, message: str) -> None:
    record = b"PAR1 something else" if body is None else MAGIC + struct.pack("<II", len(body), zlib.crc32(body)) + body
    (tmp_path / "journal.bin").write_bytes(record)
    with pytest.raises(RunDirectoryError, match=message):
        list(read_journal(tmp_path / "journal.bin"))


def test_an_existing_journal_is_never_written_over(journal: Path) -> None:
    with pytest.raises(FileExistsError):
        JournalWriter(journal)


def test_a_hole_of_many_gigabytes_is_damage_and_is_not_read(journal: Path) -> None:
    os.truncate(journal, 64 << 30)
    with pytest.raises(RunDirectoryError, match=r"is broken at byte .*, and more records follow"):
        list(read_journal(journal))


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


@pytest.mark.parametrize(
    ("text", "value"),
    list(
        {"4194304": 4194304, "0x10": 16, "010": 8, "4M": 4, " 7": 7, "-2": -2, "M": None, "": None, "09": None}.items()
    ),
)
def test_numbers_are_read_as_strtoll_reads_them(text: str, value: int | None) -> None:
    assert number({"NCCL_BUFFSIZE": text}, "NCCL_BUFFSIZE") == value


def test_a_variable_that_does_not_count_is_refused_with_the_option_that_sets_it() -> None:
    with pytest.raises(JobError) as caught:
        check_variable("NCCL_BUFSIZE", "1")
    assert "did you mean NCCL_BUFFSIZE?" in caught.value.hint
    assert "--env NCCL_BUFSIZE=1" in caught.value.hint


def test_a_value_that_nccl_would_not_read_whole_is_refused() -> None:
    for value in ("4M", "big", ""):
        with pytest.raises(JobError, match="not a whole number"):
            check_variable("NCCL_BUFFSIZE", value)
    check_variable("NCCL_ALGO", "^Tree")
    check_variable("NCCL_MAX_NCHANNELS", "8")


def test_only_what_counts_and_is_set_is_kept() -> None:
    environ = {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring", "NCCL_PROTO": "", "HOME": "/"}
    assert nccl_variables(environ) == {"NCCL_ALGO": "Ring"}
