from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator

import pytest

from fakedist.launcher.launching import Listener, ProgressLine
from fakedist.rank.reporter import PIPE_VARIABLE, Ended, Progress, Reporter
from fakedist.rundir.outcome import Outcome

MESSAGE = Progress("forward", step=1, steps=2, allocated_bytes=3 << 30)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def test_the_parent_hears_the_latest_of_each_kind(listener: Listener) -> None:
    reporter = Reporter(listener.writer)
    for step in (1, 2):
        reporter.send(dataclasses.replace(MESSAGE, step=step))
    reporter.send(Ended(Outcome.FINISHED, 0))
    listener.wait(1.0)
    assert listener.progress == dataclasses.replace(MESSAGE, step=2)
    assert listener.ended == Ended(Outcome.FINISHED, 0)
    assert listener.started is listener.failed is None
    reporter.send(Ended(Outcome.EXCEPTION, 1, "x" * 100_000))  # a long text is cut, and not lost
    listener.wait(1.0)
    assert listener.ended == Ended(Outcome.EXCEPTION, 1, "x" * 600)
    listener.close_writer()


def test_a_parent_that_does_not_listen_never_holds_the_child_up(listener: Listener) -> None:
    os.set_blocking(listener.writer, False)
    reporter = Reporter(listener.writer)
    for _ in range(5_000):
        reporter.send(MESSAGE)
    listener.close_writer()
    reporter.send(MESSAGE)


def test_the_script_does_not_see_the_pipe(monkeypatch: pytest.MonkeyPatch, listener: Listener) -> None:
    os.set_inheritable(listener.writer, True)
    monkeypatch.setenv(PIPE_VARIABLE, str(listener.writer))
    Reporter.from_environment()
    assert PIPE_VARIABLE not in os.environ
    assert not os.get_inheritable(listener.writer)
    listener.close_writer()


def test_a_child_that_ends_in_the_middle_of_a_line_does_no_harm(listener: Listener) -> None:
    foreign = b'not json\n[1]\n{"Ended": 1}\n{"Ended": {"outcome": "foreign", "code": 0}}\n{"Other": {}}\n'
    os.write(
        listener.writer, b'{"Ended": {"outcome": "finished", "code": 0}}\n' + foreign + b'{"Ended": {"outcome": "exc'
    )
    listener.close_writer()
    listener.wait(1.0)
    listener.wait(0.0)
    assert listener.ended == Ended(Outcome.FINISHED, 0)


def test_the_line_leaves_the_cursor_where_the_script_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = io.StringIO()
    line = ProgressLine(stream)
    line.show(MESSAGE)
    line.show(MESSAGE)
    text = "[step 1/2, forward, peak 3.00 GiB]"
    column = 60 - len(text)
    assert stream.getvalue() == f"\x1b7\x1b[{column}G\x1b[K\x1b[{column}G{text}\x1b8"
    line.clear()
    assert stream.getvalue().endswith(f"\x1b7\x1b[{column}G\x1b[K\x1b8")
    assert "\n" not in stream.getvalue()
