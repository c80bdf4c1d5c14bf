"""Measures one thing in a process of its own, each by a function for start.py.

``one_job`` writes down what the allocator did in a job. Under ``fakedist profile`` the history belongs to the profile,
so that only the statistics are written. ``growing`` is a job that grows until it does not fit, with less and less
memory. ``outside`` uses one library after another, and has the memory outside the caching allocator after each.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from fakedist.extras.confirm.allocator_history import Events, EventsBuilder, JobRecord
from fakedist.extras.confirm.jobs import MOST_GIB, PROFILED, GpuJob
from fakedist.extras.confirm.jobs.training import Transformer, language_loss
from fakedist.extras.confirm.scripts.start import Measuring

_TORCH, _JOBS = f"{os.sep}torch{os.sep}", f"{Path(__file__).parents[1] / 'jobs'}{os.sep}"


def one_job(measuring: Measuring) -> None:
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


GIB = 1 << 30
_LENGTHS = (256, 1024, 4096)


@dataclass
class Failure:
    """Where a trial ended.

    Attributes:
        step: From 1; 0 while the model is made.
        phase: "init", "forward", "backward", "optimizer"; empty where it ended well.
        num_allocations: Blocks that the allocator had given.
        requested_bytes: Of the request that failed; 0 where none did.
        peak_reserved_bytes: Most in segments.
    """

    step: int = 0
    phase: str = "init"
    num_allocations: int = 0
    requested_bytes: int = 0
    peak_reserved_bytes: int = 0


def growing(measuring: Measuring) -> None:
    """Run the trials, one after another: where each fails.

    The memory shrinks in steps of 1 GiB, in two ways. "allocator": torch.cuda.set_per_process_memory_fraction, a limit
    of the caching allocator's own. "device": cudaMalloc, past the allocator, takes all but so much of the device, so it
    is the device that refuses. Each trial trains from scratch: three steps of a transformer, each on longer sequences
    than the last. One trial without a limit runs first, so that libraries have already taken what they take at first
    use.
    """
    rows: list[dict[str, Any]] = [{"limit": "nothing", "gib": 0, "found": asdict(_trial())}]
    for limit, limited in (("allocator", by_allocator), ("device", by_device)):
        for gib in range(MOST_GIB, 0, -1):
            with limited(gib * GIB):
                rows.append({"limit": limit, "gib": gib, "found": asdict(_trial())})
            measuring.write(rows)


@contextmanager
def by_allocator(num_bytes: int) -> Iterator[None]:
    """The allocator's own limit."""
    torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.mem_get_info()[1])
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def by_device(num_bytes: int) -> Iterator[None]:
    """All but so many bytes of the device are taken outside the allocator."""
    runtime = ctypes.CDLL(None)  # torch has loaded it for the whole process
    taken = ctypes.c_void_p()
    size = torch.cuda.mem_get_info()[0] - num_bytes
    if code := runtime.cudaMalloc(ctypes.byref(taken), ctypes.c_size_t(size)):
        raise SystemExit(f"cudaMalloc of {size} bytes: error {code}")
    yield
    runtime.cudaFree(taken)


def _trial() -> Failure:
    """One training from nothing; where it failed. Everything is given back after it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    asked: list[int] = []
    bindings: Any = torch._C
    bindings._cuda_attach_out_of_memory_observer(lambda device, size, total, free: asked.append(size))
    found = Failure()
    try:
        _train(found)
        found.phase = ""
    except torch.OutOfMemoryError:
        found.requested_bytes = asked[-1]
    found.num_allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    found.peak_reserved_bytes = torch.cuda.max_memory_reserved()
    gc.collect()
    torch.cuda.synchronize()
    bindings._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return found


def _train(found: Failure) -> None:
    torch.manual_seed(0)
    model = Transformer(num_layers=8, dim=1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for step, length in enumerate(_LENGTHS, 1):
        found.step, found.phase = step, "forward"
        tokens = torch.zeros(4, length, dtype=torch.int64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = language_loss(model(tokens), tokens)
        found.phase = "backward"
        loss.backward()
        found.phase = "optimizer"
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()


def outside(measuring: Measuring) -> None:
    """Use the libraries, one after another, and look at the memory after the first use of each.

    Bytes in use on the device, by ``cudaMemGetInfo``, and bytes that the allocator reserved: the difference is the CUDA
    context, loaded kernels, the handles of libraries and NCCL's buffers. No other process may use the GPU meanwhile.
    """
    rows: list[dict[str, Any]] = []
    for name, use in {**LIBRARIES, **(COMMUNICATORS if measuring.gpu is None else {})}.items():
        rows.append(_after(name.partition(" (")[0], use))
        measuring.write(rows)


def _after(name: str, use: Callable[[], object]) -> dict[str, Any]:
    error = ""
    try:
        use()
        torch.cuda.synchronize()
    except Exception as failed:  # a library that is not there must not hide what the others take
        error = f"{type(failed).__name__}: {str(failed).strip().splitlines()[0] if str(failed).strip() else ''}"
    free, total = torch.cuda.mem_get_info()
    used = {"used_bytes": total - free, "reserved_bytes": torch.cuda.memory_reserved()}
    return {"after": name, **used, "error": error}


def _product(multiply: Callable[[torch.Tensor], object]) -> None:
    multiply(torch.ones(512, 512, device="cuda", dtype=torch.bfloat16))


def _training() -> None:
    model = Transformer(num_layers=2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(2, 512, dtype=torch.int64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = language_loss(model(tokens), tokens)
    loss.backward()
    optimizer.step()


def _cudnn() -> None:
    layer = torch.nn.Conv2d(16, 32, 3).cuda()
    layer(torch.ones(4, 16, 64, 64, device="cuda")).sum().backward()


def _first_communicator() -> None:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # of a world of one rank: nothing to meet
    store = f"tcp://127.0.0.1:{20_000 + os.getpid() % 20_000}"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(1 << 20, device="cuda"))


def _another_communicator() -> None:
    dist.all_reduce(torch.ones(1 << 20, device="cuda"), group=cast(dist.ProcessGroup, dist.new_group([0])))


#: What is used for the first time, in this order.
LIBRARIES: dict[str, Callable[[], object]] = {
    "CUDA context": lambda: (torch.cuda.init(), torch.cuda.current_stream()),
    "a first kernel": lambda: torch.zeros(1024, device="cuda").add_(1),
    "cuBLAS: a product": lambda: _product(lambda a: a @ a),
    "cuBLASLt: a product with an epilogue": lambda: _product(
        lambda a: torch._addmm_activation(a[0], a, a, use_gelu=True)
    ),
    "a training step of a transformer: its kernels": _training,
    "cuDNN: a convolution, forward and backward": _cudnn,
    "cuSOLVER: QR": lambda: torch.linalg.qr(torch.ones(64, 64, device="cuda")),
    "cuFFT": lambda: torch.fft.fft(torch.ones(4096, device="cuda")),
}
#: Groups of one rank; the virtual GPU refuses NCCL, which fakedist never calls.
COMMUNICATORS: dict[str, Callable[[], object]] = {
    "NCCL: a communicator of one rank": _first_communicator,
    "NCCL: one more": _another_communicator,
    "NCCL: one more (again)": _another_communicator,
}
