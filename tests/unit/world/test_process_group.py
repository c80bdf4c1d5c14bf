"""The value table of docs/backend-contract.md, call by call, as a script makes them."""

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
#: A call's work, its outputs, and what each output holds afterwards (None: something finite).
Made = tuple[Any, list[torch.Tensor], Any]


def mine() -> torch.Tensor:
    return torch.tensor([1.0, 2.0])


def each(size: int) -> list[torch.Tensor]:
    """A chunk for each rank, with its number."""
    return [torch.full((2,), float(number)) for number in range(size)]


def slots(size: int) -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(size)]


def into(call: Callable[..., Any], output: torch.Tensor, expected: Any, **options: Any) -> Made:
    return call(output, **options), [output], expected


def all_gather(size: int, rank: int, **options: Any) -> Made:
    return dist.all_gather(found := slots(size), mine(), **options), found, [1, 2]


def gather(size: int, rank: int, **options: Any) -> Made:
    return dist.gather(mine(), found := slots(size), dst=rank, **options), found, [1, 2]


def gather_elsewhere(size: int, rank: int, **options: Any) -> Made:
    given, found = mine(), None if rank else slots(1)
    return dist.gather(given, found, dst=0, **options), found or [given], [1, 2]


def all_to_all(size: int, rank: int, **options: Any) -> Made:
    return dist.all_to_all(found := slots(size), each(size), **options), found, [rank, rank]


CALLS: dict[str, Callable[..., Made]] = {
    "all_reduce": lambda size, rank, **o: into(dist.all_reduce, mine(), [size, 2 * size], **o),
    "reduce to me": lambda size, rank, **o: into(dist.reduce, mine(), [size, 2 * size], dst=rank, **o),
    "reduce elsewhere": lambda size, rank, **o: into(dist.reduce, mine(), [1, 2], dst=(rank + 1) % size, **o),
    "all_gather": all_gather,
    "all_gather into one": lambda size, rank, **o: into(
        ALL_GATHER, torch.zeros(size * 2), [1, 2] * size, input_tensor=mine(), **o
    ),
    "gather": gather,
    "gather elsewhere": gather_elsewhere,
    "scatter": lambda size, rank, **o: into(
        dist.scatter, slots(1)[0], [rank, rank], scatter_list=each(size), src=rank, **o
    ),
    "scatter from another": lambda size, rank, **o: into(
        dist.scatter, torch.full((2,), float("nan")), None, scatter_list=None if rank else each(1), src=0, **o
    ),
    "reduce_scatter": lambda size, rank, **o: into(
        dist.reduce_scatter, slots(1)[0], [rank * size] * 2, input_list=each(size), **o
    ),
    "reduce_scatter of one": lambda size, rank, **o: into(
        REDUCE_SCATTER, slots(1)[0], [rank * size] * 2, input=torch.cat(each(size)), **o
    ),
    "mean of one": lambda size, rank, **o: into(
        REDUCE_SCATTER, slots(1)[0], [rank] * 2, input=torch.cat(each(size)), op=dist.ReduceOp.AVG, **o
    ),
    "all_to_all": all_to_all,
    "all_to_all of one": lambda size, rank, **o: into(
        dist.all_to_all_single, torch.zeros(size * 2), [rank] * 2 * size, input=torch.cat(each(size)), **o
    ),
    "broadcast": lambda size, rank, **o: into(dist.broadcast, mine(), [1, 2], src=rank, **o),
    "broadcast from another": lambda size, rank, **o: into(dist.broadcast, mine(), [1, 2], src=(rank + 1) % size, **o),
    "barrier": lambda size, rank, **o: (dist.barrier(**o), [], None),
}


@WORLDS
@MODES
@pytest.mark.parametrize("call", CALLS)
def test_a_call_gives_its_values_and_its_work_is_over(
    enter_world: Enter, call: str, size: int, rank: int, is_async: bool
) -> None:
    enter_world(size, rank)
    work, outputs, expected = CALLS[call](size, rank, async_op=is_async)
    for output in outputs:
        assert output.tolist() == expected if expected else torch.isfinite(output).all()
    if not is_async:
        assert work is None
        return
    assert work.is_completed()
    assert work.is_success()
    assert work.wait() is True
    for held in (work.get_future().wait(), work.result()):
        assert [tensor.data_ptr() for tensor in held] == [tensor.data_ptr() for tensor in outputs]


@MODES
def test_calls_are_written_down_with_bytes_and_peer(enter_world: Enter, is_async: bool) -> None:
    notes = enter_world(4, 1, "ucc")
    dist.all_reduce(mine(), async_op=is_async)
    uneven = [torch.zeros(length) for length in (1, 2, 5, 0)]
    dist.all_gather(uneven, mine(), async_op=is_async)
    assert [slot.tolist() for slot in uneven] == [[1], [1, 2], [1, 2, 1, 2, 1], []]
    dist.gather(mine(), dst=0, async_op=is_async)
    dist.barrier(async_op=is_async)
    assert notes.calls == [
        ("all_reduce", 0, 8, 8, (is_async, -1)),
        ("all_gather", 0, 8, 32, (is_async, -1)),
        ("gather", 0, 8, 0, (is_async, -1)),
        ("barrier", 0, 0, 0, (is_async, -1)),
    ]


