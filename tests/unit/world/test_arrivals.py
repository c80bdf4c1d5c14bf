import sys

import pytest
import torch
import torch.distributed as dist

from fakedist.world.arrivals import Arrivals, premultiplier
from fakedist.world.checks import reduction_name

SIZES = [1, 2, 8, 1024]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


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
    assert reduced(arrivals, [1, 2, -3], dtype, size, dist.ReduceOp.SUM) == [size, 2 * size, -3 * size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["AVG", "MIN", "MAX", "BAND", "BOR"])
def test_reductions_of_equals_are_mine(arrivals: Arrivals, op: str, size: int) -> None:
    assert reduced(arrivals, [1, 2, -3], torch.int32, size, getattr(dist.ReduceOp, op)) == [1, 2, -3]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_product_is_mine_to_the_power_of_the_ranks(arrivals: Arrivals, size: int) -> None:
    for dtype in (torch.float32, torch.int64):
        assert reduced(arrivals, [1, 2, -3], dtype, size, dist.ReduceOp.PRODUCT) == [1, 2**size, (-3) ** size]


@pytest.mark.parametrize(("size", "expected"), [(1, [5, 3]), (2, [0, 0]), (3, [5, 3]), (1024, [0, 0])])
def test_an_exclusive_or_is_mine_or_zero(arrivals: Arrivals, size: int, expected: list[int]) -> None:
    assert reduced(arrivals, [5, 3], torch.int32, size, dist.ReduceOp.BXOR) == expected


def test_a_premultiplied_sum_takes_its_factor(arrivals: Arrivals) -> None:
    op = dist._make_nccl_premul_sum(0.5)
    assert (reduction_name(op), premultiplier(op)) == ("PREMUL_SUM", 0.5)
    assert reduced(arrivals, [1, 2], torch.float32, 8, op) == [4, 8]


def test_an_unknown_reduction_is_an_error(arrivals: Arrivals) -> None:
    with pytest.raises(ValueError, match="no such reduction: MEDIAN"):
        arrivals.reduced(torch.ones(1), 2, "MEDIAN")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT])
def test_gradients_of_many_ranks_stay_finite(arrivals: Arrivals, dtype: torch.dtype, op: object) -> None:
    tensor = torch.tensor([1000.0, -1000.0], dtype=dtype)
    arrivals.reduced(tensor, 1024, op)
    assert torch.isfinite(tensor).all()
    assert tensor[0] >= 60000


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


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT])
@pytest.mark.parametrize("dtype", RANGES)
def test_results_saturate_at_the_ends_of_the_types_range(arrivals: Arrivals, dtype: torch.dtype, op: object) -> None:
    low, high = RANGES[dtype]
    assert reduced(arrivals, [low, 0, high], dtype, 3, op) == [low, 0, high]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_a_sum_next_to_the_end_of_the_range_is_exact(arrivals: Arrivals, dtype: torch.dtype) -> None:
    low, high = RANGES[dtype]
    inside = (int(high) - 1) // 2
    assert reduced(arrivals, [inside, inside + 1], dtype, 2, dist.ReduceOp.SUM) == [2 * inside, high]
    assert reduced(arrivals, [1, 0], dtype, 10**6, dist.ReduceOp.SUM) == [min(10**6, int(high)), 0]
    assert reduced(arrivals, [-int(low < 0)], dtype, 10**6, dist.ReduceOp.SUM) == [max(-(10**6), int(low))]


def test_a_sum_of_64_bit_integers_saturates_at_the_largest_multiple(arrivals: Arrivals) -> None:
    most = 2**63 - 1
    found = reduced(arrivals, [most, -most, most // 10, 3], torch.int64, 10, dist.ReduceOp.SUM)
    assert found == [most // 10 * 10, -(most // 10 * 10), most // 10 * 10, 30]


def test_a_product_of_64_bit_integers_saturates_at_the_ends(arrivals: Arrivals) -> None:
    assert reduced(arrivals, [2, -2], torch.int64, 63, dist.ReduceOp.PRODUCT) == [2**63 - 1, -(2**63)]
    assert reduced(arrivals, [2, -3], torch.int64, 65, dist.ReduceOp.PRODUCT) == [2**63 - 1, -(2**63)]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.int8])
def test_a_product_of_every_type_is_a_power(arrivals: Arrivals, dtype: torch.dtype) -> None:
    assert reduced(arrivals, [-2, 4, 1], dtype, 3, dist.ReduceOp.PRODUCT) == [-8, 64, 1]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float16])
