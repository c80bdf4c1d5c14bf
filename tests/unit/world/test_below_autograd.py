"""Collectives write where autograd does not look, as c10d's operations do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

Enter = Callable[..., Any]
# torch 2.15 calls them by other names and warns of these.
ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
COMMUNICATE: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda tensor: dist.all_reduce(tensor),
    "all_reduce, async": lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "recv": lambda tensor: dist.recv(tensor, 0),
    "all_gather": lambda tensor: ALL_GATHER(tensor, torch.ones(1)),
    "reduce_scatter": lambda tensor: REDUCE_SCATTER(tensor, torch.ones(64)),
    "all_to_all_single": lambda tensor: dist.all_to_all_single(tensor, torch.ones(8)),
}


@pytest.mark.parametrize("communicate", COMMUNICATE.values(), ids=COMMUNICATE.keys())
def test_autograd_does_not_see_what_arrives(enter_world: Enter, communicate: Callable[[torch.Tensor], Any]) -> None:
    enter_world(8, 5)
    leaf = torch.full((8,), 3.0, requires_grad=True)
    communicate(leaf)  # pipelines receive into such
    saved = leaf * 2
    squared = saved.square()
    communicate(saved)
    assert leaf._version == saved._version == 0
    assert saved.grad_fn is not None
    assert saved.grad_fn.name() == "MulBackward0"
    squared.sum().backward()  # with the present values, without an error
    torch.testing.assert_close(leaf.grad, 4 * saved.detach())
