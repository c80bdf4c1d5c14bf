"""Runs a command of fakedist for an agent: within limits, with progress, and ended when the agent cancels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process

from fakedist.launcher.process_tree import ProcessTree, rss_bytes
from fakedist.units import format_bytes
from fakedist.visible import visible_lines

_POLL_S = 0.2
_PROGRESS_S = 1.0
#: How long a command may take to end its ranks, once it gets SIGTERM.
_END_S = 15.0
#: Of what a command printed on stderr, an answer has these last characters.
_TAIL_CHARACTERS = 2_000

Progress = Callable[[float, str], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """Limits of one command and all that it starts."""

    seconds: int
    memory_bytes: int


@dataclass(frozen=True)
class Answered:
    """A command that has ended.

    Attributes:
        data: The object that it printed; None if it printed none.
        said: The end of what it and the script printed.
        exceeded: The limit that ended it, in words; empty if none did.
    """

    code: int
    data: Any
    said: str
    exceeded: str


async def run_command(
    words: Sequence[str], project: Path, limits: Limits, progress: Progress, output: Path | None
) -> Answered:
    """Run ``fakedist WORDS --json`` in the project. What the script prints goes into a file, if one is named."""
    command = [sys.executable, "-P", "-m", "fakedist", *words]  # a module of the project must not stand for Python's
    with (
        tempfile.TemporaryFile() as printed,
        tempfile.TemporaryFile() if output is None else output.open("w+b") as said,
    ):
        process = await anyio.open_process(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=said, cwd=project, start_new_session=True
        )
        try:
            exceeded = await _follow(process, limits, progress, said.fileno())
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
        said_text = _tail(said.fileno())
        printed.seek(0)
        data = None
        with suppress(ValueError):
            data = json.loads(printed.read())
        return Answered(process.returncode or 0, data, said_text, exceeded)


async def _follow(process: Process, limits: Limits, progress: Progress, said: int) -> str:
    """Wait for a process's end. Returns the limit that it exceeded; it then still runs."""
    begin = time.monotonic()
    tree, next_progress = ProcessTree(process.pid), _PROGRESS_S
    while process.returncode is None:
        await anyio.sleep(_POLL_S)
        seconds = time.monotonic() - begin
        if seconds > limits.seconds:
            return f"it took longer than {limits.seconds:,} s: fakedist mcp --time-limit SECONDS allows more"
        if rss_bytes(process.pid) + tree.rss_bytes() > limits.memory_bytes:
            most = format_bytes(limits.memory_bytes)
            return f"it held more than {most} of memory: fakedist mcp --memory-limit SIZE allows more"
        if seconds >= next_progress:
            next_progress = seconds + _PROGRESS_S
            await progress(seconds, _tail(said).rpartition("\n")[2])
    return ""


async def _end(process: Process) -> None:
    """End a process that still runs, and all that it started."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(_END_S):
            await process.wait()
    if process.returncode is None:
        await anyio.to_thread.run_sync(ProcessTree(process.pid).kill)
        process.kill()
        await process.wait()


def _tail(file: int) -> str:
    """The last lines of a file that another process writes, safe to show."""
    size = os.fstat(file).st_size
    text = os.pread(file, _TAIL_CHARACTERS, max(0, size - _TAIL_CHARACTERS)).decode(errors="replace")
    return visible_lines(text.strip())
