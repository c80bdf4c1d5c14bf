"""Stops the script, also where a test runner, a notebook or a bare ``except:`` catches what stops it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any, NoReturn

from fakedist.errors import StopRun, chain_of
from fakedist.frames import script_line
from fakedist.patch import patched

#: How often a script may catch the stop and train on. Then its process ends.
MOST_SWALLOWED = 3
#: Methods by which unittest reports what a test raised, and the position of the error among their arguments.
_REPORTS = {"addError": 2, "addFailure": 2, "addSubTest": 3}


class Stopping:
    """Makes the exception that is raised inside the script to end the run; a context manager that undoes its patches.

    - unittest catches whatever a test raises. Its results are made to stop there, without a failure.
    - pytest catches everything but its own ``Exit``. So the exception is also an ``Exit``, with exit code 0.
    - IPython prints a traceback and goes on with the next cell. Here it prints none.
    - A bare ``except:`` around a training step swallows it, and the next step raises it again. After the third time the
      process ends instead. ``num_swallowed`` counts them.
    """

    def __init__(self) -> None:
        self.num_swallowed = 0
        self._undo = ExitStack()
        self._is_first = True

    def __enter__(self) -> Stopping:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def error(self) -> StopRun:
        """The exception to raise now. The process ends here if the script has swallowed it too often."""
        if not self._is_first and not any(
            isinstance(link, StopRun) for link in chain_of(sys.exception() or Exception())
        ):
            self.num_swallowed += 1
            if self.num_swallowed >= MOST_SWALLOWED:
                _end_process(self.num_swallowed)
        if self._is_first:
            self._is_first = False
            for owner, name, replacement in _unittest_patches():
                self._undo.enter_context(patched(owner, name, replacement))
            shell = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
            if shell is not None and shell.initialized():
                shell.instance().set_custom_exc((StopRun,), lambda *error, **offset: None)
        exit_error = getattr(sys.modules.get("_pytest.outcomes"), "Exit", None)
        return _pytest_stop(exit_error) if exit_error is not None and _runs("/_pytest/runner.py") else StopRun()


def _end_process(num_swallowed: int) -> NoReturn:
    """End the process as ``os._exit`` does, which closes the recording (:mod:`fakedist.rank.ending`)."""
    line = script_line()
    message = f"fakedist: the script caught the stop {num_swallowed} times and went on"
    with suppress(OSError, ValueError):  # the script may have closed them
        sys.stderr.write(f"{message}{f', last at {line}' if line else ''}: the process ends here\n")
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(0)


def _pytest_stop(exit_error: type) -> StopRun:
    kind: Any = type(  # its signature is pytest's
        "StopRun", (StopRun, exit_error), {"__module__": StopRun.__module__}
    )
    stop: StopRun = kind(str(StopRun()), returncode=0)
    return stop


def _runs(filename: str) -> bool:
    """Return whether code in a file whose name ends like this called us."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(filename):
            return True
        frame = frame.f_back
    return False


def _unittest_patches() -> Iterator[tuple[type, str, Callable[..., None]]]:
    """Every method that reports an error, in all result classes, and its replacement."""
    result = getattr(sys.modules.get("unittest.result"), "TestResult", None)
    classes: list[type] = [] if result is None else [result]
    for class_ in classes:
        subclasses: list[type] = class_.__subclasses__()
        classes += [subclass for subclass in subclasses if subclass not in classes]
    pytests = getattr(sys.modules.get("_pytest.unittest"), "TestCaseFunction", None)
    for class_ in [*classes, *([] if pytests is None else [pytests])]:
        for name, index in _REPORTS.items():
            if name in vars(class_):
                yield class_, name, _quiet(vars(class_)[name], index, raises=class_ is pytests)


def _quiet(original: Callable[..., None], index: int, *, raises: bool) -> Callable[..., None]:
    def report(*args: Any, **kwargs: object) -> None:
        error = args[index][1] if len(args) > index and args[index] else None
        link: BaseException | None = error
        while link is not None and not isinstance(link, StopRun):
            link = link.__cause__ or link.__context__
        if link is None:
            original(*args, **kwargs)
        elif raises:
            raise link
        else:
            args[0].stop()

    return report
