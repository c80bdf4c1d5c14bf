"""examples/three_d.py: its mathematics with real ranks, its groups and calls on the virtual GPU."""

from __future__ import annotations

import pytest
import torch

from tests.integration.real import RealRun, run_for_real

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


def test_the_losses_of_eight_real_ranks_are_those_of_one(real: dict[str, RealRun]) -> None:
    assert len(real["alone"].losses) == 3
    assert real["split"].losses == pytest.approx(real["alone"].losses, rel=1e-5)


def test_the_gradients_of_eight_real_ranks_are_those_of_one(real: dict[str, RealRun]) -> None:
    whole = real["alone"].gradients[0]
    seen = set()
    for first in range(0, 8, 2):  # ranks 0 and 1 share matrices, and so on
        ranks = [real["split"].gradients[rank] for rank in (first, first + 1)]
        for name in ranks[0]:
            torch.testing.assert_close(joined([each[name] for each in ranks], name), whole[name], rtol=1e-4, atol=1e-6)
            seen.add(name)
    assert seen == set(whole)
