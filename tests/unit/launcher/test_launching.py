from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fakedist.errors import JobError, RecordingError, SetupError
from fakedist.launcher import launching
from fakedist.launcher.launching import Streams, time_in_second_run
from fakedist.launcher.machine import Memory
from fakedist.options import Device, Job
from fakedist.rank.reporter import PIPE_VARIABLE, Failed, Message
from fakedist.rank.reporter import Ended as Told
from fakedist.rundir.directory import JOURNAL_NAME, KERNELS_NAME, JournalWriter, load_job, read_journal
from fakedist.rundir.encoding import Record
from fakedist.rundir.launch_records import HostClockRecord, LaunchKeysRecord
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.plain import to_plain
from fakedist.rundir.records import NoteRecord, StepRecord
from fakedist.rundir.time_notes import host_clock_disturbed, timed_early

JOB = Job(world_size=16, rank=9, target="train.py")


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    return directory


def tell(message: Message) -> str:
    """Code of the child that sends the parent a message."""
    line = json.dumps({type(message).__name__: to_plain(message)}) + "\n"
    return f"os.write(pipe, {line.encode()!r})"


def child(run_directory: Path, code: str, started: bool = True, grace_s: float = 600.0, **job: Any) -> Ending:
    """The end of a rank that runs ``code`` instead of the harness."""
    lines = ["import os, sys, signal, time, subprocess", f"pipe = int(os.environ['{PIPE_VARIABLE}'])"]
    if started:
        lines.append('os.write(pipe, b\'{"Started": {"pid": %d}}\\n\' % os.getpid())')
    recorded, say = job.pop("recorded", lambda: None), job.pop("say", lambda text: None)
    streams = Streams(say=say, program=(sys.executable, "-c", "\n".join([*lines, code])), grace_s=grace_s)
    return launching.run_child(dataclasses.replace(JOB, **job), run_directory, streams, recorded)


