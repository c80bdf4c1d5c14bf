"""Fuzzes files, and checks what holds for every result: one line, nothing run, no more read than there is."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fakedist.cli import main
from fakedist.errors import ExitCode, FakedistError

#: Cases for each kind of file. ``FAKEDIST_FUZZ=5000`` looks for more, with other cases each time.
NUM_CASES = int(os.environ.get("FAKEDIST_FUZZ", "30"))
#: Bytes that one case may read: each of its own so often, and what the program itself needs.
_READS_OF_A_BYTE, _READS_AT_LEAST = 64, 64 << 20
#: How much the process may grow over a whole test, in bytes.
_MOST_GROWTH = 2 << 30
#: The most characters of an error's line.
_LONGEST_LINE = 2_100
_LAST_LINE = "fakedist: exit 1: "
#: What steers a terminal: control characters, and what turns the direction of what follows.
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

#: Settings of every fuzzed test: no deadline, as no test depends on the machine's speed; pytest's timeout is the end.
bounded = settings(
    max_examples=NUM_CASES,
    deadline=None,
    derandomize="FAKEDIST_FUZZ" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
#: The same with fewer cases, for commands that take a second.
bounded_commands = settings(bounded, max_examples=max(NUM_CASES // 15, 2))

_NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([1 << 31, 1 << 53, 1 << 63, 1 << 64, 1 << 70, -(1 << 63), 10**400]),
    st.sampled_from([0.5, -1.5, 1e300, float("nan"), float("inf")]),
)
TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            "\x1b[31mred\x9b2J",
            "\u202egnp.\u2066",
            "\0",
            "\udcff",
            "</script><script>alert(1)</script>",
            "a" * 5000,
            "0-99999999",
        ]
    ),
    st.text(max_size=20),
)
_PLAIN = st.one_of(st.none(), st.booleans(), _NUMBERS, TEXTS)
#: What JSON and pickles hold.
VALUES = st.recursive(
    _PLAIN,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)


@st.composite
def damaged_bytes(draw: Any, whole: bytes) -> bytes:
    """The file cut off, or with some of its bytes changed."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(content) - 1, 0)))
        if draw(st.booleans()):
            content[place : place + 1] = draw(st.binary(min_size=1, max_size=3))
        else:
            del content[place:]
    return bytes(content)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value within a value is, as keys."""
    if at:
        yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, each in inside:
        yield from places(each, (*at, key))


def replaced(value: Any, at: Sequence[Any], by: Any) -> Any:
    """The value with another value in a place."""
    if not at:
        return by
    key, *rest = at
    if isinstance(value, dict):
        return {**value, key: replaced(value[key], rest, by)}
    return type(value)(replaced(each, rest, by) if number == key else each for number, each in enumerate(value))


def without(value: Any, at: Sequence[Any]) -> Any:
    """The value without what is in a place."""
    *before, last = at
    holder = value
    for key in before:
        holder = holder[key]
    if isinstance(holder, dict):
        kept: Any = {key: each for key, each in holder.items() if key != last}
    else:
        kept = type(holder)(each for number, each in enumerate(holder) if number != last)
    return replaced(value, before, kept)


@st.composite
def changed(draw: Any, value: Any) -> Any:
    """The value with one to three places changed or left out."""
    for _ in range(draw(st.integers(1, 3))):
        listed = sorted(places(value), key=repr)
        if not listed:
            break
        at = draw(st.sampled_from(listed))
        value = without(value, at) if draw(st.booleans()) else replaced(value, at, draw(VALUES))
    return value


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(file.stat().st_size for file in files)


def _bytes_read() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


def told(path: Path, *command: str, named: Sequence[str] = ()) -> int:
    """Run a command that reads a file, and check what it says. Returns its exit code.

    Args:
        path: The file, or the directory of a run.
        command: The command with its arguments.
        named: What an error may name in place of the file.
    """
    out, err = io.StringIO(), io.StringIO()
    before, size = _bytes_read(), _size(path)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command)
    assert _bytes_read() - before <= _READS_AT_LEAST + _READS_OF_A_BYTE * size
    assert code in (
        ExitCode.DONE,
        ExitCode.ERROR,
        ExitCode.USAGE,
        ExitCode.EXCEEDED,
        ExitCode.OUT_OF_MEMORY,
        ExitCode.MISMATCH,
    )
    assert "Traceback" not in err.getvalue()
    assert not STEERS.search(err.getvalue())
    if "html" not in command:
        assert not STEERS.search(out.getvalue())
    if code in (ExitCode.ERROR, ExitCode.USAGE):
        lines = err.getvalue().splitlines()
        begins = next(place for place, line in enumerate(lines) if line.startswith(("fakedist: error: ", _LAST_LINE)))
        first, *more = lines[begins:]
        if first == f"{_LAST_LINE}no point fits":  # of a sweep in which that is the result
            return int(code)
        assert any(name in first for name in (named or (path.name,))), first
        assert len(first) < _LONGEST_LINE
        assert all(line.startswith("  ") for line in more)
    return int(code)


def reads(read: Callable[[], object], path: Path) -> None:
    """Read a file with a function of the package: it is read, or one line names it."""
    before, size = _bytes_read(), _size(path)
    message = path.name
    try:
        read()
    except FakedistError as error:
        message = error.message
    assert path.name in message
    assert "\n" not in message
    assert _bytes_read() - before <= _READS_AT_LEAST + _READS_OF_A_BYTE * size


@contextlib.contextmanager
def bounded_growth() -> Iterator[None]:
    """Check that the process did not grow by more than any of these small files may take."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 <= _MOST_GROWTH
