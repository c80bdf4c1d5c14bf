"""The value table of docs/backend-contract.md, call by call, as a script makes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

Enter = Callable[..., Any]
#: World size and rank; the rank is never the first one but where it is alone.
WORLDS = pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1), (8, 5), (1024, 517)])
MODES = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])

# torch 2.15 calls them by other names and warns of these.
ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
FUNCTIONAL_GATHER: Any = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
FUNCTIONAL_SCATTER: Any = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)

FUNCTIONAL_GATHER_SEVERAL: Any = getattr(funcol, "all_gather_single_coalesced", funcol.all_gather_into_tensor_coalesced)
FUNCTIONAL_SCATTER_SEVERAL: Any = getattr(
    funcol, "reduce_scatter_single_coalesced", funcol.reduce_scatter_tensor_coalesced
)


def finish(work: Any, is_async: bool, outputs: list[torch.Tensor]) -> None:
    """Check a call: it is over, and its work holds its outputs."""
    if not is_async:
        assert work is None
        return
    assert work.is_completed()
    assert work.is_success()
    assert work.wait() is True
    held = work.get_future().wait()
    assert [tensor.data_ptr() for tensor in held] == [tensor.data_ptr() for tensor in outputs]
    assert [tensor.data_ptr() for tensor in work.result()] == [tensor.data_ptr() for tensor in outputs]


@WORLDS
@MODES
def test_all_reduce(enter_world: Enter, size: int, rank: int, is_async: bool) -> None:
    notes = enter_world(size, rank)
    tensor = torch.tensor([1.0, 2.0])
    finish(dist.all_reduce(tensor, async_op=is_async), is_async, [tensor])
    assert tensor.tolist() == [size, 2 * size]
    assert notes.calls == [("all_reduce", 0, 8, 8, (is_async, -1))]


@WORLDS
@pytest.mark.parametrize(
    ("op", "expected"), [("AVG", 3), ("MIN", 3), ("MAX", 3), ("BAND", 3), ("BOR", 3), ("PRODUCT", None), ("BXOR", None)]
)
def test_all_reduce_with_other_reductions(
    enter_world: Enter, size: int, rank: int, op: str, expected: int | None
) -> None:
    enter_world(size, rank)
    tensor = torch.tensor([3])
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    if op == "PRODUCT":
        expected = min(3**size, torch.iinfo(torch.int64).max)
    elif op == "BXOR":
        expected = 3 if size == 1 else 0
    assert tensor.tolist() == [expected]


def test_sums_of_a_thousand_ranks_saturate(enter_world: Enter) -> None:
    enter_world(1024)
    gradients, votes = torch.full((3,), 1000.0).half(), torch.ones(3, dtype=torch.uint8)
    for tensor in (gradients, votes):
        dist.all_reduce(tensor)
    assert torch.isfinite(gradients).all()
    assert (votes > 0).all()
    dist.all_reduce(votes)
    assert votes.tolist() == [255] * 3


@MODES
def test_all_reduce_coalesced(enter_world: Enter, is_async: bool) -> None:
    enter_world(8)
    tensors = [torch.ones(2), torch.ones(3)]
    with dist._coalescing_manager(async_ops=is_async) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if is_async:
        manager.wait()
    assert [tensor.tolist() for tensor in tensors] == [[8, 8], [8, 8, 8]]


@WORLDS
@MODES
def test_reduce(enter_world: Enter, size: int, rank: int, is_async: bool) -> None:
    enter_world(size, rank)
    mine, other = torch.ones(2), torch.ones(2)
    finish(dist.reduce(mine, rank, async_op=is_async), is_async, [mine])
    finish(dist.reduce(other, (rank + 1) % size, async_op=is_async), is_async, [other])
    assert mine.tolist() == [size] * 2
    assert other.tolist() == [1 if size > 1 else size] * 2


@WORLDS
@MODES
def test_all_gather(enter_world: Enter, size: int, rank: int, is_async: bool) -> None:
    enter_world(size, rank)
    slots = [torch.zeros(2) for _ in range(size)]
    finish(dist.all_gather(slots, torch.tensor([1.0, 2.0]), async_op=is_async), is_async, slots)
    assert all(slot.tolist() == [1, 2] for slot in slots)


def test_all_gather_into_uneven_slots(enter_world: Enter) -> None:
    notes = enter_world(4, 1, "ucc")
    slots = [torch.zeros(length) for length in (1, 2, 5, 0)]
    dist.all_gather(slots, torch.tensor([1.0, 2.0]))
    assert [slot.tolist() for slot in slots] == [[1], [1, 2], [1, 2, 1, 2, 1], []]
    assert notes.calls == [("all_gather", 0, 8, 32, (False, -1))]


@WORLDS
@MODES
def test_all_gather_into_one_tensor(enter_world: Enter, size: int, rank: int, is_async: bool) -> None:
    enter_world(size, rank)
    output = torch.zeros(size * 2)
    finish(ALL_GATHER(output, torch.tensor([1.0, 2.0]), async_op=is_async), is_async, [output])
    assert output.tolist() == [1, 2] * size


@WORLDS
def test_all_gather_in_place(enter_world: Enter, size: int, rank: int) -> None:
    enter_world(size, rank)
    output = torch.zeros(size, 2)
    output[rank] = torch.tensor([1.0, 2.0])
    ALL_GATHER(output, output[rank])
    assert (output == torch.tensor([1.0, 2.0])).all()


def test_all_gather_into_several_tensors_at_once(enter_world: Enter) -> None:
    enter_world(8)
    outputs = [torch.zeros(16), torch.zeros(8)]
    with dist._coalescing_manager():
        for output, mine in zip(outputs, (torch.ones(2), torch.ones(1)), strict=True):
            ALL_GATHER(output, mine)
    assert all((output == 1).all() for output in outputs)


@WORLDS
@MODES
def test_gather(enter_world: Enter, size: int, rank: int, is_async: bool) -> None:
    notes = enter_world(size, rank)
    slots, mine = [torch.zeros(2) for _ in range(size)], torch.ones(2)
    finish(dist.gather(mine, slots, dst=rank, async_op=is_async), is_async, slots)
    assert all(slot.tolist() == [1, 1] for slot in slots)
    if size > 1:
        finish(dist.gather(mine, dst=0, async_op=is_async), is_async, [mine])
        assert notes.calls[-1][:4] == ("gather", 0, 8, 0)


@WORLDS
@MODES
def test_scatter(enter_world: Enter, size: int, rank: int, is_async: bool) -> None:
    enter_world(size, rank)
    output = torch.full((2,), float("nan"))
    chunks = [torch.full((2,), float(number)) for number in range(size)]
    finish(dist.scatter(output, chunks, src=rank, async_op=is_async), is_async, [output])
    assert output.tolist() == [rank, rank]
    if size > 1:
        output.fill_(float("nan"))
        finish(dist.scatter(output, src=0, async_op=is_async), is_async, [output])
        assert torch.isfinite(output).all()


def test_scatter_of_indices_from_another_rank_is_zeros(enter_world: Enter) -> None:
    enter_world(8, 3)
    output = torch.full((4,), 7)
    dist.scatter(output, src=0)
    assert output.tolist() == [0] * 4


@WORLDS
@MODES
def test_reduce_scatter(enter_world: Enter, size: int, rank: int, is_async: bool) -> None:
    enter_world(size, rank)
    output = torch.zeros(2)
    chunks = [torch.full((2,), float(number)) for number in range(size)]
    finish(dist.reduce_scatter(output, chunks, async_op=is_async), is_async, [output])
    assert output.tolist() == [rank * size] * 2


@WORLDS
@MODES
def test_reduce_scatter_of_one_tensor(enter_world: Enter, size: int, rank: int, is_async: bool) -> None:
    enter_world(size, rank)
    output, given = torch.zeros(2), torch.arange(size).repeat_interleave(2).float()
    finish(REDUCE_SCATTER(output, given, async_op=is_async), is_async, [output])
    assert output.tolist() == [rank * size] * 2
    assert given.tolist() == torch.arange(size).repeat_interleave(2).tolist()
    REDUCE_SCATTER(output, given, op=dist.ReduceOp.AVG)
    assert output.tolist() == [rank] * 2


def test_reduce_scatter_in_place(enter_world: Enter) -> None:
    enter_world(8, 5)
    given = torch.arange(16.0)
    REDUCE_SCATTER(given[10:12], given)
    assert given.tolist() == [*range(10), 80, 88, *range(12, 16)]


@WORLDS
@MODES
def test_all_to_all(enter_world: Enter, size: int, rank: int, is_async: bool) -> None:
    enter_world(size, rank)
    outputs = [torch.zeros(2) for _ in range(size)]
    inputs = [torch.full((2,), float(number)) for number in range(size)]
    finish(dist.all_to_all(outputs, inputs, async_op=is_async), is_async, outputs)
    assert all(output.tolist() == [rank, rank] for output in outputs)


@WORLDS
@MODES
def test_all_to_all_of_one_tensor(enter_world: Enter, size: int, rank: int, is_async: bool) -> None:
    enter_world(size, rank)
    output, given = torch.zeros(size * 2), torch.arange(size).repeat_interleave(2).float()
    finish(dist.all_to_all_single(output, given, async_op=is_async), is_async, [output])
    assert output.tolist() == [rank] * 2 * size


@pytest.mark.parametrize("sizes", [list, numpy.array], ids=["list", "array"])
def test_all_to_all_with_splits(enter_world: Enter, sizes: Callable[[list[int]], Any]) -> None:
    """Megatron's token dispatcher gives its splits as arrays."""
    enter_world(4, 2)
    given, output = torch.arange(12.0).view(6, 2), torch.full((7, 2), -1.0)
    dist.all_to_all_single(output, given, sizes([3, 0, 1, 3]), sizes([1, 1, 2, 2]))
    mine = [[4, 5], [6, 7]]  # what I would send to me
    assert output.tolist() == [mine[0], mine[1], mine[0], mine[0], mine[0], mine[1], mine[0]]


