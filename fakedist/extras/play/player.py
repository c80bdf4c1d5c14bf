"""Plays a recorded sequence of allocations with other sizes, through torch's caching allocator on the virtual GPU.

It is the program of a process: ``python -m fakedist.extras.play.player PROGRAM.npz`` reads the counts of a play from
stdin, and writes a row of :data:`PLAYED` to stdout, all as 64-bit integers. If the program has kinds of steps, it reads
steps, and writes a row of :data:`OUTCOME` and one of :data:`STEP` for each. Torch's Python is not imported.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fakedist.errors import RecordingError, SetupError
from fakedist.gpu.driver.build import ensure_driver, torch_directory
from fakedist.gpu.fast_path.build import Library
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.virtual import virtual_gpu
from fakedist.launcher.machine import num_cores
from fakedist.rundir.environment import SETTINGS

#: What is known of a play. ``failed_event`` is -1 if every request was served.
PLAYED = ("peak_allocated_bytes", "peak_reserved_bytes", "num_retries", "num_mallocs", "failed_event")
#: Where a play of steps ended early: -1 if it did not. Step -1 is what comes before the first.
OUTCOME = ("failed_step", "failed_event", "requested_bytes", "allocated_bytes", "reserved_bytes")
#: What is known of a played step.
STEP = ("peak_allocated_bytes", "peak_reserved_bytes", "num_retries", "num_mallocs")
#: Before the counts of a played step: its kind, and whether the cache is emptied after it.
STEP_HEAD = 2
#: What plays a program, of torch's caching allocator.
PLAYER = Library(
    "player",
    (str(Path(__file__).with_name("player.cpp")),),
    (),
    ("-std=c++20", "-O2"),
    ("-lc10_cuda", "-lc10"),
    "it builds what plays a recording with other sizes",
    "the player of allocations",
)
_ARRAYS = ("events", "base", "per", "follows", "stream", "is_shared")


class _Program(ctypes.Structure):
    """``Program`` of player.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_events", "num_blocks", "num_streams")),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
    ]


_KIND_ARRAYS = (
    *("first_event", "first_block", "events", "base", "per", "follows", "stream", "is_shared"),
    *("group", "carried", "generation", "age", "maker"),
)


