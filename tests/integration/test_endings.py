"""Every way a run can end: the exit code is right, run.json says how it was, and the report is made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pytest

from fakedist.launcher.executors.process import TaskProcesses
from fakedist.launcher.executors.task import Task
from fakedist.options import Job
from tests.conftest import RunFakedist

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parent / "jobs" / "ending.py"
ROOT = Path(__file__).parents[2]


@dataclass
class Run:
    """A finished run: exit code, output, outcome in run.json."""

    directory: Path
    code: int
    out: str
    err: str
    outcome: object
    command: RunFakedist

    @cached_property
    def report(self) -> dict[str, Any]:
        """Its report, from ``fakedist report``, as JSON."""
        return self.command("report", "run", "--json", cwd=self.directory).json()


def environment() -> dict[str, str]:
    """This process's environment with fakedist found, whether it is installed or not."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "COLUMNS": "200"}


JOB = ("profile", "--device", "virtual", "--world-size", "16", "--rank", "11", "--no-page", "--output", "run")


def start(directory: Path, how: str, *options: str) -> subprocess.Popen[str]:
    """Start a run of the script that ends in the way ``how``, in ``directory``, in processes of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "fakedist", *JOB, *options, str(SCRIPT), how],
        cwd=directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Ran(Protocol):
    """The type of the fixture ``ran``."""

    def __call__(self, how: str, *options: str, directory: Path = ...) -> Run: ...


class Finish(Protocol):
    """The type of the fixture ``finish``."""

    def __call__(self, process: subprocess.Popen[str], out: str = "") -> Run: ...


@pytest.fixture
def ran(run_fakedist: RunFakedist, tmp_path: Path) -> Ran:
    """Run the script until it has ended in the way ``how``."""

    def run(how: str, *options: str, directory: Path = tmp_path) -> Run:
        done = run_fakedist(*JOB, *options, SCRIPT, how, cwd=directory, env={"COLUMNS": "200"})
        return ended(directory, done.code, done.stdout, done.stderr, run_fakedist)

    return run


@pytest.fixture
def finish(run_fakedist: RunFakedist, tmp_path: Path) -> Finish:
    """Wait for a run that was started, of which ``out`` was read."""

    def wait(process: subprocess.Popen[str], out: str = "") -> Run:
        rest, err = process.communicate()
        return ended(tmp_path, process.returncode, out + rest, err, run_fakedist)

    return wait


def ended(directory: Path, code: int, out: str, err: str, command: RunFakedist) -> Run:
    """The run of a command that has ended."""
    manifest = json.loads((directory / "run/run.json").read_text())
    assert manifest["exit"]["code"] == code, err
    return Run(directory, code, out, err, manifest["exit"]["outcome"], command)


def until(process: subprocess.Popen[str], line: str) -> str:
    """Read the run's output until the script has printed ``line``."""
    assert process.stdout is not None
    read = ""
    while not read.endswith(f"{line}\n"):
        part = process.stdout.readline()
        assert part, f"ended before it printed {line!r}: {read}"
        read += part
    return read


def timed_step(run: Run) -> tuple[int, str]:
    """The step that has times, and how the printed report calls it."""
    (line,) = [line for line in run.out.splitlines() if line.startswith("Time of ")]
    assert "\n  limited by " in run.out
    return run.report["kernels"]["step"], line.removeprefix("Time of ").removesuffix(" by a model of the GPU")


