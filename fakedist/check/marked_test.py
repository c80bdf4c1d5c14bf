"""The child process of a marked test: ``python -m fakedist.check.marked_test ARGUMENTS``, run as a rank of a job.

pytest finds and runs the one test with its fixtures. What the test raises leaves this process as it would leave a
script, so the run ends like a script's run.
"""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest

#: Exceptions that end a run in a special way: the last step, a full GPU, a signal. By name, as torch may not be loaded.
_KEPT = ("StopRun", "OutOfMemoryError", "Terminated", "JournalFailed", "KeyboardInterrupt")


class Watcher:
    """Keeps what the test raised.

    Attributes:
        error: What the test raised, or None.
    """

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
    watcher = Watcher()
    code = int(pytest.main(arguments, plugins=[watcher]))
    error = watcher.error
    if error is None:
        return code
    link: BaseException | None = error
    while link is not None:
        if type(link).__name__ in _KEPT:
            raise error
        link = link.__cause__ or link.__context__
    told = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
    raise SystemExit(f"skipped: {error}" if isinstance(error, pytest.skip.Exception) else told)


if __name__ == "__main__":
    raise SystemExit(run_test(sys.argv[1:]))
