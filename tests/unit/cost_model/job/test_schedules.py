"""A pipeline's actions are played in the order of torch's schedules, and each waits for what it needs."""

import pytest

from fakedist.cost_model.job.schedules import COMPUTES, Action, Wire, play, with_transfers
from fakedist.errors import JobError
from tests.unit.cost_model.pipelines_by_hand import Shape

US = 100.0
FREE = Wire(0.0, is_stream_by_peer=True)


def step_us(shape: Shape, wire: Wire = FREE, host_us: float = 0.0) -> float:
    """The step of stages in which a forward, and each gradient, takes 100 us."""
    from fakedist.extras.plan.torch_orders import order_of  # imports torch, which takes three seconds

    rank_of, orders = order_of(shape.schedule, shape.num_ranks, shape.num_chunks, shape.micro_batches)
    actions = [
        with_transfers([(str(kind), stage, batch) for kind, stage, batch in own], len(rank_of)) for own in orders
    ]
    costs = {(kind, stage): (US * (1 + (kind == "B")), host_us) for kind in COMPUTES for stage in range(len(rank_of))}
    return max(play(actions, rank_of, costs, [0.0] * shape.num_ranks, wire).gpu_us)


@pytest.mark.parametrize(
    ("schedule", "chunks", "is_split"),
    [("GPipe", 1, 0), ("1F1B", 1, 0), ("Interleaved1F1B", 2, 0), ("ZBVZeroBubble", 2, 1)],
)
@pytest.mark.parametrize(("ranks", "batches"), [(2, 8), (4, 8), (4, 16)])
def test_the_bubble_is_the_formulas(schedule: str, chunks: int, is_split: int, ranks: int, batches: int) -> None:
    work = 3 * US * chunks * batches
    bubble = (ranks - 1) * US * (1 if is_split else 3)
    assert step_us(Shape(schedule, ranks, chunks, batches)) == pytest.approx(work + bubble)


def test_a_receive_that_is_made_when_it_is_needed_adds_its_time() -> None:
    shape = Shape("GPipe", 4, 1, 8)
    assert step_us(shape, Wire(10.0, is_stream_by_peer=True)) == pytest.approx(step_us(shape) + 2 * (8 + 4 - 2) * 10.0)


def test_a_host_that_takes_longer_than_the_gpu_sets_the_pace() -> None:
    assert step_us(Shape("GPipe", 2, 1, 4), host_us=1000.0) >= 8 * 1000.0


@pytest.mark.parametrize(
    ("is_stream_by_peer", "works_us", "end_us"), [(1, 10.0, 15.0), (0, 10.0, 510.0), (0, 0.0, 505.0)]
)
def test_transfers_on_one_stream_follow_one_another_unless_they_begin_together(
    is_stream_by_peer: int, works_us: float, end_us: float
) -> None:
    """Rank 1 posts a receive from rank 2, works, then sends to rank 0."""
    orders: list[list[Action]] = [
        [("RECV_B", 0, 0)],
        [("RECV_B", 1, 1), ("W", 1, 0), ("SEND_B", 1, 0)],
        [("B", 2, 1), ("SEND_B", 2, 1)],
    ]
    costs = {("B", 2): (500.0, 0.0), ("W", 1): (works_us, 0.0)}
    played = play(orders, [0, 1, 2], costs, [0.0] * 3, Wire(5.0, bool(is_stream_by_peer)))
    assert played.times["RECV_B", 0, 0][1] == end_us


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    with pytest.raises(JobError, match="wait for each other"):
        play([[("RECV_B", 0, 0)], [("RECV_F", 1, 0)]], [0, 1], {}, [0.0, 0.0], FREE)
