"""Recorded points prove something of others, once their order is known."""

from __future__ import annotations

from dataclasses import replace

from fakedist.options import JobProgram
from fakedist.sweep.command import Texts
from fakedist.sweep.plan import CommandLineSettings, SweepPlan, sweep_of_command
from fakedist.sweep.point_rows import Row, Status
from fakedist.sweep.pruning import Pruning
from fakedist.sweep.space import Axis
from tests.unit.sweep.rows_by_hand import row, step


def planned(names: tuple[str, ...] = ("full", "none")) -> SweepPlan:
    axes = ("replicas=1,2", Axis("checkpoint", names, {name: (f"--ac={name}",) for name in names}))
    program = JobProgram("train.py", ("--dp={replicas}", "{checkpoint}"))
    grows = {"replicas": 1, "checkpoint": -1}
    return sweep_of_command(program, CommandLineSettings(axes, options={"world_size": Texts(("8",))}, grows=grows))


def point(replicas: int, checkpoint: str, speed: float = 1000.0, least: float = 0.5, memory_gib: float = 40.0) -> Row:
    status = Status.FITS if memory_gib < 80 else Status.DOES_NOT_FIT
    known = row(speed, memory_gib, status=status, replicas=replicas, checkpoint=checkpoint)
    return replace(known, step=step(speed, least=least) if memory_gib < 80 else None)


def proved(pruning: Pruning, plan: SweepPlan, replicas: int, checkpoint: str) -> Row | None:
    values = {"replicas": replicas, "checkpoint": checkpoint}
    (one,) = (one for one in plan.points() if dict(one.values) == values)
    return pruning.row_without_run(plan.command.at(plan.space, one), row_id="it", key="it")


def test_more_recomputation_than_a_point_that_fits_cannot_win_once_a_pair_shows_the_order() -> None:
    plan = planned()
    pruning = Pruning(plan)
    pruning.take(point(1, "none"))
    assert proved(pruning, plan, 1, "full") is None
    pruning.take(point(1, "full", 800, 0.6))
    pruning.take(point(2, "none", 900))
    pruned = proved(pruning, plan, 2, "full")
    assert pruned is not None
    assert pruned.status is Status.SLOWER
    assert pruned.reason == "computes no less than replicas=2 checkpoint=none, which fits with 900 tokens/s per GPU"


def test_more_replicas_cannot_win_where_the_kernels_alone_are_slower_than_the_fastest() -> None:
    plan = planned()
    pruning = Pruning(plan)
    pruning.take(point(1, "none", 1000, 0.9))
    pruning.take(point(1, "full", 800, 0.95))
    assert proved(pruning, plan, 2, "full") is None  # nothing shows yet that more replicas compute no less
    pruning.take(point(2, "none", 600, 0.6))
    pruned = proved(pruning, plan, 2, "full")
    assert pruned is not None
    assert "replicas=2 checkpoint=none, which fits with 600" in pruned.reason or "kernels alone" in pruned.reason
    slow = Pruning(plan)
    for one in (point(1, "none", 1000, 0.9), point(1, "full", 800, 0.7), point(2, "none", 900, 0.9, 79.0)):
        slow.take(one)  # the last has no headroom, so that it does not win; kernels alone allow 1,154
    assert proved(slow, plan, 2, "full") is None
    quick = Pruning(plan)
    for one in (point(1, "none", 1000, 0.9), point(1, "full", 800, 0.95), point(2, "none", 900, 0.9, 79.0)):
        quick.take(one)
    pruned = proved(quick, plan, 2, "full")
    assert pruned is not None
    assert pruned.reason == (
        "computes no less than replicas=1 checkpoint=full, whose kernels alone allow 851 tokens/s per GPU; "
        "replicas=1 checkpoint=none has 1,000"
    )


def test_names_in_a_wrong_order_prune_nothing_where_no_point_fits() -> None:
    plan = planned(("none", "full"))
    pruning = Pruning(plan)
    pruning.take(point(1, "none", memory_gib=90))
    assert proved(pruning, plan, 1, "full") is None
    pruned = proved(pruning, plan, 2, "none")  # numbers need no proof: fewer shards hold no less
    assert pruned is not None
    assert pruned.status is Status.PRUNED


def test_an_axis_whose_order_is_refuted_leaves_the_others() -> None:
    plan = planned(("none", "full"))
    pruning = Pruning(plan)
    pruning.take(point(1, "none", memory_gib=90))
    assert pruning.take(point(1, "full")) == {Status.PRUNED}
    assert list(pruning.refuted) == [(Status.PRUNED, "checkpoint")]
    assert proved(pruning, plan, 2, "full") is None
    pruned = proved(pruning, plan, 2, "none")
    assert pruned is not None
    assert "holds no less than replicas=1 checkpoint=none" in pruned.reason


def test_points_that_may_decide_on_each_other_are_known() -> None:
    plan = planned()
    runs = [plan.command.at(plan.space, one) for one in plan.points()]
    pruning = Pruning(plan)
    assert [dict(run.point.values) for run in pruning.in_order(runs)] == [
        {"replicas": replicas, "checkpoint": checkpoint} for replicas in (1, 2) for checkpoint in ("none", "full")
    ]
    assert pruning.may_depend(runs[0], runs[1:])
    assert not pruning.may_depend(runs[0], runs[:1])