def test_what_an_all_to_all_exchanges_is_recorded(enter_world: Enter) -> None:
    notes = enter_world(4, 1)
    rows = torch.zeros(6, 3)
    dist.all_to_all_single(torch.empty(7, 3), rows, [3, 4, 0, 0], [1, 2, 2, 1])
    dist.all_to_all_single(torch.empty(6, 3), rows, [0, 6, 0, 0], [0, 6, 0, 0])
    dist.all_to_all_single(torch.empty(8), torch.zeros(8))
    dist.all_to_all([torch.empty(size) for size in (2, 9, 3, 1)], [torch.zeros(size) for size in (1, 9, 1, 4)])
    dist.all_reduce(rows)
    # Of rows of 3 floats each: 3 received, of 3; nothing for others; 2 floats of 6; 4 floats of 6 sent, 6 received.
    assert notes.exchanged == [(3 * 3 * 4, 4 * 3 * 4), (0, 0), (2 * 4, 6 * 4), (4 * 4, 6 * 4), (0, 0)]


def test_all_to_all_of_nothing(enter_world: Enter) -> None:
    enter_world(4, 2)
    output = torch.full((4,), 7.0)
    dist.all_to_all_single(output, torch.empty(0), [1, 1, 1, 1], [0, 0, 0, 0])
    assert output.tolist() == [0] * 4
    dist.all_to_all_single(torch.empty(0), torch.empty(0), [0] * 4, [0] * 4)
    dist.all_to_all_single(torch.empty(0), torch.ones(4), [0] * 4, [1] * 4)


