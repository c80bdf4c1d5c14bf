"""Triton and autotuning on the virtual GPU: timings there mean nothing, so the first configuration is taken.

Triton's key depends on the installed files alone, so it is kept under a digest of their paths, sizes and times of
change. Times between events that the script reads count as made up. Autotuning covers Inductor's templates
(``max_autotune``), its block sizes (also ``coordinate_descent_tuning``) and ``triton.autotune``. It is left alone on a
real GPU.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from fakedist.patch import now_and_when_imported, patched, present
from fakedist.rundir import notes
from fakedist.rundir.notes import Note
from fakedist.rundir.sources import EVENT_TIME

_MODULE, _NAME = "triton.runtime.cache", "triton_key"
_replace = os.replace  # not what watches the script's calls of it


@contextmanager
def kept_triton_key(directory: Path) -> Iterator[None]:
    """Compute Triton's key, which Inductor asks for too, once for all ranks, and keep it in a directory."""
    with ExitStack() as stack:

        def is_imported(module: ModuleType) -> None:
            compute, file = getattr(module, _NAME, None), getattr(module, "__file__", None)
            if callable(compute) and file:
                key = functools.cache(lambda: _kept(directory, Path(file).parents[1], compute))
                stack.enter_context(patched(module, _NAME, key))

        stack.enter_context(now_and_when_imported((_MODULE,), is_imported))
        yield


def _kept(directory: Path, installed: Path, compute: Callable[[], str]) -> str:
    try:
        file = directory / f"{_digest(installed)}.txt"
    except OSError:  # a link that leads nowhere, or a file that has just been removed
        return compute()
    with suppress(OSError, UnicodeDecodeError):
        if key := file.read_text():
            return key
    key = compute()
    with suppress(OSError):  # no room: the next rank computes it again
        directory.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(key)
        _replace(draft, file)
    return key


def _digest(installed: Path) -> str:
    digest = hashlib.sha256()
    for at, directories, files in os.walk(installed):
        directories[:] = sorted(name for name in directories if name != "__pycache__")
        for name in sorted(files):
            stat = os.stat(os.path.join(at, name))
            digest.update(f"{at}/{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()


_HEURISTICS = "torch._inductor.runtime.triton_heuristics"
_SELECTION = "torch._inductor.select_algorithm"
_TRITON = "triton.runtime.autotuner"
_Method = Callable[..., object]


@contextmanager
def event_times(count: Callable[[str, int], None]) -> Iterator[None]:
    """Call ``count(EVENT_TIME, 1)`` for each time between two events that the script reads, which is this machine's.

    RecordingError if this torch's events differ. A plain ``torch.Event`` is not seen: its class cannot be patched.
    """

    def elapsed_time(self: torch.cuda.Event, end_event: torch.cuda.Event) -> float:
        count(EVENT_TIME, 1)
        time_ms: float = original(self, end_event)
        return time_ms

    with patched(torch.cuda.Event, "elapsed_time", elapsed_time) as original:
        yield


class _KernelTuner(Protocol):
    """Inductor's ``CachingAutotuner``."""

    configs: list[object] | None
    compile_results: list[object]
    launchers: list[object]


class _TritonConfig(Protocol):
    def all_kwargs(self) -> dict[str, object]: ...


class _TritonTuner(Protocol):
    """Triton's ``Autotuner``; ``nargs`` has the arguments of the launch that is tuned, in order."""

    configs: list[object]
    nargs: dict[str, object]
    fn: Any


class FirstConfigurations:
    """Takes the first configuration wherever autotuning would choose one, and counts how often."""

    def __init__(self) -> None:
        self._exit = ExitStack()
        self._chosen: dict[str, int] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take first configurations from now on, also in modules imported later. RecordingError if tuning differs."""
        modules = {_HEURISTICS: self._inductor, _SELECTION: self._templates, _TRITON: self._triton}
        with ExitStack() as self._exit:
            watch = now_and_when_imported(modules, lambda module: modules[module.__name__](module))
            self._exit.enter_context(watch)
            yield

    def notes(self) -> list[Note]:
        """Notes for the report: that nothing was tuned, if anything would have been."""
        return [notes.nothing_tuned(self._chosen)] if self._chosen else []

    def _count(self, choice: str) -> None:
        self._chosen[choice] = self._chosen.get(choice, 0) + 1

    def _patch(self, owner: object, name: str, make: Callable[[Any], _Method]) -> None:
        self._exit.enter_context(patched(owner, name, make(present(owner, name))))

    def _inductor(self, module: ModuleType) -> None:
        tuner = present(module, "CachingAutotuner")

        def worker(original: _Method) -> _Method:
            def precompile_worker(self_: _KernelTuner) -> None:
                configs = self_.configs
                if self_.compile_results or not configs or len(configs) == 1:
                    original(self_)
                    return
                self._count("kernels of Inductor")
                for last, config in enumerate(configs, start=1):
                    self_.configs = [config]
                    try:
                        original(self_)
                    except Exception:  # too large for this GPU; tuning would skip it
                        if last == len(configs):
                            raise
                    else:
                        return

            return precompile_worker

        def coordinates(original: _Method) -> _Method:
            def coordinate_descent_tuning(
                self_: _KernelTuner, launcher: object, *args: object, **kwargs: object
            ) -> object:
                self._count("kernels by coordinate descent")
                return launcher

            return coordinate_descent_tuning

        def times(original: _Method) -> _Method:
            def benchmark_all_configs(self_: _KernelTuner, *args: object, **kwargs: object) -> dict[object, float]:
                return {launcher: float(position) for position, launcher in enumerate(self_.launchers)}

            return benchmark_all_configs

        self._patch(tuner, "_precompile_worker", worker)
        self._patch(tuner, "coordinate_descent_tuning", coordinates)
        self._patch(tuner, "benchmark_all_configs", times)

    def _templates(self, module: ModuleType) -> None:
        def select(original: _Method) -> _Method:
            def call(self_: object, name: str, choices: list[object], *args: object, **kwargs: object) -> object:
                if len(choices) > 1:
                    self._count("choices of templates")
                return original(self_, name, choices[:1], *args, **kwargs)

            return call

        self._patch(present(module, "AlgorithmSelectorCache"), "__call__", select)

    def _triton(self, module: ModuleType) -> None:
        def prune(original: Callable[..., list[_TritonConfig]]) -> _Method:
            def prune_configs(self_: _TritonTuner, kwargs: dict[str, object]) -> list[_TritonConfig]:
                configs = original(self_, kwargs)
                if len(configs) == 1:
                    return configs
                self._count("kernels of triton.autotune")
                return [next((config for config in configs if _fits(self_, config, kwargs)), configs[-1])]

            return prune_configs

        def bench(original: _Method) -> _Method:
            def _bench(self_: _TritonTuner, *args: object, config: object, **meta: object) -> list[float]:
                return [0.0] * 3  # older Tritons also time a single configuration

            return _bench

        tuner = present(module, "Autotuner")
        self._patch(tuner, "prune_configs", prune)
        self._patch(tuner, "_bench", bench)


def _fits(tuner: _TritonTuner, config: _TritonConfig, kwargs: dict[str, object]) -> bool:
    """Whether a configuration compiles and the GPU has the shared memory and threads for it; else Triton skips it."""
    try:
        compiled = tuner.fn.run(*tuner.nargs.values(), **{**kwargs, **config.all_kwargs(), "warmup": True})
        compiled._init_handles()
    except Exception:  # raised again by the launch if no configuration fits
        return False
    return True
