"""Snapshots that no torch wrote: what each is called, its content, and what is said of it."""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any


class Runs:
    """A pickle that calls something when it is loaded."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def event(**changed: Any) -> dict[str, Any]:
    """An event as torch writes it, with changes."""
    frames = [{"filename": "/job/model.py", "line": 12, "name": "forward"}]
    return {"action": "alloc", "addr": 512, "size": 1 << 20, "stream": 0, "time_us": 1, "frames": frames, **changed}


def of(*events: object, segments: object = ()) -> bytes:
    """The pickle of a snapshot with one history."""
    listed = list(segments) if isinstance(segments, tuple) else segments
    return pickle.dumps({"segments": listed, "device_traces": [list(events)]})


def _shared(depth: int) -> list[Any]:
    """A list of a few bytes whose text has more letters than any disk."""
    found: list[Any] = ["A" * 100]
    for _ in range(depth):
        found = [found, found]
    return found


def _framed(**frame: Any) -> bytes:
    return of(event(frames=[{"filename": "x", "line": 1, "name": "y"} | frame]))


#: Content, and a part of the one line that is said of it.
REFUSED: dict[str, tuple[bytes, str]] = {
    "calls os.system": (pickle.dumps(Runs(os.system, ("touch PWNED",))), "tries to run posix.system"),
    "calls within": (of(Runs(eval, ("__import__('os').system('touch PWNED')",))), "tries to run builtins.eval"),
    "refers outside": (b"\x80\x04Pabc\n.", "outside the file"),
    "shared frames": (of(event(frames=[_shared(30)])), "a frame is neither a dict nor a text"),
    "shared action": (of(event(action=_shared(30))), "an action is not a text"),
    "tuple for an action": (of(event(action=(("A",),))), "an action is not a text"),
    "shared segments": (of(segments=_shared(30)), "a segment is not a dict"),
    "nested lists": (b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".", "a segment is not a dict"),
    "address of 70 bits": (of(event(addr=1 << 70)), "'addr' of an entry must be an integer"),
    "negative size": (of(event(size=-5)), "'size' of an entry must be an integer"),
    "half a byte": (of(event(size=0.5)), "'size' of an entry must be an integer"),
    "text for a stream": (of(event(stream="x")), "a value of an event must be an integer"),
    "line of 100 bits": (_framed(line=1 << 100), "a line must be an integer"),
    "a segment of -10 bytes": (of(segments=[{"address": 5, "total_size": -10}]), "'total_size' of an entry"),
    "bytes without end": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"abc.", "is not a memory snapshot"),
    "frame without end": (b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"].", "is not a memory snapshot"),
    "number without end": (b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"1.", "is not a memory snapshot"),
    "cut off": (of(event())[:-9], "is not a memory snapshot"),
    "empty": (b"", "is not a memory snapshot"),
    "a number": (pickle.dumps(3), "it has no segments"),
}

ESCAPES = "\x1b]0;pwned\x07\x1b[31mred\x1b[2J\x9b31m\udc9b1m"

#: Content that is shown.
SHOWN: dict[str, bytes] = {
    "escapes": _framed(filename=ESCAPES + ".py", name="[red]markup[/red] \r\n x"),
    "long name": _framed(filename="a" * 5_000_000),
    "surrogates": _framed(filename="\udcff\ud800.py"),
    "markup": _framed(filename="</script><script>alert(1)</script>.py", name='"><img src=x onerror=alert(2)>'),
    "blocks without segments": of(*(event(addr=512 * number) for number in range(9))),
    "one address over and over": of(*(event(time_us=number) for number in range(9))),
    "frees alone": of(*(event(action="free_completed", size=1 << 40) for _ in range(9))),
    "unknown action": of(event(action=ESCAPES)),
}
