"""Every file that a command reads besides its run: a good one of each, and the command."""

from __future__ import annotations

import functools
import gzip
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.cost_model.kernels.calibration_table import CalibrationOrigin, calibration_table_text, made_table
from fakedist.launcher.executors.task import Task, TaskResult
from fakedist.rundir.outcome import Outcome
from tests.extras.calibration.made_up_step import Tracing, step
from tests.unit.report.handmade import timed
from tests.unit.results.test_job_ranks import entry, write
from tests.unit.results.test_job_time import stage
from tests.unit.sweep.fake_executor import result
from tests.unit.traces.nsys_made_up import training

CHECK = """
[check]
max_increase = "1%"
[[check.jobs]]
name = "job"
script = "train.py"
world_size = 8
ranks = [0, 4]
gpu = "h100-80g"
arguments = "--x 1"
env = { A = "1" }
budgets = { peak_allocated = "70 GiB" }
"""
SWEEP = """
script = "train.py"
arguments = "--tp {tp} --pp {pp}"
world_size = 8
gpu = "h100-80g"
keep = "none"
headroom = "8%"
where = "tp * pp <= 2"
[axes]
tp = [1, 2]
pp = { from = 1, to = 2, factor = 2 }
"""


@dataclass(frozen=True)
class Input:
    """A file that a command reads.

    Attributes:
        name: Its path in the place that :func:`make_good` fills.
        command: The command, in which ``{}`` stands for the place.
        named: What an error names: the file, or what it belongs to.
    """

    name: str
    command: str
    named: tuple[str, ...] = ()

    def words(self, place: Path) -> list[str]:
        """The command's words, for a place."""
        return [word.replace("{}", str(place)) for word in self.command.split()]

    def __str__(self) -> str:
        return f"{self.command.split()[0]}-{self.name.replace('/', '-')}"


_CHECK = "check --config {}/check/fakedist.toml --annotations --junit {}/out/j -o {}/out/c --format"
_CALIBRATE = "calibrate {}/rank0 --force -o {}/out/times.json --from-trace"
INPUTS = [
    Input("check/fakedist.toml", f"{_CHECK} text"),
    Input("check/fakedist-baselines/job.json", f"{_CHECK} markdown", ("job.json", "'job'")),
    Input("check/fakedist-baselines/job.json", f"{_CHECK} json --update", ("job.json", "'job'")),
    Input("rank4/run.json", "compare --all-rows {}/rank0 {}/rank4", ("rank4",)),
    Input("rank4/tables/layers.parquet", "compare {}/rank0 {}/rank4 --format markdown", ("rank4",)),
    Input("trace.json", "compare {}/trace.json {}/rank0"),
    Input("report.sqlite", "compare {}/rank0 {}/report.sqlite --format markdown"),
    Input("nccl_trace_rank_1", "match {}/nccl_trace_rank_0 {}/nccl_trace_rank_1"),
    Input("rank4/memory_snapshot.pickle", "compare {}/timed/memory_snapshot.pickle {}/rank4/memory_snapshot.pickle"),
    Input("trace.json", f"{_CALIBRATE} {{}}/trace.json"),
    Input("trace.json.gz", f"{_CALIBRATE} {{}}/trace.json.gz --json"),
    Input("report.sqlite", f"{_CALIBRATE} {{}}/report.sqlite"),
    Input("rank0/tables/launches.parquet", f"{_CALIBRATE} {{}}/trace.json", ("rank0", "trace.json")),
    Input("rank0/run.json", "export {}/rank0 --format chakra --force -o {}/out", ("rank0",)),
    Input("rank0/tables/launches.parquet", "export {}/rank0 --format chakra --force -o {}/out --json", ("rank0",)),
    Input("rank0/tables/calls.parquet", "export {}/rank0 {}/rank4 --format chakra --force -o {}/out", ("rank0",)),
    Input("rank0/tables/groups.parquet", "report {}/rank0 --section communication", ("rank0",)),
    Input("rank0/tables/calls.parquet", "report {}/rank0 --section communication --json", ("rank0",)),
    Input("rank0/run.json", "report {}/rank0 --section communication", ("rank0",)),
    Input("own.json", "time {}/rank0 --times {}/own.json"),
    Input("gpu.toml", "time {}/rank0 --gpu {}/gpu.toml"),
    Input("fabric.toml", "time {}/rank0 --fabric {}/fabric.toml"),
    Input("sweep.toml", "sweep --dry-run {}/sweep.toml", ("sweep.toml", "axis", "point")),
    Input("sweep/sweep.json", "sweep {}/sweep", ("sweep",)),
    Input("sweep/journal.jsonl", "sweep {}/sweep", ("sweep",)),
    Input("sweep/journal.jsonl", "sweep -o {}/sweep {}/sweep.toml", ("sweep",)),
    Input("sweep/sweep.json", "sweep -o {}/sweep {}/sweep.toml", ("sweep",)),
]


