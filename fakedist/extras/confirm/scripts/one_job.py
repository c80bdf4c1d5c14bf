"""Runs one job and writes down what the allocator did: what a recording starts once for each job.

Under ``fakedist profile`` the history belongs to the profile, so that only the statistics are written. Standard library
and torch only, but for the virtual GPU and a faked world, which are fakedist's.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fakedist.extras.confirm.allocator_history import Events, EventsBuilder, JobRecord
from fakedist.extras.confirm.jobs import PROFILED, GpuJob
from fakedist.extras.confirm.scripts.start import Measuring

_TORCH, _JOBS = f"{os.sep}torch{os.sep}", f"{Path(__file__).parents[1] / 'jobs'}{os.sep}"


def measure(measuring: Measuring) -> None:
    """Run the job; its record is written whatever happens, short of a crash of the process."""
    gpu, job = measuring.gpu, measuring.job
    assert job is not None
    if gpu is None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # of a world of one rank: nothing to meet
    record = JobRecord(job.name)
    with _surroundings(job, gpu is not None):
        facts = _record(job, record)
    if gpu is not None:
        record.notes += [f"refused: {name}, {calls} calls" for name, calls in gpu.refused()]
    versions = {"torch": str(torch.__version__), "python": sys.version.split()[0]}
    measuring.write({"job": asdict(record), **facts, **versions})
    if record.error:
        raise SystemExit(record.error)


@contextmanager
def _surroundings(job: GpuJob, virtual: bool) -> Iterator[None]:
    """The world of a job that runs bare, and the values that it reads; under ``fakedist profile`` both are there."""
    if os.environ.get(PROFILED):
        yield
        return
    with ExitStack() as stack:
        is_undefined = compute_what_is_read() if virtual else None
        if job.world_size and (virtual or job.world_size > 1):
            from fakedist.options import Job
            from fakedist.rank.frameworks.adapting import adapted_frameworks
            from fakedist.world.environ import rank_environment
            from fakedist.world.reroute import fake_world

            rank = Job(job.world_size, 0, "job", device="virtual" if virtual else "cuda")
            os.environ.update(rank_environment(rank))
            stack.enter_context(fake_world(rank, None, is_undefined))
            stack.enter_context(adapted_frameworks())
        elif job.world_size:
            alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
            os.environ.update(alone | {"MASTER_PORT": str(20_000 + os.getpid() % 20_000)})
        yield


def compute_what_is_read() -> Callable[[Any], bool]:
    """Let the value engine run where a job reads values, and nowhere else; says what it left without a value."""
    from fakedist.extras.confirm.jobs.training import computed_by
    from fakedist.gpu.values.engine import ValueEngine
    from fakedist.record.operations import Operations
    from fakedist.record.position import Position

    engine = ValueEngine(0)
    # Outside, no operation accounts for a kernel's writes, and the driver takes values away from what it may write to.
    engine.host.storages._losses = ctypes.c_uint64(0)
    computed_by(lambda: Operations(Position(), engine.execute, lambda: None, lambda text: None))
    return engine.is_undefined


def _record(job: GpuJob, record: JobRecord) -> dict[str, Any]:
    """Run the job into its record; what the device is."""
    torch.cuda.init()
    properties = torch.cuda.get_device_properties(0)
    profiled = bool(os.environ.get(PROFILED))
    if not profiled:
        torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python")
    torch.manual_seed(0)
    gc.collect()
    gc.disable()  # when it would run depends on how many objects Python has made, so also on who watches
    try:
        job.run()
        torch.cuda.synchronize()
    except Exception as error:
        record.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        record.notes.append(_script_line(error))
    record.statistics = {name: value for name, value in torch.cuda.memory_stats().items() if isinstance(value, int)}
    if not profiled:
        record.events = _events(torch._C._cuda_memorySnapshot(None)["device_traces"][0])
    return {"gpu": properties.name, "capacity_bytes": properties.total_memory}


def _events(trace: list[dict[str, Any]]) -> Events:
    builder = EventsBuilder()
    lines: dict[int, str] = {}
    for entry in trace:
        frames = entry.get("frames") or ()
        line = lines.get(id(frames))
        if line is None:
            line = lines[id(frames)] = innermost_line(frames)
        builder.add(entry["action"], entry["size"], entry["stream"], line)
    return builder.build()


def innermost_line(frames: Any) -> str:
    """The innermost function of torch, where it is one, and the line of the job that called it."""
    inside = ""
    for frame in frames:
        filename = frame["filename"]
        if filename.startswith(_JOBS):
            line = f"{os.path.basename(filename)}:{frame['line']} {frame['name']}"
            return f"{line} > {inside}" if inside else line
        if not inside and _TORCH in filename:
            inside = f"{os.path.basename(filename)}:{frame['line']} {frame['name']}"
    return inside


def _script_line(error: BaseException) -> str:
    trace, line = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_JOBS):
            line = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"it ended at {line}" if line else "it ended outside of the job"