@WORLDS
@MODES
def test_broadcast(enter_world: Enter, size: int, rank: int, is_async: bool) -> None:
    enter_world(size, rank)
    for source in (rank, (rank + 1) % size):
        tensor = torch.tensor([1.0, 2.0])
        finish(dist.broadcast(tensor, source, async_op=is_async), is_async, [tensor])
        assert tensor.tolist() == [1, 2]


def test_broadcast_from_another_rank_makes_values_finite(enter_world: Enter) -> None:
    enter_world(8, 3)
    given = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    tensor = given.clone()
    dist.broadcast(tensor, 0)
    assert tensor[0] == 1
    assert torch.isfinite(tensor).all()
    mine = given.clone()
    dist.broadcast(mine, 3)
    assert torch.equal(mine, given) or mine.isnan()[1]
    assert mine.isinf().sum() == 2


@pytest.mark.parametrize("source", [0, None], ids=["a rank", "any rank"])
def test_recv_defines_the_buffer(enter_world: Enter, source: int | None) -> None:
    notes = enter_world(8, 3)
    floats, indices = torch.full((4,), float("nan")), torch.full((4,), -1)
    for tensor in (floats, indices):
        assert dist.recv(tensor, source) == 0
    assert torch.isfinite(floats).all()
    assert indices.tolist() == [0] * 4
    assert notes.calls[0] == ("recv", 0, 0, 16, (False, -1 if source is None else 0))


