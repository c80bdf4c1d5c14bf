"""torch.compile with Triton kernels, and with CUDA-graph trees: recorded as it runs, in the place where it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.conftest import RunFakedist
from tests.integration.virtual import on_virtual_gpu

JOB = Path(__file__).parent / "jobs" / "compiled.py"


def _bare(mode: str) -> Any:
    found = on_virtual_gpu(
        f"""
        import contextlib, io, runpy
        sys.argv = [{str(JOB)!r}, {mode!r}]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path({str(JOB)!r}, run_name="__main__")
        line = next(line for line in printed.getvalue().splitlines() if line.startswith("STATS "))
        found["stats"] = json.loads(line.removeprefix("STATS "))
        found["refused"] = gpu.refused()
        """,
        devices=1,
    )
    assert found["refused"] == []
    return found["stats"]


def _recorded(run_fakedist: RunFakedist, run: Path, mode: str) -> Any:
    options = ("--world-size", "8", "--rank", "0", "--gpus-per-node", "1", "--steps", "5", "-o", run)
    finished = run_fakedist("profile", "--device", "virtual", *options, JOB, mode)
    assert finished.code == 0, finished.stderr
    assert "global hooks" not in finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.startswith("STATS "))
    return json.loads(line.removeprefix("STATS "))


@pytest.mark.parametrize(
    ("mode", "modules"),
    [("reduce-overhead", {"(TransformerEncoder)"}), ("each-layer", {"layers.0", "layers.1"})],
)
def test_a_compiled_model_is_recorded_as_it_runs_and_where(
    mode: str, modules: set[str], tmp_path: Path, run_fakedist: RunFakedist
) -> None:
    """The first compilation tunes kernels, which allocates; from the cache on, a bare run does the same."""
    _recorded(run_fakedist, tmp_path / "first", mode)
    assert _recorded(run_fakedist, tmp_path / "run", mode) == _bare(mode)

    phases = pd.read_parquet(tmp_path / "run" / "tables" / "phases.parquet")
    assert list(phases.loc[phases["step"] == 1, "phase"].astype(str))[:3] == ["forward", "backward", "optimizer"]
    blocks = pd.read_parquet(tmp_path / "run" / "tables" / "blocks.parquet")
    graphs = blocks[(blocks["operation"].astype(str) == "inductor::graph") & (blocks["step"] == 1)]
    forward = graphs[graphs["phase"].astype(str) == "forward"]
    layers = pd.read_parquet(tmp_path / "run" / "tables" / "layers.parquet")
    assert set(forward["layer"]) == set(layers.index[layers["name"].isin(modules)])
    assert (forward["category"].astype(str) == "activation").any()
    assert {"forward", "backward"} <= set(graphs["phase"].astype(str))
