"""Measures one thing in a process of its own, on its CUDA device or on a virtual GPU, and writes it as JSON.

    python start.py MODULE[:FUNCTION] [JOB] RESULT.json [--device virtual --gpu h200 --gpu-memory BYTES]

The function is ``measure`` by default. Its module imports torch, so it is imported once the device exists. Standard
library only, but for the virtual GPU, which is fakedist's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakedist.extras.confirm.jobs import JOBS, GpuJob


@dataclass
class Measuring:
    """The job to measure and the device to measure on.

    Attributes:
        job: The job of the accuracy set; None where the module needs none.
        gpu: The virtual GPU; None on the process's own device.
        write: Replaces the result as a whole: a process that is killed leaves the previous one.
    """

    job: GpuJob | None
    gpu: Any
    write: Callable[[object], None]


def main() -> None:
    """Enter the device, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module")
    parser.add_argument("job", nargs="?", choices=JOBS)
    parser.add_argument("result", type=Path)
    parser.add_argument("--device", choices=("cuda", "virtual"), default="cuda")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--gpu-memory", type=lambda text: int(text.removesuffix("B")))
    args = parser.parse_args()
    job = None if args.job is None else JOBS[args.job]

    def write(result: object) -> None:
        scratch = args.result.with_suffix(".new")
        scratch.write_text(json.dumps(result))
        scratch.replace(args.result)

    device: Any = nullcontext()
    if args.device == "virtual":
        from fakedist.gpu.models.catalogue import find_gpu
        from fakedist.gpu.virtual import virtual_gpu

        device = virtual_gpu(find_gpu(args.gpu), max(1, job.world_size if job else 1), args.gpu_memory)
    with device as gpu:
        module, _, function = args.module.partition(":")
        getattr(importlib.import_module(module), function or "measure")(Measuring(job, gpu, write))
        time.sleep(0.3)  # an autograd thread that starts while the interpreter ends aborts the process


if __name__ == "__main__":
    main()
