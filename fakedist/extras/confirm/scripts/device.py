"""Where one of these scripts runs: on the CUDA device that its process has, or on a virtual GPU; without torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def parse(description: str | None, *positional: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """The arguments of a script: its own, and ``--device virtual --gpu h200 --gpu-memory BYTES``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, options in positional:
        parser.add_argument(name, **options)
    parser.add_argument("--device", choices=("present", "virtual"), default="present")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--gpu-memory", type=int)
    return parser.parse_args()


@contextmanager
def device(args: argparse.Namespace, num_gpus: int = 1) -> Iterator[Any]:
    """The device of these arguments: the virtual GPU while it is entered, None for the process's own."""
    if args.device != "virtual":
        yield None
        return
    from fakedist.gpu.models.catalogue import find_gpu
    from fakedist.gpu.virtual import virtual_gpu

    with virtual_gpu(find_gpu(args.gpu), num_gpus, args.gpu_memory) as gpu:
        yield gpu