class CopyingExecutor:
    """Copies a run in place of running a task."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def run(self, tasks: Iterable[Task | None]) -> Iterator[TaskResult]:
        for task in filter(None, tasks):
            shutil.rmtree(task.directory, ignore_errors=True)
            shutil.copytree(self._place / f"rank{4 if task.job.rank == 4 else 0}", task.directory)
            yield result(task, Outcome.STOPPED)

    def close(self) -> None:
        """Nothing runs."""


def make_good(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fill a place with a good file of each kind. From here on, no command runs a job or looks at this machine."""
    monkeypatch.setattr("fakedist.launcher.launching.check", lambda job: None)
    monkeypatch.setattr(
        "fakedist.launcher.executors.choosing.make_executor", lambda *args, **kwargs: CopyingExecutor(place)
    )
    place.mkdir()
    for rank in (0, 4):
        stage(place / f"rank{rank}", rank)
    timed(place / "timed")
    for folder in ("check", "out"):
        (place / folder).mkdir()
    for folder in (place, place / "check"):
        (folder / "train.py").write_text("pass\n")
    Tracing().write(place / "trace.json", step() * 2)
    (place / "trace.json.gz").write_bytes(gzip.compress((place / "trace.json").read_bytes()))
    training().write(place / "report.sqlite")
    write(place, {rank: [entry(1, "all_reduce"), entry(2, "broadcast")] for rank in range(2)})
    origin = CalibrationOrigin(gpu="NVIDIA H100 80GB HBM3", tool="nsys", date="2026-01-31", file="x")
    table = made_table(origin, {each.work: (each.duration_us, 2 * each.duration_us) for each in step()})
    (place / "own.json").write_text(calibration_table_text(table))
    (place / "gpu.toml").write_text('like = "h100-80g"\nwatts = 500\nmemory = "90 GiB"\n[peak_tflops]\nbf16 = 900\n')
    (place / "fabric.toml").write_text('like = "p5-efa"\nnic_gbit_per_s = 100\nachieved = 0.9\n')
    (place / "check/fakedist.toml").write_text(CHECK)
    (place / "sweep.toml").write_text(SWEEP)
    monkeypatch.chdir(place)
    assert main(["check", "--config", "check/fakedist.toml", "--update"]) == 0
    assert main(["sweep", "-o", "sweep", "sweep.toml"]) == 0
    return place


def _emptied(path: Path) -> Path:
    path.unlink()
    return path


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        descriptor = os.open(_emptied(path).parent, os.O_DIRECTORY)
        server.bind(f"/proc/self/fd/{descriptor}/{path.name}")  # a socket's path has at most 107 bytes
        os.close(descriptor)


def _sparse(path: Path) -> None:
    """Many more bytes than any reader may take, in no blocks of the disk."""
    path.write_bytes(path.read_bytes()[:100])
    os.truncate(path, 20 << 30)


@functools.cache
def _gigabyte() -> bytes:
    """The beginning of a trace and a gigabyte of spaces, compressed: a megabyte."""
    compressor = zlib.compressobj(9, wbits=31)  # as gzip does
    parts = [b'{"traceEvents":[', *([b" " * (1 << 20)] * (1 << 10))]
    return b"".join([*map(compressor.compress, parts), compressor.flush()])


#: What may lie where a file should. Each replaces a good file.
ODD: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path.unlink(),
    "directory": lambda path: _emptied(path).mkdir(),
    "pipe": lambda path: os.mkfifo(_emptied(path)),
    "socket": _socket,
    "device": lambda path: _emptied(path).symlink_to("/dev/zero"),
    "link to nothing": lambda path: _emptied(path).symlink_to("nothing"),
    "link to itself": lambda path: _emptied(path).symlink_to(path.name),
    "empty": lambda path: path.write_bytes(b""),
    "null characters": lambda path: path.write_bytes(b"\0" * 10_000),
    "UTF-16": lambda path: path.write_bytes("{}".encode("utf-16")),
    "sparse": _sparse,
    "brackets": lambda path: path.write_bytes(b"[" * 200_000),
    "nested keys": lambda path: path.write_text(".".join("a" * 10_000) + " = 1"),
    "a long text": lambda path: path.write_text(f'"{"a" * 1_000_000}"'),
    "a long key": lambda path: path.write_text(f"{'a' * 1_000_000} = 1"),
    "escapes": lambda path: path.write_bytes(b"\x1b[2J\x9b2J\xe2\x80\xae = 1\n"),
    "compressed, cut off": lambda path: path.write_bytes(gzip.compress(os.urandom(10_000))[:-100]),
    "compressed bomb": lambda path: path.write_bytes(_gigabyte()),
    "twice the same": lambda path: path.write_bytes(path.read_bytes() * 2),
}
