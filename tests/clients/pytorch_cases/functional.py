"""Functional collectives, tracing and compiling."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from cases import Rank, case, same
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx

SAME = "all ranks hold the same numbers"
GATHER: Any = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
SCATTER: Any = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)


@case("test_functional_api.py: TestTraceableCollectives", "values and shapes of functional collectives", SAME)
def values(rank: Rank) -> None:
    world = dist.group.WORLD
    same(funcol.all_reduce(rank.full(1), "sum", world) + 0, rank.size)
    whole = GATHER(rank.full(2, 2, 3), 0, world) + 0
    assert whole.shape == (2 * rank.size, 3)
    same(whole, 2)
    same(SCATTER(rank.full(3, rank.size, 2), "avg", 0, world) + 0, 3)


@case("test_functional_api.py: test_all_to_all_single_autograd", "gradients go back through an all_to_all", SAME)
def autograd(rank: Rank) -> None:
    tensor = rank.full(1, rank.size, 2).requires_grad_()
    out = funcol.all_to_all_single_autograd(tensor, None, None, dist.group.WORLD)
    (out * 3).sum().backward()
    assert tensor.grad is not None
    same(tensor.grad, 3)


@case("test_c10d_functional_native.py: test_all_reduce_single_", "in place, and the input stays where it is not", SAME)
def in_place(rank: Rank) -> None:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    given = rank.full(1)
    out = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(given, "sum", name))
    same(given, 1)
    same(out, rank.size)
    torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(given, "sum", name))
    same(given, rank.size)


@case(
    "test_fake_pg.py: test_fake_pg_tracing",
    "make_fx writes down the collective and its wait, with real, fake and symbolic tensors",
)
def make_fx_of_functional(rank: Rank) -> None:
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(lambda part: GATHER(part, 0, dist.group.WORLD) + 1, tracing_mode=mode)(rank.full(1, 2, 2))
        targets = " ".join(str(node.target) for node in graph.graph.nodes)
        assert "_c10d_functional.all_gather" in targets, targets
        assert "wait_tensor" in targets, targets


@case(
    "test_fake_pg.py: test_fake_pg_tracing",
    "make_fx writes down dist.all_reduce as one operation; its graph runs",
    SAME,
)
def make_fx_of_calls(rank: Rank) -> None:
    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor * 2
        dist.all_reduce(mine)
        return mine + 1

    graph = make_fx(reduced)(rank.full(1))
    assert [str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target)] == ["c10d.allreduce_.default"]
    same(graph(rank.full(1)), 2.0 * rank.size + 1)


@case("test_comm_mode.py: test_comm_mode", "CommDebugMode counts functional calls and those of dist")
def counted(rank: Rank) -> None:
    with CommDebugMode() as mode:
        dist.all_reduce(rank.full(1))
        funcol.all_reduce(rank.full(1), "sum", dist.group.WORLD)
    counts = {str(name): count for name, count in mode.get_comm_counts().items()}
    assert mode.get_total_counts() == 2, counts


@case(
    "test_inductor_collectives.py: test_allreduce_inductor", "dist.all_reduce in a compiled function is one graph", SAME
)
def compiled_call(rank: Rank) -> None:
    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor * 2
        dist.all_reduce(mine)
        return mine + 1

    compiled = torch.compile(reduced, backend="aot_eager", fullgraph=True)
    same(compiled(rank.full(1)), 2.0 * rank.size + 1)


@case(
    "test_inductor_collectives.py: test_graph_break_async_op", "an asynchronous call breaks the graph and works", SAME
)
def compiled_asynchronous_call(rank: Rank) -> None:
    @torch.compile(backend="aot_eager")
    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor * 2
        work: Any = dist.all_reduce(mine, async_op=True)
        work.wait()
        return mine + 1

    same(reduced(rank.full(1)), 2.0 * rank.size + 1)