def test_a_negative_number_to_an_even_power_is_positive(arrivals: Arrivals, dtype: torch.dtype) -> None:
    assert reduced(arrivals, [-10], dtype, 2, dist.ReduceOp.PRODUCT) == [100]
    assert reduced(arrivals, [-10], dtype, 20, dist.ReduceOp.PRODUCT)[0] > 100


def test_one_object_serves_groups_types_and_reductions_of_any_kind(arrivals: Arrivals) -> None:
    for _ in range(2):  # the second round is answered from what the first remembered
        assert reduced(arrivals, [3], torch.int32, 2, dist.ReduceOp.SUM) == [6]
        assert reduced(arrivals, [3], torch.int32, 4, dist.ReduceOp.SUM) == [12]
        assert reduced(arrivals, [3], torch.int32, 4, dist.ReduceOp.PRODUCT) == [81]
        assert reduced(arrivals, [100], torch.uint8, 4, dist.ReduceOp.SUM) == [255]
        for factor in (0.5, 2.0):
            assert reduced(arrivals, [3], torch.float32, 4, dist._make_nccl_premul_sum(factor)) == [12 * factor]
        by_tensor = dist._make_nccl_premul_sum(torch.tensor(3.0))
        assert reduced(arrivals, [1, 2], torch.float32, 4, by_tensor) == [12, 24]


def test_a_reduction_into_another_tensor_leaves_mine(arrivals: Arrivals) -> None:
    output, mine = torch.zeros(3, 2), torch.arange(6.0).view(2, 3).t()
    arrivals.reduced_into(output, mine, 4, dist.ReduceOp.SUM)
    assert output.view(-1).tolist() == [0, 12, 4, 16, 8, 20]
    assert mine.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_true_vote_stays_true(arrivals: Arrivals) -> None:
    assert reduced(arrivals, [True, False], torch.bool, 1024, dist.ReduceOp.SUM) == [True, False]


def test_complex_sums(arrivals: Arrivals) -> None:
    tensor = torch.tensor([1 + 2j])
    arrivals.reduced(tensor, 8, dist.ReduceOp.SUM)
    assert tensor.tolist() == [8 + 16j]
    arrivals.reduced(tensor, 8, dist.ReduceOp.AVG)
    assert tensor.tolist() == [8 + 16j]


def test_bools_stay_under_every_reduction(arrivals: Arrivals) -> None:
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.BXOR, dist.ReduceOp.BOR):
        assert reduced(arrivals, [True, False], torch.bool, 4, op) == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_spreading_fills_every_slot(arrivals: Arrivals, dtype: torch.dtype) -> None:
    slots = [torch.zeros(3, dtype=dtype) for _ in range(5)]
    mine = torch.tensor([1, 0, 1]).to(dtype)
    arrivals.spread(slots, mine)
    assert all(torch.equal(slot, mine) for slot in slots)


def test_uneven_slots_get_mine_repeated_or_cut(arrivals: Arrivals) -> None:
    slots = [torch.full((size,), -1) for size in (0, 2, 3, 7)]
    arrivals.spread(slots, torch.tensor([1, 2, 3]))
    assert [slot.tolist() for slot in slots] == [[], [1, 2], [1, 2, 3], [1, 2, 3, 1, 2, 3, 1]]


def test_nothing_to_repeat_is_zeros(arrivals: Arrivals) -> None:
    slots = [torch.full((2,), -1.0), torch.empty(0)]
    arrivals.spread(slots, torch.empty(0))
    assert slots[0].tolist() == [0, 0]