def test_what_rank_0_receives_is_not_its_own(enter_world: Enter) -> None:
    enter_world(8, 0)
    assert dist.recv(torch.ones(1)) == 1


def test_send_and_asynchronous_point_to_point(enter_world: Enter) -> None:
    notes = enter_world(8, 3)
    given, got = torch.ones(4), torch.full((4,), float("nan"))
    dist.send(given, 5)
    for work in (dist.isend(given, 5), dist.irecv(got, 5)):
        assert work is not None
        assert work.is_completed()
        assert work.wait()
    assert torch.isfinite(got).all()
    assert given.tolist() == [1] * 4
    assert [(call[0], call[4][1]) for call in notes.calls] == [("send", 5), ("send", 5), ("recv", 5)]


def test_a_batch_of_sends_and_receives(enter_world: Enter) -> None:
    enter_world(8, 3)
    got = torch.full((4,), float("nan"))
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(4), 4), dist.P2POp(dist.irecv, got, 2)])
    for work in works:
        work.wait()
    assert torch.isfinite(got).all()


@WORLDS
@MODES
def test_barriers(enter_world: Enter, size: int, rank: int, is_async: bool) -> None:
    notes = enter_world(size, rank)
    finish(dist.barrier(async_op=is_async), is_async, [])
    dist.monitored_barrier()
    assert [call[0] for call in notes.calls] == ["barrier", "monitored_barrier"]


@WORLDS
def test_functional_collectives(enter_world: Enter, size: int, rank: int) -> None:
    enter_world(size, rank)
    group = dist.group.WORLD
    mine = torch.tensor([1.0, 2.0])
    assert (funcol.all_reduce(mine, "sum", group) + 0).tolist() == [size, 2 * size]
    assert mine.tolist() == [1, 2]
    assert (FUNCTIONAL_GATHER(mine, 0, group) + 0).tolist() == [1, 2] * size
    chunks = torch.arange(size).repeat_interleave(2).float()
    assert (FUNCTIONAL_SCATTER(chunks, "sum", 0, group) + 0).tolist() == [rank * size] * 2
    assert (funcol.broadcast(mine, 0, group) + 0).tolist() == [1, 2]
    assert (funcol.all_to_all_single(chunks, None, None, group) + 0).tolist() == [rank] * 2 * size


def test_functional_collectives_of_several_tensors(enter_world: Enter) -> None:
    enter_world(8, 5)
    reduced = funcol.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", dist.group.WORLD)
    assert [(tensor + 0).tolist() for tensor in reduced] == [[8] * 2, [8] * 3]
    gathered = FUNCTIONAL_GATHER_SEVERAL([torch.ones(1), torch.ones(2)], dist.group.WORLD)
    assert [len(tensor + 0) for tensor in gathered] == [8, 16]
    scattered = FUNCTIONAL_SCATTER_SEVERAL([torch.ones(8)], "sum", [0], dist.group.WORLD)
    assert [(tensor + 0).tolist() for tensor in scattered] == [[8]]


def test_a_call_that_is_not_waited_on_holds_its_tensors(enter_world: Enter) -> None:
    enter_world(8)
    given = torch.ones(8)
    held_by_me = _references(given)
    work = REDUCE_SCATTER(torch.zeros(1), given, async_op=True)
    assert _references(given) > held_by_me
    work.wait()
    assert _references(given) == held_by_me


def _references(tensor: torch.Tensor) -> int:
    return sys.getrefcount(tensor)


def test_without_values_nothing_moves(enter_world: Enter) -> None:
    notes = enter_world(8, 5, collectives="noop")
    tensor, many = torch.tensor([1.0, float("nan")]), torch.zeros(16)
    works = [
        dist.all_reduce(tensor, async_op=True),
        dist.reduce(tensor, 5, async_op=True),
        dist.broadcast(tensor, 0, async_op=True),
        dist.all_gather(list(many.split(2)), tensor, async_op=True),
        ALL_GATHER(many, tensor, async_op=True),
        REDUCE_SCATTER(tensor, many, async_op=True),
        dist.scatter(tensor, src=0, async_op=True),
        dist.all_to_all_single(many, many + 1, async_op=True),
        dist.irecv(tensor, 0),
    ]
    assert all(work is not None and work.wait() for work in works)
    assert tensor[0] == 1
    assert tensor[1].isnan()
    assert many.tolist() == [0] * 16
    assert len(notes.calls) == len(works)
