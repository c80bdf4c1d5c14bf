"""torch_memory_saver, which SGLang and slime sleep with: what is held asleep and awake, by arithmetic."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist

pytestmark = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="torch-memory-saver")),
    reason="torch_memory_saver is not installed: docs/rl.md",
)
JOB = Path(__file__).parent / "jobs/memory_saver.py"
MIB = 1 << 20
#: Segments of the allocator: 30 MiB and, of 20 MiB, that of a tensor of 7 MiB; 1,001 MiB in a segment of whole pages.
OTHERS, WEIGHTS, CACHE = 100 * MIB, (30 + 20) * MIB, 1002 * MIB


@pytest.mark.parametrize("mode", ["torch", "preload"])
def test_asleep_it_gives_back_its_segments_and_awake_it_has_them_again(
    mode: str, run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    options = ["--device", "virtual", "--world-size", "1", "--gpus-per-node", "1", "--output", "run"]
    finished = run_fakedist("profile", *options, JOB, mode, cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    lines = [line.removeprefix("HELD ") for line in finished.stdout.splitlines() if line.startswith("HELD ")]
    points: dict[str, dict[str, Any]] = {point.pop("at"): point for point in map(json.loads, lines)}
    end = points.pop("end")
    assert {at: point["used"] for at, point in points.items()} == {
        "before": OTHERS,
        "filled": OTHERS + WEIGHTS + CACHE,
        "cache asleep": OTHERS + WEIGHTS,
        "weights asleep": OTHERS,
        "weights awake": OTHERS + WEIGHTS,
        "cache awake": OTHERS + WEIGHTS + CACHE,
    }
    assert {point["reserved"] for point in list(points.values())[1:]} == {OTHERS + WEIGHTS + CACHE}, "torch's count"
    assert (end["same"], end["first"], end["other"]) == (True, 24, 8), "addresses and values"
    if mode == "torch":
        (phase, _) = json.loads((tmp_path / "run/run.json").read_text())["summary"]["named_phases"]
        assert (phase["phase"], phase["end_backed_bytes"], phase["end_outside_bytes"]) == (
            "cache asleep",
            OTHERS + WEIGHTS,
            0,
        )
