"""The parent process: checks the job, starts the child, forwards signals, sees how it ended and builds the tables."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TextIO

from fakedist.errors import ExitCode, FakedistError, RecordingError, SetupError
from fakedist.gpu.driver.build import ensure_driver, torch_build
from fakedist.gpu.fast_path.build import FAST_PATH
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.smi.offer import ensure_smi, smi_environment
from fakedist.launcher.checked_script import check_script
from fakedist.launcher.fork_servers import Ahead, Child, OwnChild, RankDoor
from fakedist.launcher.machine import count_real_gpus, first_visible_gpu, memory, rss_bytes
from fakedist.options import Job
from fakedist.rank.preloading import restarted_rank
from fakedist.rank.reporter import PIPE_VARIABLE, Ended, Failed, Message, Progress, Restarted, Signals, Started
from fakedist.rundir.directory import (
    JOURNAL_NAME,
    KERNELS_NAME,
    MANIFEST_NAME,
    PAGE_NAME,
    SMI_NAME,
    JournalWriter,
    clear,
    create_run_directory,
    default_name,
    new_manifest,
    read_journal,
    write_manifest,
)
from fakedist.rundir.encoding import Record
from fakedist.rundir.environment import check_variable, refusal
from fakedist.rundir.launch_records import HostClockRecord, LaunchKeysRecord
from fakedist.rundir.outcome import BY_ITSELF, Ending, Outcome
from fakedist.rundir.plain import PlainValueError, from_plain
from fakedist.rundir.records import NoteRecord, StepRecord
from fakedist.rundir.time_notes import second_run_without_time
from fakedist.temporary import scratch_directory
from fakedist.units import format_bytes
from fakedist.world.environ import rank_environment

#: Runs a job until it ends, in a run directory with its manifest.
RunJob = Callable[[Job, Path], Ending]
#: A second run needs two steps. Of fewer than four it records the first alone, of others two.
_LEAST_STEPS, _FEW_STEPS = 2, 4
#: Notes of the second run that are the first one's, too.
_NOTES = ("second_run_without_time", "host_clock_disturbed")


def time_in_second_run(job: Job, run_directory: Path, ending: Ending, run: RunJob) -> None:
    """Run the script of a finished run again, unless that had bare steps, and add the host's clock or a note to it.

    Args:
        ending: How the first run ended.
        run: Runs the job.
    """
    first = None
    num_steps = 0
    for record in read_journal(run_directory / JOURNAL_NAME):
        if isinstance(record, LaunchKeysRecord):
            first = record
        elif isinstance(record, StepRecord):
            num_steps = max(num_steps, record.step)
    if first is None:
        return
    if not ending.ended_well:
        records = _no_time("the first run did not end well")
    elif num_steps < _LEAST_STEPS:
        records = _no_time("the script trains one step, and must train another")
    else:
        again = dataclasses.replace(job, steps=1 if num_steps < _FEW_STEPS else 2, until=None, clock_run=False)
        records = _of_second_run(again, first, run)
    _write(run_directory / KERNELS_NAME, records)


def _of_second_run(job: Job, first: LaunchKeysRecord, run: RunJob) -> list[Record]:
    """The host's clock, or a note that says why there is none."""
    with scratch_directory("clock") as directory:
        new_manifest(directory, job)
        _write(directory / KERNELS_NAME, [first])
        try:
            ending = run(job, directory)
        except FakedistError as error:
            return _no_time(error.message)
        except KeyboardInterrupt:
            return _no_time("it was interrupted")
        records = [record for record in read_journal(directory / JOURNAL_NAME) if _is_of_clock(record)]
    return records or _no_time(ending.message or "its process ended before")


def _no_time(why: str) -> list[Record]:
    return [NoteRecord(second_run_without_time(why))]


def _is_of_clock(record: Record) -> bool:
    return isinstance(record, HostClockRecord) or (isinstance(record, NoteRecord) and record.note.code in _NOTES)


def _write(path: Path, records: Iterable[Record]) -> None:
    with closing(JournalWriter(path)) as journal:
        for record in records:
            journal.append(record)


