"""Runs the player of allocations (gpu/player.py) in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from fakedist.errors import RecordingError
from fakedist.gpu.driver.build import ensure_driver
from fakedist.gpu.fast_path.build import PLAYER
from fakedist.gpu.player import PLAYED
from fakedist.rundir.environment import SETTINGS

Ints = npt.NDArray[np.int64]


def play(program: Path, counts: Iterable[Ints], alloc_conf: str) -> Iterator[dict[str, int]]:
    """Play a program with each of the counts, under settings of the allocator. Yields a play by ``player.PLAYED``.

    Raises:
        FakedistError: The player cannot be built, or its process ended early.
    """
    ensure_driver()
    PLAYER.ensure()
    environment = {name: text for name, text in os.environ.items() if name not in SETTINGS}
    environment |= dict.fromkeys(SETTINGS, alloc_conf) if alloc_conf else {}
    command = [sys.executable, "-m", "fakedist.gpu.player", os.fspath(program)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        feeder = threading.Thread(target=_feed, args=(child.stdin, counts), daemon=True)
        feeder.start()
        size = 8 * len(PLAYED)
        while len(row := child.stdout.read(size)) == size:
            yield dict(zip(PLAYED, np.frombuffer(row, np.int64).tolist(), strict=True))
        feeder.join()
    if child.returncode:
        raise RecordingError(f"the player's process ended with exit code {child.returncode}", "fakedist doctor")


def _feed(pipe: IO[bytes], counts: Iterable[Ints]) -> None:
    with suppress(BrokenPipeError), pipe:
        for row in counts:
            pipe.write(np.ascontiguousarray(row, np.int64).tobytes())
            pipe.flush()
