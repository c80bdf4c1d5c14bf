"""Reserved memory of jobs with `record_stream`: on a virtual GPU with no and with full lag, and on a real one.

    python bench/gpu_lag.py [JOB ...]

The real GPU, if the machine has one, runs each job bare, with the other ranks faked. What it reserves has to lie
between no and full lag. Kernels take milliseconds, so that it lags behind its host. Jobs whose streams wait for each
other instead reserve the same in each case. Exit code 1 if any of this is not so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
WORLD_SIZE, NUM_STEPS, WIDTH = 8, 3, 2048
MIB = 1 << 20


def _blocks(num: int) -> list[object]:
    from torch import nn

    return [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False))
        for _ in range(num)
    ]


def _train(model: Callable[[object], object], parameters: object, rows: int = 8192) -> None:
    import torch

    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    given = torch.randn(rows, WIDTH, device="cuda")
    for _ in range(NUM_STEPS):
        model(given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _fsdp1(*, limit_all_gathers: bool) -> None:
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({nn.Sequential})
    model = FullyShardedDataParallel(
        nn.Sequential(*_blocks(12)).cuda(), auto_wrap_policy=policy, limit_all_gathers=limit_all_gathers
    )
    _train(model, model.parameters())


def fsdp1() -> None:
    """FSDP1 as it is: the host waits for all but two gathers."""
    _fsdp1(limit_all_gathers=True)


def fsdp1_unlimited() -> None:
    """FSDP1 whose host waits for nothing."""
    _fsdp1(limit_all_gathers=False)


def ddp() -> None:
    """DDP, which waits on streams alone."""
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Sequential(*_blocks(6)).cuda(), init_sync=False)
    _train(model, model.parameters())


def _offload(*, records: bool) -> None:
    """Saved tensors go to the host on a side stream, by hooks; FSDP2's way if the side stream is waited for instead."""
    import torch
    from torch import nn
    from torch.autograd.graph import saved_tensors_hooks

    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    waited: list[torch.Tensor] = []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        if saved.numel() * 4 < 32 * MIB or isinstance(saved, nn.Parameter) or saved.grad_fn is None:
            return saved
        there = torch.empty(saved.shape, dtype=saved.dtype, pin_memory=True)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            there.copy_(saved, non_blocking=True)
        if records:
            saved.record_stream(side)
        else:
            waited.append(saved)
            if len(waited) > 2:
                main.wait_stream(side)
                waited.clear()
        return there

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        return saved if saved.is_cuda else saved.cuda(non_blocking=True)

    layers = nn.Sequential(*_blocks(8)).cuda()

    def model(given: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(pack, unpack):
            return layers(given)

    _train(model, layers.parameters())


def offload() -> None:
    """Saved tensors offloaded on a side stream, with record_stream."""
    _offload(records=True)


def offload_waits() -> None:
    """The same without record_stream: the stream that allocates waits for the side stream."""
    _offload(records=False)


def zero3() -> None:
    """DeepSpeed ZeRO-3 (``make frameworks``), whose host waits for all but two gathers and all but two reductions."""
    import deepspeed
    import torch
    from torch import nn

    model = nn.Sequential(*_blocks(12))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 4 * WIDTH * WIDTH}
    zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "reduce_bucket_size": 4 * WIDTH * WIDTH}
    optimizer = {"type": "SGD", "params": {"lr": 1e-3}}
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": zero}
    settings["zero_allow_untested_optimizer"] = True  # SGD
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    given = torch.randn(8192, WIDTH, device="cuda")
    for _ in range(NUM_STEPS):
        engine.backward(engine(given).square().mean())
        engine.step()


JOBS = {job.__name__: job for job in (fsdp1, fsdp1_unlimited, ddp, offload, offload_waits, zero3)}
#: They use no record_stream: streams wait.
WAITING = {"ddp", "offload_waits"}


def run_job(name: str) -> None:
    """Run a job in this process, whose world exists, and print what it reserved."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    JOBS[name]()
    found = {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
    print("FOUND", json.dumps(found), flush=True)


def run_bare(name: str) -> None:
    """The same on the real GPU of this process, with a faked world and no recorder."""
    from fakedist.options import Job
    from fakedist.rank.frameworks.adapting import adapted_frameworks
    from fakedist.world.environ import rank_environment
    from fakedist.world.reroute import fake_world

    rank = Job(WORLD_SIZE, 0, "job", device="cuda")
    os.environ.update(rank_environment(rank))
    with fake_world(rank, None, None), adapted_frameworks():
        run_job(name)


def measure(command: list[str]) -> dict[str, int]:
    """Run a job and read what it printed. A failed one ends the benchmark."""
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            found: dict[str, int] = json.loads(line.removeprefix("FOUND "))
            return found
    raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")


def virtual(name: str, lag: str, gpu: list[str]) -> dict[str, int]:
    """Run a job under `fakedist profile`."""
    with tempfile.TemporaryDirectory(prefix="gpu-lag-") as directory:
        options = ["--device=virtual", f"--gpu-lag={lag}", f"--world-size={WORLD_SIZE}", "--rank=0", "--until=end"]
        options += ["--no-page", "--no-kernels", "-o", f"{directory}/run", *gpu]
        return measure([sys.executable, "-m", "fakedist", "profile", *options, __file__, "--in-world", name])


def compare(name: str, gpu: list[str], *, is_real: bool) -> bool:
    """Print a job's row; whether each reserves what it may."""
    with ThreadPoolExecutor(4 if (os.cpu_count() or 1) > 4 else 1) as pool:
        bare = pool.submit(measure, [sys.executable, __file__, "--bare", name]) if is_real else None
        none, full = pool.map(lambda lag: virtual(name, lag, gpu), ("none", "full"))
        real = bare.result() if bare else None
    is_right = none["reserved"] <= (real or none)["reserved"] <= full["reserved"]
    is_right &= (none["reserved"] == full["reserved"]) == (name in WAITING)
    columns = [
        f"{found[what] / MIB:,.0f}" if found else "-"
        for what in ("reserved", "allocated")
        for found in (none, real, full)
    ]
    print(f"{name:<16}{''.join(f'{text:>10}' for text in columns)}", "" if is_right else "WRONG", flush=True)
    return is_right


def main() -> int:
    """Compare the jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="*", metavar="JOB", help=f"{', '.join(JOBS)}; all if none is named")
    for option in ("--in-world", "--bare"):
        parser.add_argument(option, choices=JOBS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_world or args.bare:
        (run_job if args.in_world else run_bare)(args.in_world or args.bare)
        return 0
    from fakedist.launcher.machine import count_real_gpus

    is_real, gpu = count_real_gpus() > 0, ["--gpu=h200"]
    if is_real:
        import torch

        from fakedist.extras.confirm.pieces import like

        model, capacity_bytes = like(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
        gpu = [f"--gpu={model}", f"--gpu-memory={capacity_bytes} B"]
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'':<16}{'reserved, MiB':>30}{'allocated, MiB':>30}")
    print(f"{'':<16}{''.join(f'{text:>10}' for text in ('no lag', 'real', 'full lag') * 2)}", flush=True)
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    names = args.job or [name for name in JOBS if has_deepspeed or name != "zero3"]
    results = [compare(name, gpu, is_real=is_real) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