_RANK = (sys.executable, os.fspath(Path(__file__).parents[1] / "rank" / "__main__.py"))
_POLL_S = 0.05
_MEMORY_S = 0.2


def _say_nothing(text: str) -> None:
    pass


@dataclass(frozen=True)
class Streams:
    """The destinations of output while the child runs.

    Attributes:
        child_stdout: Descriptor for the script's output. None inherits the parent's.
        progress: Terminal for the progress line. None shows no line.
        say: Called with a line for the user, such as which of several ranks runs next.
        door: The fork server from which the rank forks, if it fits. None starts the rank on its own.
        program: The rank's program. Its argument is the run directory.
        grace_s: Seconds between asking the child to end and killing it.
    """

    child_stdout: int | None = None
    progress: TextIO | None = None
    say: Callable[[str], None] = _say_nothing
    door: RankDoor | None = None
    program: tuple[str, ...] = _RANK
    grace_s: float = 10.0


def check(job: Job) -> None:
    """Check that the job can run on this machine, before anything is written.

    Raises:
        FakedistError: The job cannot run: no such script or GPU, a CPU build of torch, no compiler.
        ScriptSyntaxError: The script does not compile.
    """
    check_script(job)
    for name, value in job.nccl_environment:
        check_variable(name, value)
    if job.tapes:
        from fakedist.rundir.tape import find_tapes

        find_tapes(job)
    if job.nsys:
        from fakedist.launcher.nsight import find_nsys

        find_nsys()
    if refused := refusal(child_environment(job)):
        raise SetupError(*refused)  # the rank checks what the script sets itself
    if job.device == "virtual":
        gpu = find_gpu(job.gpu)
        if job.fabric is not None:
            from fakedist.cost_model.collectives.collective_times import find_fabric

            find_fabric(job.fabric)
        if job.host is not None:
            from fakedist.cost_model.hosts import check_host

            check_host(job.host)
        if job.times:
            from fakedist.cost_model.kernels.calibration_table import (
                check_calibration_table,  # numpy takes a while to import
            )

            check_calibration_table(Path(job.times), gpu.product)
        ensure_driver()
        ensure_smi()
        _prepare_fast_path()
        return
    version, cuda = torch_build()
    if not cuda:
        raise SetupError(
            f"torch {version} is a CPU build; --device cuda needs a CUDA build", "pip install torch==2.15.0"
        )
    if count_real_gpus() == 0:
        raise SetupError("no NVIDIA GPU was found on this machine", "--device virtual needs none")


@cache
def _prepare_fast_path() -> None:
    """Build the fast path, or say once in this process that ranks run without it."""
    try:
        FAST_PATH.ensure()
    except SetupError as error:
        reason = f"{error.message.splitlines()[0]}: {error.hint}"
        sys.stderr.write(f"fakedist: steps are recorded in Python, slower, with the same results: {reason}\n")


def run_child(job: Job, run_directory: Path, streams: Streams, recorded: Callable[[], None] = lambda: None) -> Ending:
    """Run the rank in a child process until it ends, and leave none of its processes running.

    A rank forks from a server if there is one for it. If it then turns out to differ, it runs again on its own.
    ``recorded`` is called once the rank has written its last record; its process may run on for a while.

    Raises:
        RecordingError: The child could not set itself up (the run directory is then empty) or could not write.
    """
    environment = smi_environment(job, run_directory / SMI_NAME, child_environment(job))
    try:
        return _Running(job, run_directory, streams).run(environment, recorded)
    except _DiffersError as error:
        clear(run_directory, but={MANIFEST_NAME})
        environment |= restarted_rank(str(error))
        return _Running(job, run_directory, dataclasses.replace(streams, door=None)).run(environment, recorded)


class _DiffersError(Exception):
    """A rank that forked differs from the first one of its server."""


