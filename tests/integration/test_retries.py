"""A job that runs out of memory in each step, its twin with room, and what the calls of the allocator take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from tests.conftest import RunFakedist

JOB = Path(__file__).parent / "jobs" / "retries.py"
MIB = 1 << 20
EXPANDABLE = ("--env", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
SCARCE, ROOMY = ("--gpu-memory", "1GiB", "--reserve", "300MiB"), ("--gpu-memory", "1GiB", "--reserve", "1MiB")

pytestmark, LONG = pytest.mark.integration, pytest.mark.long


class Ran(NamedTuple):
    counted: dict[str, Any]
    report: dict[str, Any]
    launches: pd.DataFrame

    @property
    def allocator(self) -> dict[str, Any]:
        found: dict[str, Any] = self.report["kernels"]["allocator"]
        return found


Profile = Callable[..., Ran]


@pytest.fixture
def profile(run_fakedist: RunFakedist, tmp_path: Path) -> Profile:
    def run(*options: str, how: str = "") -> Ran:
        rank = ("--world-size", "1", "--rank", "0", "--device", "virtual", "--host", "dgx-h100")
        arguments = (JOB, tmp_path / "counts.json", *filter(None, (how,)))
        ended = run_fakedist("profile", *rank, *options, "--no-page", "--json", "-o", tmp_path / "run", *arguments)
        assert ended.code == 0
        table = pd.read_parquet(tmp_path / "run" / "tables" / "launches.parquet")
        return Ran(json.loads((tmp_path / "counts.json").read_text()), ended.json(), table)

    return run


@pytest.mark.parametrize(
    ("options", "given_back"),
    [(SCARCE, 2), pytest.param((*SCARCE, *EXPANDABLE), 15 + 25, marks=LONG)],
    ids=["cudaMalloc", "expandable"],
)
def test_the_retries_of_a_steady_step_are_the_allocators_own(
    profile: Profile, options: tuple[str, ...], given_back: int
) -> None:
    """The last one of six steps is as the timed one: torch counts two retries."""
    ran = profile(*options)
    assert ran.counted["retries"][1:] == [2] * 5
    allocator = ran.allocator
    assert allocator["num_retries"] == 2
    assert allocator["num_given_back"] == allocator["num_taken"] == given_back
    assert allocator["given_back_bytes"] == allocator["taken_bytes"] == 800 * MIB
    assert 0 < allocator["low_us"] < allocator["time_us"] < allocator["high_us"]
    assert ran.report["time"]["step_us"] > allocator["time_us"]
    assert ran.report["kernels"]["notes"][0]["code"] == "allocator_retries"
    waits = ran.launches[ran.launches["what"].str.startswith("host_waits")]
    assert (waits["allocator"] != "").all()
    assert len(waits) >= 2


@pytest.mark.parametrize("options", [ROOMY, pytest.param((*ROOMY, *EXPANDABLE), marks=LONG)])
def test_the_same_job_with_room_has_none(profile: Profile, options: tuple[str, ...]) -> None:
    ran = profile(*options)
    assert not any(ran.counted["retries"])
    assert ran.allocator is None
    assert "allocator_retries" not in str(ran.report["kernels"]["notes"])
    assert (ran.launches["allocator"] == "").all()


@LONG
def test_a_reserve_is_others_memory_and_none_of_the_gpus_size(profile: Profile) -> None:
    free, whole = profile(*SCARCE).counted["free"]
    assert whole == 1024 * MIB
    assert free == (1024 - 300 - 522) * MIB


@LONG
def test_a_script_that_empties_the_cache_pays_for_it_too(profile: Profile) -> None:
    ran = profile(*ROOMY, how="empty_cache")
    assert not any(ran.counted["retries"])
    assert ran.allocator["num_retries"] == 0
    assert ran.allocator["given_back_bytes"] >= 800 * MIB
    assert "empty_cache" in ran.report["kernels"]["notes"][0]["text"]


def test_a_rank_that_needs_more_than_the_reserve_leaves_does_not_fit(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    rank = ("--world-size", "1", "--rank", "0", "--device", "virtual", "--gpu-memory", "1GiB", "--reserve", "600MiB")
    ended = run_fakedist("profile", *rank, "--no-page", "-o", tmp_path / "run", JOB, tmp_path / "counts.json")
    assert ended.code == 4
    assert "of 424.00 MiB that --reserve leaves" in " ".join(ended.stdout.split())
