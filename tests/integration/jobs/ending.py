"""A tiny training script that ends in the way its first argument names; test_endings.py runs it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

atexit.register(lambda: print("atexit ran", flush=True))


class Picklable:
    """Can be pickled only if ``__main__`` is this script."""


def double(number: int) -> tuple[int, str]:
    """The work of a worker process, and the name of its module."""
    return 2 * number, __name__


def train(steps: int) -> None:
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        try:
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        except Exception:
            print("swallowed", flush=True)


def fill() -> torch.Tensor:
    """Ask for more than the GPU has."""
    return torch.empty(1 << 45, dtype=torch.uint8, device="cuda")


def main(how: str) -> None:
    """Train one step, then end; "timeout" ends in the fourth."""
    if how == "stopped":
        try:
            train(100)
        finally:
            print("finally ran", flush=True)
    train(3 if how == "timeout" else 1)
    match how:
        case "exit3":
            sys.exit(3)
        case "exit_text":
            sys.exit("a text")
        case "exception":
            raise ValueError("a bad value")
        case "os_exit":
            os._exit(7)
        case "out_of_memory":
            fill()
        case "caught_out_of_memory":
            try:
                fill()
            except torch.OutOfMemoryError:
                print("caught", flush=True)
        case "interrupt" | "terminate" | "timeout":
            try:
                if how == "timeout":
                    torch.nn.Linear(64, 64, device="cuda")(torch.ones(8, 64, device="cuda"))
                print("sleeping", flush=True)  # the test's signal comes at once
                time.sleep(600)
            finally:
                print("finally ran", flush=True)
        case "address_space":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), resource.RLIM_INFINITY))  # as ulimit -v does
            with suppress(RuntimeError):
                torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "sigkill":
            print("left", subprocess.Popen(["sleep", "600"]).pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        case "workers":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(double, [21]), flush=True)
        case "fork":
            if os.fork() == 0:
                torch.ones(4).sum().item()
                sys.exit(5)
            print("child", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