class Clock:
    """The time as the parent reads it. It stands still until ``begun`` exists, then every deadline is over."""

    def __init__(self, begun: Path) -> None:
        self._begun = begun
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return time.monotonic() if self._begun.exists() else -1e9


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Python for a child: from here on the given time is over, however long the child took to come here."""
    begun = tmp_path / "begun"
    monkeypatch.setattr(launching, "time", Clock(begun))
    return f"open({str(begun)!r}, 'w').close()"


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        (tell(Told(Outcome.FINISHED, 0)), Ending(Outcome.FINISHED, 0)),
        ("sys.exit(3)", Ending(Outcome.EXIT, 3)),
        (f"{tell(Told(Outcome.OUT_OF_MEMORY, 4, 'm'))}; sys.exit(4)", Ending(Outcome.OUT_OF_MEMORY, 4, "m")),
        ("os.kill(os.getpid(), signal.SIGSEGV)", Ending(Outcome.KILLED, 139, "by SIGSEGV")),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            Ending(Outcome.KILLED, 137, "by SIGKILL; the machine may have run out of memory"),
        ),
    ],
)
def test_the_ending_is_what_the_child_said_or_how_it_died(run_directory: Path, code: str, ending: Ending) -> None:
    assert child(run_directory, code) == ending


def test_a_machine_whose_memory_is_nearly_gone_is_said_once_before_the_kernel_ends_the_rank(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "memory", lambda: Memory(1 << 30, 24 << 30))
    monkeypatch.setattr(launching, "rss_bytes", lambda pid: 20 << 30)
    monkeypatch.setattr(launching, "_MEMORY_S", 0.0)
    said: list[str] = []
    code = "time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)"
    message = "by SIGKILL; this machine's memory was nearly gone, 20.00 GiB of it held by the rank"
    assert child(run_directory, code, say=said.append) == Ending(Outcome.KILLED, 137, message)
    nearly_gone = "this machine's memory is nearly gone: 1.00 GiB of 24.00 GiB are left, and the rank holds 20.00 GiB"
    assert said == [f"{nearly_gone}; the kernel may end it"]


def test_a_rank_that_does_not_leave_when_asked_to_is_killed_and_was_interrupted(run_directory: Path) -> None:
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    assert child(run_directory, code, grace_s=0.2) == Ending(Outcome.INTERRUPTED, 143, "SIGTERM")


@pytest.mark.parametrize(
    ("at_sigterm", "grace_s", "line"),
    [
        ("signal.SIG_DFL", 600.0, ""),
        ("signal.SIG_IGN", 0.2, ""),
        (
            f"lambda *_: ({tell(Told(Outcome.INTERRUPTED, 143, 'SIGTERM', 'train.py:3 (wait_for)'))}, sys.exit(143))",
            600.0,
            ", at train.py:3 (wait_for)",
        ),
    ],
    ids=["dies", "does not heed", "names the line that it came to"],
)
def test_the_given_time_is_over(run_directory: Path, begin: str, at_sigterm: str, grace_s: float, line: str) -> None:
    code = f"signal.signal(signal.SIGTERM, {at_sigterm}); {begin}; time.sleep(600)"
    reached = f"the time limit given with --timeout was reached{line}"
    assert child(run_directory, code, grace_s=grace_s, timeout_s=0.5) == Ending(Outcome.TIMEOUT, 124, reached)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (f"{tell(Failed('no', 'do', before_start=True))}; sys.exit(1)", ("no", "do")),
        ("sys.exit(9)", ("the rank's process ended before the script began: exit code 9", "fakedist doctor")),
    ],
)
def test_an_error_of_ours_before_the_script_leaves_nothing_behind(
    run_directory: Path, code: str, error: tuple[str, str]
) -> None:
    with pytest.raises(RecordingError) as caught:
        child(run_directory, code, started=False)
    assert (caught.value.message, caught.value.hint) == error
    assert list(run_directory.iterdir()) == []


@pytest.mark.parametrize(
    ("heard", "ending"),
    [
        (f"{tell(Told(Outcome.INTERRUPTED, 130, 'told'))}; sys.exit(130)", Ending(Outcome.INTERRUPTED, 130, "told")),
        ("os.kill(os.getppid(), signal.SIGINT); signal.pause()", Ending(Outcome.INTERRUPTED, 130, "Ctrl-C, twice")),
    ],
)
def test_a_ctrl_c_reaches_the_child_once_and_the_second_kills_it(
    run_directory: Path, heard: str, ending: Ending
) -> None:
    said: list[str] = []
    body = "try:\n    os.kill(os.getppid(), signal.SIGINT)\n    time.sleep(600)\nexcept KeyboardInterrupt:\n"
    code = f"signal.signal(signal.SIGINT, signal.default_int_handler)\n{body}    {heard}"
    assert child(run_directory, code, say=said.append) == ending
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert said == ["stopping; writing the report (a second Ctrl-C kills the script)"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_the_caller_ignores_stays_ignored(run_directory: Path, number: int) -> None:
    code = f"os.kill(os.getppid(), {number}); time.sleep(0.3); {tell(Told(Outcome.FINISHED, 0))}"
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert child(run_directory, code) == Ending(Outcome.FINISHED, 0)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_the_last_record_is_reported_while_the_child_still_runs(run_directory: Path) -> None:
    heard = run_directory / "heard"
    waits = f"\nwhile not os.path.exists({str(heard)!r}): time.sleep(0.01)"
    code = tell(Told(Outcome.FINISHED, 0)) + waits
    assert child(run_directory, code, recorded=heard.touch) == Ending(Outcome.FINISHED, 0)


def test_what_the_child_left_running_is_ended(run_directory: Path) -> None:
    left = run_directory / "left"
    child(run_directory, f"open({str(left)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))")
    stat = Path(f"/proc/{left.read_text()}/stat")
    assert not stat.exists() or ") Z " in stat.read_text()


def test_what_the_user_set_wins_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "kept")
    monkeypatch.setenv("RANK", "77")
    job = dataclasses.replace(JOB, environment=(("WORLD_SIZE", "3"), ("NEW", "1")))
    environment = launching.child_environment(job)
    assert (environment["MINE"], environment["NEW"], environment["WORLD_SIZE"]) == ("kept", "1", "3")
    assert environment["RANK"] == "9"


@pytest.mark.parametrize(("visible", "chosen"), [(None, "0"), ("2,3", "2"), ("GPU-abc", "GPU-abc")])
def test_a_rank_sees_the_first_real_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, chosen: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environment = launching.child_environment(dataclasses.replace(JOB, device="cuda"))
    assert environment["CUDA_VISIBLE_DEVICES"] == chosen


def test_hidden_real_gpus_do_not_hide_the_virtual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" not in launching.child_environment(JOB)


def test_a_cpu_build_of_torch_is_named_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(launching, "torch_build", lambda: ("2.13.0+cpu", ""))
    job = dataclasses.replace(JOB, target=str(tmp_path / "train.py"), device="cuda")
    with pytest.raises(SetupError, match=r"2\.13\.0\+cpu is a CPU build") as error:
        launching.check(job)
    assert "pip install torch" in error.value.hint


def test_an_unknown_gpu_is_named_before_anything_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(launching, "ensure_driver", lambda: pytest.fail("built"))
    with pytest.raises(JobError, match="h100-80"):
        launching.check(dataclasses.replace(JOB, target=str(tmp_path / "train.py"), gpu="h100-80"))


def test_ranks_that_run_without_the_fast_path_say_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(launching, "ensure_driver", lambda: None)
    monkeypatch.setenv("FAKEDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    launching._prepare_fast_path.cache_clear()
    for _ in range(2):
        launching.check(dataclasses.replace(JOB, target=str(tmp_path / "train.py")))
    launching._prepare_fast_path.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert "recorded in Python, slower, with the same results: no C++ compiler was found" in line
    assert "apt-get install g++" in line


@pytest.mark.parametrize("device", ["virtual", "cuda"])
def test_an_allocator_that_keeps_no_history_is_refused_before_anything_is_written(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text("")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8, backend: cudaMallocAsync")
    job = Job(world_size=8, rank=0, target=str(tmp_path / "script.py"), device=device)
    with pytest.raises(SetupError, match="cudaMallocAsync") as error:
        launching.check(job)
    assert "--env PYTORCH_CUDA_ALLOC_CONF=" in error.value.hint


KEYS = LaunchKeysRecord(3, b"12345678", 1)
CLOCK = HostClockRecord(3, b"12345678", 1, 2.0, 3.0, 3.0, 0.0, 0.1, 0.0, is_second_run=True)


def written(path: Path, *records: Record) -> None:
    journal = JournalWriter(path)
    for record in records:
        journal.append(record)
    journal.close()


def second_run(
    tmp_path: Path,
    *journal: Record,
    records: tuple[Record, ...] | RecordingError = (),
    outcome: Outcome = Outcome.FINISHED,
) -> tuple[list[Record], list[Job]]:
    """The records that a second run adds to a run with this journal, and the jobs that ran. It writes or raises."""
    written(tmp_path / JOURNAL_NAME, *journal)
    jobs = []

    def run(job: Job, directory: Path) -> Ending:
        assert load_job(directory) == job
        assert list(read_journal(directory / KERNELS_NAME)) == [KEYS]
        jobs.append(job)
        if isinstance(records, RecordingError):
            raise records
        written(directory / JOURNAL_NAME, *records)
        return Ending(Outcome.KILLED, 137, "by SIGKILL")

    job = dataclasses.replace(JOB, until="end", clock_run=True)
    time_in_second_run(job, tmp_path, Ending(outcome, 0), run)
    path = tmp_path / KERNELS_NAME
    return (list(read_journal(path)) if path.exists() else []), jobs


def steps(number: int) -> list[Record]:
    return [StepRecord(step, 0, 1, 0, "", "") for step in range(1, number + 1)]


@pytest.mark.parametrize(("num_steps", "recorded"), [(2, 1), (3, 1), (4, 2), (100, 2)])
def test_a_second_run_records_a_step_or_two_and_adds_the_clock_of_the_others(
    tmp_path: Path, num_steps: int, recorded: int
) -> None:
    disturbed = NoteRecord(host_clock_disturbed(2.0))
    made = (*steps(recorded), CLOCK, NoteRecord(timed_early(1)), disturbed)
    added, (job,) = second_run(tmp_path, *steps(num_steps), KEYS, records=made)
    assert added == [CLOCK, disturbed]
    assert (job.steps, job.until, job.clock_run) == (recorded, None, False)


@pytest.mark.parametrize(
    ("num_steps", "how", "why"),
    [
        (1, {}, "the script trains one step"),
        (3, {"outcome": Outcome.EXCEPTION}, "the first run did not end well"),
        (3, {"records": RecordingError("no such thing", "")}, "no such thing"),
        (3, {"records": ()}, "by SIGKILL"),
    ],
)
def test_a_second_run_that_measured_nothing_says_why(
    tmp_path: Path, num_steps: int, how: dict[str, Any], why: str
) -> None:
    (note,), _ = second_run(tmp_path, *steps(num_steps), KEYS, **how)
    assert isinstance(note, NoteRecord)
    assert note.note.code == "second_run_without_time"
    assert why in note.note.text


def test_a_run_that_had_bare_steps_needs_no_second_one(tmp_path: Path) -> None:
    assert second_run(tmp_path, *steps(3)) == ([], [])