def test_spreading_changes_the_shape_but_not_the_order(arrivals: Arrivals) -> None:
    slot = torch.zeros(3, 2)
    arrivals.spread([slot], torch.arange(6.0).view(2, 3))
    assert slot.view(-1).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", SIZES)
def test_equal_slots_of_one_tensor(arrivals: Arrivals, size: int) -> None:
    output = torch.zeros(size * 2)
    arrivals.spread_evenly(output, torch.tensor([1.0, 2.0]), 0, size)
    assert output.tolist() == [1, 2] * size


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_mine_may_be_a_part_of_the_output(arrivals: Arrivals, rank: int) -> None:
    output = torch.zeros(8, 2)
    output[rank] = torch.tensor([1.0, 2.0])
    arrivals.spread_evenly(output, output[rank], rank, 8)
    assert output.tolist() == [[1, 2]] * 8


def test_mine_may_lie_next_to_the_output_in_one_buffer(arrivals: Arrivals) -> None:
    buffer = torch.arange(10.0)
    arrivals.spread_evenly(buffer[2:], buffer[:2], 1, 4)
    assert buffer.tolist() == [0, 1] * 5


def test_equal_slots_keep_the_order_of_a_matrix(arrivals: Arrivals) -> None:
    output = torch.zeros(3, 2, 2)
    arrivals.spread_evenly(output, torch.arange(4.0).view(2, 2).t(), 1, 3)
    assert output.tolist() == [[[0, 2], [1, 3]]] * 3


def test_unequal_slots_of_one_tensor(arrivals: Arrivals) -> None:
    output = torch.zeros(8)
    arrivals.spread_evenly(output, torch.tensor([1.0, 2.0, 3.0]), 0, 4)
    assert output.tolist() == [1, 2] * 4
    arrivals.spread_evenly(torch.empty(0), torch.ones(3), 0, 4)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
def test_what_arrives_unasked_is_normal_and_seeded(dtype: torch.dtype) -> None:
    drawn = []
    for seed in (0, 0, 1):
        tensor = torch.full((1000,), float("nan"), dtype=dtype)
        Arrivals(seed).invent(tensor)
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


def test_a_finite_buffer_is_kept_and_the_rest_of_it_replaced(arrivals: Arrivals) -> None:
    tensor = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 2.0])
    arrivals.finite(tensor)
    assert tensor[[0, 4]].tolist() == [1, 2]
    assert torch.isfinite(tensor).all()
    assert len(set(tensor.tolist())) == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_type_is_made_finite_and_a_finite_one_untouched(arrivals: Arrivals, dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, float("nan"), 2.0]).to(dtype)
    arrivals.finite(tensor)
    assert (tensor[0], tensor[2]) == (1, 2)
    assert torch.isfinite(tensor).all()
    version = tensor._version
    arrivals.finite(tensor)
    assert tensor._version == version


def test_eight_bit_floats_are_left_as_they_are(arrivals: Arrivals) -> None:
    tensor = torch.tensor([1.0, float("nan")]).to(torch.float8_e5m2)
    arrivals.finite(tensor)
    assert tensor[0].float() == 1
    assert tensor[1].float().isnan()


def test_draws_go_on_from_call_to_call(arrivals: Arrivals) -> None:
    first, second = torch.empty(10), torch.empty(10)
    arrivals.invent(first)
    arrivals.invent(second)
    assert not torch.equal(first, second)


def test_an_integer_buffer_is_kept(arrivals: Arrivals) -> None:
    tensor = torch.tensor([1, 2])
    arrivals.finite(tensor)
    assert tensor.tolist() == [1, 2]


def test_an_undefined_buffer_is_made_up() -> None:
    arrivals = Arrivals(seed=0, is_undefined=lambda tensor: True)
    floats, integers = torch.full((1000,), 7.0), torch.full((3,), 7)
    arrivals.finite(floats)
    arrivals.finite(integers)
    assert abs(float(floats.mean())) < 0.2
    assert integers.tolist() == [0, 0, 0]
