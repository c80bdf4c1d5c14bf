"""Wrong calls get the error that torch gives: each text was printed by two real processes with gloo, or is NCCL's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fakedist.world.checks import (
    CheckedGroup,
    check_dense,
    check_gathered,
    check_gathered_into,
    check_op,
    check_scattered_from,
    check_slots,
)

Enter = Callable[..., Any]
NCCL = CheckedGroup("nccl", 2)


def t(length: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(length, dtype=dtype)


# By rank 1 of 2.
GLOO: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "root": (lambda: of_default_group().broadcast([t()], _to(7)), RuntimeError, "broadcast: invalid root rank: 7"),
    "all_gather": (
        lambda: dist.all_gather([t()], t()),
        RuntimeError,
        r"allgather: invalid output tensor list at index 0 \(expected length 2, got 1\)",
    ),
    "all_gather slot": (
        lambda: dist.all_gather([t(), t(3)], t()),
        RuntimeError,
        r"allgather: invalid tensor size at index 1 \(expected \(4\), got \(3\)\)",
    ),
    "all_gather type": (
        lambda: dist.all_gather([t(dtype=torch.float64), t()], t()),
        ValueError,
        "Invalid usage of tensors with different dtypes",
    ),
    "all_gather_into_tensor": (
        lambda: of_default_group()._allgather_base(t(7), t()),
        RuntimeError,
        r"allgather: invalid tensor size at index 1 \(expected \(4\), got \(3\)\)",
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter(t(), [t()]),
        RuntimeError,
        "invalid input tensor list size, must be world size",
    ),
    "bits of floats": (
        lambda: dist.all_reduce(t(), dist.ReduceOp.BXOR),
        RuntimeError,
        "Cannot use ReduceOp.BXOR with non-integral dtype",
    ),
    "a group without ranks": (
        lambda: dist.new_group([]),
        AssertionError,
        "Group rank must be specified for group members",
    ),
    "a send to a rank outside": (lambda: dist.send(t(), 2), dist.DistStoreError, "wait timeout"),
    "a receive from a rank outside": (lambda: dist.recv(t(), 5), dist.DistStoreError, "wait timeout"),
    "all_to_all_single": (
        lambda: dist.all_to_all_single(t(8), t(7)),
        RuntimeError,
        "Tensor's dim 0 does not divide equally across group size",
    ),
    "all_to_all_single splits": (
        lambda: dist.all_to_all_single(t(8), t(8), [4, 4], [4, 3]),
        RuntimeError,
        "Split sizes doesn't match total dim 0 size",
    ),
    "all_to_all_single number": (
        lambda: dist.all_to_all_single(t(8), t(8), [4, 4], [8]),
        RuntimeError,
        "Number of tensor splits not equal to group size",
    ),
    "all_to_all": (
        lambda: dist.all_to_all([t()], [t()]),
        RuntimeError,
        "alltoall: input tensor list size 1 does not match world size 2",
    ),
    **{
        name: (call, RuntimeError, rf"ProcessGroupGloo::{name}: invalid tensor size at index 0 \(expected \(4\), got")
        for name, call in {
            "scatter": lambda: dist.scatter(t(), [t(3), t(4)], src=1),
            "gather": lambda: dist.gather(t(), [t(3), t(4)], dst=1),
        }.items()
    },
    "no tensor": (lambda: dist.all_reduce([1]), TypeError, "Expected parameter `tensor` of type torch.Tensor"),  # type: ignore[arg-type]
    "to itself": (lambda: dist.send(t(), 1), ValueError, "destination rank should not be the same"),
    "from itself": (lambda: dist.recv(t(), 1), ValueError, "source rank should not be the same"),
    "no such backend": (lambda: dist.new_group([0, 1], backend="ncll"), AssertionError, "Unknown backend type ncll"),
    "twice": (lambda: dist.init_process_group("gloo"), ValueError, "initialize the default process group twice"),
}


def of_default_group() -> Any:
    return dist.distributed_c10d._get_default_group()


def _to(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", list(GLOO))
def test_wrong_arguments_get_gloos_error(enter_world: Enter, call: str) -> None:
    notes = enter_world(2, 1)
    wrong, kind, text = GLOO[call]
    with pytest.raises(kind, match=text):
        wrong()
    assert notes.calls == []


@pytest.mark.parametrize("call", [lambda: dist.all_reduce(t()), lambda: dist.recv(t(), 0), lambda: dist.send(t(), 0)])
def test_nccl_takes_no_tensor_of_the_host(enter_world: Enter, call: Callable[[], Any]) -> None:
    enter_world(2, 1, "nccl")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        call()


def test_nccls_own_words() -> None:
    words: list[tuple[type[Exception], str, Callable[..., object], tuple[Any, ...]]] = [
        (ValueError, "output tensor size must be equal to world_size", check_gathered_into, (NCCL, t(7), t())),
        (TypeError, "must have the same type as input", check_gathered_into, (NCCL, t(8, torch.float64), t())),
        (ValueError, "must be the same size as output size times", check_scattered_from, (NCCL, t(3), t(8))),
        (TypeError, r"type as the output tensor\.", check_scattered_from, (NCCL, t(4, torch.float64), t(8))),
        (RuntimeError, "NCCL::gather: Incorrect output list size 1", check_slots, (NCCL, "gather", [t()], t())),
        (ValueError, "Tensors must be contiguous", check_dense, ([t()], [torch.ones(4, 2).t()])),
        (ValueError, "Tensors must be CUDA and dense", check_dense, ([torch.ones(4, 2).to_sparse()],)),
    ]
    for kind, text, check, arguments in words:
        with pytest.raises(kind, match=text):
            check(*arguments)
    check_dense([torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)])
    check_dense(list(torch.ones(4, 4).chunk(2, dim=1)))  # slots are filled from a buffer
    check_gathered(NCCL, [t(3), t(5)], t())  # uneven slots are its own


MEMBERS_ONLY: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(t(), group=group),
    "broadcast": lambda group: dist.broadcast(t(), src=0, group=group),
    "all_gather": lambda group: dist.all_gather([t()], t(), group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "gather_object": lambda group: dist.gather_object(1, None, dst=0, group=group),
    "scatter_object_list": lambda group: dist.scatter_object_list([None], [1], src=0, group=group),
}


@pytest.mark.parametrize("call", list(MEMBERS_ONLY))
def test_a_collective_of_a_group_without_this_rank_warns(enter_world: Enter, call: str) -> None:
    notes = enter_world(2, 1)
    group = dist.new_group([0])
    with pytest.warns(UserWarning, match="which does not belong to the given group"):
        MEMBERS_ONLY[call](group)
    assert notes.calls == []


def test_a_send_in_a_group_without_this_rank_is_an_error(enter_world: Enter) -> None:
    enter_world(2, 1)
    group: Any = dist.new_group([0])
    calls: list[Callable[[], Any]] = [
        lambda: dist.send(t(), 0, group=group),
        lambda: dist.send_object_list([1], dst=0, group=group),
        lambda: dist.recv_object_list([1], src=0, group=group),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="Invalid process group specified"):
            call()


@pytest.mark.filterwarnings("ignore:.*does not belong")
def test_after_the_end_there_is_no_group(enter_world: Enter) -> None:
    enter_world(2, 1)
    dist.destroy_process_group()
    for call in (lambda: dist.all_reduce(t()), dist.get_rank):
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            call()


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_nccl_has_no_reduction_of_bits_nor_a_mean_of_booleans(op: str) -> None:
    with pytest.raises(ValueError, match=f"Cannot use ReduceOp.{op} with NCCL"):
        check_op(NCCL, getattr(dist.ReduceOp, op), torch.int32)
    with pytest.raises(TypeError, match=r"Cannot use ReduceOp.AVG with boolean inputs"):
        check_op(NCCL, dist.ReduceOp.AVG, torch.bool)
    check_op(NCCL, dist.ReduceOp.AVG, torch.float32)
    check_op(CheckedGroup("gloo", 2), getattr(dist.ReduceOp, op), torch.int32)
