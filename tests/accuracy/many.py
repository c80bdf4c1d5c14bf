"""Run a job as several real processes, and each of its ranks alone under ``fakedist profile``; put both side by side.

    python -m tests.accuracy.many [--device virtual|cuda] [--ranks 2,4] [--backend nccl|gloo] [--job NAME ...] [--write]

On a real GPU all the processes share it, and each rank is faked twice: on that GPU, and on a virtual one of the same
model and memory. Without a GPU, each process has a virtual one; the ranks' tensors meet all the same. ``--backend
nccl`` uses device memory as NCCL does (tests/accuracy/host_group.py), ``gloo`` is torch's own. ``--write`` puts the
rows into docs/accuracy, in place of those of the same jobs, and the table into its page. Exit code 1: a job
that failed, or a difference without an explanation.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from fakedist.analysis.recording import read_recording
from fakedist.extras.confirm.allocator_history import first_difference, recorded_events
from fakedist.extras.confirm.pieces import ended_with, like, real_machine
from fakedist.options import Device, Job
from fakedist.results.building import build_tables
from fakedist.rundir.directory import create_run_directory, load_manifest, new_manifest, write_manifest
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.tables import read_table
from fakedist.world.environ import rank_environment
from tests.accuracy.results import same_job, write_result, write_tables

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "job.py"
JOBS = ("ddp", "ddp_bucket_view", "fsdp2", "tensor_sequence", "pipeline_1f1b", "experts_capacity", "experts_dropless")
TIMEOUT_S = 300
MOST_STEPS = 1_000  # the script ends by itself
#: What makes two rows the same job's.
KEYS = ("job", "backend", "num_ranks")
DEVICES = ("virtual", "cuda")
_LATER = "gloo keeps tensors with record_stream, which frees them later, at a time that depends on its threads"
#: Why a job is known to differ on a device, or over a backend.
CAUSES = {
    (
        "experts_dropless",
        "cuda",
    ): "token counts: a real rank gets what the other ranks' routers send to it, a faked one "
    "what its own would send to itself",
    ("ddp", "gloo"): _LATER,
    ("ddp_bucket_view", "gloo"): _LATER,
    ("experts_dropless", "gloo"): _LATER,
    ("fsdp2", "gloo"): "gloo gathers into a device tensor of its own, on a stream of its own",
    ("tensor_sequence", "gloo"): "gloo scatters from a device tensor of its own",
}
COLUMNS = ("peak_allocated_bytes", "peak_reserved_bytes", "end_allocated_bytes")


class JobFailedError(Exception):
    """A process of a job ended otherwise than well; its last words."""


@dataclass(frozen=True)
class Way:
    """One way of running a job.

    Attributes:
        job: A name of :data:`JOBS`.
        num_ranks: Ranks of the job.
        device: "virtual" or "cuda".
        backend: What the script asks for: "nccl" or "gloo".
    """

    job: str
    num_ranks: int
    device: str
    backend: str

    @property
    def faked_on(self) -> tuple[str, ...]:
        """Devices that each rank is faked on."""
        return ("cuda", "virtual") if self.device == "cuda" else ("virtual",)

    def rank(self, rank: int) -> Job:
        """One of its ranks."""
        device: Device = "cuda" if self.device == "cuda" else "virtual"
        arguments = (self.job, self.backend)
        return Job(
            self.num_ranks, rank, str(SCRIPT), arguments=arguments, device=device, steps=MOST_STEPS, kernels=False
        )

    @property
    def cause(self) -> str:
        """Why its ranks are known to differ; empty where they must not."""
        return CAUSES.get((self.job, self.device)) or CAUSES.get((self.job, self.backend), "")


@dataclass(frozen=True)
class Row:
    """One rank of one job, both ways; all in bytes.

    Attributes:
        job: Its name.
        backend: "nccl" or "gloo".
        num_ranks: Ranks of the job.
        rank: This one.
        faked_on: Device of the faked rank.
        real_allocated_bytes, real_reserved_bytes: Peaks of the rank among real processes.
        allocated_difference_bytes, reserved_difference_bytes: The peaks under ``fakedist profile`` less those.
        phases_differing: Figures of a step's phase that differ, and of how many.
        num_phase_figures: See there.
        num_events: What the allocator of the real rank did, in events.
        first_other_event: The first that differs in action, size or stream; -1 if none does.
        cause: Why, where anything differs.
    """

    job: str
    backend: str
    num_ranks: int
    rank: int
    faked_on: str
    real_allocated_bytes: int
    real_reserved_bytes: int
    allocated_difference_bytes: int
    reserved_difference_bytes: int
    phases_differing: int
    num_phase_figures: int
    num_events: int
    first_other_event: int
    cause: str

    @property
    def is_same(self) -> bool:
        """Whether every figure is the same, of the run and of each phase."""
        return not (self.allocated_difference_bytes or self.reserved_difference_bytes or self.phases_differing)


def real_runs(way: Way, directory: Path) -> list[Path]:
    """Run a job as many processes that talk to each other; the run directory of each.

    Raises:
        JobFailedError: A process failed, or did not end in time.
    """
    port = _free_port()
    started = [_start_real(way.rank(rank), directory, port) for rank in range(way.num_ranks)]
    try:
        for _, process in started:
            process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise JobFailedError(f"{way.job}: its {way.num_ranks} ranks did not end within {TIMEOUT_S} seconds") from None
    finally:
        for _, process in started:
            process.kill()
            process.wait()
    for run, process in started:
        if process.returncode:
            raise JobFailedError(f"{way.job}: {run.name}: {(directory / f'{run.name}.txt').read_text()[-2000:]}")
        write_manifest(run, replace(load_manifest(run), exit=Ending(Outcome.FINISHED, 0)))
        build_tables(run)
    return [run for run, _ in started]


def faked_run(way: Way, rank: int, directory: Path, options: Sequence[str]) -> Path:
    """Run one rank of a job under ``fakedist profile`` with its ``options`` of the device; its run directory.

    Raises:
        JobFailedError: It failed, or did not end in time.
    """
    run = directory / f"faked-{options[1]}-{rank}"
    job = ["--world-size", str(way.num_ranks), "--rank", str(rank), "--steps", str(MOST_STEPS), *options]
    script = [str(SCRIPT), way.job, way.backend]
    ended = ended_with(["-m", "fakedist", "profile", *job, "--no-kernels", "-o", str(run), *script], TIMEOUT_S)
    if ended.why:
        raise JobFailedError(f"{way.job}: rank {rank}, faked, {ended.why}")
    return run


def compare(way: Way, ranks: Sequence[int] | None = None, at_once: int = 1) -> list[Row]:
    """Run a job both ways, ``at_once`` faked ranks at a time; a row for each of ``ranks``, or all, and device.

    Raises:
        JobFailedError: See :func:`real_runs` and :func:`faked_run`.
    """
    with tempfile.TemporaryDirectory(prefix="many-") as text, ThreadPoolExecutor(at_once) as pool:
        directory = Path(text)
        real = real_runs(way, directory)
        options = {device: _device_options(way, device, real[0]) for device in way.faked_on}
        chosen = [(rank, device) for rank in (range(way.num_ranks) if ranks is None else ranks) for device in options]
        faked = pool.map(lambda each: faked_run(way, each[0], directory, options[each[1]]), chosen)
        return [_row(way, each, real[each[0]], run) for each, run in zip(chosen, faked, strict=True)]


def compare_all(
    ways: Sequence[Way], at_once: int = 1, ends_at: float = float("inf"), told: Callable[[str], None] = print
) -> tuple[list[Row], list[str]]:
    """Compare many jobs, none begun after ``ends_at`` (``time.monotonic()``); their rows, and why others have none."""

    def run(way: Way) -> tuple[list[Row], list[str]]:
        if time.monotonic() > ends_at:
            return [], [f"{way.job}, {way.num_ranks} ranks, {way.backend}: not run: the time was over"]
        try:
            rows = compare(way, at_once=at_once)
        except JobFailedError as error:
            told(f"{way.job}, {way.num_ranks} ranks, {way.backend}: {error}")
            return [], [f"{way.job}, {way.num_ranks} ranks, {way.backend}: {str(error).strip().splitlines()[-1]}"]
        for row in rows:
            told(line_of(row))
        return rows, []

    with ThreadPoolExecutor(max(1, at_once // 4)) as pool:
        found = list(pool.map(run, ways))
    return [row for rows, _ in found for row in rows], [text for _, failed in found for text in failed]


def _device_options(way: Way, device: str, real: Path) -> list[str]:
    """Where a rank is faked: a virtual GPU that is compared with real ones has their model and memory."""
    if device == way.device:
        return ["--device", device]
    summary = load_manifest(real).summary
    assert summary is not None
    gpu, memory_bytes = like(summary.gpu, summary.capacity_bytes)
    return ["--device", device, "--gpu", gpu, "--gpu-memory", f"{memory_bytes}B"]


def _start_real(job: Job, directory: Path, port: int) -> tuple[Path, subprocess.Popen[bytes]]:
    run = directory / f"real-{job.rank}"
    with create_run_directory(run, force=False) as made:
        new_manifest(made, job)
    environment = {**os.environ, **rank_environment(job), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 keeps the store itself
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    environment["OMP_NUM_THREADS"] = "1"
    with (directory / f"{run.name}.txt").open("wb") as output:
        command = [sys.executable, "-m", "tests.accuracy.real_rank", str(run)]
        return run, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _row(way: Way, faked_rank: tuple[int, str], real: Path, faked: Path) -> Row:
    phases = [_phase_figures(run) for run in (real, faked)]
    keys = phases[0].keys() | phases[1].keys()
    differing = sum(phases[0].get(key) != phases[1].get(key) for key in keys)
    (allocated, reserved), (faked_allocated, faked_reserved) = _peaks(real), _peaks(faked)
    num_events, first_other = _first_difference(real, faked)
    same = (allocated, reserved) == (faked_allocated, faked_reserved) and not differing
    return Row(
        way.job, way.backend, way.num_ranks, *faked_rank, allocated, reserved, faked_allocated - allocated,
        faked_reserved - reserved, differing, len(keys), num_events, first_other, "" if same else way.cause,
    )  # fmt: skip


def _phase_figures(run: Path) -> dict[tuple[int, str, str], int]:
    rows = read_table(run, "phases").to_pylist()
    return {(row["step"], row["phase"], column): int(row[column]) for row in rows for column in COLUMNS}


def _peaks(run: Path) -> tuple[int, int]:
    summary = load_manifest(run).summary
    assert summary is not None
    return summary.peak_allocated_bytes, summary.peak_reserved_bytes


def _first_difference(real: Path, faked: Path) -> tuple[int, int]:
    sides = [recorded_events(read_recording(run)) for run in (real, faked)]
    at = first_difference(*sides)
    return len(sides[0]), -1 if at is None else at


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="virtual")
    parser.add_argument("--backend", choices=("nccl", "gloo"), action="append")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas between")
    parser.add_argument("--job", action="append", choices=JOBS)
    parser.add_argument("--write", action="store_true", help="the data and the table into docs/accuracy")
    parser.add_argument("--at-once", type=int, default=1, help="faked ranks at a time, and a job for every four")
    chosen = parser.parse_args(arguments)
    ways = [
        Way(job, int(num_ranks), chosen.device, backend)
        for backend in chosen.backend or ["nccl"]
        for job in chosen.job or JOBS
        for num_ranks in chosen.ranks.split(",")
    ]
    rows, failed = compare_all(ways, chosen.at_once, told=partial(print, flush=True))
    if chosen.write:
        name = f"many-processes-{chosen.device}"
        gpu = {} if chosen.device == "virtual" else real_machine()
        write_result(name, [asdict(row) for row in rows], instead_of=same_job(KEYS), **gpu)
        write_tables()
    return 1 if failed or any(not row.is_same and not row.cause for row in rows) else 0


def line_of(row: Row) -> str:
    """One row in words."""
    return (
        f"{row.job:<18}{row.backend:<5} rank {row.rank} of {row.num_ranks} on {row.faked_on}: "
        f"real {row.real_allocated_bytes:>13,} {row.real_reserved_bytes:>13,}  "
        f"difference {row.allocated_difference_bytes:+,} "
        f"{row.reserved_difference_bytes:+,}, {row.phases_differing} of {row.num_phase_figures} of phases; "
        f"{row.num_events:,} events, first other {row.first_other_event}  {row.cause}"
    )


if __name__ == "__main__":
    sys.exit(main())