@pytest.mark.parametrize(
    ("how", "code", "outcome", "last"),
    [
        ("stopped", 0, "stopped", ""),
        pytest.param("finished", 0, "finished", "", marks=pytest.mark.nightly),
        pytest.param("exit3", 3, "exit", "fakedist: exit 3: the script's own exit code", marks=pytest.mark.nightly),
        pytest.param("exit_text", 1, "exit", "fakedist: exit 1: the script's own exit code", marks=pytest.mark.nightly),
        ("exception", 1, "exception", "fakedist: exit 1: the script raised ValueError: a bad value"),
        pytest.param("os_exit", 7, "exit", "fakedist: exit 7: the script's own exit code", marks=pytest.mark.nightly),
        pytest.param(
            *("out_of_memory", 4, "out_of_memory", "fakedist: exit 4: the rank does not fit the GPU"),
            marks=pytest.mark.long,
        ),
        pytest.param("caught_out_of_memory", 0, "finished", "", marks=pytest.mark.nightly),
        pytest.param(
            *("segfault", 139, "killed", "fakedist: exit 139: the script was killed by SIGSEGV, which it sent itself"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_run_ends_as_its_script_does(ran: Ran, how: str, code: int, outcome: str, last: str) -> None:
    run = ran(how)
    assert (run.code, run.outcome) == (code, outcome), run.err
    assert run.err.rstrip().rpartition("\n")[2] == last
    assert "swallowed" not in run.out
    ends_by_itself = how not in ("os_exit", "segfault")
    assert ("atexit ran" in run.out) == ends_by_itself
    assert ("finally ran" in run.out) == (how == "stopped")
    assert (run.report["world_size"], run.report["rank"]) == (16, 11)
    peak = run.report["peak_allocated_bytes"]
    assert isinstance(peak, int)
    if how == "exception":  # before step 2, the first that is to be timed
        assert timed_step(run) == (1, "step 1, the last complete one before the script failed, estimated")
        shown = run.err[run.err.index("Traceback") :]
        assert shown.splitlines()[1].strip().startswith(f'File "{SCRIPT}", line ')
        assert f"{ROOT}/fakedist/" not in shown
        assert "ValueError: a bad value" in shown
    if how != "segfault":  # killed before the first drain of the history, nothing but the start may be there
        assert peak > 3 * 64 * 64 * 4  # weights, gradients and AdamW's state of the tiny model


def test_address_space_that_the_machine_refuses_is_an_error_of_the_machine(
    run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    """Never of the GPU, which had it left, and whatever the script does with the error."""
    done = run_fakedist(*JOB, SCRIPT, "address_space", cwd=tmp_path)
    *_, error, hint = done.stderr.splitlines()
    assert done.code == 1, done.stderr
    assert error.startswith("fakedist: error: this machine gave no address space for 4.00 GiB: ulimit -v allows ")
    assert (hint.strip(), "does not fit" in done.stdout + done.stderr) == ("ulimit -v unlimited", False)


@pytest.mark.nightly
def test_an_error_where_nothing_is_computed_says_that_it_may_come_of_that(ran: Ran, tmp_path: Path) -> None:
    assert any(note["code"] == "values_off" for note in ran("exception", "--values", "off").report["notes"])
    (tmp_path / "small").mkdir()
    notes = ran("exception", directory=tmp_path / "small").report["notes"]
    assert not any(note["code"] == "values_off" for note in notes)


@pytest.mark.parametrize(
    ("how", "number", "code", "outcome", "message"),
    [
        ("interrupt", signal.SIGINT, 130, "interrupted", "Ctrl-C"),
        pytest.param("terminate", signal.SIGTERM, 143, "interrupted", "SIGTERM", marks=pytest.mark.nightly),
    ],
)
def test_a_signal_ends_the_script_and_not_the_report(
    tmp_path: Path, finish: Finish, how: str, number: int, code: int, outcome: str, message: str
) -> None:
    process = start(tmp_path, how)
    out = until(process, "sleeping")
    process.send_signal(number)
    run = finish(process, out)
    assert (run.code, run.outcome) == (code, outcome), run.err
    assert "finally ran" in run.out
    assert "atexit ran" in run.out
    assert run.err.rstrip().endswith(f"fakedist: exit {code}: the script was interrupted ({message})")
    assert timed_step(run) == (1, "step 1, the last complete one before the interruption, estimated")
    assert (run.err.count("Traceback"), run.err.count("KeyboardInterrupt")) == ((1, 1) if code == 130 else (0, 0))


@pytest.mark.nightly
def test_a_run_that_is_killed_itself_is_told_as_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "terminate")
    until(process, "sleeping")
    time.sleep(5)  # the rank writes what it recorded every two seconds; a slow machine misses no limit by it
    process.kill()
    process.communicate()  # the rank has the same pipes: both have ended
    assert json.loads((tmp_path / "run/run.json").read_text())["exit"]["outcome"] == "running"
    again = [sys.executable, "-m", "fakedist", "report", "run"]
    report = subprocess.run(again, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert "killed (with fakedist profile, which was killed) after 1 step" in report.stdout, report.stderr


@pytest.mark.nightly
def test_what_a_killed_run_leaves_in_the_temporary_directory_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of several ranks have a temporary directory."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    processes, left = [], []
    for name in ("killed", "living"):
        (tmp_path / name).mkdir()
        processes.append(start(tmp_path / name, "terminate", "--rank", "12"))
        until(processes[-1], "sleeping")
        left.append((set((tmp_path / "tmp").glob("fakedist-*")) - {*left}).pop())
    processes[0].kill()
    processes[0].communicate()
    assert left[0].is_dir()
    (tmp_path / "next").mkdir()
    process = start(tmp_path / "next", "exit3")
    process.communicate()
    assert process.returncode == 3
    assert (left[0].exists(), left[1].exists()) == (False, True)
    processes[1].terminate()
    processes[1].communicate()
    assert not left[1].exists()


def test_the_time_of_a_run_can_be_limited(ran: Ran) -> None:
    for seconds in (5, 20, 80, 320):  # it counts from the start, and a slow machine takes longer to come to the step
        run = ran("timeout", "--timeout", str(seconds), "--force", "--steps", "9")
        if "sleeping" in run.out:
            break
    assert (run.code, run.outcome) == (124, "timeout"), run.err
    assert "finally ran" in run.out
    assert f"reached, at {SCRIPT}:" in run.err
    assert timed_step(run) == (2, "step 2, the last timed one before the time limit, estimated")
    assert [note["text"] for note in run.report["notes"] if note["code"] == "timed_early"] == [
        "the run ended before the step that was to be timed: the times are those of step 2"
    ]


def test_a_rank_that_is_killed_leaves_a_report_and_no_process(tmp_path: Path, finish: Finish) -> None:
    run = finish(start(tmp_path, "sigkill"))
    assert (run.code, run.outcome) == (137, "killed"), run.err
    assert "killed by SIGKILL, which it sent itself" in run.err
    left = next(line.split()[1] for line in run.out.splitlines() if line.startswith("left "))
    stat = Path(f"/proc/{left}/stat")
    assert not stat.exists() or ") Z " in stat.read_text()


def test_worker_processes_of_the_script_work_and_leave_the_recording_alone(ran: Ran) -> None:
    run = ran("workers")
    assert "fork [(42, '__main__')]" in run.out
    assert "spawn [(42, '__mp_main__')]" in run.out
    assert (run.code, run.outcome) == (0, "finished"), run.err


@pytest.mark.nightly
def test_a_process_that_the_script_forked_ends_with_its_own_code(ran: Ran) -> None:
    run = ran("fork")
    assert "child 5" in run.out
    assert (run.code, run.outcome) == (0, "finished"), run.err


@pytest.mark.long
def test_with_json_the_object_stands_alone_on_stdout(ran: Ran) -> None:
    run = ran("stopped", "--json")
    assert json.loads(run.out) == run.report
    assert "finally ran" in run.err
    assert "atexit ran" in run.err


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--rank", "16", str(SCRIPT)], 2, "rank 16 does not exist in a world of 16"),
        (["absent.py"], 2, "no such script: absent.py"),
        (["bad.py"], 1, "SyntaxError"),
        (["--gpu", "h100-80", str(SCRIPT)], 2, "h100-80g"),
        (["--output", "taken", str(SCRIPT)], 1, "taken"),
        (["--device", "cuda", str(SCRIPT)], 1, "--device virtual"),
    ],
)
def test_a_bad_request_leaves_nothing_behind(
    tmp_path: Path, run_fakedist: RunFakedist, options: list[str], code: int, told: str
) -> None:
    (tmp_path / "bad.py").write_text("if x\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    device = [] if "--device" in options else ["--device", "virtual"]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if "--device" in options else {}
    done = run_fakedist("profile", "--world-size", "16", "--rank", "0", *device, *options, cwd=tmp_path, env=hidden)
    assert (done.code, done.stdout) == (code, ""), done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_task_leaves_no_process_even_with_a_killed_supervisor(tmp_path: Path) -> None:
    """Ray kills the children of a worker that exits because its node is gone."""
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(
        "import os, subprocess, time\n"
        "left = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(told)!r}, 'w').write(f'{{left.pid}} {{os.getpid()}}\\n')\n"
        "time.sleep(600)\n"
    )
    job = Job(world_size=8, rank=0, target=str(script), device="virtual")
    task = Task(key="task", job=job, directory=tmp_path / "run", cwd=tmp_path)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(TaskProcesses().run, task)
        while not (told.exists() and told.read_text().endswith("\n")):
            time.sleep(0.01)
        left, rank = map(int, told.read_text().split())
        os.kill(_parent(_parent(rank)), signal.SIGKILL)
        assert result.result().failure == "the process that supervises it was killed"
    until = time.monotonic() + 120  # the rank has ten seconds to leave, and then the tables are made
    while _is_alive(left):
        assert time.monotonic() < until
        time.sleep(0.01)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


@pytest.mark.parametrize(
    ("ranks", "said"),
    [("3", "the script's own exit code"), ("0,1", "rank 0: the script's own exit code")],
    ids=["one", "several"],
)
def test_a_command_line_that_the_script_refuses_leaves_no_run_and_no_report(
    run_fakedist: RunFakedist, tmp_path: Path, ranks: str, said: str
) -> None:
    script = "import argparse\nparser = argparse.ArgumentParser()\nparser.parse_args()\n"
    (tmp_path / "train.py").write_text(script)
    ended = run_fakedist("profile", "--world-size=8", f"--rank={ranks}", "train.py", "--bogus", cwd=tmp_path)
    assert (ended.code, ended.stdout) == (2, "")
    assert "train.py: error: unrecognized arguments: --bogus" in ended.stderr
    assert ended.stderr.splitlines()[-1] == f"fakedist: exit 2: {said}"
    assert [path.name for path in (tmp_path / ".fakedist").iterdir()] == [".gitignore"]
