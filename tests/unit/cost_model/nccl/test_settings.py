"""The collective of a call."""

from __future__ import annotations

import pytest

from fakedist.cost_model.nccl.settings import collective_of


@pytest.mark.parametrize(
    ("operation", "kind", "num_bytes"),
    [
        ("all_gather_into_tensor_coalesced", "all_gather", 800),
        ("reduce_scatter_tensor", "reduce_scatter", 100),
        ("all_reduce", "all_reduce", 100),
        ("reduce", "reduce", 800),
        ("all_to_all_single", "all_to_all", 800),
        ("recv", "send", 800),
        ("broadcast_object_list", "broadcast", 800),
        ("frobnicate", "", 800),
    ],
)
def test_the_collective_and_its_whole_buffer(operation: str, kind: str, num_bytes: int) -> None:
    assert collective_of(operation, 100, 800) == (kind, num_bytes)
