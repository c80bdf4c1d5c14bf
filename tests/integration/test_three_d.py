"""examples/three_d.py: its mathematics with real ranks, its groups and calls on the virtual GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, RunFakedist
from tests.support.real import RealRun, run_for_real

SIZES = ("--layers", "3", "--hidden", "32", "--heads", "4", "--vocab", "96", "--seq-len", "16", "--batch", "8")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RealRun]:
    """The same three steps in one process, and on 2 x 2 x 2."""
    runs = {}
    for name, world_size, layout in (("alone", 1, ()), ("split", 8, ("--tp", "2", "--pp", "2", "--dp", "2"))):
        options = (*layout, *SIZES, "--micro-batch", "2", "--steps", "3")
        folder = tmp_path_factory.mktemp(name)
        runs[name] = run_for_real("three_d.py", world_size, folder, "average_gradients", *options)
    return runs


def joined(parts: list[torch.Tensor], name: str) -> torch.Tensor:
    """The whole gradient from those of the tensor parallel ranks."""
    if name.endswith("qkv.weight"):
        return torch.cat([part.view(3, -1, part.shape[1]) for part in parts], dim=1).flatten(0, 1)
    if name.endswith("up.weight"):
        return torch.cat(parts, dim=0)
    if name.endswith(("projection.weight", "down.weight")):
        return torch.cat(parts, dim=1)
    torch.testing.assert_close(parts[0], parts[1])
    return parts[0]


@pytest.mark.nightly
def test_the_losses_of_eight_real_ranks_are_those_of_one(real: dict[str, RealRun]) -> None:
    assert len(real["alone"].losses) == 3
    assert real["split"].losses == pytest.approx(real["alone"].losses, rel=1e-5)


@pytest.mark.nightly
def test_the_gradients_of_eight_real_ranks_are_those_of_one(real: dict[str, RealRun]) -> None:
    whole = real["alone"].gradients[0]
    seen = set()
    for first in range(0, 8, 2):  # ranks 0 and 1 share matrices, and so on
        ranks = [real["split"].gradients[rank] for rank in (first, first + 1)]
        for name in ranks[0]:
            torch.testing.assert_close(joined([each[name] for each in ranks], name), whole[name], rtol=1e-4, atol=1e-6)
            seen.add(name)
    assert seen == set(whole)


@pytest.fixture(scope="module")
def topologies(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """A rank of each of two stages, from one command: its folder and objects by rank."""
    folder = tmp_path_factory.mktemp("topologies")
    job = ("--world-size", "8", "--rank", "0,7", "--device", "virtual", "-o", "runs")
    script = (ROOT / "examples" / "three_d.py", "--tp", "2", "--pp", "2", "--dp", "2", *SIZES)
    finished = run_fakedist("profile", *job, *script, cwd=folder)
    assert finished.code == 0, finished.stderr
    section = ("--section", "communication", "--json")
    return folder, {rank: run_fakedist("report", folder / f"runs/rank{rank}", *section).json() for rank in (0, 7)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "line"),
    [
        (0, "TP [0,1] all_reduce every layer; PP [0,2] send, recv; DP [0,4] all_reduce after backward"),
        (7, "TP [6,7] all_reduce every layer; PP [5,7] recv, send; DP [3,7] all_reduce after backward"),
    ],
)
def test_the_groups_of_a_rank_are_told_in_a_line(topologies: tuple[Path, dict[int, Any]], rank: int, line: str) -> None:
    assert topologies[1][rank]["line"] == line


@pytest.mark.long
def test_calls_and_bytes_of_a_step_are_those_of_the_mathematics(topologies: tuple[Path, dict[int, Any]]) -> None:
    """Stage 0 of two has layers 0 and 1 of three; a replica has 4 of 8 sequences, in 4 micro-batches."""
    groups = {group["name"]: group for group in topologies[1][0]["groups"]}
    calls = {(name, call["operation"]): call for name, group in groups.items() for call in group["calls"]}
    activation_bytes = 16 * 32 * 2  # bfloat16
    reduced = calls["TP", "all_reduce"]
    assert (reduced["num_calls"], reduced["bytes_in"]) == (4 * 2 * 4, 4 * 2 * 4 * activation_bytes)
    assert (reduced["num_layers"], reduced["of_layers"]) == (2, 2)
    sent, received = calls["PP", "send"], calls["PP", "recv"]
    assert (sent["num_calls"], sent["bytes_in"]) == (received["num_calls"], received["bytes_out"])
    assert (sent["num_calls"], sent["bytes_in"]) == (4, 4 * activation_bytes)
    per_layer = 4 * 32 + 12 * 32 * 32 // 2  # norms, and half of the matrices
    parameters = 96 * 32 + 16 * 32 + 2 * per_layer
    assert calls["DP", "all_reduce"]["bytes_in"] == parameters * 2 + 4  # and the loss
    assert groups["default_pg"]["calls"] == []


@pytest.mark.long
def test_existing_runs_are_shown_again_on_80_columns(
    topologies: tuple[Path, dict[int, Any]], run_fakedist: RunFakedist
) -> None:
    section = ("--section", "communication")
    shown = run_fakedist("report", "runs/rank0", *section, cwd=topologies[0], env={"COLUMNS": "80"})
    assert shown.code == 0, shown.stderr
    assert max(len(line) for line in shown.stdout.splitlines() if not line.startswith(("job", "run"))) <= 80
    rows = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert rows.count("TP all_reduce 32 32.00 KiB 32.00 KiB forward, backward; every layer") == 1  # of rank 0
