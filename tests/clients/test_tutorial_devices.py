"""PyTorch's own tutorials leave the choice of the device to the device mesh: it must fall on LOCAL_RANK's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT, RunFakedist

JOB = ROOT / "tests/clients/jobs/tutorial_device_mesh.py"
RANKS = (0, 4, 7)


@pytest.mark.parametrize("tutorial", ["tensor-parallel", "sequence-parallel", "fsdp-tp", "fsdp2"])
def test_a_tutorials_ranks_run_on_their_own_devices(tutorial: str, tmp_path: Path, run_fakedist: RunFakedist) -> None:
    ranks = ",".join(map(str, RANKS))
    options = ("--world-size", "8", "--rank", ranks, "-o", tmp_path / "run")
    finished = run_fakedist("profile", *options, JOB, tutorial)
    assert finished.code == 0, finished.stderr
    chosen = [line for line in finished.stdout.splitlines() if line.startswith("DEVICE ")]
    assert chosen == [f"DEVICE {rank}" for rank in RANKS]
    manifests = [json.loads((tmp_path / "run" / f"rank{rank}" / "run.json").read_text()) for rank in RANKS]
    assert not any("cuda:" in note["text"] for manifest in manifests for note in manifest["notes"])
    assert len({manifest["summary"]["peak_allocated_bytes"] for manifest in manifests}) == 1
    assert all(len(manifest["summary"]["steps"]) == 2 for manifest in manifests)
