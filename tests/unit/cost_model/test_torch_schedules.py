"""The bubble of torch.distributed.pipelining's schedules comes out of the order in which their ranks act."""

import numpy as np
import pytest

from fakedist.cost_model.job.stages import RankStep, dependencies_of, place_together
from fakedist.cost_model.timeline import Timeline
from tests.unit.cost_model.launches_by_hand import Host
from tests.unit.cost_model.pipelines_by_hand import Recording, Shape

#: What forward, and the gradient of the input, and that of the weights, each take.
PRODUCT_US = 100.0


def step_us(shape: Shape, send_us: float = 0.0) -> float:
    """The step of equal stages."""
    steps = []
    for rank in range(shape.num_ranks):
        tables = Recording(shape, rank).tables()
        launches, work = tables["launches"], tables["work"]
        is_product = (work["family"] == "gemm").to_numpy(bool)
        is_sent = work["operation"].isin(("send", "recv")).to_numpy(bool)
        took = np.append(np.where(is_product, PRODUCT_US, np.where(is_sent, send_us, 0.0)), 0.0)
        durations, timeline = took[launches["work"].to_numpy("i8")], Timeline(launches)
        others = dependencies_of(
            (launches, tables["calls"], tables["groups"]), timeline, durations, rank, set(range(shape.num_ranks))
        )
        steps.append(RankStep(rank, timeline, durations, others.transfers))
    found = place_together(steps, Host())
    assert not any(found.num_unmatched.values())
    return max(each.end_us for each in found.placed.values())


def bubble(shape: Shape) -> float:
    return 1 - 3 * PRODUCT_US * shape.num_chunks * shape.micro_batches / step_us(shape)


@pytest.mark.parametrize(("schedule", "chunks"), [("GPipe", 1), ("1F1B", 1), ("LoopedBFS", 2), ("Interleaved1F1B", 3)])
@pytest.mark.parametrize(("ranks", "batches"), [(2, 8), (4, 8), (4, 16)])
def test_the_bubble_is_the_formulas(schedule: str, chunks: int, ranks: int, batches: int) -> None:
    expected = (ranks - 1) / (chunks * batches + ranks - 1)
    assert bubble(Shape(schedule, ranks, chunks, batches)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize(("ranks", "batches"), [(2, 8), (4, 8), (4, 16)])
def test_apart_from_the_gradients_of_weights_a_pipeline_idles_for_a_third(
    schedule: str, ranks: int, batches: int
) -> None:
    """The first and the last ranks wait for (p - 1) forwards, or as many gradients of inputs, and fill the rest."""
    expected = (ranks - 1) / (3 * 2 * batches + ranks - 1)
    assert bubble(Shape(schedule, ranks, 2, batches)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("ranks", "batches"), [(2, 8), (4, 8), (4, 16)])
def test_a_receive_that_is_posted_when_it_is_needed_adds_its_time(ranks: int, batches: int) -> None:
    """GPipe: each of the receives that the last rank makes forward, and the first backward, and those on the way."""
    shape = Shape("GPipe", ranks, 1, batches)
    assert step_us(shape, 10.0) == pytest.approx(step_us(shape) + 2 * (batches + ranks - 2) * 10.0)
