"""The mark and the fixture, in a pytest of their own: what passes, what fails, and what a failure shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.integration

SUITE = """
import os
import unittest
import pytest

def train(width, steps=5):
    import torch
    import torch.distributed as dist
    from torch import nn
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    model = nn.Sequential(nn.Linear(512, width), nn.ReLU(), nn.Linear(width, 512)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(4096, 512, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dist.get_world_size() == 7, "too many ranks"

@pytest.fixture
def width():
    assert "fakedist.rank.main" in __import__("sys").modules  # made in the child alone
    return 2048

@pytest.mark.fakedist(world_size=1024, rank=3, max_peak="1 GiB")
@pytest.mark.parametrize("factor", [1])
def test_within(width, factor, tmp_path):
    train(width * factor)

@pytest.mark.fakedist(world_size=1024, max_peak="1 MiB", min_headroom="1 GiB")
def test_over(width):
    train(width)

@pytest.mark.fakedist(world_size=8, gpu_memory="100 MiB")
def test_misfit(width):
    train(width)

@pytest.mark.fakedist(world_size=8)
def test_broken(width):
    train(width, steps=1)

@pytest.mark.fakedist(world_size=8)
def test_skipped(width):
    pytest.skip("no data here")

@pytest.mark.fakedist(world_size=8, max_peek="1 GiB")
def test_misspelt():
    raise SystemExit("must not run")

@pytest.mark.fakedist(world_size=8, max_peak="72 GX")
def test_unit():
    raise SystemExit("must not run")

class TestOld(unittest.TestCase):
    @pytest.mark.fakedist(world_size=8)
    def test_old(self):
        raise SystemExit("must not run")

def test_fixture(fakedist):
    run = fakedist.profile("train.py", world_size=16, rank=15)
    assert run.summary.rank == 15
    assert run.fits and run.headroom_bytes == run.capacity_bytes - run.peak_reserved_bytes
    assert sum(run.by_category.values()) == run.peak_allocated_bytes
    assert run.peak_allocated_bytes < 1 << 20

def test_isolated():
    assert "torch" not in __import__("sys").modules
"""

#: The tests of which one alone runs a rank; the others are refused or need none.
ONE_RUN = "test_over or test_misspelt or test_unit or test_old or test_isolated"

SCRIPT = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1)
for _ in range(3):
    model(torch.randn(64, 512, device="cuda")).sum().backward()
    optimizer.step()
"""


Suite = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """Run the tests that a pytest expression chooses."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_memory.py").write_text(SUITE)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    # Installed or not, the plugin of these sources is the one that is loaded.
    plugin = ["-p", "no:fakedist", "-p", "fakedist.check.plugin", "-p", "no:cacheprovider"]
    return lambda chosen: subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *plugin, "-k", chosen, "test_memory.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def one_run(suite: Suite) -> subprocess.CompletedProcess[str]:
    """The tests of which one alone runs a rank."""
    return suite(ONE_RUN)


@pytest.fixture(scope="module")
def finished(suite: Suite) -> subprocess.CompletedProcess[str]:
    """The tests that run a rank each."""
    return suite(f"not ({ONE_RUN})")


def section(finished: subprocess.CompletedProcess[str], name: str) -> str:
    """The report's section on one test that failed."""
    parts = re.split(r"^_{3,} (\S+) _{3,}$", finished.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[name]


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("test_over", "FAILED"),
        ("test_misspelt", "FAILED"),
        ("test_unit", "FAILED"),
        ("TestOld::test_old", "ERROR"),
        ("test_isolated", "PASSED"),
    ],
)
def test_every_mark_ends_as_it_should(one_run: subprocess.CompletedProcess[str], name: str, outcome: str) -> None:
    assert f"test_memory.py::{name} {outcome}" in one_run.stdout, one_run.stdout


def test_a_mark_that_is_exceeded_shows_by_how_much_and_the_table(one_run: subprocess.CompletedProcess[str]) -> None:
    shown = section(one_run, "test_over")
    assert re.search(r"peak allocated is [\d.]+ MiB, [\d.]+ MiB over max_peak='1 MiB': most of it temporaries", shown)
    assert "min_headroom" not in shown
    assert "By layer at the peak, with children" in shown


def test_what_the_mark_does_not_know_is_likened_to_what_it_does(one_run: subprocess.CompletedProcess[str]) -> None:
    assert "the mark has no argument 'max_peek'\n  did you mean 'max_peak'?" in section(one_run, "test_misspelt")


def test_a_unit_that_does_not_exist_is_told_before_anything_runs(
    one_run: subprocess.CompletedProcess[str],
) -> None:
    shown = section(one_run, "test_unit")
    assert "the mark's max_peak: '72 GX' is not a size with a unit" in shown
    assert "must not run" not in shown


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("test_within[1]", "PASSED"),
        ("test_misfit", "FAILED"),
        ("test_broken", "FAILED"),
        ("test_skipped", "SKIPPED"),
        ("test_fixture", "FAILED"),
    ],
)
def test_every_rank_ends_as_it_should(finished: subprocess.CompletedProcess[str], name: str, outcome: str) -> None:
    assert f"test_memory.py::{name} {outcome}" in finished.stdout, finished.stdout


@pytest.mark.nightly
def test_a_rank_that_does_not_fit_fails_whatever_the_mark_says(finished: subprocess.CompletedProcess[str]) -> None:
    shown = section(finished, "test_misfit")
    assert re.search(
        r"the rank does not fit the GPU: needs [\d.]+ MiB reserved \([\d.]+ MiB allocated\) of 100.00 MiB;", shown
    )


@pytest.mark.nightly
def test_a_test_that_fails_shows_its_own_assertion(finished: subprocess.CompletedProcess[str]) -> None:
    shown = section(finished, "test_broken")
    assert "AssertionError: too many ranks" in shown
    assert "assert 8 == 7" in shown
    assert "over max_peak" not in shown


@pytest.mark.nightly
def test_the_fixture_shows_the_table_of_its_run(finished: subprocess.CompletedProcess[str]) -> None:
    shown = section(finished, "test_fixture")
    assert "assert" in shown
    assert "rank    15 of 16" in shown
    assert "Largest blocks at the peak" in shown