class _Kinds(ctypes.Structure):
    """``Kinds`` of player.cpp, field by field."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("num_kinds", "num_columns", "num_carried", "num_generations", "num_streams")
        ),
        *((name, ctypes.c_void_p) for name in _KIND_ARRAYS),
    ]


def main(path: Path) -> None:
    """Play a program with each row of counts that comes, until there are no more.

    A play whose request is refused is played again with all the memory that it asks for: its peaks are what it needs.
    """
    with np.load(path) as file:
        arrays = {name: np.ascontiguousarray(file[name]) for name in file if name != "gpu"}
        gpu_name = str(file["gpu"])
    has_kinds = "first_event" in arrays
    num_streams, capacity_bytes = arrays["sizes"].tolist()[-2:]
    with virtual_gpu(find_gpu(gpu_name), memory_bytes=_UNLIMITED) as gpu:
        for name in ("libc10.so", "libc10_cuda.so"):
            ctypes.CDLL(os.fspath(torch_directory() / "lib" / name), mode=os.RTLD_GLOBAL)
        library = ctypes.CDLL(os.fspath(PLAYER.ensure()))
        library.fakedist_player_begin.argtypes = [ctypes.c_int64]
        library.fakedist_player_play.argtypes = [ctypes.c_void_p] * 3
        library.fakedist_player_play_steps.argtypes = [
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]
        if not library.fakedist_player_begin(num_streams):
            raise SetupError("torch's caching allocator did not start on the virtual GPU", "fakedist doctor")
        if has_kinds:
            gpu.limit(0, capacity_bytes)
            _play_steps(library, arrays)
            return
        num_counts = int(arrays["sizes"][0])
        addresses = {name: arrays[name].ctypes.data for name in _ARRAYS}
        program = _Program(len(arrays["events"]), len(arrays["base"]), num_streams, **addresses)
        played = np.zeros(len(PLAYED) + 1, np.int64)

        def play(limit_bytes: int, counts: bytes) -> None:
            gpu.limit(0, limit_bytes)
            if not library.fakedist_player_play(ctypes.byref(program), counts, played.ctypes.data):
                raise SetupError("the player's process ended early", "fakedist doctor")

        while len(counts := sys.stdin.buffer.read(8 * num_counts)) == 8 * num_counts and num_counts:
            play(capacity_bytes, counts)
            if (failed := int(played[_FAILED])) >= 0:
                play(0, counts)
                played[_FAILED] = failed
            sys.stdout.buffer.write(played[: len(PLAYED)].tobytes())
            sys.stdout.buffer.flush()


def _play_steps(library: ctypes.CDLL, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    num_steps, num_columns, num_carried, num_generations, num_streams, _ = arrays["sizes"].tolist()
    addresses = {name: arrays[name].ctypes.data for name in _KIND_ARRAYS}
    kinds = _Kinds(len(arrays["first_event"]) - 1, num_columns, num_carried, num_generations, num_streams, **addresses)
    size = 8 * num_steps * (STEP_HEAD + num_columns)
    played = np.zeros(len(OUTCOME) + 1 + len(STEP) * num_steps, np.int64)
    while len(steps := sys.stdin.buffer.read(size)) == size:
        if not library.fakedist_player_play_steps(ctypes.byref(kinds), steps, num_steps, played.ctypes.data):
            raise SetupError("the player's process ended early", "fakedist doctor")
        sys.stdout.buffer.write(np.delete(played, len(OUTCOME)).tobytes())
        sys.stdout.buffer.flush()
        if not size:
            return


_FAILED = PLAYED.index("failed_event")
_UNLIMITED = 1 << 45

if __name__ == "__main__":
    main(Path(sys.argv[1]))


Ints = npt.NDArray[np.int64]


#: So many players run at once, if there are as many cores.
_MOST = 8


def play(program: Path, counts: Iterable[Ints], alloc_conf: str) -> Iterator[dict[str, int]]:
    """Play a program with each of the counts, under settings of the allocator. Yields a play by ``player.PLAYED``.

    Raises:
        FakedistError: The player cannot be built, or its process ended early.
    """
    for row in _plays(program, counts, alloc_conf, len(PLAYED)):
        yield dict(zip(PLAYED, row.tolist(), strict=True))


def play_steps(program: Path, steps: Iterable[Ints], alloc_conf: str) -> Iterator[tuple[dict[str, int], Ints]]:
    """Play kinds of steps: rows of kind, whether the cache is emptied after it, and counts. All plays have as many.

    Yields where a play ended early by ``player.OUTCOME``, and its steps, [steps, ``player.STEP``]. Raises as
    :func:`play`.
    """
    first = next(steps := iter(steps))
    for row in _plays(program, chain([first], steps), alloc_conf, len(OUTCOME) + len(STEP) * len(first)):
        outcome = dict(zip(OUTCOME, row[: len(OUTCOME)].tolist(), strict=True))
        yield outcome, row[len(OUTCOME) :].reshape(-1, len(STEP))


def _plays(program: Path, counts: Iterable[Ints], alloc_conf: str, num_values: int) -> Iterator[Ints]:
    ensure_driver()
    PLAYER.ensure()
    environment = {name: text for name, text in os.environ.items() if name not in SETTINGS}
    environment |= dict.fromkeys(SETTINGS, alloc_conf) if alloc_conf else {}
    # NumPy's threads would take part of the other players' time. Small blocks of memory come and go without a lock.
    environment |= {"OPENBLAS_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=60000"}
    command = [sys.executable, "-m", "fakedist.extras.play.player", os.fspath(program)]
    with ExitStack() as stack:
        players = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            )
            for _ in range(min(num_cores(), _MOST))
        ]
        feeder = _Feeder(players, counts)
        feeder.start()
        for player in cycle(players):
            assert player.stdout is not None
            if len(row := player.stdout.read(8 * num_values)) < 8 * num_values:
                break
            yield np.frombuffer(row, np.int64)
        feeder.join()
    if feeder.error is not None:
        raise feeder.error
    if codes := [player.returncode for player in players if player.returncode]:
        raise RecordingError(f"a player's process ended with exit code {codes[0]}", "fakedist doctor")


class _Feeder(threading.Thread):
    """Gives each player the next counts in turn, while they play the ones before."""

    def __init__(self, players: Sequence[subprocess.Popen[bytes]], counts: Iterable[Ints]) -> None:
        super().__init__(daemon=True)
        self._pipes = [player.stdin for player in players if player.stdin is not None]
        self._counts = counts
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            for pipe, row in zip(cycle(self._pipes), self._counts, strict=False):
                pipe.write(np.ascontiguousarray(row, np.int64).tobytes())
                pipe.flush()
        except BrokenPipeError:
            pass  # the player's exit code says why
        except Exception as error:  # the caller's thread raises it
            self.error = error
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.close()
