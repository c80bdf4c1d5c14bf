"""A recorded pipeline by other schedules, numbers of micro-batches and layouts: its step, bubble and memory.

The order in which each rank acts is that of torch.distributed.pipelining's own schedules. Actions take what the units
of their stage took when they were recorded.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from fakedist.analysis.evidence import Fits
from fakedist.cost_model.job.schedules import COMPUTES, Action, PlayedActions, play, with_transfers
from fakedist.errors import JobError
from fakedist.extras.plan.pipeline_units import Cost, PipelineModel
from fakedist.results.run import room_of_run

Layout = Sequence[Sequence[int]]  # the units of each stage
#: The schedules that are planned: torch's, and the stages of each rank.
SCHEDULES = {
    "GPipe": ("GPipe", 1),
    "1F1B": ("1F1B", 1),
    "Interleaved1F1B": ("Interleaved1F1B", 2),
    "InterleavedZeroBubble": ("InterleavedZeroBubble", 2),
    "ZB-H1": ("InterleavedZeroBubble", 1),
    "ZBVZeroBubble": ("ZBVZeroBubble", 2),
    "DualPipeV": ("DualPipeV", 2),
}


@dataclass(frozen=True)
class ScheduleOrder:
    """The actions of each rank by a schedule, sends and receives among them, and the rank of each stage."""

    name: str
    num_micro_batches: int
    rank_of: Sequence[int]
    actions: Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Planned:
    """A schedule of the pipeline.

    Attributes:
        is_balanced: Its layout is not the recorded or even one.
        is_known: If not, it divides backwards, which the recording does not: step and peaks are the least they can be.
        bubble: The share of the step in which ranks wait, on average.
        busy_us: By rank, the time in which it computes.
        peak_bytes: By rank, the most allocated; None if its layers share buffers, and are others than recorded.
        fits: Whether the rank fits that allocates most.
        actions: What each rank does: columns ``rank``, ``kind``, ``stage``, ``micro_batch``, ``start_us``, ``end_us``.
    """

    order: ScheduleOrder
    layout: Layout
    is_balanced: bool
    is_known: bool
    step_us: float
    bubble: float
    busy_us: Sequence[float]
    peak_bytes: Sequence[float | None]
    fits: Fits
    actions: pd.DataFrame


def read_orders(wanted: Sequence[tuple[str, int, int]]) -> list[ScheduleOrder | str]:
    """The orders of schedules, of (name, ranks, micro-batches); for one that cannot be, the reason.

    Raises:
        JobError: torch is not installed, or lacks them.
    """
    rows = [[SCHEDULES[name][0], ranks, SCHEDULES[name][1], number] for name, ranks, number in wanted]
    command = [sys.executable, "-m", "fakedist.extras.plan.torch_orders"]
    ran = subprocess.run(command, input=json.dumps(rows), capture_output=True, text=True, check=False)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["it was killed"])[-1]
        raise JobError(f"torch.distributed.pipelining gives no orders of schedules: {last}", "pip install torch")
    orders: list[ScheduleOrder | str] = []
    for (name, _, number), found in zip(wanted, json.loads(ran.stdout), strict=True):
        if isinstance(found, str):
            orders.append(found)
            continue
        rank_of, actions = found
        of_ranks = [with_transfers([(str(one[0]), one[1], one[2]) for one in own], len(rank_of)) for own in actions]
        orders.append(ScheduleOrder(name, number, rank_of, of_ranks))
    return orders


def plan_pipeline(model: PipelineModel, micro_batches: Sequence[int]) -> tuple[list[Planned], list[str]]:
    """Every schedule, number of micro-batches and layout, and the reasons why others cannot be.

    Known ones come first, of those what fits, then the shortest for each micro-batch.
    """
    wanted = [(name, len(model.ranks), number) for number in micro_batches for name in SCHEDULES]
    made, refused = [], []
    for (name, _, number), order in zip(wanted, read_orders(wanted), strict=True):
        even = None if isinstance(order, str) else even_layout(model, len(order.rank_of))
        if isinstance(order, str) or even is None:
            refused.append(
                f"{name}, {number} micro-batches: {order if even is None and isinstance(order, str) else _FEW}"
            )
            continue
        made.append(plan(model, order, even))
        balanced = balanced_layout(model, len(order.rank_of))
        if balanced and balanced != list(even):
            made.append(plan(model, order, balanced, is_balanced=True))
    made.sort(key=lambda one: (not one.is_known, one.fits == _TOO_LARGE, one.step_us / one.order.num_micro_batches))
    return made, refused


_FEW = "it has more stages than there are layers"
_TOO_LARGE = "does not fit"


def plan(model: PipelineModel, order: ScheduleOrder, layout: Layout, *, is_balanced: bool = False) -> Planned:
    """Run a schedule with a layout.

    Raises:
        JobError: Its ranks wait for each other.
    """
    is_split = any(kind == "I" for actions in order.actions for kind, _, _ in actions)
    costs = [dict(unit.costs) for unit in model.units]
    for unit in (
        layout[0] if is_split else ()
    ):  # torch computes all gradients of the first stage at once, when it does W
        costs[unit] |= {"I": Cost(0.0), "W": costs[unit]["B"]}
    by_stage = {
        (kind, stage): (sum(costs[unit][kind].us for unit in units), sum(costs[unit][kind].host_us for unit in units))
        for stage, units in enumerate(layout)
        for kind in COMPUTES
    }
    played = play(order.actions, order.rank_of, by_stage, [rank.lead_us for rank in model.ranks], model.wire)
    rows = [(order.rank_of[action[1]], *action, *times) for action, times in played.times.items()]
    rows += [(rank, "tail", -1, -1, *times) for rank, times in enumerate(_tails(model, order, layout, played))]
    actions = pd.DataFrame(rows, columns=["rank", "kind", "stage", "micro_batch", "start_us", "end_us"])
    works = actions[actions["kind"].isin((*COMPUTES, "tail"))]
    busy_us = (works["end_us"] - works["start_us"]).groupby(works["rank"]).sum()
    is_known = not is_split or any(unit.is_split for unit in model.units)
    step_us = float(actions["end_us"].max())
    if not is_known:  # each rank computes, once a micro-batch has come through the stages before its first
        before = np.append(0.0, np.cumsum([by_stage["F", stage][0] for stage in range(len(layout))]))
        step_us = max(before[order.rank_of.index(rank)] + busy_us[rank] for rank in busy_us.index)
    peaks = [_peak(model, order, rank, layout, costs) for rank in range(len(model.ranks))]
    most = int(max(peak or 0 for peak in peaks))
    cached = max(rank.run.peak_reserved_bytes - rank.run.peak_allocated_bytes for rank in model.ranks)
    return Planned(
        order=order,
        layout=layout,
        is_balanced=is_balanced,
        is_known=is_known,
        step_us=step_us,
        bubble=1.0 - float(busy_us.mean()) / step_us,
        busy_us=busy_us.tolist(),
        peak_bytes=peaks,
        fits=room_of_run(model.ranks[0].run).fits(most, most + cached) if None not in peaks else "",
        actions=actions,
    )


def _tails(
    model: PipelineModel, order: ScheduleOrder, layout: Layout, played: PlayedActions
) -> list[tuple[float, float]]:
    """When each rank begins and ends its optimizer, which takes as long as its units have bytes."""
    tails = []
    for place, rank in enumerate(model.ranks):
        gpu_us, host_us = rank.tail_us
        kept, recorded = (
            sum(model.units[unit].kept_bytes for unit in _own(order, place, layout)),
            rank.kept_bytes[1:].sum(),
        )
        grown = kept / recorded if recorded else 1.0
        start = played.gpu_us[place]
        tails.append((start, max(start + gpu_us * grown, played.host_us[place] + host_us)))
    return tails


def _own(order: ScheduleOrder, rank: int, layout: Layout) -> list[int]:
    """The units of a rank."""
    return [unit for stage, of in enumerate(order.rank_of) if of == rank for unit in layout[stage]]


def _peak(
    model: PipelineModel, order: ScheduleOrder, rank: int, layout: Layout, costs: Sequence[dict[str, Cost]]
) -> float | None:
    """The most that a rank allocates, in the order of its actions; None if it is not known.

    What a stage receives stays until its backward is done with it. With torch, what it sends back stays until it waits
    for that, and the losses of a last stage keep its inputs, unless torch computes their gradients apart.
    """
    own, is_torch, bytes_ = _own(order, rank, layout), model.ranks[0].is_torch, model.received_bytes
    recorded = [at for at, unit in enumerate(model.units) if unit.place == rank]
    if not model.ranks[rank].is_attributed and own != recorded:
        return None
    kept, gradients = (
        sum(getattr(model.units[unit], name) for unit in own) for name in ("kept_bytes", "gradient_bytes")
    )
    last = len(model.units) - 1
    alike = [one for at, one in enumerate(model.ranks) if (last in own) == (at == model.last_rank)]
    other = model.ranks[rank] if (last in own) == (rank == model.last_rank) else alike[0]
    level = peak = kept + other.other_bytes
    after = level + gradients + kept * max(one.tail_bytes / (one.kept_bytes[1:].sum() or 1.0) for one in model.ranks)
    receives, with_gradients = set(order.actions[rank]), set[int]()
    for kind, stage, batch in order.actions[rank]:
        level += bytes_ * (kind.startswith("RECV") + is_torch * ((kind == "SEND_B") - (kind == "WAIT_SEND_B")))
        if kind not in COMPUTES:
            continue
        for unit in layout[stage] if kind == "F" else reversed(layout[stage]):
            peak = max(peak, level + costs[unit][kind].peak_bytes)
            level += costs[unit][kind].net_bytes
            if kind in "BW" and unit not in with_gradients:
                with_gradients.add(unit)
                level += model.units[unit].gradient_bytes
        keeps = kind == "B" and is_torch and stage == len(layout) - 1
        level -= bytes_ * (kind in "BW" and not keeps and ("RECV_F", stage, batch) in receives)
        level -= bytes_ * (kind in "BI" and ("RECV_B", stage, batch) in receives)
    return float(max(peak, after))


# ---- layouts


def even_layout(model: PipelineModel, num_stages: int) -> Layout | None:
    """The recorded layout, if it has as many stages; else as many layers for each, which the others join.

    None with fewer layers than stages.
    """
    layers = [at for at, unit in enumerate(model.units) if unit.is_layer]
    if len(model.stages) == num_stages or len(layers) < num_stages:
        return model.stages if len(model.stages) == num_stages else None
    parts = np.array_split(layers, num_stages)
    begins = [0, *(int(part[0]) for part in parts[1:]), len(model.units)]
    return [range(*ends) for ends in pairwise(begins)]


def balanced_layout(model: PipelineModel, num_stages: int) -> list[Sequence[int]] | None:
    """The layout whose busiest stage takes least, and of those, the one whose stages are most alike.

    A stage begins with a layer: what comes before the layers or after them stays with its neighbour. Stages that do not
    fit the GPU with as many micro-batches as 1F1B holds are left out. None with fewer layers than stages, or if none is
    left.
    """
    cuts = [0, *[at for at, unit in enumerate(model.units) if unit.is_layer][1:], len(model.units)]
    rows = [
        (unit.costs["F"].us + unit.costs["B"].us, unit.kept_bytes + unit.gradient_bytes, unit.costs["F"].net_bytes)
        for unit in model.units
    ]
    sums, room = np.vstack([np.zeros(3), np.cumsum(rows, axis=0)])[cuts], room_of_run(model.ranks[0].run)

    @functools.cache
    def best(stage: int, end: int) -> tuple[float, float, tuple[int, ...]]:
        """Of the first stages up to a cut: the busiest, the sum of the squares of all, and the cuts."""
        if not stage:
            return (np.inf, np.inf, ()) if end else (0.0, 0.0, (0,))
        made: list[tuple[float, float, tuple[int, ...]]] = [(np.inf, np.inf, ())]
        for begin in range(stage - 1, end):
            us, kept, saved = sums[end] - sums[begin]
            needs, (most, squares, before) = int(kept + (num_stages - stage + 1) * saved), best(stage - 1, begin)
            own = np.inf if room.fits(needs, needs) == _TOO_LARGE else us
            made.append((max(most, own), squares + own**2, (*before, cuts[end])))
        return min(made)

    most, _, found = best(num_stages, len(cuts) - 1)
    return [range(*ends) for ends in pairwise(found)] if np.isfinite(most) else None


def megatron_layout(model: PipelineModel, layout: Layout) -> str:
    """The layout as ``--pipeline-model-parallel-layout`` takes it: "Et*5|t*6|t*5L"."""
    words = []
    for at, units in enumerate(layout):
        number = sum(model.units[unit].is_layer for unit in units)
        before, after = at == 0 and not model.units[0].is_layer, at == len(layout) - 1
        words.append("E" * before + (f"t*{number}" if number > 1 else "t" * number) + "L" * after)
    return "|".join(words)
