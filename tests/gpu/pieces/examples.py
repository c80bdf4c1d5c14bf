"""The examples under ``fakedist profile``: on the real GPU, and on the virtual one of its model and memory."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakedist.analysis.recording import read_recording
from fakedist.extras.confirm.allocator_history import EventsBuilder, HistoryDifference, JobRecord, compare_job
from fakedist.extras.confirm.pieces import ROOT, TIME_IS_OVER, Session, Way, columns, ended_with, peaks
from fakedist.rundir.schema import ACTIONS


@dataclass(frozen=True)
class Example:
    """One example: its world, its arguments, and a package that it needs."""

    world_size: int
    rank: int
    arguments: tuple[str, ...]
    needs: str = ""

    @property
    def command(self) -> str:
        """The command line without the device."""
        world = f"--world-size {self.world_size} --rank {self.rank}"
        return f"fakedist profile {world} examples/{' '.join(self.arguments)}"


EXAMPLES = (
    Example(8, 3, ("ddp_gpt.py", "--model", "gpt2-xl")),
    Example(64, 0, ("llama_fsdp2.py", "--model", "8b", "--checkpoint", "selective")),
    Example(1024, 1023, ("llama_fsdp2.py", "--model", "70b", "--tp", "8", "--checkpoint", "full")),
    Example(64, 5, ("three_d.py", "--tp", "4", "--pp", "2", "--dp", "8", "--layers", "16")),
    Example(8, 0, ("nonuniform_tp.py",)),
    Example(64, 0, ("megatron_gpt.py", "--preset", "mixtral-8x7b"), "megatron.core"),
)


def run(session: Session) -> bool:
    """Run every example on both sides; whether all ran."""
    rows, failed = [], []
    with tempfile.TemporaryDirectory(prefix="gpu-examples-") as text:
        directory = Path(text)

        def on_virtual(example: Example) -> JobRecord:
            return _run(example, session.virtual, directory / f"virtual-{EXAMPLES.index(example)}", session)

        with ThreadPoolExecutor(max(1, session.at_once // 2)) as pool:
            futures = [(example, pool.submit(on_virtual, example)) for example in _present(session)]
            for example, future in futures:  # two at a time might not fit into one GPU
                real = _run(example, session.real, directory / f"real-{EXAMPLES.index(example)}", session)
                virtual = future.result()
                difference = compare_job(example.command, real, virtual)
                session.say(_line(example, real, difference))
                rows.append(_row(example, real, difference))
                if real.error or virtual.error:
                    failed.append(f"{example.command}: {real.error or virtual.error}")
                _write_lines(session, difference)
    session.write("gpu-examples", rows)
    return not failed


def _present(session: Session) -> Iterable[Example]:
    for example in EXAMPLES:
        if example.needs and importlib.util.find_spec(example.needs.partition(".")[0]) is None:
            session.say(f"{example.command}: not run: {example.needs} is not installed here")
        else:
            yield example


def _run(example: Example, way: Way, run_directory: Path, session: Session) -> JobRecord:
    """One run's events and statistics."""
    record = JobRecord(example.command)
    if session.is_over:
        record.error = TIME_IS_OVER
        return record
    world = ["--world-size", str(example.world_size), "--rank", str(example.rank), "--no-kernels"]
    script, *arguments = example.arguments
    command = ["-m", "fakedist", "profile", *world, *way.device_options, "-o", str(run_directory)]
    ended = ended_with([*command, str(ROOT / "examples" / script), *arguments], session.timeout_s(240.0))
    if ended.why:
        record.error = f"it {ended.why}"
        return record
    return recorded(example.command, run_directory)


def recorded(name: str, run_directory: Path) -> JobRecord:
    """Events and statistics of a run directory, as of a job of the accuracy set."""
    found = read_recording(run_directory)
    events, builder = found.device_events, EventsBuilder()
    for action, size, stream in zip(*(events[column].tolist() for column in ("action", "size", "stream")), strict=True):
        builder.add(ACTIONS[action], size, stream)
    last = found.statistics.get(found.device)
    allocated, reserved = (0, 0) if last is None else (last.allocated_peak_bytes, last.reserved_peak_bytes)
    statistics = {"allocated_bytes.all.peak": allocated, "reserved_bytes.all.peak": reserved}
    return JobRecord(name, statistics=statistics, events=builder.build())


def _row(example: Example, real: JobRecord, difference: HistoryDifference) -> dict[str, Any]:
    return {
        "command": example.command,
        **peaks(real),
        **columns("virtual", difference),
        "error": difference.reason if difference.verdict in ("failed", "error") else "",
    }


def _line(example: Example, real: JobRecord, difference: HistoryDifference) -> str:
    return (
        f"{example.command}: {len(real.events)} events, {real.peak_allocated_bytes:,} and "
        f"{real.peak_reserved_bytes:,} bytes; {difference.verdict} {difference.reason}"
    )


def _write_lines(session: Session, difference: HistoryDifference) -> None:
    if not difference.is_same:
        with (session.others / "differences-examples.txt").open("a") as file:
            file.write("\n".join([f"== {difference.job}: {difference.reason}", *difference.lines, "", ""]))
