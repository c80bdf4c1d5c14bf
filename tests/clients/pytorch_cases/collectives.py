"""Collectives, as c10d's tests of NCCL and gloo call them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cases import Rank, case, raises, same

SAME = "all ranks hold the same numbers"
ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@case("test_c10d_nccl.py: test_allreduce_ops", "sum, mean, minimum, maximum and product of all ranks", SAME)
def all_reduce(rank: Rank) -> None:
    wanted = {"SUM": 2.0 * rank.size, "AVG": 2.0, "MIN": 2.0, "MAX": 2.0, "PRODUCT": 2.0**rank.size}
    for name, value in wanted.items():
        dist.all_reduce(tensor := rank.full(2), op=getattr(dist.ReduceOp, name))
        same(tensor, value)


@case("test_c10d_nccl.py: test_allreduce_ops", "a sum with a factor before it", SAME)
def premultiplied_sum(rank: Rank) -> None:
    dist.all_reduce(tensor := rank.full(2), op=dist._make_nccl_premul_sum(3.0))
    same(tensor, 6.0 * rank.size)


@case("test_c10d_nccl.py: test_reduce_ops", "a reduction to each root in turn", SAME)
def reduce(rank: Rank) -> None:
    for root in range(rank.size):
        dist.reduce(tensor := rank.full(2), root)
        if root == rank.rank:
            same(tensor, 2.0 * rank.size)


@case("test_c10d_nccl.py: test_broadcast_ops", "what each root in turn holds is on all ranks", SAME)
def broadcast(rank: Rank) -> None:
    for root in range(rank.size):
        dist.broadcast(tensor := rank.full(5), root)
        same(tensor, 5)


@case("test_c10d_nccl.py: test_allgather_ops", "every rank's tensor is in its slot of a list", SAME)
def all_gather(rank: Rank) -> None:
    slots = [rank.full(-1) for _ in range(rank.size)]
    dist.all_gather(slots, rank.full(7))
    for slot in slots:
        same(slot, 7)


@case(
    "test_c10d_nccl.py: test_allgather_base_basics",
    "sizes and types that do not fit are refused; slots are filled",
    SAME,
)
def all_gather_into_one(rank: Rank) -> None:
    raises(lambda: ALL_GATHER(rank.full(0, rank.size * 3 + 1), rank.full(1)), "output tensor size must be equal")
    raises(lambda: ALL_GATHER(rank.full(0, rank.size * 3).long(), rank.full(1)), "same dtype", "same type")
    ALL_GATHER(whole := rank.full(0, rank.size * 3), rank.full(1))
    same(whole, 1)


@case(
    "test_c10d_nccl.py: test_reduce_scatter_base_basics",
    "sizes and types that do not fit are refused; parts are sums",
    SAME,
)
def reduce_scatter_from_one(rank: Rank) -> None:
    raises(lambda: REDUCE_SCATTER(rank.full(0), rank.full(1, rank.size * 3 + 1)), "input tensor must be the same size")
    raises(lambda: REDUCE_SCATTER(rank.full(0), rank.full(1, rank.size * 3).long()), "same dtype", "same type")
    rows = torch.arange(rank.size, device=rank.device, dtype=torch.float).repeat_interleave(3)
    REDUCE_SCATTER(part := rank.full(0), rows)
    same(part, float(rank.rank * rank.size))


@case(
    "test_c10d_nccl.py: test_reduce_scatter_ops", "a rank gets the sum, the minimum and the maximum of its chunk", SAME
)
def reduce_scatter(rank: Rank) -> None:
    for name, times in (("SUM", rank.size), ("MIN", 1), ("MAX", 1)):
        chunks = [rank.full(i) for i in range(rank.size)]
        dist.reduce_scatter(part := rank.full(-1), chunks, op=getattr(dist.ReduceOp, name))
        same(part, float(rank.rank * times))


@case(
    "test_c10d_nccl.py: test_gather_ops", "the root has every rank's tensor; a list that does not fit is refused", SAME
)
def gather(rank: Rank) -> None:
    slots = [rank.full(-1) for _ in range(rank.size)]
    dist.gather(rank.full(4), slots, dst=rank.rank)
    for slot in slots:
        same(slot, 4)
    raises(lambda: dist.gather(rank.full(4), None, dst=rank.rank), "must be specified")


@case("test_c10d_nccl.py: test_scatter_ops", "a rank gets its chunk of the root's list")
def scatter(rank: Rank) -> None:
    dist.scatter(mine := rank.full(-1), [rank.full(i) for i in range(rank.size)], src=rank.rank)
    same(mine, float(rank.rank))


@case("test_c10d_nccl.py: test_all_to_all_single_unequal_split", "rows arrive by the splits that the ranks gave", SAME)
def all_to_all_uneven(rank: Rank) -> None:
    # Every rank sends rank + 1 rows to each rank: all ranks' input splits are the same, the output's are mine.
    given = [i + 1 for i in range(rank.size)]
    rows = torch.cat([rank.full(i, i + 1, 2) for i in range(rank.size)])
    got = rank.full(-1, (rank.rank + 1) * rank.size, 2)
    dist.all_to_all_single(got, rows, [rank.rank + 1] * rank.size, given)
    same(got, float(rank.rank))


@case("distributed_test.py: test_all_to_all", "slot j holds what rank j sends to this rank", SAME)
def all_to_all(rank: Rank) -> None:
    slots = [rank.full(-1) for _ in range(rank.size)]
    dist.all_to_all(slots, [rank.full(i) for i in range(rank.size)])
    for slot in slots:
        same(slot, float(rank.rank))


@case(
    "distributed_test.py: test_batch_isend_irecv_nccl",
    "what the neighbour sends arrives",
    SAME,
    why="the neighbour does not run: without a tape the value is made up, finite and of the right shape",
)
def batch_of_sends(rank: Rank) -> None:
    got, right, left = rank.full(-1), (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, rank.full(3), right), dist.P2POp(dist.irecv, got, left)])
    for work in works:
        work.wait()
    same(got, 3)


@case(
    "distributed_test.py: test_send_recv_any_source",
    "a receive from anywhere names its sender",
    "the value is not looked at",
)
def receive_from_anywhere(rank: Rank) -> None:
    source = dist.recv(tensor := rank.full(float("nan")))
    assert 0 <= source < rank.size
    assert source != rank.rank
    assert torch.isfinite(tensor.cpu()).all()


@case("test_c10d_common.py: test_allreduce_future", "a work's future gives the result, and what follows from it", SAME)
def futures(rank: Rank) -> None:
    work: Any = dist.all_reduce(rank.full(2), async_op=True)
    follows = work.get_future().then(lambda future: future.value()[0] / rank.size)
    same(follows.wait(), 2)
    work.wait()
    assert work.is_completed()


@case("distributed_test.py: test_all_reduce_coalesced_manager", "calls in one manager are waited on as one", SAME)
def coalescing(rank: Rank) -> None:
    tensors = [rank.full(i + 1) for i in range(3)]
    with dist._coalescing_manager(device=rank.device, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for i, tensor in enumerate(tensors):
        same(tensor, float((i + 1) * rank.size))


@case("test_c10d_nccl.py: test_barrier", "a barrier orders calls of two groups", SAME)
def barrier(rank: Rank) -> None:
    work: Any = dist.all_reduce(tensor := rank.full(1), async_op=True)
    dist.barrier()
    work.wait()
    same(tensor, rank.size)


@case("test_c10d_common.py: test_invalid arguments", "no tensor, a bad root, a foreign list: torch's own errors")
def wrong_arguments(rank: Rank) -> None:
    raises(lambda: dist.all_reduce([rank.full(1)]), "Invalid function argument")  # type: ignore[arg-type]
    raises(lambda: dist.broadcast(rank.full(1), rank.size), "not part of group", "invalid root")
    raises(lambda: dist.all_gather([rank.full(1)] * rank.size, [rank.full(1)]), "Invalid function argument")  # type: ignore[arg-type]
    raises(lambda: dist.send(rank.full(1), rank.rank), "Invalid destination rank")
    raises(
        lambda: dist.all_gather([rank.full(1)], rank.full(1)), "invalid output tensor list", "list of output tensors"
    )
