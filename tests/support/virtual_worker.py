"""Test functions that run on the virtual GPU, in a process of their own: it must be loaded before torch is.

One worker process serves all tests of a module; what a test function raises there fails the test here. Tests of what a
process is (how many devices it has, how it runs out of memory) take :mod:`tests.support.virtual` instead.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import inspect
import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        command = [sys.executable, "-m", "tests.support.virtual_worker", module]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self._stop)

    def run(self, name: str) -> str:
        """The traceback of a test; empty when it passed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.poll() is not None:
            _worker.cache_clear()
            return f"an earlier test ended the worker with {self._process.returncode}"
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return str(json.loads(line)) if line else f"the worker ended with {self._process.wait()}"

    def _stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@functools.cache
def _worker(module: str) -> _Worker:
    return _Worker(module)


def _serve(module_path: Path) -> None:
    from fakedist.gpu.models.catalogue import find_gpu
    from fakedist.gpu.virtual import virtual_gpu

    answers = sys.stdout
    sys.stdout = sys.stderr
    with virtual_gpu(find_gpu("h100-80g"), devices=NUM_DEVICES):
        spec = importlib.util.spec_from_file_location(module_path.stem, module_path)
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
    from fakedist.gpu.fast_path.event_tracker import EventTracker
    from fakedist.record.device_memory import keeps_metadata

    torch.cuda.init()
    if not keeps_metadata():
        EventTracker()
    elif (fast_path := make_fast_path(None)) is not None:
        fast_path.watch_history()
        fast_path.stop_history()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
