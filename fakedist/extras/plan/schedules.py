"""A recorded pipeline by other schedules, numbers of micro-batches and layouts: its step, bubble and memory.

The order in which each rank acts is that of torch.distributed.pipelining's own schedules. Actions take what the units
of their stage took when they were recorded. A rank's transfers are on one stream: one begins once those before it have
ended, and a receive ends a transfer's time after its sender has reached the send.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pandas as pd

from fakedist.analysis.evidence import Fits
from fakedist.analysis.recording import Array
from fakedist.errors import JobError
from fakedist.extras.plan.units import Cost, PipelineModel

Action = tuple[str, int, int]  # its kind, stage and micro-batch
Layout = Sequence[Sequence[int]]  # the units of each stage
#: The schedules that are planned, with the stages of each rank.
SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZB-H1": 1,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
#: ZB-H1 is the interleaved one with a single stage on each rank.
_CLASSES = {"ZB-H1": "InterleavedZeroBubble"}
_KINDS = ("F", "B", "I", "W")


@dataclass(frozen=True)
class Order:
    """The actions of each rank by a schedule, sends and receives among them, and the rank of each stage."""

    name: str
    num_micro_batches: int
    rank_of: Sequence[int]
    actions: Sequence[Sequence[Action]]

    @property
    def is_split(self) -> bool:
        """Whether backwards come in two parts."""
        return any(kind == "I" for actions in self.actions for kind, _, _ in actions)


@dataclass(frozen=True)
class Planned:
    """A schedule of the pipeline.

    Attributes:
        layout: The units of each stage.
        is_balanced: It is not the recorded or even one.
        is_known: If not, it divides backwards, which the recording does not: step and peaks are the least they can be.
        step_us: The job's step.
        busy_us: By rank, the time in which it computes.
        peak_bytes: By rank, the most allocated.
        actions: What each rank does: columns ``rank``, ``kind``, ``stage``, ``micro_batch``, ``start_us``, ``end_us``.
    """

    order: Order
    layout: Layout
    is_balanced: bool
    is_known: bool
    step_us: float
    busy_us: Sequence[float]
    peak_bytes: Sequence[float]
    actions: pd.DataFrame

    @property
    def bubble(self) -> float:
        """The share of the step in which ranks wait, on average."""
        return 1.0 - float(np.mean(self.busy_us)) / self.step_us

    @property
    def us_per_micro_batch(self) -> float:
        """The step for each micro-batch, by which schedules of different numbers are compared."""
        return self.step_us / self.order.num_micro_batches


def read_orders(wanted: Sequence[tuple[str, int, int]]) -> list[Order | str]:
    """The orders of torch's schedules, of (schedule, ranks, micro-batches); for one that cannot be, the reason.

    Raises:
        JobError: torch is not installed, or lacks them.
    """
    rows = [[_CLASSES.get(name, name), ranks, SCHEDULES[name], number] for name, ranks, number in wanted]
    command = [sys.executable, "-m", "fakedist.extras.plan.torch_orders"]
    ran = subprocess.run(command, input=json.dumps(rows), capture_output=True, text=True, check=False)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["it was killed"])[-1]
        raise JobError(f"torch.distributed.pipelining gives no orders of schedules: {last}", "pip install torch")
    return [
        one
        if isinstance(one, str)
        else Order(name, number, one[0], [_with_transfers(rank, len(one[0])) for rank in one[1]])
        for one, (name, _, number) in zip(json.loads(ran.stdout), wanted, strict=True)
    ]


def _with_transfers(actions: Sequence[Sequence[str | int]], num_stages: int) -> list[Action]:
    """The actions with sends and receives: where torch names none, each is made when it is needed."""
    own = [(str(kind), int(stage), int(batch)) for kind, stage, batch in actions]
    if any(kind.startswith("SEND") for kind, _, _ in own):
        return own
    made: list[Action] = []
    sent: list[Action] = []
    is_alternating = any(before[0] == "B" and after[0] == "F" for before, after in pairwise(own))
    for at, (kind, stage, _) in enumerate(own):
        batch = sum(
            before[:2] == (kind, stage) for before in own[:at]
        )  # torch 2.15's 1F1B counts the last rank's from 1
        way, from_end = ("F", stage == 0) if kind == "F" else ("B", stage == num_stages - 1)
        to_end = stage == (num_stages - 1 if kind == "F" else 0)
        made += [] if from_end else [(f"RECV_{way}", stage, batch)]
        made.append((kind, stage, batch))
        if to_end:
            continue
        if way == "B" and is_alternating and sent:
            made.append(sent.pop())
        made.append((f"SEND_{way}", stage, batch))
        sent += [("WAIT_SEND_B", stage, batch)] if way == "B" else []
    return made + sent


# ---- time


def _sender(action: Action) -> Action:
    kind, stage, batch = action
    return f"SEND{kind[4:]}", stage - 1 if kind == "RECV_F" else stage + 1, batch


def _before(action: Action, last_stage: int) -> Action | None:
    """The action whose result a forward or backward needs, wherever it ran; None if it needs none."""
    kind, stage, batch = action
    if kind == "F":
        return ("F", stage - 1, batch) if stage else None
    return ("B", stage + 1, batch) if kind in "BI" and stage < last_stage else None


class _Clock:
    """Runs the actions of all ranks."""

    def __init__(self, order: Order, costs: Mapping[tuple[str, int], Cost], model: PipelineModel) -> None:
        self.order, self.costs, self.model = order, costs, model
        self.done: dict[Action, tuple[float, float]] = {}
        self.reached: dict[Action, float] = {}
        self.gpu, self.host = [0.0] * len(order.actions), list(model.lead_us)
        self.posted: dict[tuple[int, int], deque[tuple[Action, float]]] = defaultdict(deque)
        self.wire: dict[tuple[int, int], float] = defaultdict(float)

    def run(self) -> None:
        """Run them all.

        Raises:
            JobError: They wait for each other.
        """
        left = [deque(actions) for actions in self.order.actions]
        while any(left) or any(self.posted.values()):
            num_done = len(self.done), sum(map(len, left))
            for rank, actions in enumerate(left):
                while actions and self._act(rank, actions[0]):
                    actions.popleft()
            for stream in list(self.posted):
                self._transfer(stream)
            if num_done == (len(self.done), sum(map(len, left))):
                raise JobError(f"{self.order.name}: transfers wait for each other on one stream", "backend='nccl-lazy'")

    def _act(self, rank: int, action: Action) -> bool:
        """Reach an action, unless what it waits for is not known yet."""
        kind, stage, batch = action
        if kind.startswith(("SEND", "RECV")):
            other = self.order.rank_of[stage + (1 if kind in ("SEND_F", "RECV_B") else -1)]
            self.posted[rank, other if self.model.is_stream_by_peer else -1].append((action, self.gpu[rank]))
            return True
        if kind.startswith("WAIT"):
            sent = self.done.get((kind[5:], stage, batch))
            self.gpu[rank] = self.gpu[rank] if sent is None else max(self.gpu[rank], sent[1])
            return sent is not None
        needs = _before(action, len(self.order.rank_of) - 1)
        ready = 0.0
        if needs is not None:
            if self.order.rank_of[needs[1]] != rank:
                needs = (f"RECV_{needs[0]}", stage, batch)
            if needs not in self.done:
                return False
            ready = self.done[needs][1]
        cost = self.costs[kind, stage]
        start = max(self.gpu[rank], ready, self.host[rank])
        self.host[rank] += cost.host_us
        self.gpu[rank] = max(start + cost.us, self.host[rank])
        self.done[action] = (start, self.gpu[rank])
        if kind == "I":  # the next stage waits for either
            self.done["B", stage, batch] = self.done[action]
        return True

    def _transfer(self, stream: tuple[int, int]) -> None:
        """Run posted transfers as far as their other sides are known."""
        while self.posted[stream]:
            action, at = self.posted[stream][0]
            start = max(at, self.wire[stream])
            if action[0].startswith("SEND"):
                self.reached[action] = start
            elif _sender(action) not in self.reached:
                return
            else:
                start = max(start, self.reached[_sender(action)])
            self.wire[stream] = start + self.model.transfer_us
            self.done[action] = (start, self.wire[stream])
            self.posted[stream].popleft()


# ---- memory


def _peak(order: Order, rank: int, layout: Layout, model: PipelineModel, costs: Sequence[Mapping[str, Cost]]) -> float:
    """The most that a rank allocates, in the order of its actions.

    What a stage receives stays until its backward is done with it, what it sends back until it waits for that. The
    losses of a last stage keep its inputs, unless torch computes their gradients apart.
    """
    own = [unit for stage, of in enumerate(order.rank_of) if of == rank for unit in layout[stage]]
    has_last = len(model.units) - 1 in own
    level = model.other_bytes[has_last] + sum(model.units[unit].kept_bytes for unit in own)
    peak, first, with_gradients = level, level, set[int]()
    held = {action for action in order.actions[rank] if action[0] in ("RECV_F", "RECV_B", "WAIT_SEND_B")}
    for kind, stage, batch in order.actions[rank]:
        level += model.boundary_bytes * (kind in ("RECV_F", "RECV_B") or (kind == "SEND_B" and model.is_torch))
        level -= model.boundary_bytes * (kind == "WAIT_SEND_B" and model.is_torch)
        if kind not in _KINDS:
            continue
        for unit in layout[stage] if kind == "F" else reversed(layout[stage]):
            cost = costs[unit][kind]
            is_first = kind in "BW" and unit not in with_gradients
            peak = max(peak, level + (cost.first_peak_bytes if is_first else cost.peak_bytes))
            level += cost.net_bytes
            if is_first:
                with_gradients.add(unit)
                level += model.units[unit].gradient_bytes
        keeps = kind == "B" and model.is_torch and stage == len(layout) - 1
        level -= model.boundary_bytes * (kind in "BW" and not keeps and ("RECV_F", stage, batch) in held)
        level -= model.boundary_bytes * (kind in "BI" and ("RECV_B", stage, batch) in held)
    kept = sum(model.units[unit].kept_bytes for unit in own)
    gradients = sum(model.units[unit].gradient_bytes for unit in own)
    return max(peak, first + gradients + kept * model.tail_share)


# ---- plans


def costs_of(model: PipelineModel) -> list[dict[str, Cost]]:
    """The costs of each unit by kind: those that were not recorded follow from the others.

    A unit whose backward was recorded whole divides as the others do. If all were, nothing waits and nothing is kept.
    """
    split = [unit for unit in model.units if "I" in unit.costs]
    share = sum(unit.costs["I"].us for unit in split) / max(sum(unit.backward_us for unit in split), 1e-9)
    made = []
    for unit in model.units:
        costs = dict(unit.costs)
        if "B" not in costs:
            inputs, weights = costs["I"], costs["W"]
            peak = max(inputs.peak_bytes, inputs.net_bytes + weights.peak_bytes)
            both_us = inputs.us + weights.us, inputs.host_us + weights.host_us
            costs["B"] = Cost(*both_us, inputs.net_bytes + weights.net_bytes, peak, peak)
        if "I" not in costs:
            whole = costs["B"]
            inputs_us = whole.us * share if split else whole.us
            costs["I"], costs["W"] = replace(whole, us=inputs_us), Cost(whole.us - inputs_us)
        made.append(costs)
    return made


def plan(model: PipelineModel, order: Order, layout: Layout, *, is_balanced: bool = False) -> Planned:
    """Run a schedule with a layout.

    Raises:
        JobError: Its transfers wait for each other.
    """
    costs = costs_of(model)
    for unit in layout[0] if order.is_split else ():  # torch computes all gradients of the first stage at once, later
        costs[unit] = {**costs[unit], "I": Cost(0.0), "W": costs[unit]["B"]}
    by_stage = {
        (kind, stage): _sum([costs[unit][kind] for unit in units])
        for stage, units in enumerate(layout)
        for kind in _KINDS
    }
    clock = _Clock(order, by_stage, model)
    clock.run()
    rows = [
        (order.rank_of[stage], kind, stage, batch, start, end)
        for (kind, stage, batch), (start, end) in clock.done.items()
        if end > start and not (kind == "B" and ("I", stage, batch) in clock.done)
    ]
    actions = pd.DataFrame(rows, columns=["rank", "kind", "stage", "micro_batch", "start_us", "end_us"])
    own = actions[actions["kind"].isin(_KINDS)]
    works = (own["end_us"] - own["start_us"]).groupby(own["rank"]).sum()
    ends = _ends(clock, layout)
    busy_us = [float(works[rank]) + end - clock.gpu[rank] for rank, end in enumerate(ends)]
    is_known = model.is_split or not order.is_split
    return Planned(
        order=order,
        layout=layout,
        is_balanced=is_balanced,
        is_known=is_known,
        step_us=max(ends) if is_known else _least_us(order, by_stage, busy_us),
        busy_us=busy_us,
        peak_bytes=[_peak(order, rank, layout, model, costs) for rank in range(len(ends))],
        actions=actions,
    )


def _least_us(order: Order, costs: Mapping[tuple[str, int], Cost], busy_us: Sequence[float]) -> float:
    """No step is shorter: each rank computes, once a micro-batch has come through the stages before its first."""
    firsts = [order.rank_of.index(rank) for rank in range(len(busy_us))]
    before = [sum(costs["F", stage].us for stage in range(first)) for first in firsts]
    return max(us + own for us, own in zip(busy_us, before, strict=True))


def _ends(clock: _Clock, layout: Layout) -> list[float]:
    """When each rank has done its optimizer, which takes as long as its units have parameters."""
    ends = []
    for rank, (gpu_us, host_us) in enumerate(clock.model.tail_us):
        own = [unit for stage, of in enumerate(clock.order.rank_of) if of == rank for unit in layout[stage]]
        kept, recorded = sum(clock.model.units[unit].kept_bytes for unit in own), clock.model.rank_bytes[rank]
        gpu = clock.gpu[rank] + gpu_us * (kept / recorded if recorded else 1.0)
        ends.append(max(gpu, clock.host[rank] + host_us))
    return ends


def _sum(costs: Sequence[Cost]) -> Cost:
    return Cost(sum(cost.us for cost in costs), sum(cost.host_us for cost in costs))


# ---- layouts


def even_layout(model: PipelineModel, num_stages: int) -> Layout | None:
    """The recorded layout, if it has as many stages; else as many layers for each, which the others join.

    None with fewer layers than stages.
    """
    if len(model.stages) == num_stages:
        return model.stages
    layers = [at for at, unit in enumerate(model.units) if unit.is_layer]
    if len(layers) < num_stages:
        return None
    each, more = divmod(len(layers), num_stages)
    sizes = [each + (stage < more) for stage in range(num_stages)]
    begins = [0, *(layers[at] for at in np.cumsum(sizes)[:-1]), len(model.units)]
    return [range(*ends) for ends in pairwise(begins)]


def balanced_layout(model: PipelineModel, num_stages: int) -> Layout | None:
    """The layout whose busiest stage takes least, and of those, the one whose stages are most alike.

    A stage begins with a layer: what comes before the layers or after them stays with its neighbour. Stages that do not
    fit the GPU with as many micro-batches as 1F1B holds are left out. None with fewer layers than stages, or if none is
    left.
    """
    layers = [at for at, unit in enumerate(model.units) if unit.is_layer]
    if len(layers) < num_stages:
        return None
    cuts = [0, *layers[1:], len(model.units)]
    us = _sums([unit.costs["F"].us + unit.backward_us for unit in model.units])[cuts]
    kept = _sums([unit.kept_bytes + unit.gradient_bytes for unit in model.units])[cuts]
    saved = _sums([unit.costs["F"].net_bytes for unit in model.units])[cuts]
    # By stages and cuts: the busiest stage, the sum of the squares of all, and where the last stage begins.
    best: dict[tuple[int, int], tuple[float, float, int]] = {(0, 0): (0.0, 0.0, 0)}
    for stage in range(1, num_stages + 1):
        held = min(num_stages - stage + 1, model.num_micro_batches)
        for end in range(stage, len(cuts)):
            for begin in range(stage - 1, end):
                own = float(us[end] - us[begin])
                needs = kept[end] - kept[begin] + held * (saved[end] - saved[begin])
                if (stage - 1, begin) in best and model.room.fits(int(needs), int(needs)) != "does not fit":
                    most, squares, _ = best[stage - 1, begin]
                    made = (max(most, own), squares + own**2, begin)
                    best[stage, end] = min(best.get((stage, end), made), made)
    ends = [len(cuts) - 1]
    if (num_stages, ends[0]) not in best:
        return None
    for stage in range(num_stages, 0, -1):
        ends.append(best[stage, ends[-1]][2])
    return [range(cuts[begin], cuts[end]) for end, begin in pairwise(ends)][::-1]


def _sums(values: Sequence[float]) -> Array:
    return np.append(0.0, np.cumsum(values))


def megatron_layout(model: PipelineModel, layout: Layout) -> str:
    """The layout as ``--pipeline-model-parallel-layout`` takes it: "Et*5|t*6|t*5L"."""
    layers = [at for at, unit in enumerate(model.units) if unit.is_layer]
    words = []
    for units in layout:
        number = sum(model.units[unit].is_layer for unit in units)
        before, after = (units[0] < layers[0]), (units[-1] > layers[-1])
        words.append("E" * before + (f"t*{number}" if number > 1 else "t" * number) + "L" * after)
    return "|".join(words)


def split_points(model: PipelineModel, layout: Layout) -> list[str]:
    """The modules that stages after the first begin with, as torchtitan and torch.distributed.pipelining split."""
    return [model.units[units[0]].name.rpartition(").")[2] for units in layout[1:]]


def plan_pipeline(model: PipelineModel, micro_batches: Sequence[int]) -> tuple[list[Planned], list[str]]:
    """Every schedule, number of micro-batches and layout, and the reasons why others cannot be.

    Known ones come first, of those what fits, then the shortest for each micro-batch.
    """
    ranks = len(model.tail_us)
    wanted = [(name, ranks, number) for number in micro_batches for name in SCHEDULES]
    made, refused = [], dict[str, None]()
    for (name, _, number), order in zip(wanted, read_orders(wanted), strict=True):
        if isinstance(order, str):
            refused[f"{name}, {number} micro-batches: {order}"] = None
            continue
        even, balanced = (find(model, len(order.rank_of)) for find in (even_layout, balanced_layout))
        if even is None:
            refused[f"{name}: {len(order.rank_of)} stages have no layer each"] = None
            continue
        layouts = [(even, False)] + ([(balanced, True)] if balanced and list(balanced) != list(even) else [])
        made += [plan(model, order, layout, is_balanced=is_balanced) for layout, is_balanced in layouts]
    too_large = {id(one): fits_of(model, max(one.peak_bytes)) == "does not fit" for one in made}
    return sorted(made, key=lambda one: (not one.is_known, too_large[id(one)], one.us_per_micro_batch)), list(refused)


def fits_of(model: PipelineModel, peak_bytes: float) -> Fits:
    """Whether a rank fits that allocates so much, and caches at most as much as a recorded one did."""
    return model.room.fits(int(peak_bytes), int(peak_bytes) + model.cached_bytes)