class _Running:
    def __init__(self, job: Job, run_directory: Path, streams: Streams) -> None:
        self._job, self._run_directory, self._streams = job, run_directory, streams
        self._listener = Listener()

    def run(self, environment: dict[str, str], recorded: Callable[[], None]) -> Ending:
        listener, streams = self._listener, self._streams
        child = self._start(environment)
        listener.close_writer()
        watch = _Watch(child, self._job.timeout_s, streams)
        line = ProgressLine(streams.progress) if streams.progress is not None else None
        try:
            with watch.signals():
                while not watch.ended():
                    listener.wait(_POLL_S)
                    watch.listen(listener)
                    if listener.ended is not None:
                        recorded()
                    if line is not None and listener.progress is not None:
                        line.show(listener.progress)
        finally:
            watch.end_group()
            returncode = child.wait()
            listener.close()
            if line is not None:
                line.clear()
        return self._ended(returncode, watch)

    def _start(self, environment: dict[str, str]) -> Child:
        """Start it in its own session: this process forwards a Ctrl-C on the terminal."""
        stdout, door, pipe = self._streams.child_stdout, self._streams.door, self._listener.writer
        sys.stdout.flush()
        if door is not None:
            forked = door.fork(self._job, self._run_directory, environment, stdout=stdout, pipe=pipe)
            if forked is not None:
                return forked
            environment = environment | door.own_start(self._job)
        environment = environment | {PIPE_VARIABLE: str(pipe)}
        around: list[str] = []
        if self._job.nsys:
            from fakedist.launcher import nsight

            around, environment = nsight.around(self._job, self._run_directory, environment)
        process = subprocess.Popen(
            [*around, *self._streams.program, os.fspath(self._run_directory)],
            env=environment,
            stdout=stdout,
            pass_fds=(pipe,),
            start_new_session=True,
        )
        return OwnChild(process)

    def _ended(self, returncode: int, watch: _Watch) -> Ending:
        listener, run_directory = self._listener, self._run_directory
        if failed := listener.failed:
            if failed.before_start:
                clear(run_directory)
            raise RecordingError(failed.error, failed.hint)
        if listener.restarted is not None and not watch.interrupts and not watch.terminated_by:
            raise _DiffersError(listener.restarted.what)
        code = returncode
        if self._job.nsys:
            from fakedist.launcher import nsight

            code = nsight.code_of_rank(returncode, listener.ended)
        ending = _ending(code, watch, listener)
        if listener.started is None:
            clear(run_directory)
            if watch.interrupts:
                raise KeyboardInterrupt
            how = ending.message or f"exit code {ending.code}"
            hint = "nsys's own messages are above; check --nsys-args" if self._job.nsys else "fakedist doctor"
            raise RecordingError(f"the rank's process ended before the script began: {how}", hint)
        return ending


def child_environment(job: Job) -> dict[str, str]:
    """The rank's complete environment. Variables from ``--env`` win."""
    environment = dict(os.environ)
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # it numbers real GPUs, and an empty one would hide virtual GPUs
    environment.update(rank_environment(job))
    if job.device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = first_visible_gpu()
    environment.update(job.nccl_environment)
    environment.update(job.environment)
    return environment


