"""Our own examples take what reports/baselines says they take: `make budgets`, one job of it here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fakedist.check.checking import baseline_path, baseline_text, read_baseline
from fakedist.check.config import CheckJob, read_config
from fakedist.gpu.driver.build import torch_build

ROOT = Path(__file__).parent.parent.parent
CONFIG = read_config(ROOT / "pyproject.toml")
pytestmark = pytest.mark.integration


@pytest.mark.parametrize("job", CONFIG.jobs, ids=lambda job: job.name)
def test_every_job_has_a_baseline_that_is_as_check_writes_it(job: CheckJob) -> None:
    baseline = read_baseline(CONFIG, job)
    assert baseline is not None
    assert set(baseline.ranks) == {each.rank for each in job.jobs}
    assert baseline_path(CONFIG, job).read_text() == baseline_text(baseline.settings, baseline.ranks)


def test_no_baseline_is_left_of_a_job_that_is_gone() -> None:
    written = {path.stem for path in CONFIG.baselines.glob("*.json")}
    assert written == {job.name for job in CONFIG.jobs}


@pytest.mark.nightly
def test_the_smallest_example_is_what_it_was() -> None:
    first = CONFIG.jobs[0]
    baseline = read_baseline(CONFIG, first)
    assert baseline is not None
    if baseline.settings["torch"] != torch_build()[0]:
        pytest.skip(f"the baselines are of torch {baseline.settings['torch']}")
    finished = subprocess.run(
        [sys.executable, "-m", "fakedist", "check", "--no-annotations", first.name],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
