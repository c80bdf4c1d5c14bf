"""examples/nonuniform_tp.py: its mathematics with real ranks; a healthy, a reduced and a spare rank profiled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, RunFakedist
from tests.support.real import RealRun, run_for_real

SIZES = ("--layers", "2", "--hidden", "48", "--heads", "12", "--vocab", "96", "--seq-len", "16", "--batch", "4")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RealRun]:
    """Two steps in one process, and on a replica of four ranks next to one that lost a rank of its four."""
    layouts = {"alone": (1, ("--tp", "1", "--dp", "1")), "split": (8, ("--tp", "4", "--dp", "2"))}
    reduced = {"alone": "1", "split": "3"}
    return {
        name: run_for_real(
            "nonuniform_tp.py",
            world_size,
            tmp_path_factory.mktemp(name),
            "average_gradients",
            *(*layout, "--reduced-tp", reduced[name], *SIZES, "--steps", "2"),
        )
        for name, (world_size, layout) in layouts.items()
    }


@pytest.mark.nightly
def test_the_rank_that_is_not_needed_leaves_and_the_others_train(real: dict[str, RealRun]) -> None:
    assert real["split"].codes == [0] * 8
    assert sorted(real["split"].gradients) == [0, 1, 2, 3, 4, 5, 6]
    assert real["split"].losses == pytest.approx(real["alone"].losses, rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [range(4), range(4, 7)], ids=["healthy", "reduced"])
def test_resharded_gradients_of_real_ranks_are_those_of_one(real: dict[str, RealRun], ranks: range) -> None:
    """Nonuniform degrees that do not divide each other: rows of one rank go to two, and back."""
    whole = real["alone"].gradients[0]
    parts = [real["split"].gradients[rank] for rank in ranks]
    for name, expected in whole.items():
        if name.endswith(("attention.qkv", "attention.out", "mlp.up", "mlp.down")):
            assert parts[0][name].shape[0] == 12 // len(ranks)
            torch.testing.assert_close(torch.cat([part[name] for part in parts]), expected, rtol=1e-4, atol=1e-6)
        else:
            for part in parts:
                torch.testing.assert_close(part[name], expected, rtol=1e-4, atol=1e-6)


SMALL = ("--layers", "2", "--hidden", "512", "--vocab", "2048", "--seq-len", "256")


@pytest.fixture(scope="module")
def profiled(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """A healthy rank, one whose gradients are only resharded, a reduced one and a spare, as ``--json``."""
    place = ("--world-size", "8", "--device", "virtual", "--json")
    script = (ROOT / "examples" / "nonuniform_tp.py", *SMALL)
    folder = tmp_path_factory.mktemp("profiled")
    return {
        rank: run_fakedist(
            "profile", *place, "--rank", str(rank), "-o", f"{rank}", *script, cwd=folder, page=True
        ).json()
        for rank in (0, 3, 5, 7)
    }


@pytest.mark.nightly
def test_a_reduced_rank_holds_twice_the_matrices_of_a_healthy_one(profiled: dict[int, dict[str, Any]]) -> None:
    def matrices_bytes(rank: int) -> int:
        layers = {layer["name"]: layer["peak_bytes"] for layer in profiled[rank]["layers"]}
        return int(layers["layers.0-1.mlp"]["parameter"])

    assert matrices_bytes(0) == matrices_bytes(3) == 2 * 2 * 512 * 2048 // 4 * 2  # two layers, up and down, bfloat16
    assert matrices_bytes(5) == 2 * matrices_bytes(0)
    assert profiled[5]["peak_allocated_bytes"] > profiled[0]["peak_allocated_bytes"]


@pytest.mark.nightly
def test_groups_of_replicas_are_of_unequal_size(profiled: dict[int, dict[str, Any]]) -> None:
    def calls(rank: int) -> set[tuple[str, int, str]]:
        return {(row["group"], row["group_size"], row["operation"]) for row in profiled[rank]["collectives"]}

    reduces_alone = {("TP", 2, "all_reduce"), ("DP", 2, "all_reduce")}
    reshards = {("TP", 4, "all_reduce"), ("TP", 4, "all_to_all_single"), ("TP", 4, "broadcast")}
    assert calls(0) == {*reshards, ("DP", 2, "all_reduce")}
    assert calls(3) == reshards
    assert calls(5) == reduces_alone


@pytest.mark.nightly
def test_a_spare_rank_is_reported_to_have_left_during_init(
    profiled: dict[int, dict[str, Any]], run_fakedist: RunFakedist
) -> None:
    spare = profiled[7]
    assert spare["exit"] == {"outcome": "exit", "code": 0, "message": ""}
    assert re.fullmatch(r".*/nonuniform_tp\.py:\d+ \(build_layout\)", spare["left_during_init"]["line"])
    assert (spare["peak_allocated_bytes"], spare["steps"], spare["collectives"]) == (0, [], [])
    said = "left the job during init, before a first step: exit 0 at "
    assert said in run_fakedist("report", spare["run_directory"]).stdout
    assert said in run_fakedist("report", spare["run_directory"], "--format", "markdown").stdout
    assert said in (Path(spare["run_directory"]) / "report.html").read_text()
    assert profiled[5]["left_during_init"] is None
