"""The replayed history has the sizes, to the byte, that the real caching allocator counted itself."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.conftest import RunFakedist

JOB = Path(__file__).parent / "jobs" / "allocations.py"
# Little enough that cached blocks have to be given back and some requests fail.
MEMORY = "3GiB"


@pytest.mark.parametrize(
    "alloc_conf",
    [
        "",
        pytest.param("max_split_size_mb:32", marks=pytest.mark.long),
        pytest.param("roundup_power2_divisions:4", marks=pytest.mark.long),
        "garbage_collection_threshold:0.3,per_process_memory_fraction:0.8",
        pytest.param("expandable_segments:True", marks=pytest.mark.long),
        "expandable_segments:True,garbage_collection_threshold:0.3,max_split_size_mb:32",
    ],
    ids=lambda conf: "-".join(part.partition(":")[0] for part in conf.split(",")) or "default",
)
def test_the_peaks_are_the_allocators_own(run_fakedist: RunFakedist, tmp_path: Path, alloc_conf: str) -> None:
    options = ("--world-size", "8", "--rank", "3", "--gpus-per-node", "4", "--device", "virtual", "--json")
    settings = ("-o", tmp_path / "run", "--gpu-memory", MEMORY, "--env", f"PYTORCH_CUDA_ALLOC_CONF={alloc_conf}")
    statistics = tmp_path / "statistics.json"
    summary = run_fakedist("profile", *options, *settings, JOB, "1", statistics).json()
    counted = json.loads(statistics.read_text())
    events = pd.read_parquet(tmp_path / "run" / "tables" / "events.parquet")

    assert counted["num_alloc_retries"] > 0
    assert counted["num_ooms"] > 0
    assert set(events["stream"]) > {0}
    assert summary["peak_allocated_bytes"] == counted["allocated_bytes.all.peak"]
    assert summary["peak_reserved_bytes"] == counted["reserved_bytes.all.peak"]
    assert not [note for note in summary["notes"] if note["code"] == "peak_differs"]
    assert events["allocated_bytes"].max() == counted["allocated_bytes.all.peak"]
    assert counted["allocated_bytes.all.current"] in set(events["allocated_bytes"])
