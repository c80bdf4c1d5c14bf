"""The child process of a marked test: what its test raises ends it as it would end a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakedist.check.marked_test import run_test
from fakedist.errors import StopRun

TESTS = """
import pytest
from fakedist.errors import StopRun

class OutOfMemoryError(RuntimeError): ...

def test_passes(): ...
def test_fails(): assert 1 == 2, "unequal"
def test_skips(): pytest.skip("no GPU")
def test_stops(): raise StopRun
def test_runs_out(): raise OutOfMemoryError("full")
def test_hides_that_it_ran_out():
    try:
        raise OutOfMemoryError("full")
    except RuntimeError as error:
        raise ValueError("wrapped") from error
@pytest.fixture
def broken(): raise ValueError("a fixture")
def test_lacks_its_fixture(broken): ...
"""


def ended(directory: Path, name: str) -> int:
    file = directory / "test_cases.py"
    file.write_text(TESTS)
    (directory / "pytest.ini").write_text(
        "[pytest]\naddopts = -q -p no:cacheprovider -p no:xdist --import-mode=importlib\n"
    )
    options = ["--rootdir", str(directory), "-c", str(directory / "pytest.ini")]
    return run_test([*options, f"{file}::{name}"])


def test_a_test_that_ends_by_itself_has_pytests_code(tmp_path: Path) -> None:
    assert ended(tmp_path, "test_passes") == 0
    assert ended(tmp_path, "test_lacks_its_fixture") == pytest.ExitCode.TESTS_FAILED
    assert ended(tmp_path, "test_does_not_exist") == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(
    ("name", "said"), [("test_fails", "AssertionError: unequal"), ("test_skips", "skipped: no GPU")]
)
def test_what_a_test_raises_is_the_last_line(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(SystemExit) as raised:
        ended(tmp_path, name)
    assert raised.value.code == said


@pytest.mark.parametrize("name", ["test_stops", "test_runs_out", "test_hides_that_it_ran_out"])
def test_what_ends_a_run_in_a_special_way_leaves_as_it_is(tmp_path: Path, name: str) -> None:
    with pytest.raises((StopRun, RuntimeError, ValueError)) as raised:
        ended(tmp_path, name)
    assert type(raised.value).__name__ in ("StopRun", "OutOfMemoryError", "ValueError")
