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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pandas as pd

from fakedist.errors import JobError
from fakedist.extras.plan.units import Cost, PipelineModel, Unit

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
        step_us: The job's step. With ``step_high_us``, its least.
        step_high_us: Its most, if how backwards divide was not recorded.
        busy_us: By rank, the time in which it computes.
        peak_bytes: By rank, the most allocated. With ``peak_high_bytes``, the least.
        peak_high_bytes: The most.
        actions: What each rank does: columns ``rank``, ``kind``, ``stage``, ``micro_batch``, ``start_us``, ``end_us``.
    """

    order: Order
    layout: Layout
    is_balanced: bool
    step_us: float
    step_high_us: float
    busy_us: Sequence[float]
    peak_bytes: Sequence[float]
    peak_high_bytes: Sequence[float]
    actions: pd.DataFrame

    @property
    def bubble(self) -> float:
        """The share of the step in which ranks wait, on average."""
        return 1.0 - float(np.mean(self.busy_us)) / self.step_us

    @property
    def is_known(self) -> bool:
        """Not bounded."""
        return self.step_us == self.step_high_us


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
        one if isinstance(one, str) else Order(name, number, one[0], [_with_transfers(rank, len(one[0])) for rank in one[1]])
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
        batch = sum(before[:2] == (kind, stage) for before in own[:at])  # torch 2.15's 1F1B counts the last rank's from 1
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


def costs_of(model: PipelineModel, *, is_high: bool) -> list[dict[str, Cost]]:
    """The costs of each unit by kind: those that were not recorded follow from the others.

    Of a recording without split backwards: at the least, the products of weights' gradients can wait and nothing more
    is kept; at the most, nothing can wait, and everything is kept until then (``is_high``).
    """
    split = [unit for unit in model.units if "I" in unit.costs]
    share = sum(unit.costs["I"].us for unit in split) / max(sum(unit.backward_us for unit in split), 1e-9)
    made = []
    for unit in model.units:
        costs = dict(unit.costs)
        if "B" not in costs:
            inputs, weights = costs["I"], costs["W"]
            peak = max(inputs.peak_bytes, inputs.net_bytes + weights.peak_bytes)
            costs["B"] = Cost(
                inputs.us + weights.us, inputs.host_us + weights.host_us, inputs.net_bytes + weights.net_bytes, peak, peak
            )
        whole = costs["B"]
        if "I" not in costs:
            kept = share if split else 1.0 if is_high else 1.0 - unit.weight_us / max(whole.us, 1e-9)
            later = 0.0 if not is_high else whole.net_bytes
            inputs_us = whole.us * kept
            costs["I"] = replace(whole, us=inputs_us, net_bytes=whole.net_bytes - later)
            costs["W"] = Cost(whole.us - inputs_us, 0.0, later)
        made.append(costs)
    return made


def plan(model: PipelineModel, order: Order, layout: Layout, *, is_balanced: bool = False) -> Planned:
    """Run a schedule with a layout."""
    sides = []
    for is_high in (False, True):
        costs = costs_of(model, is_high=is_high)
        by_stage = {
            (kind, stage): _sum([costs[unit][kind] for unit in units])
            for stage, units in enumerate(layout)
            for kind in _KINDS
        }
        if order.is_split:  # torch computes all gradients of the first stage at once, once the others' are on their way
            by_stage["W", 0], by_stage["I", 0] = by_stage["B", 0], Cost(0.0)
        clock = _Clock(order, by_stage, model)
        clock.run()
        peaks = [_peak(order, rank, layout, model, _first_whole(costs, layout, order)) for rank in range(len(clock.gpu))]
        sides.append((clock, _ends(clock, layout), peaks))
        if model.is_split or not order.is_split:
            break
    clock, ends, peaks = sides[0]
    rows = [
        (order.rank_of[stage], kind, stage, batch, start, end)
        for (kind, stage, batch), (start, end) in clock.done.items()
        if not (kind == "B" and ("I", stage, batch) in clock.done) and end > start
    ]
    steps = [max(side[1]) for side in sides]
    actions = pd.DataFrame(rows, columns=["rank", "kind", "stage", "micro_batch", "start_us", "end_us"])
    lasts = actions[actions["kind"].isin(_KINDS)].assign(us=lambda frame: frame["end_us"] - frame["start_us"])
    busy = lasts.groupby("rank")["us"].sum().reindex(range(len(ends)), fill_value=0.0)
    tails = [end - gpu for end, gpu in zip(ends, clock.gpu, strict=True)]
    return Planned(
        order=order,
        layout=layout,
        is_balanced=is_balanced,
        step_us=steps[0],
        step_high_us=max(steps),
        busy_us=(busy + tails).tolist(),
        peak_bytes=peaks,
        peak_high_bytes=[max(low, high) for low, high in zip(peaks, sides[-1][2], strict=True)],
        actions=actions,
    )


def _first_whole(costs: list[dict[str, Cost]], layout: Layout, order: Order) -> list[dict[str, Cost]]:
    """The costs with backwards of the first stage that come at once, where those of others come in two parts."""
    made = list(costs)
    for unit in layout[0] if order.is_split else ():
        made[unit] = {**costs[unit], "I": Cost(0.0), "W": costs[unit]["B"]}
    return made


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

    A stage begins with a layer: what comes before the layers or after them, or within, stays with its neighbour.
    None with fewer layers than stages.
    """
    layers = [at for at, unit in enumerate(model.units) if unit.is_layer]
    if len(layers) < num_stages:
        return None
    cuts = [0, *layers[1:], len(model.units)]
    us = np.concatenate([[0.0], np.cumsum([unit.costs["F"].us + unit.backward_us for unit in model.units])])[cuts]
    # By stages and cuts: the busiest stage, the sum of the squares of all, and where the last stage begins.
    best = {(1, end): (us[end], us[end] ** 2, 0) for end in range(1, len(cuts))}
    for stage in range(2, num_stages + 1):
        for end in range(stage, len(cuts)):
            last = [(begin, us[end] - us[begin]) for begin in range(stage - 1, end)]
            best[stage, end] = min(
                (max(best[stage - 1, begin][0], own), best[stage - 1, begin][1] + own**2, begin) for begin, own in last
            )
    ends = [len(cuts) - 1]
    for stage in range(num_stages, 0, -1):
        ends.append(best[stage, ends[-1]][2])
    return [range(cuts[begin], cuts[end]) for end, begin in pairwise(ends)][::-1]
