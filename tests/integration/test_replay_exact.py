"""The replayed history has the sizes, to the byte, that the real caching allocator counted itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.analysis.blocks import build_blocks
from fakedist.analysis.recording import read_recording
from fakedist.analysis.segments import segments_at
from tests.conftest import RunFakedist

JOB = Path(__file__).parent / "jobs" / "allocations.py"
# Little enough that cached blocks have to be given back and some requests fail.
MEMORY = "3GiB"


@pytest.mark.parametrize(
    "alloc_conf",
    [
        "",
        pytest.param("max_split_size_mb:32", marks=pytest.mark.nightly),
        pytest.param("roundup_power2_divisions:4", marks=pytest.mark.nightly),
        "garbage_collection_threshold:0.3,per_process_memory_fraction:0.8",
        pytest.param("expandable_segments:True", marks=pytest.mark.nightly),  # the last one has it, too
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
    recording = read_recording(tmp_path / "run")
    blocks = build_blocks(recording)
    last = int(np.flatnonzero(blocks.replay.allocated_bytes == counted["allocated_bytes.all.current"])[-1])
    found = segments_at(recording, blocks, last)
    assert segment_rows(found) == sorted(map(segment_row, counted["segments"]))
    assert found["free_bytes"].sum() > 0
    assert set(found["state"]) >= {"private", "expandable" if "expandable" in alloc_conf else "used"}
    for moment in summary["reserved"]:
        assert moment["reserved_bytes"] - moment["allocated_bytes"] == sum(moment["unused"].values())
    assert summary["reserved"][0]["reserved_bytes"] == counted["reserved_bytes.all.peak"]
    assert summary["reserved"][1]["allocated_bytes"] == counted["allocated_bytes.all.peak"]


def segment_row(segment: dict[str, Any]) -> tuple[object, ...]:
    """A segment as torch reports it: address, pool, bytes allocated and asked for, and its holes."""
    holes = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
    pool = "" if segment["segment_pool_id"] == [0, 0] else "{},{}".format(*segment["segment_pool_id"])
    return (
        segment["address"],
        segment["total_size"],
        segment["stream"],
        segment["segment_type"],
        pool,
        segment["is_expandable"],
        segment["allocated_size"],
        segment["requested_size"],
        segment["active_size"] - segment["allocated_size"],
        len(holes),
        max(holes, default=0),
    )


def segment_rows(table: pd.DataFrame) -> list[tuple[object, ...]]:
    names = ["address", "bytes", "stream", "pool", "private_pool", "is_expandable"]
    names += ["allocated_bytes", "requested_bytes", "waiting_bytes", "num_holes", "largest_hole_bytes"]
    return sorted(table[names].itertuples(index=False, name=None))


#: As vLLM's engine does around its profiling run. Each block may be given all of its segment, or be rounded up.
SETS = """
import torch
held = []
for settings in ("", "max_split_size_mb:24", "roundup_power2_divisions:4", ""):
    torch.cuda.memory._set_allocator_settings(settings)
    held += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (30_000_100, 67_719_168)]
print("HELD", torch.cuda.max_memory_allocated())
"""


def test_settings_that_the_script_changes_hold_from_there_on(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SETS)
    found = run_fakedist("profile", "--world-size", "1", "--device", "virtual", "-o", "run", "job.py", cwd=tmp_path)
    assert found.code == 0, found.stderr
    (held,) = [int(line.removeprefix("HELD ")) for line in found.stdout.splitlines() if line.startswith("HELD ")]
    summary = json.loads((tmp_path / "run/run.json").read_text())["summary"]
    assert summary["peak_allocated_bytes"] == held > 4 * (30_000_384 + 67_719_168)
