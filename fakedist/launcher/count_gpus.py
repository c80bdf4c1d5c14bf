"""A program that prints how many real NVIDIA GPUs there are. It runs in isolated mode, by its path."""

from __future__ import annotations

import ctypes
import sys


def count_gpus() -> int:
    """The number of GPUs that a process started here sees. 0 if the driver does not start."""
    cuda = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    return count.value if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


if __name__ == "__main__":
    sys.stdout.write(str(count_gpus()))
