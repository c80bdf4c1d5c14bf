"""Runs the player of allocations (player.py) in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain, cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fakedist.errors import RecordingError
from fakedist.extras.play.player import OUTCOME, PLAYED, PLAYER, STEP
from fakedist.gpu.driver.build import ensure_driver
from fakedist.launcher.machine import num_cores
from fakedist.rundir.environment import SETTINGS

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
