"""Megatron-core on Transformer Engine: the same experts, with kernels that the dispatcher sees and with fused ones."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pandas
import pytest

from tests.conftest import RunFakedist

pytestmark = pytest.mark.skipif(
    not all(any(importlib.metadata.distributions(name=name)) for name in ("megatron_core", "transformer_engine_torch")),
    reason="not installed: tests/clients/build_transformer_engine.sh, and pip install --no-deps megatron-core==0.16.1",
)
JOB = Path(__file__).parent / "jobs/megatron_moe.py"


@pytest.fixture(scope="module")
def peaks(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], int]:
    """Peak bytes allocated, by the job's options. Each run ends well, and nothing is refused."""
    found = {}
    for options in ((), ("fused",), ("fused", "fp8")):
        directory = tmp_path_factory.mktemp("megatron")
        where = ["--device", "virtual", "--gpu", "h100-80g", "--world-size", "64", "--rank", "0", "--output", "run"]
        finished = run_fakedist("profile", *where, JOB, *options, cwd=directory)
        assert finished.code == 0, finished.stderr
        assert finished.stdout.count("NORM True") == 2
        assert pandas.read_parquet(directory / "run/tables/unanswered.parquet").empty
        found[options] = run_fakedist("report", "run", "--json", cwd=directory).json()["peak_allocated_bytes"]
    return found


def test_fused_routing_gives_the_experts_as_many_tokens(peaks: dict[tuple[str, ...], int]) -> None:
    assert peaks["fused",] == pytest.approx(peaks[()], rel=0.01)


def test_fp8_keeps_weights_twice(peaks: dict[tuple[str, ...], int]) -> None:
    assert peaks["fused", "fp8"] > peaks["fused",]
