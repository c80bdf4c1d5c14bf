"""Layouts, memory and passes of a pipeline, on models made by hand."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fakedist.analysis.evidence import Room
from fakedist.cost_model.job.schedules import Wire, with_transfers
from fakedist.extras.plan import pipeline_plans
from fakedist.extras.plan.pipeline_plans import ScheduleOrder, balanced_layout, even_layout, megatron_layout, plan
from fakedist.extras.plan.pipeline_units import Cost, PipelineModel, Unit
from fakedist.extras.plan.torch_orders import order_of

MIB = 2**20


def unit(name: str, us: float, saved: float = 0.0, *, is_split: bool = True) -> Unit:
    """A unit whose backward takes twice its forward, half of it gradients of weights."""
    costs = {
        "F": Cost(us, 0.0, saved, saved),
        "B": Cost(2 * us, 0.0, -saved),
        "I": Cost(us),
        "W": Cost(us, 0.0, -saved),
    }
    return Unit(name, 0, name.isdecimal(), costs, is_split, 100.0 * MIB, 50.0 * MIB)


def model(
    monkeypatch: pytest.MonkeyPatch, units: list[Unit], ranks: int = 2, room: Room | None = None
) -> PipelineModel:
    """A model on ranks with nothing else, which all units share."""
    monkeypatch.setattr(pipeline_plans, "room_of_run", lambda _: room or Room())
    run = SimpleNamespace(peak_reserved_bytes=0, peak_allocated_bytes=0)
    facts: dict[str, Any] = {"lead_us": 0.0, "tail_us": (0.0, 0.0), "other_bytes": 0.0, "tail_bytes": 0.0}
    rank = SimpleNamespace(run=run, kept_bytes=np.zeros(2), is_torch=True, is_attributed=True, **facts)
    recorded: Any = [rank] * ranks
    stages = [range(len(units) // 2), range(len(units) // 2, len(units))]
    return PipelineModel(units, stages, recorded, ranks - 1, Wire(0.0, is_stream_by_peer=True), 0.0)


def order(name: str, ranks: int, chunks: int, batches: int) -> ScheduleOrder:
    rank_of, actions = order_of(name, ranks, chunks, batches)
    own = [with_transfers([tuple(action) for action in of_rank], len(rank_of)) for of_rank in actions]
    return ScheduleOrder(name, batches, rank_of, own)


LAYERS = [unit("embedding", 1.0), *(unit(str(number), 10.0) for number in range(8)), unit("head", 25.0)]


def test_a_balanced_layout_gives_the_stage_with_the_head_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(monkeypatch, LAYERS)
    layout = balanced_layout(made, 4)
    assert layout is not None
    assert megatron_layout(made, layout) == "Et*2|t*2|t*3|tL"
    assert megatron_layout(made, even_layout(made, 4) or []) == "Et*2|t*2|t*2|t*2L"
    assert balanced_layout(made, 9) is even_layout(made, 9) is None


def test_a_balanced_layout_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four stages, the first holds four micro-batches: one layer of 100 MiB each fits, with what is kept."""
    units = [unit(str(number), 10.0, 100.0 * MIB) for number in range(5)] + [unit("head", 10.0)]
    size = 800 * MIB
    layout = balanced_layout(model(monkeypatch, units, room=Room(size, size)), 4)
    assert layout is not None
    assert [len(stage) for stage in layout][:2] == [1, 1], "two layers would need 1.1 GiB there"
    assert balanced_layout(model(monkeypatch, units, room=Room(MIB, MIB)), 4) is None


@pytest.mark.parametrize(("name", "held"), [("GPipe", (8, 8)), ("1F1B", (2, 1))])
def test_a_rank_holds_as_many_micro_batches_as_its_schedule_has_in_flight(
    monkeypatch: pytest.MonkeyPatch, name: str, held: tuple[int, int]
) -> None:
    made = model(monkeypatch, [unit("0", 10.0, 300.0 * MIB), unit("1", 10.0, 300.0 * MIB)])
    planned = plan(made, order(name, 2, 1, 8), made.stages)
    grown = [50.0 * (number < 8) for number in held]  # gradients, once a backward was
    assert [peak / MIB for peak in planned.peak_bytes] == [
        100.0 + 300.0 * number + more for number, more in zip(held, grown, strict=True)
    ]
    assert planned.step_us == pytest.approx(8 * 30.0 + 30.0)
    assert planned.bubble == pytest.approx(1 / 9)


def test_a_schedule_that_divides_backwards_is_bounded_where_none_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    units = [unit(str(number), 10.0, is_split=False) for number in range(4)]
    made = model(monkeypatch, units)
    planned = plan(made, order("ZBVZeroBubble", 2, 2, 8), [[0], [1], [2], [3]])
    known = plan(model(monkeypatch, [unit(str(at), 10.0) for at in range(4)]), planned.order, planned.layout)
    assert (planned.is_known, known.is_known) == (False, True)
    assert planned.step_us <= known.step_us
    assert plan(made, order("1F1B", 2, 1, 8), made.stages).is_known


def test_memory_of_layers_that_share_a_buffer_is_known_where_they_ran_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    units = [dataclasses.replace(unit(str(at), 10.0), place=at // 2) for at in range(4)]
    made = model(monkeypatch, units)
    made.ranks[0].is_attributed = False
    of = order("1F1B", 2, 1, 8)
    assert None not in plan(made, of, made.stages).peak_bytes
    assert plan(made, of, [[0], [1, 2, 3]]).peak_bytes == [None, None]
