"""vLLM's engine on the virtual GPU: its KV cache by its own measuring, what it holds awake and asleep, by arithmetic.

Runs where vLLM is installed; docs/rl.md says how to make its environment, which takes 9 GB.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from fakedist.results.opening import open_run
from tests.conftest import RunFakedist

pytestmark = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="vllm")), reason="vLLM is not installed: docs/rl.md"
)
JOB = Path(__file__).parent / "jobs/vllm_engine.py"
MIB, GRANULE = 1 << 20, 2 << 20

# As in the job.
HIDDEN, INNER, LAYERS, VOCABULARY, KEYS, SIZE = 2048, 8192, 16, 128256, 512, 2
LAYER = HIDDEN * (2 * HIDDEN + 2 * KEYS + 3 * INNER)
NORMS = (2 * LAYERS + 1) * HIDDEN * SIZE
TOKEN = 2 * KEYS * SIZE  # of one layer in the KV cache
#: What two ranks share, at least: buffers of vLLM's own all-reduce and of symmetric memory, and their addresses.
SHARED = (2 * 64 + 64 + 8) * MIB
#: Those of an engine that hold memory of the rank's GPU.
PROCESSES = {"--process": ["EngineCore"], "--process --tensor-parallel": ["VllmWorker-0"]}


def weights_of(ranks: int) -> int:
    """Bytes of a rank's weights: norms are whole on each."""
    return (VOCABULARY * HIDDEN + LAYERS * LAYER) * SIZE // ranks + NORMS


@pytest.fixture(
    scope="module", params=["", "--graphs", "--process", "--tensor-parallel", "--process --tensor-parallel"]
)
def found(
    request: pytest.FixtureRequest, run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Bytes that the engine said it held, by point, the ranks that share its layers, and the report's object."""
    directory = tmp_path_factory.mktemp("vllm")
    arguments = request.param.split()
    ranks = "2" if "--tensor-parallel" in arguments else "1"
    of_job = "1" if "--process" in arguments else ranks
    options = ["--device", "virtual", "--world-size", of_job, "--gpus-per-node", ranks, "--output", "run"]
    finished = run_fakedist("profile", *options, JOB, *arguments, cwd=directory)
    assert finished.code == 0, finished.stderr
    lines = [line.removeprefix("HELD ") for line in finished.stdout.splitlines() if line.startswith("HELD ")]
    points = {point.pop("at"): point for point in map(json.loads, lines)}
    use = open_run(directory / "run").table("device_use")
    return points | {
        "variant": request.param,
        "ranks": int(ranks),
        "report": json.loads((directory / "run/run.json").read_text())["summary"],
        "processes": [name for name in use["process"].unique() if name],
    }


def test_the_kv_cache_fills_what_its_measuring_leaves_of_half_the_gpu(found: dict[str, Any]) -> None:
    started = found["started"]
    cache = started["blocks"] * started["block_size"] * TOKEN // found["ranks"] * LAYERS
    left = started["total"] // 2 - cache
    weights = weights_of(found["ranks"])
    assert weights < left < weights + 4 * 1024 * MIB, "weights, activations of 16,384 tokens, and CUDA graphs"
    assert found["decoded"]["tokens"] == 16


def test_asleep_it_gives_back_exactly_its_weights_and_its_kv_cache(found: dict[str, Any]) -> None:
    layer = found["started"]["blocks"] * found["started"]["block_size"] * TOKEN // found["ranks"]
    cache = -(-LAYERS * layer // GRANULE) * GRANULE  # one segment
    for level in (1, 2):
        held = found[f"awake {level}"]["used"] - found[f"asleep {level}"]["used"] - cache
        assert 1 < held / weights_of(found["ranks"]) < 1.02
        assert found[f"asleep {level}"]["reserved"] == found[f"awake {level}"]["reserved"], "torch knows nothing of it"
    assert found["asleep 1"]["used"] == found["asleep 2"]["used"]
    graphs = 256 * MIB if found["variant"] == "--graphs" else 0
    shared = SHARED if found["ranks"] > 1 else 0
    assert 0 <= found["asleep 1"]["used"] - shared - 96 * MIB < graphs + 16 * MIB


def test_of_an_engines_processes_only_the_first_ranks_holds_memory_of_the_gpu(found: dict[str, Any]) -> None:
    assert found["processes"] == PROCESSES.get(found["variant"], [])


def test_what_it_keeps_asleep_is_all_that_its_process_has_in_use(found: dict[str, Any]) -> None:
    rows = found["report"]["engine_sleeps"]
    assert {row["process"] for row in rows} == set(PROCESSES.get(found["variant"], [""]))
    assert [(row["how"], row["times"]) for row in rows] == [("level 1", 1), ("level 2", 1)]
    for row, level in zip(rows, (1, 2), strict=True):
        assert sum(row["kept"].values()) == found[f"asleep {level}"]["used"]
        assert ("private pools" in row["kept"]) == (found["variant"] == "--graphs")
        assert row["kept"]["engine's tensors"] > 64 * MIB
        assert "other tensors" not in row["kept"], "the script has none"


def test_the_largest_share_is_known_in_whichever_process_the_engine_is(found: dict[str, Any]) -> None:
    engine = found["report"]["engine"]
    assert engine["unknown_because"] == ""
    assert engine["num_blocks"] == found["started"]["blocks"]
    assert engine["peak_awake_bytes"] == max(row["peak_used_bytes"] for row in found["report"]["named_phases"])
    assert engine["peak_asleep_bytes"] == found["asleep 2"]["used"]
    assert 0.9 < engine["largest_utilization"] < 1


def test_the_report_has_the_phases_and_counts_no_memory_that_sleeps(found: dict[str, Any]) -> None:
    report = found["report"]
    assert [row["phase"] for row in report["named_phases"]] == [
        "start",
        "rollout",
        "sleep 1",
        "wake",
        "sleep 2",
        "wake",
    ]
    for row, level in zip(report["named_phases"][2::2], (1, 2), strict=True):
        by_all = sum(row[f"end_{part}_bytes"] for part in ("backed", "outside", "others"))
        assert by_all == found[f"asleep {level}"]["used"]
        assert row["peak_used_bytes"] >= found["awake 1"]["used"]
