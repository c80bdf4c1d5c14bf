"""Whole runs of the two example jobs, on the virtual GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
WORLDS = (8, 1_024, 16_384)
SMALL_LLAMA = ("llama_fsdp2.py", "--model", "debug", "--seq-len", "128", "--tp", "8")
SMALL_GPT = ("ddp_gpt.py", "--model", "debug", "--batch-size", "2", "--accumulate", "2")


def profile(run_fakedist: RunFakedist, world_size: int, rank: int, *script: str) -> dict[str, Any]:
    """The JSON object of a run on the virtual GPU, checked for what is true of every run."""
    place = ("--world-size", str(world_size), "--rank", str(rank), "--device", "virtual")
    finished = run_fakedist("profile", *place, "--json", EXAMPLES / script[0], *script[1:])
    result = finished.json()
    assert finished.code == 0, finished.stderr
    assert (result["world_size"], result["rank"], result["device"]) == (world_size, rank, "virtual")
    assert result["fits"] is True
    assert sum(result["by_category"].values()) == result["peak_allocated_bytes"]
    assert 0 < result["peak_allocated_bytes"] <= result["peak_reserved_bytes"] <= result["capacity_bytes"]
    assert len(result["steps"]) == 2
    assert Path(result["run_directory"]).is_dir()
    return result


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("script", [SMALL_LLAMA, SMALL_GPT], ids=["llama", "gpt"])
def test_every_rank_of_every_world_runs(
    run_fakedist: RunFakedist, script: tuple[str, ...], world_size: int, place: str
) -> None:
    rank = {"first": 0, "middle": world_size // 2 + 1, "last": world_size - 1}[place]
    result = profile(run_fakedist, world_size, rank, *script)
    assert result["collectives"]
    assert result["by_category"]["parameter"] > 0
    assert result["by_category"]["optimizer_state"] > 0
