"""Whole runs, from one tensor to a sweep: seconds from start to report, CPU seconds, host memory, and the goal.

    python bench/whole_runs.py [--only NAME]

A goal is wall time on two cores that do nothing else. The line says how loaded they were. The runs of DeepSeek-V3 need
megatron-core, and Transformer Engine for the layers of the published job.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from processes import ROOT, run_process

LLAMA = [str(ROOT / "examples" / "llama_fsdp2.py"), "--tp", "8", "--checkpoint", "full"]
MEGATRON = [str(ROOT / "examples" / "megatron_gpt.py"), "--preset", "deepseek-v3", "--exit-interval", "2"]
LAYOUTS = ["--axis", "tp=1,2,4,8", "--axis", "checkpoint=none,selective,full", "--axis", "batch=1,2"]
SWEPT = ["--model", "70b", "--tp", "{tp}", "--checkpoint", "{checkpoint}", "--batch-size", "{batch}"]
ONE_TENSOR = "import torch; torch.ones(3, device='cuda')"
SMALL, LARGE, LARGEST = (["--world-size", str(size), "--rank", "0"] for size in (8, 1024, 16384))
#: Runs a script's rank on the virtual GPU with torch's own fake process group, and records nothing.
ALONE = """
import os, runpy, sys
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.virtual import virtual_gpu
os.environ.update(OMP_NUM_THREADS="1", LOCAL_RANK="0", RANK="0", WORLD_SIZE=sys.argv[1])
with virtual_gpu(find_gpu("h100-80g"), 8):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    init, size = dist.init_process_group, int(sys.argv[1])
    dist.init_process_group = lambda *args, **options: init("fake", rank=0, world_size=size, store=FakeStore())
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)
"""
H200 = ["--gpu", "h200", "--gpu-memory", "unlimited"]


@dataclass(frozen=True)
class Run:
    """One line of the benchmark.

    Attributes:
        options: Options of fakedist.
        script: The script and its arguments.
        goal_s: Wall time that the run should not exceed. None if there is no goal.
        command: fakedist's command; empty for the script alone.
        needs: A module that the script imports.
    """

    options: list[str]
    script: list[str]
    goal_s: float | None = None
    command: str = "profile"
    needs: str = "torch"


RUNS = {
    "one tensor, no page": Run([*SMALL, "--no-page"], ["one_tensor.py"]),
    "70B at world 1,024 (make demo)": Run(LARGE, [*LLAMA, "--model", "70b"], 8),
    "the same, no page": Run([*LARGE, "--no-page"], [*LLAMA, "--model", "70b"]),
    "the 70B script alone, torch's fake group": Run(["1024"], [*LLAMA, "--model", "70b", "--steps", "2"], command=""),
    "24 layouts of 70B, a sweep, no page": Run(
        [*LARGE, "--no-page", *LAYOUTS], [LLAMA[0], *SWEPT], 144, command="sweep"
    ),
    "405B at world 16,384": Run(LARGEST, [*LLAMA, "--model", "405b"], 60),
    "DeepSeek-V3 at world 1,024, rank 0": Run([*LARGE, *H200], MEGATRON, 25, needs="megatron"),
    "its 16 pipeline stages": Run(
        ["--world-size", "1024", "--rank", "0-960:64", "--jobs", "2", "--no-page", *H200],
        MEGATRON,
        150,
        needs="megatron",
    ),
}


def main() -> None:
    """Print one line a run; ``--only`` names the runs to make."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run those whose name contains this")
    only = parser.parse_args().only
    for name, run in RUNS.items():
        if only not in name:
            continue
        if importlib.util.find_spec(run.needs) is None:
            print(f"{name:<41} needs {run.needs}, which is not installed")
            continue
        print(f"{name:<41} {measured(run)}", flush=True)


def measured(run: Run) -> str:
    """Make a run, and say what it took."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "one_tensor.py").write_text(ONE_TENSOR)
        command = ["-m", "fakedist", run.command, *run.options, "--device", "virtual", "-o", "run", *run.script]
        arguments = command if run.command else ["-c", ALONE, *run.options, *run.script]
        ended = run_process([sys.executable, *arguments], cwd=Path(directory), may_fail=True)
    goal = "" if run.goal_s is None else f" (goal {run.goal_s:.0f} s)"
    took = f"{ended.wall_s:6.1f} s{goal}, {ended.cpu_s:.1f} s of CPU, {ended.host_gb:.2f} GB of host memory"
    return f"{took}, exit {ended.code}, load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
