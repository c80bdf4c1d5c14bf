"""The child process of a marked test: ``python -m fakedist.check.marked_test ARGUMENTS``, run as a rank of a job.

pytest finds and runs the one test with its fixtures. What the test raises leaves this process as it would leave a
script, so the run ends like a script's run.
"""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest

from fakedist.errors import StopRun, chain_of

#: Other exceptions that end a run in a special way: a full GPU, a signal, a full disk. By name, as torch may not be
#: loaded here, and the reading half does not import the recording half.
_KEPT_NAMES = ("OutOfMemoryError", "Terminated", "JournalFailed")


class FailureKeeper:
    """Keeps the error that the test raised; None without one."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self) -> Generator[None, object, object]:
        """Run the test function."""
        try:
            return (yield)
        except BaseException as error:
            self.error = error
            raise


def run_test(arguments: list[str]) -> int:
    """Run the one test. Returns its exit code if it did not raise."""
    keeper = FailureKeeper()
    code = int(pytest.main(arguments, plugins=[keeper]))
    error = keeper.error
    if error is None:
        return code
    for link in chain_of(error):
        if isinstance(link, StopRun | KeyboardInterrupt) or type(link).__name__ in _KEPT_NAMES:
            raise error
    if isinstance(error, pytest.skip.Exception):
        raise SystemExit(f"skipped: {error}")
    raise SystemExit(f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": "))


if __name__ == "__main__":
    raise SystemExit(run_test(sys.argv[1:]))
