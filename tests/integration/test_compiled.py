"""torch.compile with Triton kernels, and with CUDA-graph trees: recorded as it runs, in the place where it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.conftest import RunFakedist
from tests.support.virtual import on_virtual_gpu

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


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["reduce-overhead", "each-layer"])
def test_a_compiled_model_is_recorded_as_it_runs_and_where(
    mode: str, tmp_path: Path, run_fakedist: RunFakedist
) -> None:
    """Compiling allocates, and a bare run tunes kernels besides; from the caches on, both do the same."""
    _recorded(run_fakedist, tmp_path / "first", mode)
    _bare(mode)
    assert _recorded(run_fakedist, tmp_path / "run", mode) == _bare(mode)

    phases = pd.read_parquet(tmp_path / "run" / "tables" / "phases.parquet")
    assert list(phases.loc[phases["step"] == 1, "phase"].astype(str))[:3] == ["forward", "backward", "optimizer"]
    blocks = pd.read_parquet(tmp_path / "run" / "tables" / "blocks.parquet")
    graphs = blocks[(blocks["operation"].astype(str) == "inductor::graph") & (blocks["step"] == 1)]
    forward = graphs[graphs["phase"].astype(str) == "forward"]
    layers = pd.read_parquet(tmp_path / "run" / "tables" / "layers.parquet")
    computes = set(layers["name"][sorted(set(forward["layer"]))])
    assert {f"layers.{number}{name}" for number in (0, 1) for name in ("", ".norm1", ".self_attn")} <= computes
    assert computes <= {name for name in layers["name"] if name.startswith("layers.")}
    assert (forward["category"].astype(str) == "activation").any()
    assert {"forward", "backward"} <= set(graphs["phase"].astype(str))


#: What a layer has of these is its modules' and the optimizer's, whoever computes with it.
SAME = ("parameter", "gradient", "optimizer_state")
GPT = Path(__file__).parent / "jobs" / "gpt.py"


def _layers(run_fakedist: RunFakedist, run: Path, mode: str) -> pd.DataFrame:
    options = ("--world-size", "8", "--rank", "1", "--gpus-per-node", "8", "--no-kernels", "-o", run)
    caches = {name: str(run.parent / "cache") for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    finished = run_fakedist("profile", "--device", "virtual", *options, GPT, mode, env=caches)
    assert finished.code == 0, finished.stderr
    table = pd.read_parquet(run / "tables" / "layers.parquet").set_index("name")
    return table[[name for name in table.columns if name.endswith("_bytes")]]


def _assert_alike(eager: pd.DataFrame, compiled: pd.DataFrame) -> None:
    """The same layers, what they own to the byte, and in each block about as many activations, inside its layers."""
    assert list(compiled.index) == list(eager.index)
    owned = [f"{when}_{name}_bytes" for when in ("peak", "most") for name in SAME]
    pd.testing.assert_frame_equal(compiled[owned], eager[owned])
    activations = "most_total_activation_bytes"
    for block in ("h.0", "h.1"):
        assert 0.5 <= compiled.loc[block, activations] / eager.loc[block, activations] <= 1.1
        for layer in ("attn.c_attn", "mlp.0"):
            assert compiled.loc[f"{block}.{layer}", activations] > 0
    inside = compiled.loc[["h.0", "h.1"], activations].sum()
    assert compiled.loc["(GPT)", activations] >= inside > 0.5 * compiled.loc["(GPT)", activations]


@pytest.mark.nightly
def test_a_model_compiled_whole_and_cut_by_ddp_has_the_layers_of_the_eager_one_also_from_caches(
    tmp_path: Path, run_fakedist: RunFakedist
) -> None:
    eager = _layers(run_fakedist, tmp_path / "eager", "ddp-eager")
    compiled = _layers(run_fakedist, tmp_path / "cold", "ddp-whole")
    _assert_alike(eager, compiled)
    pd.testing.assert_frame_equal(_layers(run_fakedist, tmp_path / "warm", "ddp-whole"), compiled)


@pytest.mark.nightly
def test_blocks_that_share_compiled_code_under_fsdp2_have_layers_of_their_own(
    tmp_path: Path, run_fakedist: RunFakedist
) -> None:
    eager = _layers(run_fakedist, tmp_path / "eager", "fsdp-eager")
    _assert_alike(eager, _layers(run_fakedist, tmp_path / "compiled", "fsdp-blocks"))