class _Watch:
    """Watches the child's process group, or under nsys the rank's own, forwards signals to it and ends it in time."""

    def __init__(self, child: Child, timeout_s: float | None, streams: Streams) -> None:
        self._child, self._say, self._grace_s = child, streams.say, streams.grace_s
        self.pid = self.rank = child.pid
        self.timed_out = self.rank_ended = False
        self.interrupts = 0
        self.terminated_by = ""
        self.memory_was_gone = ""
        self._look_at = 0.0
        self._timeout_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._kill_at: float | None = None

    def listen(self, listener: Listener) -> None:
        """Take in the rank's messages. A rank that could not set itself up gets a deadline to leave."""
        if self._kill_at is None and listener.failed is not None and listener.failed.before_start:
            self._kill_at = time.monotonic() + self._grace_s
        if listener.started is not None:
            self.rank = listener.started.pid
        if self.rank != self.pid and listener.ended is not None and not self.rank_ended:
            from fakedist.launcher import nsight

            self.rank_ended, self._timeout_at = True, None
            self._kill_at = time.monotonic() + nsight.FINISH_S

    def ended(self) -> bool:
        now = time.monotonic()
        if self._timeout_at is not None and now > self._timeout_at:
            self.timed_out, self._timeout_at = True, None
            self._terminate()
        if self._kill_at is not None and now > self._kill_at:
            self._kill_at = None
            self._signal_group(signal.SIGKILL)
        if now > self._look_at and not self.memory_was_gone:
            self._look_at = now + _MEMORY_S
            self._look_at_memory()
        return self._child.has_ended()

    def _look_at_memory(self) -> None:
        """Say once that this machine's memory is nearly gone: a kernel that ends the rank says nothing."""
        left = memory()
        if left.is_nearly_gone:
            held = format_bytes(rss_bytes(self.rank))
            self.memory_was_gone = f"this machine's memory was nearly gone, {held} of it held by the rank"
            figures = f"{format_bytes(left.free)} of {format_bytes(left.total)} are left, and the rank holds {held}"
            self._say(f"this machine's memory is nearly gone: {figures}; the kernel may end it")

    def end_group(self) -> None:
        """End what the child left running, such as DataLoader workers of a killed rank, and the child if it runs."""
        self._signal_group(signal.SIGTERM)
        until = time.monotonic() + 0.5
        while self._others_run() and time.monotonic() < until:
            time.sleep(_POLL_S)
        self._signal_group(signal.SIGKILL)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Forward the signals that end a program. The first Ctrl-C goes to the whole group, the second kills it.

        Signals that the caller ignores stay ignored, as ``nohup`` and a shell's background jobs expect.
        """
        handlers = {
            signal.SIGINT: self._interrupt,
            signal.SIGTERM: self._pass_on_termination,
            signal.SIGHUP: self._pass_on_termination,
            signal.SIGTSTP: self._pause,
        }
        heard = {number: on for number, on in handlers.items() if signal.getsignal(number) is not signal.SIG_IGN}
        before = {number: signal.signal(number, handler) for number, handler in heard.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1
        if self.interrupts == 1:
            self._say("stopping; writing the report (a second Ctrl-C kills the script)")
        self._signal_group(signal.SIGINT if self.interrupts == 1 else signal.SIGKILL)

    def _pass_on_termination(self, number: int, frame: FrameType | None) -> None:
        self.terminated_by = signal.Signals(number).name
        self._terminate()

    def _pause(self, number: int, frame: FrameType | None) -> None:
        self._signal_group(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_group(signal.SIGCONT)

    def _terminate(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.rank, signal.SIGTERM)
        self._kill_at = time.monotonic() + self._grace_s

    def _signal_group(self, number: int) -> None:
        for group in {self.rank, self.pid} if number == signal.SIGKILL else {self.rank}:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def _others_run(self) -> bool:
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, _, group = path.read_text().rpartition(") ")[2].split()[:3]  # proc(5): state, parent, group
                if int(group) in (self.pid, self.rank) and state != "Z":
                    return True
        return False


def _ending(returncode: int, watch: _Watch, listener: Listener) -> Ending:
    ended = listener.ended
    if watch.timed_out:
        at = f", at {ended.line}" if ended is not None and ended.line else ""
        return Ending(Outcome.TIMEOUT, ExitCode.TIMEOUT, f"the time limit given with --timeout was reached{at}")
    if watch.interrupts > 1:
        return Ending(Outcome.INTERRUPTED, ExitCode.INTERRUPTED, "Ctrl-C, twice")
    if returncode < 0 and watch.terminated_by:  # the rank did not leave in time and was killed
        return Ending(Outcome.INTERRUPTED, ExitCode.TERMINATED, watch.terminated_by)
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = f"; {watch.memory_was_gone or 'the machine may have run out of memory'}" if name == "SIGKILL" else ""
        sent = BY_ITSELF if listener.own_signal == -returncode else ""
        return Ending(Outcome.KILLED, 128 - returncode, f"by {name}{sent or hint}")
    if ended is None:
        return Ending(Outcome.EXIT, returncode)
    if ended.outcome is Outcome.OUT_OF_MEMORY:  # the script that went on does not know
        returncode = ExitCode.OUT_OF_MEMORY
    return Ending(ended.outcome, returncode, ended.message)


def profile(job: Job, output: Path | None, force: bool, streams: Streams) -> tuple[Path, Ending]:
    """Run the job, which has passed :func:`check`, and leave a finished run directory, however the script ended.

    A missing ``output`` is named after the script and the rank; ``force`` overwrites an existing run.

    Raises:
        FakedistError: The run directory cannot be written, or the child could not be set up.
    """
    with create_run_directory(output or default_name(job), force) as run_directory:
        try:
            manifest = new_manifest(run_directory, job)
        except OSError:
            clear(run_directory)
            raise
        with Ahead(job, run_directory) as ahead:
            # What a second run of the script is to add comes later.
            ending = run_child(job, run_directory, streams, (lambda: None) if job.clock_run else ahead.recorded)
        manifest = dataclasses.replace(manifest, exit=ending)
        write_manifest(run_directory, manifest)  # ranks that wait for its tape see that it has ended
        if job.nsys:
            from fakedist.launcher import nsight

            nsight.join_report(run_directory)
        if job.clock_run:
            quiet = dataclasses.replace(streams, child_stdout=subprocess.DEVNULL, door=None)
            time_in_second_run(job, run_directory, ending, lambda again, directory: run_child(again, directory, quiet))
        from fakedist.results.building import build_tables

        build_tables(run_directory, computed=ahead.computed, manifest=manifest)
        if job.page:
            _write_page(run_directory)
    return run_directory, ending


def _write_page(run_directory: Path) -> None:
    from fakedist.report.render.html import write_page  # plotly takes 0.3 s to import
    from fakedist.results.opening import open_run_directory

    write_page(open_run_directory(run_directory), run_directory / PAGE_NAME)


_MESSAGES: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Started, Progress, Ended, Restarted, Signals, Failed)
}


class Listener:
    """The parent's end of the pipe, with the last message of each kind; ``own_signal`` is 0 without one."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._rest = b""
        self._open = True
        self.started: Started | None = None
        self.progress: Progress | None = None
        self.ended: Ended | None = None
        self.restarted: Restarted | None = None
        self.own_signal = 0
        self.failed: Failed | None = None

    def wait(self, seconds: float) -> None:
        """Read the messages that have arrived, after waiting at most this many seconds for one."""
        ready = select.select([self._reader] if self._open else [], [], [], seconds)[0]
        if ready:
            self._read()

    def close_writer(self) -> None:
        """Close the writing end. The child has its own copy."""
        os.close(self.writer)

    def close(self) -> None:
        """Read what is left and close."""
        self._read()
        os.close(self._reader)
        self._open = False

    def _read(self) -> None:
        while self._open:
            try:
                data = os.read(self._reader, 65536)
            except BlockingIOError:
                return
            if not data:
                self._open = False
                os.close(self._reader)
                self._reader = os.open(os.devnull, os.O_RDONLY)
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            ((name, value),) = json.loads(line).items()
            message = from_plain(_MESSAGES[name], value)
        except (ValueError, AttributeError, KeyError, PlainValueError):  # the script wrote into the pipe
            return
        match message:
            case Started():
                self.started = message
            case Progress():
                self.progress = message
            case Ended():
                self.ended = message
            case Restarted():
                self.restarted = message
            case Signals():
                self.own_signal = message.number
            case Failed():
                self.failed = message


class ProgressLine:
    """Phase, step and peak at the right edge of the terminal's current line.

    The script writes to the same terminal, so the cursor returns to where it was (ESC 7, ESC 8): the script's lines
    start at the left edge, whole, whatever the right edge shows.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._column = 0
        self._shown = ""

    def show(self, progress: Progress) -> None:
        """Show where the script is."""
        of = f"/{progress.steps}" if isinstance(progress.steps, int) else ""
        step = f"step {progress.step}{of}" if progress.step else "start"
        text = f"[{step}, {progress.phase}, peak {format_bytes(progress.allocated_bytes)}]"
        if text == self._shown:
            return
        column = max(1, shutil.get_terminal_size().columns - len(text))
        start = min(column, self._column or column)
        self._stream.write(f"\x1b7\x1b[{start}G\x1b[K\x1b[{column}G{text}\x1b8")
        self._stream.flush()
        self._column, self._shown = column, text

    def clear(self) -> None:
        """Remove the text from the terminal."""
        if self._shown:
            self._stream.write(f"\x1b7\x1b[{self._column}G\x1b[K\x1b8")
            self._stream.flush()
            self._shown = ""
