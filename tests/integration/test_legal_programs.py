"""Legal programs that are unlike most training jobs run to their end, and their report is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import ProfileOnce

JOB = Path(__file__).parent / "jobs" / "legal.py"


@pytest.mark.parametrize("rank", [0, pytest.param(5, marks=pytest.mark.nightly)])
def test_they_run_to_the_end(profile_once: ProfileOnce, rank: int) -> None:
    ran = profile_once(JOB, rank=rank, options=("--json", "--until", "end"))
    summary = ran.summary
    assert summary["exit"]["outcome"] == "finished", ran
    assert sum(summary["by_category"].values()) == summary["peak_allocated_bytes"]
    layers = ran.table("layers").set_index("name")
    table = layers.loc["table"]
    assert table["peak_parameter_bytes"] == 50_000 * 64 * 4
    assert table["peak_optimizer_state_bytes"] == 2 * 50_000 * 64 * 4  # SparseAdam's two moments
    assert "Sequential" in set(layers["class_name"])  # scripted and traced ones have their author's class


def test_rpc_among_several_workers_is_refused_by_name(tmp_path: Path, profile_once: ProfileOnce) -> None:
    script = tmp_path / "rpc.py"
    script.write_text(
        "import torch.distributed as dist, torch.distributed.rpc as rpc\n"
        "dist.init_process_group('nccl')\n"
        "rpc.init_rpc(f'w{dist.get_rank()}', rank=dist.get_rank(), world_size=dist.get_world_size())\n"
    )
    ran = profile_once(script, rank=3).finished
    assert ran.code == 1
    assert "rpc.init_rpc waits for 8 workers, and only this rank runs" in ran.stderr
    assert "bug in fakedist" not in ran.stderr
