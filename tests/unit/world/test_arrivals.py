import pytest
import torch
import torch.distributed as dist

from fakedist.world.arrivals import Arrivals, premultiplier
from fakedist.world.options import reduction_name

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


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_votes_do_not_wrap(arrivals: Arrivals, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, 1.0, 100.0]).to(dtype)
    arrivals.reduced(tensor, 1024, dist.ReduceOp.SUM)
    none, one, many = tensor.double().tolist()
    assert none == 0
    assert 1 <= one <= many


def test_negative_integers_saturate_at_the_lower_end(arrivals: Arrivals) -> None:
    low, high = reduced(arrivals, [-100, 100], torch.int8, 8, dist.ReduceOp.SUM)
    assert -128 <= low <= -120
    assert 120 <= high <= 127
    assert reduced(arrivals, [-100, 100], torch.int8, 3, dist.ReduceOp.PRODUCT) == [-128, 127]


def test_a_true_vote_stays_true(arrivals: Arrivals) -> None:
    assert reduced(arrivals, [True, False], torch.bool, 1024, dist.ReduceOp.SUM) == [True, False]


def test_complex_sums(arrivals: Arrivals) -> None:
    tensor = torch.tensor([1 + 2j])
    arrivals.reduced(tensor, 8, dist.ReduceOp.SUM)
    assert tensor.tolist() == [8 + 16j]


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
