"""The parent's end of the child's messages, and the terminal line that shows progress."""

from __future__ import annotations

import json
import os
import select
import shutil
from typing import TextIO

from fakedist.rank.reporter import Ended, Failed, Message, Progress, Restarted, Signals, Started
from fakedist.rundir.plain import PlainValueError, from_plain
from fakedist.units import format_bytes

_MESSAGES: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Started, Progress, Ended, Restarted, Signals, Failed)
}


class Listener:
    """The parent's end of the pipe, with the last message of each kind; ``own_signal`` is 0 without one."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._rest = b""
        self._open = True
        self.started: Started | None = None
        self.progress: Progress | None = None
        self.ended: Ended | None = None
        self.restarted: Restarted | None = None
        self.own_signal = 0
        self.failed: Failed | None = None

    def wait(self, seconds: float) -> None:
        """Read the messages that have arrived, after waiting at most this many seconds for one."""
        ready = select.select([self._reader] if self._open else [], [], [], seconds)[0]
        if ready:
            self._read()

    def close_writer(self) -> None:
        """Close the writing end. The child has its own copy."""
        os.close(self.writer)

    def close(self) -> None:
        """Read what is left and close."""
        self._read()
        os.close(self._reader)
        self._open = False

    def _read(self) -> None:
        while self._open:
            try:
                data = os.read(self._reader, 65536)
            except BlockingIOError:
                return
            if not data:
                self._open = False
                os.close(self._reader)
                self._reader = os.open(os.devnull, os.O_RDONLY)
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            ((name, value),) = json.loads(line).items()
            message = from_plain(_MESSAGES[name], value)
        except (ValueError, AttributeError, KeyError, PlainValueError):  # the script wrote into the pipe
            return
        match message:
            case Started():
                self.started = message
            case Progress():
                self.progress = message
            case Ended():
                self.ended = message
            case Restarted():
                self.restarted = message
            case Signals():
                self.own_signal = message.number
            case Failed():
                self.failed = message


class ProgressLine:
    """Phase, step and peak at the right edge of the terminal's current line.

    The script writes to the same terminal, so the cursor returns to where it was (ESC 7, ESC 8): the script's lines
    start at the left edge, whole, whatever the right edge shows.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._column = 0
        self._shown = ""

    def show(self, progress: Progress) -> None:
        """Show where the script is."""
        of = f"/{progress.steps}" if isinstance(progress.steps, int) else ""
        step = f"step {progress.step}{of}" if progress.step else "start"
        text = f"[{step}, {progress.phase}, peak {format_bytes(progress.allocated_bytes)}]"
        if text == self._shown:
            return
        column = max(1, shutil.get_terminal_size().columns - len(text))
        start = min(column, self._column or column)
        self._stream.write(f"\x1b7\x1b[{start}G\x1b[K\x1b[{column}G{text}\x1b8")
        self._stream.flush()
        self._column, self._shown = column, text

    def clear(self) -> None:
        """Remove the text from the terminal."""
        if self._shown:
            self._stream.write(f"\x1b7\x1b[{self._column}G\x1b[K\x1b8")
            self._stream.flush()
            self._shown = ""
