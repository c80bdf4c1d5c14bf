"""Modes and tensor subclasses see our calls as they see a C++ group's: as c10d's operations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fakedist.torch_releases import installed
from fakedist.world.process_group import around_calls
from fakedist.world.reroute import operations_of_groups

Enter = Callable[..., Any]
SIZE, RANK = 4, 1
ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


#: torch 2.11 has no way from Python to an operation with a reduction.
reductions_are_operations = pytest.mark.skipif(
    not hasattr(dist.ReduceOp, "boxed"), reason="this torch cannot give a reduction to an operation from Python"
)


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def values(tensor: torch.Tensor) -> list[Any]:
    return [] if isinstance(tensor, FakeTensor) else list(tensor.tolist())


def ones(count: int = 2) -> torch.Tensor:
    return torch.ones(count)


def slots() -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(SIZE)]


def gathered() -> list[Any]:
    dist.all_gather(found := slots(), ones())
    return [values(one) for one in found]


def gathered_at_me() -> list[Any]:
    dist.gather(ones(), found := slots(), dst=RANK)
    return [values(one) for one in found]


def into(call: Callable[[torch.Tensor], Any], count: int = 2) -> Callable[[], list[Any]]:
    """Call with a tensor of ones; its contents afterwards."""

    def called() -> list[Any]:
        call(tensor := ones(count))
        return values(tensor)

    return called


CALLS: dict[str, Callable[[], list[Any]]] = {
    "c10d.allreduce_.default": into(lambda tensor: dist.all_reduce(tensor)),
    "c10d.broadcast_.default": into(lambda tensor: dist.broadcast(tensor, 0)),
    "c10d.reduce_.default": into(lambda tensor: dist.reduce(tensor, RANK)),
    "c10d.allgather_.default": gathered,
    "c10d._allgather_base_.default": into(lambda tensor: ALL_GATHER(tensor, ones() * 3), 8),
    "c10d.gather_.default": gathered_at_me,
    "c10d.scatter_.default": into(lambda tensor: dist.scatter(tensor, [ones() * 5] * SIZE, src=RANK)),
    "c10d.reduce_scatter_.default": into(lambda tensor: dist.reduce_scatter(tensor, [ones() * 5] * SIZE)),
    "c10d._reduce_scatter_base_.default": into(lambda tensor: REDUCE_SCATTER(tensor, ones(8), dist.ReduceOp.MAX)),
    "c10d.alltoall_.default": into(lambda tensor: dist.all_to_all([tensor, *slots()[1:]], [ones() * 7] * SIZE)),
    "c10d.alltoall_base_.default": into(
        lambda tensor: dist.all_to_all_single(tensor, ones(8) * 7, [1, 2, 3, 2], [2, 2, 2, 2]), 8
    ),
    "c10d.send.default": into(lambda tensor: dist.send(tensor, 0)),
    "c10d.recv_.default": into(lambda tensor: dist.recv(tensor, 0)),
    "c10d.recv_any_source_.default": into(lambda tensor: dist.recv(tensor)),
    "c10d.barrier.default": into(lambda tensor: dist.barrier()),
}


@pytest.mark.parametrize(
    "operation",
    [pytest.param(name, marks=reductions_are_operations if "reduce" in name else ()) for name in sorted(CALLS)],
)
def test_a_mode_sees_one_operation_and_nothing_inside(enter_world: Enter, operation: str) -> None:
    notes = enter_world(SIZE, RANK)
    alone = CALLS[operation]()
    written = notes.calls[:]
    with Watch() as watch:
        torch.empty(1)
        found = CALLS[operation]()
    if "recv" not in operation:  # every made-up value is different
        assert found == alone
    named = [name for name in watch.seen if "c10d" in name]
    assert named == [operation]
    assert notes.calls == written * 2
    assert not {"aten.mul_.Tensor", "aten.clamp_.default"} & set(watch.seen)


@pytest.mark.skipif(installed() < (2, 11), reason="FakeTensorMode of this torch lacks collectives")
@pytest.mark.parametrize("operation", sorted(CALLS))
def test_fake_tensors_move_nothing(enter_world: Enter, operation: str) -> None:
    notes = enter_world(SIZE, RANK)
    with FakeTensorMode():
        CALLS[operation]()
    assert notes.calls == []


@pytest.mark.parametrize("operation", sorted(CALLS))
def test_the_host_clock_stands_still_in_the_call_and_in_the_wait_for_it(enter_world: Enter, operation: str) -> None:
    enter_world(SIZE, RANK)
    moves: list[int] = []
    with around_calls(lambda: moves.append(1), lambda: moves.append(-1)):
        CALLS[operation]()
    assert moves.count(1) == moves.count(-1) > 1


def test_an_asynchronous_call_is_over_in_a_mode_too(enter_world: Enter) -> None:
    enter_world(SIZE, RANK)
    with Watch():
        work: Any = dist.all_reduce(tensor := ones(), async_op=True)
        assert work.wait() is True
        assert tensor.tolist() == [4.0, 4.0]
        assert work.get_future().wait()[0].data_ptr() == tensor.data_ptr()
    with FakeTensorMode():
        work = dist.all_reduce(ones(), async_op=True)
        assert work.wait() is True
        assert tuple(work.get_future().wait()[0].shape) == (2,)


def reduced(tensor: torch.Tensor) -> torch.Tensor:
    mine = tensor * 2
    dist.all_reduce(mine)
    return mine + 1


@reductions_are_operations
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_writes_down_the_call(enter_world: Enter, mode: str) -> None:
    enter_world(SIZE, RANK)
    graph = make_fx(reduced, tracing_mode=mode)(ones())
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    operations = ["aten.mul.Tensor", "c10d.allreduce_.default", "aten.add.Tensor"]
    assert [name for name in names if "getitem" not in name] == operations
    assert graph(ones()).tolist() == reduced(ones()).tolist() == [9.0, 9.0]


@reductions_are_operations
def test_functionalized_calls_reduce(enter_world: Enter) -> None:
    enter_world(SIZE, RANK)
    assert torch.func.functionalize(reduced)(ones()).tolist() == [9.0, 9.0]


def test_torch_has_its_own_kernels_again_afterwards() -> None:
    def kernel() -> str:
        return str(torch._C._dispatch_dump("c10d::broadcast_"))

    before = kernel()
    with operations_of_groups():
        assert kernel() != before
    assert kernel() == before