def test_a_monitored_barrier_is_written_down(enter_world: Enter) -> None:
    notes = enter_world(4, 1)
    dist.monitored_barrier()
    assert [call[0] for call in notes.calls] == ["monitored_barrier"]


@WORLDS
def test_all_reduce_with_other_reductions(enter_world: Enter, size: int, rank: int) -> None:
    enter_world(size, rank)
    of_equals = dict.fromkeys(("AVG", "MIN", "MAX", "BAND", "BOR"), 3)
    largest = torch.iinfo(torch.int64).max
    for op, expected in (of_equals | {"PRODUCT": min(3**size, largest), "BXOR": 3 if size == 1 else 0}).items():
        tensor = torch.tensor([3])
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        assert tensor.tolist() == [expected]


def test_sums_of_a_thousand_ranks_saturate(enter_world: Enter) -> None:
    enter_world(1024)
    gradients, votes = torch.full((3,), 1000.0).half(), torch.ones(3, dtype=torch.uint8)
    for tensor in (gradients, votes):
        dist.all_reduce(tensor)
    assert torch.isfinite(gradients).all()
    assert votes.tolist() == [255] * 3


@MODES
def test_calls_of_several_tensors_at_once(enter_world: Enter, is_async: bool) -> None:
    enter_world(8)
    tensors, outputs = [torch.ones(2), torch.ones(3)], [torch.zeros(16), torch.zeros(8)]
    with dist._coalescing_manager(async_ops=is_async) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if is_async:
        manager.wait()
    assert [tensor.tolist() for tensor in tensors] == [[8, 8], [8, 8, 8]]
    with dist._coalescing_manager():
        for output, given in zip(outputs, (torch.ones(2), torch.ones(1)), strict=True):
            ALL_GATHER(output, given)
    assert all((output == 1).all() for output in outputs)


@WORLDS
def test_all_gather_in_place(enter_world: Enter, size: int, rank: int) -> None:
    enter_world(size, rank)
    output = torch.zeros(size, 2)
    output[rank] = mine()
    ALL_GATHER(output, output[rank])
    assert (output == mine()).all()


def test_reduce_scatter_in_place(enter_world: Enter) -> None:
    enter_world(8, 5)
    given = torch.arange(16.0)
    REDUCE_SCATTER(given[10:12], given)
    assert given.tolist() == [*range(10), 80, 88, *range(12, 16)]


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


def test_broadcast_from_another_rank_makes_values_finite(enter_world: Enter) -> None:
    enter_world(8, 3)
    theirs, own = (torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]) for _ in range(2))
    dist.broadcast(theirs, 0)
    dist.broadcast(own, 3)
    assert theirs[0] == 1
    assert torch.isfinite(theirs).all()
    assert own.isnan().tolist() == [False, True, False, False]
    assert own.isinf().sum() == 2


@pytest.mark.parametrize("source", [0, None], ids=["a rank", "any rank"])
def test_what_comes_from_another_rank_defines_the_buffer(enter_world: Enter, source: int | None) -> None:
    notes = enter_world(8, 3)
    floats, indices = torch.full((4,), float("nan")), torch.full((4,), -1)
    for tensor in (floats, indices):
        assert dist.recv(tensor, source) == 0
    assert torch.isfinite(floats).all()
    assert indices.tolist() == [0] * 4
    assert notes.calls[0] == ("recv", 0, 0, 16, (False, -1 if source is None else 0))
    dist.scatter(indices.fill_(7), src=0)
    assert indices.tolist() == [0] * 4


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


def test_the_first_wait_for_a_call_is_recorded_unless_it_was_over_when_it_returned(enter_world: Enter) -> None:
    notes = enter_world(world_size=2)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    reduced = dist.all_reduce(tensor, async_op=True)
    dist.recv(tensor, 1)
    sent = dist.isend(tensor, 1)
    assert reduced is not None
    assert sent is not None
    assert notes.waits == [[2]]
    for _ in range(2):
        sent.wait()
        reduced.wait()
    assert notes.waits == [[2], [3], [1]]


def test_a_batch_of_gloo_has_a_request_for_each_call_as_in_torch_and_one_of_nccl_is_a_call(enter_world: Enter) -> None:
    notes = enter_world(world_size=2)
    calls = [dist.P2POp(dist.isend, torch.ones(2), 1), dist.P2POp(dist.irecv, torch.ones(2), 1)]
    requests = dist.batch_isend_irecv(calls)
    assert [request.wait() for request in requests] == [True, True]
    assert (notes.waits, [terms.batch for terms in notes.terms]) == ([[0], [1]], [0, 0])
