import os
import sys
import unittest
from typing import NoReturn

import pytest

from fakedist.errors import StopRun
from fakedist.record.stopping import MOST_SWALLOWED, Stopping


class ProcessEnded(BaseException):
    pass


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which the process would have ended."""
    codes: list[int] = []

    def end(code: int) -> NoReturn:
        codes.append(code)
        raise ProcessEnded

    monkeypatch.setattr(os, "_exit", end)
    return codes


def swallow(stopping: Stopping, times: int) -> None:
    """Train on after the stop, as a loop with a bare ``except:`` does."""
    for _ in range(times):
        try:
            raise stopping.error()
        except StopRun:
            pass


def test_the_process_ends_after_the_third_swallowed_stop(ended: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    with Stopping() as stopping:
        swallow(stopping, MOST_SWALLOWED)
        assert ended == []
        with pytest.raises(ProcessEnded):
            stopping.error()
        assert stopping.num_swallowed == MOST_SWALLOWED
    assert ended == [0]
    said = capsys.readouterr().err
    assert said.startswith("fakedist: the script caught the stop 3 times and went on, last at ")
    assert "test_stopping.py" in said


def test_what_trains_while_the_stop_runs_through_it_swallows_nothing(ended: list[int]) -> None:
    with Stopping() as stopping:
        try:
            raise stopping.error()
        except StopRun:
            for _ in range(10):  # a teardown that trains on
                assert isinstance(stopping.error(), StopRun)
    assert (stopping.num_swallowed, ended) == (0, [])


def reported(error: BaseException) -> tuple[list[str], bool]:
    """Errors that a unittest result keeps of a test that raises, and whether the result stops."""
    result = unittest.TestResult()
    case = unittest.FunctionTestCase(lambda: None)
    try:
        raise error
    except BaseException:
        result.addError(case, sys.exc_info())
        result.addSubTest(case, case, None)  # without an error
    return [text.splitlines()[-1] for _, text in result.errors], result.shouldStop


def test_a_unittest_stops_without_a_failure_and_others_fail_as_usual() -> None:
    before = vars(unittest.TestResult)["addError"]
    with Stopping() as stopping:
        wrapped = RuntimeError("of the test")
        wrapped.__cause__ = stopping.error()
        assert reported(wrapped) == ([], True)
        assert reported(ValueError("a bug")) == (["ValueError: a bug"], False)
    assert vars(unittest.TestResult)["addError"] is before
