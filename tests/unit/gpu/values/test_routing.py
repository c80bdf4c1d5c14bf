"""Indices that no kernel computed are spread evenly."""

from __future__ import annotations

import pytest
import torch

from fakedist.gpu.values.means import spread
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.routing import choose

ATEN = torch.ops.aten


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_topk_picks_distinct_ones_and_all_equally_often(dim: int) -> None:
    source = torch.randn(64, 32)
    num_choices = source.shape[dim]
    indices = torch.topk(source, 4, dim=dim).indices
    chosen = choose(Operator(ATEN.topk.default), (source, 4, dim), {}, indices)
    assert chosen.shape == indices.shape
    assert torch.bincount(chosen.flatten(), minlength=num_choices).unique().numel() == 1
    rows = chosen.movedim(dim, -1)
    assert all(len(set(row.tolist())) == 4 for row in rows.reshape(-1, 4))


def test_argmax_names_a_valid_index_in_every_row_and_of_everything_the_first() -> None:
    source = torch.randn(6, 4)
    chosen = choose(Operator(ATEN.argmax.default), (source, 1), {}, source.argmax(1))
    assert chosen.tolist() == [0, 1, 2, 3, 0, 1]
    assert choose(Operator(ATEN.argmax.default), (source,), {}, source.argmax()).item() == 0


def test_a_sort_has_every_index_once_also_with_its_dimension_by_keyword() -> None:
    source = torch.randn(3, 5, 2)
    chosen = choose(Operator(ATEN.sort.default), (source, 1), {}, source.sort(1).indices)
    assert chosen.sort(1).values.unique(dim=0).shape[0] == 1
    assert chosen[2, :, 1].tolist() == [0, 1, 2, 3, 4]
    stable = choose(Operator(ATEN.sort.stable), (source,), {"stable": True, "dim": 1}, source.sort(1).indices)
    assert torch.equal(stable, chosen)


@pytest.mark.parametrize(
    ("shape", "mean", "total"), [((64, 32), 4 / 32, 256), ((32, 64), 4 / 32, 256), ((9, 5), 1 / 3, 15)]
)
def test_a_mask_has_its_share_in_every_row_and_column(shape: tuple[int, int], mean: float, total: int) -> None:
    mask = spread(torch.Size(shape), mean)
    assert int(mask.sum()) == total
    for counts in (mask.sum(0), mask.sum(1)):
        assert int(counts.max() - counts.min()) <= (mean == 1 / 3)
