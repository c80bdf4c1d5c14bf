"""Test functions that run on the virtual GPU, in a process of their own: it must be loaded before torch is.

One worker process serves all tests of a module; what a test function raises there fails the test here. Workers fork
from a process that has imported torch, as do those of :mod:`tests.support.virtual`, which run one piece of Python each.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
import inspect
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fakedist.launcher.fork_servers import ForkedChild, ForkServer
from tests.conftest import ROOT, clean_environment

if TYPE_CHECKING:
    from fakedist.gpu.values.engine import ValueEngine

NUM_DEVICES = 2


def on_virtual_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in the worker. One with an argument ``engine`` runs with the value engine active and gets it."""

    @functools.wraps(test)
    def ask() -> None:
        answer = _worker(test.__code__.co_filename).run(test.__name__)
        assert not answer, answer

    # pytest asks the signature for fixtures; the engine is none.
    ask.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
    return ask


def invented_values(engine: ValueEngine) -> int:
    """How many values were made up since the last call."""
    return sum(values for *_, values in engine.invented())


class _Worker:
    def __init__(self, module: str) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._process, self._module = _asked({"module": module}, (theirs_in, theirs_out, 2)), module
        os.close(theirs_in)
        os.close(theirs_out)
        self._questions, self._answers = os.fdopen(ours_out, "w"), os.fdopen(ours_in)

    def run(self, name: str) -> str:
        """The traceback of a test; empty when it passed."""
        if self._process.has_ended():
            self.close()
            return f"an earlier test ended the worker with {self._process.wait()}"
        self._questions.write(name + "\n")
        self._questions.flush()
        line = self._answers.readline()
        return str(json.loads(line)) if line else f"the worker ended with {self._process.wait()}"

    def is_of(self, module: str) -> bool:
        return self._module == module

    def close(self) -> None:
        """End it, and forget it."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._questions.close()
        self._answers.close()
        _workers.remove(self)


#: The worker of the module whose tests run; the server follows one process at a time.
_workers: list[_Worker] = []


def _worker(module: str) -> _Worker:
    _close_workers(but_of=module)
    if not _workers:
        _workers.append(_Worker(module))
    return _workers[0]


def _close_workers(but_of: str = "") -> None:
    for worker in _workers[:]:
        if not worker.is_of(but_of):
            worker.close()


def run_python(body: str, gpu: str, devices: int, memory_bytes: int | None, files: tuple[int, int, int]) -> int:
    """Run Python in a process of its own with these virtual GPUs, ``torch``, ``gpu`` and the dict ``found``, which it
    prints as JSON at the end. ``files`` are its streams. Returns its exit code.
    """
    _close_workers()
    return _asked({"body": body, "gpu": gpu, "devices": devices, "memory": memory_bytes}, files).wait()


def _asked(request: dict[str, Any], files: tuple[int, int, int]) -> ForkedChild:
    process = _server().ask({"environment": clean_environment(), "cwd": str(ROOT), **request}, files)
    assert process is not None
    return process


@functools.cache
def _server() -> ForkServer:
    server = ForkServer()
    server.start([sys.executable, "-m", "tests.support.virtual_worker"], clean_environment(), str(ROOT), 2)
    atexit.register(server.close)
    atexit.register(_close_workers)  # first
    return server


def _serve(door: str) -> None:
    """Be the server, and in each fork run Python or answer for the tests of a module."""
    from fakedist.gpu.models.catalogue import find_gpu
    from fakedist.gpu.virtual import virtual_gpu
    from fakedist.rank.fork_server import can_fork, end_with_parent, serve

    end_with_parent(signal.SIGKILL)
    with virtual_gpu(find_gpu("h100-80g")):  # forks configure their own
        import torch

        import fakedist.gpu.values.engine  # noqa: F401
    gc.collect()
    gc.freeze()
    request, _ = serve(socket.socket(fileno=int(door)), serves=can_fork())
    torch.default_generator.seed()
    if "body" in request:
        found: dict[str, Any] = {}
        with virtual_gpu(find_gpu(request["gpu"]), request["devices"], request["memory"]) as gpu:
            exec(request["body"], {"torch": torch, "gpu": gpu, "found": found, "sys": sys, "json": json})
            print("FOUND", json.dumps(found), flush=True)
            os._exit(0)  # an autograd thread that starts while the interpreter ends aborts the process
    with virtual_gpu(find_gpu("h100-80g"), devices=NUM_DEVICES):
        answers = sys.stdout
        sys.stdout = sys.stderr
        path = Path(request["module"])
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for line in sys.stdin:
            answers.write(json.dumps(_answer(getattr(module, line.strip()).__wrapped__)) + "\n")
            answers.flush()


def _answer(test: Callable[..., None]) -> str:
    import torch

    from fakedist.gpu.values.engine import ValueEngine
    from fakedist.record.operations import Operations
    from fakedist.record.position import Position

    _follow_blocks()
    try:
        with ExitStack() as stack:
            arguments: dict[str, Any] = {}
            if "engine" in inspect.signature(test).parameters:
                engine = arguments["engine"] = ValueEngine(0)
                stack.enter_context(Operations(Position(), engine.execute, lambda: None, lambda text: None))
            test(**arguments)
    except BaseException:
        return traceback.format_exc()
    finally:
        torch.set_grad_enabled(True)
    return ""


@functools.cache
def _follow_blocks() -> None:
    """Have the driver told of the blocks that the allocator hands out, as in a recorded run."""
    import torch

    from fakedist.gpu.fast_path.compiled import make_fast_path

    torch.cuda.init()
    if (fast_path := make_fast_path(None)) is not None:
        fast_path.watch_history()
        fast_path.stop_history()


if __name__ == "__main__":
    _serve(sys.argv[1])
