"""The purposes of blocks, inferred from a snapshot alone, against the marks that were set while the job ran.

The snapshot is that of the run, without what only a recording of fakedist has: the forward's frames below those of a
backward, whose stacks are empty in torch's own.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from fakedist.results.opening import open_run
from tests.conftest import RunFakedist

JOB = Path(__file__).parent / "jobs" / "ten_trainings.py"
IN_CI = ("sgd", "adamw")
NIGHTLY = ("momentum", "convolutions", "fused", "autocast", "recompute", "accumulate", "clip", "ddp", "fsdp")
LEAST = 0.95


def as_torchs_own(snapshot: Any) -> Any:
    """The snapshot with stacks as torch records them."""

    def cut(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
        own = [number for number, frame in enumerate(frames) if frame["filename"] == "<autograd>"]
        return frames[: own[0]] if own else frames

    for event in (event for trace in snapshot["device_traces"] for event in trace):
        event["frames"] = cut(event["frames"])
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"]):
        block["frames"] = cut(block["frames"])
    return snapshot


@pytest.mark.parametrize("kind", [*IN_CI, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in NIGHTLY)])
def test_categories_at_the_peak_are_those_of_the_recording(
    kind: str, tmp_path: Path, run_fakedist: RunFakedist
) -> None:
    run = tmp_path / "run"
    options = ("--world-size", "8", "--rank", "0", "--device", "virtual", "--no-kernels", "-o", run)
    run_fakedist("profile", *options, JOB, kind, cwd=tmp_path)
    path = tmp_path / "alone.pickle"
    path.write_bytes(pickle.dumps(as_torchs_own(pickle.loads((run / "memory_snapshot.pickle").read_bytes()))))
    recorded, inferred = open_run(run), open_run(path)
    assert inferred.peak_allocated_bytes == recorded.peak_allocated_bytes
    marked, alone = recorded.table("blocks"), inferred.table("blocks")
    held = marked["at_peak"].to_numpy(bool)
    agrees = marked["category"].astype(str).to_numpy() == alone["category"].astype(str).to_numpy()
    sizes = marked["bytes"].to_numpy()
    assert sizes[held & agrees].sum() >= LEAST * sizes[held].sum()
    assert inferred.summary.peak_phase == recorded.summary.peak_phase
    assert len(inferred.summary.steps) == len(recorded.summary.steps)
