"""The pytest plugin: tests that are ranks of jobs, and a fixture that runs ranks. Each runs in a child process.

Every pytest loads it if fakedist is installed, so it imports nothing heavy before it is needed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Unpack
from unittest import TestCase

import pytest

from fakedist.temporary import scratch_directory

if TYPE_CHECKING:
    from fakedist.options import JobOptions
    from fakedist.results.run import Run

#: Set in the child, where the marked function runs like any other test.
INSIDE_VARIABLE = "FAKEDIST_MARKED_TEST"
_SKIPPED = "skipped: "
_WIDTH = 120
_LIMITS = ("max_peak", "max_reserved", "min_headroom")
_MARK = (
    "fakedist(world_size, rank=0, max_peak=None, max_reserved=None, min_headroom=None, **options): run the test as one "
    "rank of a job, in a child process, and see that its memory stays within; options as of fakedist.profile"
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", _MARK)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the fixtures of marked tests to the child process."""
    for item in items:
        if _is_marked(item) and isinstance(item, pytest.Function):
            item.fixturenames = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marked test that cannot run in a child process: it would run here without being judged."""
    if _is_marked(item) and (not isinstance(item, pytest.Function) or issubclass(item.cls or object, TestCase)):
        pytest.fail(
            "fakedist: the mark works on functions and on methods of plain classes, not of unittest.TestCase", False
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test in a child process, and judge its figures."""
    if not _is_marked(pyfuncitem):
        return None
    mark = pyfuncitem.get_closest_marker("fakedist")
    assert mark is not None
    if mark.args:
        pytest.fail("fakedist: the mark takes keywords only: fakedist(world_size=8)", pytrace=False)
    limits = _read_limits(mark)
    options = {name: value for name, value in mark.kwargs.items() if name not in _LIMITS}
    with scratch_directory("test") as scratch:
        run = _profiled(pyfuncitem, lambda: _run_marked(pyfuncitem, options, scratch / "run"))
        exceeded = _exceeded(run, limits)
    if exceeded:
        pytest.fail("\n".join(exceeded), pytrace=False)
    return True


class Fakedist:
    """The fixture's value: :meth:`profile` is :func:`fakedist.profile` with run directories below ``tmp_path``."""

    def __init__(self, item: pytest.Item, directory: Path) -> None:
        self._item = item
        self._directory = directory
        self._number = 0

    def profile(
        self,
        target: str | os.PathLike[str],
        *arguments: str,
        world_size: int | None = None,
        rank: int = 0,
        module: bool = False,
        output: str | os.PathLike[str] | None = None,
        **options: Unpack[JobOptions],
    ) -> Run:
        """Run one rank of a job in a child process. If the test fails, the run's tables are shown."""
        from fakedist.api import profile

        self._number += 1
        directory = output or self._directory / f"run{self._number}"

        def make() -> Run:
            return profile(
                target, *arguments, world_size=world_size, rank=rank, module=module, output=directory, **options
            )

        return _profiled(self._item, make)


@pytest.fixture
def fakedist(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fakedist:
    """Run ranks of jobs: ``run = fakedist.profile("train.py", world_size=1024)``."""
    return Fakedist(request.node, tmp_path_factory.mktemp("fakedist"))


def _is_marked(item: pytest.Item) -> bool:
    return INSIDE_VARIABLE not in os.environ and item.get_closest_marker("fakedist") is not None


def _profiled(item: pytest.Item, make: Callable[[], Run]) -> Run:
    from fakedist.errors import FakedistError, ScriptError

    try:
        run = make()
        message = ""
    except ScriptError as error:
        item.add_report_section("call", "output of the rank", error.output)
        message = error.message
    except FakedistError as error:
        message = "\n  ".join(filter(None, (error.message, error.hint)))
    if _SKIPPED in message:
        pytest.skip(message.partition(_SKIPPED)[2])
    if message:
        pytest.fail(message, pytrace=False)
    from rich.console import Console

    from fakedist.report.content.run import run_report
    from fakedist.report.render.terminal import render

    text = io.StringIO()
    render(run_report(run.path, is_full=True), Console(file=text, width=_WIDTH))
    item.add_report_section("call", "fakedist", text.getvalue())
    return run


def _run_marked(item: pytest.Function, options: Mapping[str, object], run_directory: Path) -> Run:
    from fakedist.api import make_job, run_job
    from fakedist.errors import JobError, did_you_mean
    from fakedist.options import JobProgram
    from fakedist.options.definition import OPTIONS

    known = [*_LIMITS, *(option.name for option in OPTIONS)]
    if unknown := [name for name in options if name not in known]:
        raise JobError(f"the mark has no argument {unknown[0]!r}", did_you_mean(unknown[0], known))
    env = options.get("env") or {}
    inside = {**env, INSIDE_VARIABLE: item.nodeid} if isinstance(env, Mapping) else env  # invalid: refused below
    program = JobProgram("fakedist.check.marked_test", tuple(_inner_arguments(item)), is_module=True)
    job = make_job(program, {**options, "env": inside})
    return run_job(job, item.name, run_directory, item.config.invocation_params.dir)


def _inner_arguments(item: pytest.Function) -> list[str]:
    """Pytest's arguments in the child: only this test, found in the same way as here."""
    config = item.config
    test = item.nodeid.partition("::")[2]
    arguments = [f"{item.path}::{test}", "-q", "-s", "--no-header", "-p", "no:cacheprovider", "-o", "addopts="]
    arguments += [f"--rootdir={config.rootpath}", f"--import-mode={config.getoption('importmode')}"]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    # An installed plugin is found as it is here. One given with -p or in a conftest must not be found a second time.
    is_installed = config.pluginmanager.get_plugin("fakedist") is not None
    return [*arguments, *(["-p", "fakedist"] if is_installed else ["-p", "no:fakedist", "-p", __name__])]


def _read_limits(mark: pytest.Mark) -> dict[str, tuple[str, int]]:
    from fakedist.errors import JobError
    from fakedist.units import parse_bytes

    limits = {}
    message = ""
    for name in _LIMITS:
        if (text := mark.kwargs.get(name)) is not None:
            try:
                limits[name] = (str(text), parse_bytes(str(text)))
            except JobError as error:
                message = f"the mark's {name}: {error.message}\n  {error.hint}"
    if message:
        pytest.fail(message, pytrace=False)
    return limits


def _exceeded(run: Run, limits: Mapping[str, tuple[str, int]]) -> list[str]:
    from fakedist.results.verdict import verdict
    from fakedist.units import format_bytes

    lines = []
    if not run.fits:
        answer = verdict(run.summary, run.manifest.cwd)
        why = answer.more.removeprefix(": ") if answer else run.manifest.exit.message
        lines.append(f"the rank does not fit the GPU: {why}".rstrip(": "))
    values = {
        "max_peak": ("peak allocated", run.peak_allocated_bytes, 1),
        "max_reserved": ("peak reserved", run.peak_reserved_bytes, 1),
        "min_headroom": ("headroom", run.headroom_bytes, -1),
    }
    for name, (text, limit) in limits.items():
        label, value, way = values[name]
        if (value - limit) * way > 0:
            gap = format_bytes(abs(value - limit))
            side = "over" if way > 0 else "under"
            lines.append(f"{label} is {format_bytes(value)}, {gap} {side} {name}={text!r}{_blame(run)}")
    return lines


def _blame(run: Run) -> str:
    from fakedist.check.judging import say_makeup

    makeup = say_makeup(run)
    return f": most of it {makeup}" if makeup else ""
