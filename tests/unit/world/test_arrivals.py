"""Collectives write where autograd does not look, as c10d's operations do."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fakedist.world.arrivals import Arrivals, Slot, premultiplier
from fakedist.world.checks import reduction_name

SIZES = [1, 2, 8, 1024]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SUM, PRODUCT, BXOR = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.BXOR


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals(seed=0)


def reduced(arrivals: Arrivals, values: list[float], dtype: torch.dtype, num_ranks: int, op: object) -> list[float]:
    tensor = torch.tensor(values, dtype=dtype)
    arrivals.reduced(tensor, num_ranks, op)
    listed: list[float] = tensor.tolist()
    return listed


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64])
def test_a_sum_is_mine_times_the_ranks(arrivals: Arrivals, dtype: torch.dtype, size: int) -> None:
    assert reduced(arrivals, [1, 2, -3], dtype, size, SUM) == [size, 2 * size, -3 * size]


@pytest.mark.parametrize("size", SIZES)
def test_other_reductions_are_mine_a_power_of_it_or_zero(arrivals: Arrivals, size: int) -> None:
    for op in ("AVG", "MIN", "MAX", "BAND", "BOR"):
        assert reduced(arrivals, [1, 2, -3], torch.int32, size, getattr(dist.ReduceOp, op)) == [1, 2, -3]
    assert reduced(arrivals, [5, 3], torch.int32, size + size % 2, BXOR) == [0, 0]
    assert reduced(arrivals, [5, 3], torch.int32, size + 1 - size % 2, BXOR) == [5, 3]
    if size <= 8:
        for dtype in (torch.float32, torch.int64):
            assert reduced(arrivals, [1, 2, -3], dtype, size, PRODUCT) == [1, 2**size, (-3) ** size]


def test_a_premultiplied_sum_takes_its_factor(arrivals: Arrivals) -> None:
    op = dist._make_nccl_premul_sum(0.5)
    assert (reduction_name(op), premultiplier(op)) == ("PREMUL_SUM", 0.5)
    assert reduced(arrivals, [1, 2], torch.float32, 8, op) == [4, 8]


def test_an_unknown_reduction_is_an_error(arrivals: Arrivals) -> None:
    with pytest.raises(ValueError, match="no such reduction: MEDIAN"):
        arrivals.reduced(torch.ones(1), 2, "MEDIAN")


#: The ends of each type's finite range.
RANGES = {
    torch.uint8: (0, 255),
    torch.int8: (-128, 127),
    torch.int16: (-32768, 32767),
    torch.int32: (-(2**31), 2**31 - 1),
    torch.float8_e4m3fn: (-448, 448),
    torch.float8_e5m2: (-57344, 57344),
    torch.float16: (-65504, 65504),
    torch.bfloat16: (-(2.0**128 - 2.0**120), 2.0**128 - 2.0**120),
    torch.float32: (-(2.0**128 - 2.0**104), 2.0**128 - 2.0**104),
    torch.float64: (-sys.float_info.max, sys.float_info.max),
}


@pytest.mark.parametrize("op", [SUM, PRODUCT])
@pytest.mark.parametrize("dtype", RANGES)
def test_results_saturate_at_the_ends_of_the_types_range(arrivals: Arrivals, dtype: torch.dtype, op: object) -> None:
    low, high = RANGES[dtype]
    assert reduced(arrivals, [low, 0, high], dtype, 3, op) == [low, 0, high]
    if dtype in FLOATS:  # gradients of many ranks stay finite
        large, negative = reduced(arrivals, [1000, -1000], dtype, 1024, op)
        assert 60000 <= large <= high
        assert abs(negative) <= high


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_a_sum_next_to_the_end_of_the_range_is_exact(arrivals: Arrivals, dtype: torch.dtype) -> None:
    low, high = RANGES[dtype]
    inside = (int(high) - 1) // 2
    assert reduced(arrivals, [inside, inside + 1], dtype, 2, SUM) == [2 * inside, high]
    assert reduced(arrivals, [1, 0], dtype, 10**6, SUM) == [min(10**6, int(high)), 0]
    assert reduced(arrivals, [-int(low < 0)], dtype, 10**6, SUM) == [max(-(10**6), int(low))]


def test_64_bit_integers_saturate_at_the_largest_multiple_and_at_the_ends(arrivals: Arrivals) -> None:
    most = 2**63 - 1
    found = reduced(arrivals, [most, -most, most // 10, 3], torch.int64, 10, SUM)
    assert found == [most // 10 * 10, -(most // 10 * 10), most // 10 * 10, 30]
    assert reduced(arrivals, [2, -2], torch.int64, 63, PRODUCT) == [most, -(2**63)]
    assert reduced(arrivals, [2, -3], torch.int64, 65, PRODUCT) == [most, -(2**63)]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.int8, torch.int64])
def test_a_product_of_every_type_is_a_power(arrivals: Arrivals, dtype: torch.dtype) -> None:
    assert reduced(arrivals, [-2, 4, 1], dtype, 3, PRODUCT) == [-8, 64, 1]
    assert reduced(arrivals, [-8], dtype, 2, PRODUCT) == [64]
    assert reduced(arrivals, [-8], dtype, 20, PRODUCT)[0] > 64  # an even power is positive where it saturates too


def test_one_object_serves_groups_types_and_reductions_of_any_kind(arrivals: Arrivals) -> None:
    for _ in range(2):  # the second round is answered from what the first remembered
        assert reduced(arrivals, [3], torch.int32, 2, SUM) == [6]
        assert reduced(arrivals, [3], torch.int32, 4, SUM) == [12]
        assert reduced(arrivals, [3], torch.int32, 4, PRODUCT) == [81]
        assert reduced(arrivals, [100], torch.uint8, 4, SUM) == [255]
        for factor in (0.5, 2.0):
            assert reduced(arrivals, [3], torch.float32, 4, dist._make_nccl_premul_sum(factor)) == [12 * factor]
        by_tensor = dist._make_nccl_premul_sum(torch.tensor(3.0))
        assert reduced(arrivals, [1, 2], torch.float32, 4, by_tensor) == [12, 24]


def test_a_reduction_into_another_tensor_leaves_mine(arrivals: Arrivals) -> None:
    output, mine = torch.zeros(3, 2), torch.arange(6.0).view(2, 3).t()
    arrivals.reduced_into(output, mine, 4, SUM)
    assert output.view(-1).tolist() == [0, 12, 4, 16, 8, 20]
    assert mine.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_bools_stay_under_every_reduction_and_complex_numbers_add_up(arrivals: Arrivals) -> None:
    for size, op in ((1024, SUM), (4, PRODUCT), (4, BXOR), (4, dist.ReduceOp.BOR)):
        assert reduced(arrivals, [True, False], torch.bool, size, op) == [True, False]
    tensor = torch.tensor([1 + 2j])
    for op in (SUM, dist.ReduceOp.AVG):
        arrivals.reduced(tensor, 8, op)
        assert tensor.tolist() == [8 + 16j]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_spreading_fills_every_slot(arrivals: Arrivals, dtype: torch.dtype) -> None:
    slots = [torch.zeros(3, dtype=dtype) for _ in range(5)]
    mine = torch.tensor([1, 0, 1]).to(dtype)
    arrivals.spread(slots, mine)
    assert all(torch.equal(slot, mine) for slot in slots)


def test_slots_of_other_sizes_and_shapes_get_mine_in_order_repeated_or_cut(arrivals: Arrivals) -> None:
    slots = [torch.full((size,), -1) for size in (0, 2, 3, 7)]
    arrivals.spread(slots, torch.tensor([1, 2, 3]))
    assert [slot.tolist() for slot in slots] == [[], [1, 2], [1, 2, 3], [1, 2, 3, 1, 2, 3, 1]]
    arrivals.spread([slot := torch.zeros(3, 2)], torch.arange(6.0).view(2, 3))
    assert slot.view(-1).tolist() == [0, 1, 2, 3, 4, 5]
    arrivals.spread([slot, torch.empty(0)], torch.empty(0))  # nothing to repeat
    assert slot.view(-1).tolist() == [0] * 6


@pytest.mark.parametrize("size", SIZES)
def test_equal_slots_of_one_tensor(arrivals: Arrivals, size: int) -> None:
    output = torch.zeros(size * 2)
    arrivals.spread_evenly(output, torch.tensor([1.0, 2.0]), 0, size)
    assert output.tolist() == [1, 2] * size


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_mine_may_be_a_part_of_the_output_or_lie_next_to_it(arrivals: Arrivals, rank: int) -> None:
    output = torch.zeros(8, 2)
    output[rank] = torch.tensor([1.0, 2.0])
    arrivals.spread_evenly(output, output[rank], rank, 8)
    assert output.tolist() == [[1, 2]] * 8
    buffer = torch.arange(18.0)
    arrivals.spread_evenly(buffer[2:], buffer[:2], rank, 8)
    assert buffer.tolist() == [0, 1] * 9


def test_slots_of_one_tensor_keep_the_order_of_a_matrix_and_may_be_unequal(arrivals: Arrivals) -> None:
    output = torch.zeros(3, 2, 2)
    arrivals.spread_evenly(output, torch.arange(4.0).view(2, 2).t(), 1, 3)
    assert output.tolist() == [[[0, 2], [1, 3]]] * 3
    output = torch.zeros(8)
    arrivals.spread_evenly(output, torch.tensor([1.0, 2.0, 3.0]), 0, 4)
    assert output.tolist() == [1, 2] * 4
    arrivals.spread_evenly(torch.empty(0), torch.ones(3), 0, 4)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
def test_what_arrives_unasked_is_normal_and_seeded(dtype: torch.dtype) -> None:
    drawn = []
    for seed in (0, 0, 1):
        tensor, later = (torch.full((1000,), float("nan"), dtype=dtype) for _ in range(2))
        arrivals = Arrivals(seed)
        arrivals.invent(tensor)
        arrivals.invent(later)
        assert not torch.equal(tensor, later)
        drawn.append(tensor)
    assert torch.isfinite(drawn[0].abs()).all()
    assert 0.8 < float(drawn[0].abs().float().square().mean()) < 1.2
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_indices_and_flags_that_arrive_unasked_are_zero(arrivals: Arrivals, dtype: torch.dtype) -> None:
    tensor = torch.ones(10).to(dtype)
    arrivals.invent(tensor)
    assert tensor.double().tolist() == [0.0] * 10


def test_inventing_leaves_the_scripts_own_random_numbers(arrivals: Arrivals) -> None:
    state = torch.get_rng_state()
    arrivals.invent(torch.empty(10))
    arrivals.finite(torch.full((10,), float("nan")))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
def test_a_finite_buffer_is_kept_and_the_rest_of_it_replaced(arrivals: Arrivals, dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 2.0]).to(dtype)
    arrivals.finite(tensor)
    assert (tensor[0], tensor[4]) == (1, 2)
    assert torch.isfinite(tensor).all()
    assert len(set(tensor.tolist())) == 5
    version = tensor._version
    arrivals.finite(tensor)
    assert tensor._version == version


def test_integers_and_eight_bit_floats_are_left_as_they_are(arrivals: Arrivals) -> None:
    floats, integers = torch.tensor([1.0, float("nan")]).to(torch.float8_e5m2), torch.tensor([1, 2])
    arrivals.finite(floats)
    arrivals.finite(integers)
    assert floats[0].float() == 1
    assert floats[1].float().isnan()
    assert integers.tolist() == [1, 2]


def test_an_undefined_buffer_is_made_up() -> None:
    arrivals = Arrivals(seed=0, is_undefined=lambda tensor: True)
    floats, integers = torch.full((1000,), 7.0), torch.full((3,), 7)
    arrivals.finite(floats)
    arrivals.finite(integers)
    assert abs(float(floats.mean())) < 0.2
    assert integers.tolist() == [0, 0, 0]


def test_choices_of_experts_arrive_as_each_rank_made_them() -> None:
    arrivals = Arrivals(0, of_ranks=lambda mine, ranks: [mine + rank for rank in ranks] if mine[0] == 7 else None)
    mine, ranks = torch.tensor([7, 8, 9, 9]), [0, 2]
    gathered, parts, slots = torch.zeros(2, 4), torch.zeros(4), [torch.zeros(4), torch.zeros(4)]
    assert arrivals.routed(gathered, mine, Slot(ranks))
    assert arrivals.routed(slots, mine, Slot(ranks))
    assert arrivals.routed(parts, mine, Slot(ranks, 1))
    assert gathered.tolist() == [slot.tolist() for slot in slots] == [[7, 8, 9, 9], [9, 10, 11, 11]]
    assert parts.tolist() == [9, 9, 11, 11]
    assert not arrivals.routed(gathered, mine + 1, Slot(ranks))
    assert not arrivals.routed(gathered, mine[:1], Slot(ranks)), "a single number is any number"
    assert not arrivals.routed(gathered, mine, Slot([1])), "a rank alone"


def test_reductions_of_choices_are_over_what_each_rank_chose() -> None:
    arrivals = Arrivals(0, of_ranks=lambda mine, ranks: [mine + rank for rank in ranks])
    for op, expected in (("SUM", [16, 18]), ("MAX", [9, 10]), ("MIN", [7, 8])):
        mine = torch.tensor([7, 8])
        assert arrivals.routed_sum(mine, [0, 2], getattr(dist.ReduceOp, op))
        assert mine.tolist() == expected
    assert not arrivals.routed_sum(torch.tensor([7, 8]), [0, 2], PRODUCT)
    assert not arrivals.routed_sum(torch.tensor([7]), [0, 2], SUM)
    assert arrivals.routed_sum(largest := torch.tensor([7]), [0, 2], dist.ReduceOp.MAX)
    assert largest.tolist() == [9]


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
