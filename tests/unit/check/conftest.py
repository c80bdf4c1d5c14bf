import functools
from collections.abc import Callable
from typing import Any

import pytest

from fakedist.results.opening import open_run
from fakedist.results.run import Run
from tests.unit.report.two_runs import run_of

Runs = Callable[..., Run]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Opens the run with these settings. It is made once."""

    @functools.cache
    def made(**settings: Any) -> Run:
        return open_run(run_of(tmp_path_factory.mktemp("run") / "run", **settings))

    return made
