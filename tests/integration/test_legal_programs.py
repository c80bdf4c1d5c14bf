"""Legal programs that are unlike most training jobs run to their end, and their report is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

JOB = Path(__file__).parent / "jobs" / "legal.py"
OPTIONS = ("--world-size", "8", "--device", "virtual", "--json")


@pytest.mark.parametrize("rank", [0, pytest.param(5, marks=pytest.mark.long)])
def test_they_run_to_the_end(tmp_path: Path, run_fakedist: Callable[..., Any], rank: int) -> None:
    ran = run_fakedist("profile", *OPTIONS, "--rank", str(rank), "--until", "end", "-o", tmp_path / "run", JOB)
    summary = ran.json()
    assert summary["exit"]["outcome"] == "finished", ran
    assert sum(summary["by_category"].values()) == summary["peak_allocated_bytes"]
    layers = pd.read_parquet(tmp_path / "run/tables/layers.parquet").set_index("name")
    table = layers.loc["table"]
    assert table["peak_parameter_bytes"] == 50_000 * 64 * 4
    assert table["peak_optimizer_state_bytes"] == 2 * 50_000 * 64 * 4  # SparseAdam's two moments
    assert "Sequential" in set(layers["class_name"])  # scripted and traced ones have their author's class


def test_rpc_among_several_workers_is_refused_by_name(tmp_path: Path, run_fakedist: Callable[..., Any]) -> None:
    script = tmp_path / "rpc.py"
    script.write_text(
        "import torch.distributed as dist, torch.distributed.rpc as rpc\n"
        "dist.init_process_group('nccl')\n"
        "rpc.init_rpc(f'w{dist.get_rank()}', rank=dist.get_rank(), world_size=dist.get_world_size())\n"
    )
    ran = run_fakedist("profile", *OPTIONS, "--rank", "3", "-o", tmp_path / "run", script)
    assert ran.code == 1
    assert "rpc.init_rpc waits for 8 workers, and only this rank runs" in ran.stderr
    assert "bug in fakedist" not in ran.stderr
