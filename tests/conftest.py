"""Fixtures that all tests share: the command line as a user runs it, and proof that no test leaves anything behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

import pytest

from tests.summary import longest_files, summary
from tests.support.commands import Commands
from tests.support.runs import Finished, Profiled, ProfileOnce, run_once
from tests.support.tiers import NIGHTLY_TIERS, NOT_SHORT, is_nightly, short_tests, tier

ROOT = Path(__file__).parent.parent
#: Says whose rank a process is; a test's own environment must not leak into the runs it starts.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
#: Files listed at the end of a run of many.
NUM_LONGEST = 10
TIERS = ("integration", "clients", "gpu")


class RunFakedist(Protocol):
    def __call__(
        self, *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, page: bool = False
    ) -> Finished: ...


def clean_environment() -> dict[str, str]:
    """This process's environment without a rank's, and with the package that is being tested in front.

    pytest-xdist tells its workers how wide the terminal is; what a test reads through a pipe is as wide as any pipe.
    """
    left_out = {*RANK_VARIABLES, "COLUMNS", "PYTEST_CURRENT_TEST"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PYTHONPATH"] = str(ROOT)
    return environment


@pytest.fixture(scope="session")
def run_fakedist(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFakedist]:
    """Run ``fakedist ...`` in a process of its own, by default in an empty directory. A profile writes no page unless
    the test looks at it, since that takes a second.
    """
    commands = Commands()

    def run(
        *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, page: bool = False
    ) -> Finished:
        command, *others = map(str, arguments)
        options = ["--no-page"] if command == "profile" and not page else []
        directory = cwd or tmp_path_factory.mktemp("cwd")
        return Finished(*commands.run([command, *options, *others], directory, clean_environment(), env or {}))

    with closing(commands):
        yield run


@pytest.fixture(scope="session")
def profile_once(run_fakedist: RunFakedist) -> ProfileOnce:
    """Profile a rank of a job on the virtual GPU. The same job with the same options runs once for all tests, which
    only read the run.
    """

    def profile(
        script: str | Path,
        *arguments: str | Path,
        world_size: int = 8,
        rank: int = 0,
        options: tuple[str, ...] = ("--json",),
        env: dict[str, str] | None = None,
    ) -> Profiled:
        job = ("--world-size", str(world_size), "--rank", str(rank), "--device", "virtual", *options)
        words = (str(script), *map(str, arguments))
        return run_once(
            [job, words, env], Path(script), lambda path: run_fakedist("profile", *job, "-o", path, *words, env=env)
        )

    return profile


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--short", action="store_true", help="every unit test; of each file of whole runs its first")
    parser.addoption("--rest", action="store_true", help="the rest of what every change has to pass")


def pytest_configure() -> None:
    """Hear Ctrl-C as in a terminal: in a script's background job it is ignored, and every child inherits that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders without a test of the chosen part are not imported; each worker would."""
    others = NOT_SHORT if config.option.short else NIGHTLY_TIERS if config.option.rest else ()
    return True if collection_path.parent == ROOT / "tests" and collection_path.name in others else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test belongs to the tier of its directory."""
    for item in items:
        if tier(item) in TIERS:
            item.add_marker(getattr(pytest.mark, tier(item)))
    if not (config.option.short or config.option.rest):
        return
    short = set(short_tests(items))
    chosen = short if config.option.short else {item for item in items if not is_nightly(item)} - short
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, not each time among all tests and torch."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries of C++ tell of what is not taken down."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many ran, how many were skipped, and why; in a run of many files, which took longest."""
    terminalreporter.section("what ran")
    longest = longest_files(terminalreporter.stats, NUM_LONGEST)
    for line in (*summary(terminalreporter.stats), *(longest if len(longest) == NUM_LONGEST else ())):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Everything that fakedist changes in a process is as it was when a test ends."""
    before = _process_state()
    yield
    after = _process_state()
    appeared = {name for name in after.keys() - before.keys() if name.startswith("$")}
    changed = {name for name, state in before.items() if after.get(name) != state}
    assert sorted(appeared | changed) == []
    assert _torch_leftovers() == []


def _process_state() -> dict[str, object]:
    # torch.compile leaves the places of its caches in the environment.
    own = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_")
    return {
        **{f"${name}": value for name, value in os.environ.items() if not name.startswith(own)},
        "working directory": Path.cwd(),
        "sys.argv": list(sys.argv),
        "sys.path": list(sys.path),
        "exception hook": sys.excepthook,
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    } | _patch_targets()


def _patch_targets() -> dict[str, object]:
    """The functions of torch that fakedist replaces while a rank runs; empty until torch is imported."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or "torch" not in sys.modules:
        return {}
    names = ("_new_process_group_helper", "rendezvous", "init_process_group", "new_group", "is_nccl_available")
    return {name: getattr(c10d, name, None) for name in names}


def _torch_leftovers() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "distributed"):
        return []
    leftovers = []
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        leftovers.append("a process group is still there")
    if torch._C._len_torch_dispatch_stack():
        leftovers.append("a dispatch mode is still active")
    return leftovers
