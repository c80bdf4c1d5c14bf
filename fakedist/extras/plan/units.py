"""The units of a pipelined model, from a recorded rank of each stage: what each takes forward and backward.

A unit is a repeated layer, or a module before or after them with what follows it: an embedding, a head with its loss.
A rank's launches of the timed step are cut into passes, each of one unit, forward or backward, for one micro-batch. A
pass takes what it adds to the end of the rank's step, placed alone. The allocations between its first operation and
its last say what it leaves allocated, and how much more it needs meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fakedist.analysis.evidence import Room
from fakedist.analysis.recording import Array
from fakedist.cost_model.estimated import Models, communication_for
from fakedist.cost_model.hosts import scaled
from fakedist.cost_model.job.stages import from_first_transfer
from fakedist.cost_model.step import StepLaunches, StepPrices
from fakedist.errors import JobError
from fakedist.options.pricing import Pricing
from fakedist.results.job_time import check_every_stage, check_one_job, price_together
from fakedist.results.replayed import room_of_run
from fakedist.results.run import Run

_NUMBERED = re.compile(r"(?:^|\.)(\d+)$")
_POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True)
class Cost:
    """A pass of a unit for one micro-batch.

    Attributes:
        us: Its time on the GPU, *estimated*.
        host_us: The time in which the host launches it.
        net_bytes: More, or less, allocated after it than before.
        peak_bytes: The most allocated during it, above what was before.
        first_peak_bytes: The same of the step's first micro-batch, which makes the gradients.
    """

    us: float
    host_us: float = 0.0
    net_bytes: float = 0.0
    peak_bytes: float = 0.0
    first_peak_bytes: float = 0.0


@dataclass(frozen=True)
class Unit:
    """A layer, or a module before or after the layers.

    Attributes:
        name: As the rank that has it calls it.
        is_layer: It is one of the repeated layers.
        costs: By kind of pass: F, B (both gradients), I (the gradients of inputs), W (those of weights). Kinds that the
            recording lacks are left out.
        kept_bytes: Allocated throughout a step: parameters and optimizer states.
        gradient_bytes: From its first backward of a step until the optimizer has run.
    """

    name: str
    is_layer: bool
    costs: Mapping[str, Cost]
    kept_bytes: int
    gradient_bytes: int

    @property
    def backward_us(self) -> float:
        """Both gradients."""
        return self.costs["B"].us if "B" in self.costs else self.costs["I"].us + self.costs["W"].us


@dataclass(frozen=True)
class PipelineModel:
    """A recorded pipeline as units, in the order in which a micro-batch passes through them.

    Attributes:
        stages: The recorded stages: numbers of units. Neighbouring stages of one rank are one.
        num_micro_batches: Recorded.
        transfer_us: A send to the next stage.
        is_stream_by_peer: A rank's transfers with each neighbour are on a stream of their own, else all are on one.
        boundary_bytes: What a stage receives of a micro-batch.
        is_torch: torch.distributed.pipelining ran it.
        lead_us: Of each rank, in order: the host before its first forward.
        tail_us: Its step after its last backward, with its optimizer: on the GPU, and on the host.
        tail_share: Allocated then, above parameters, gradients and optimizer states, as a share of those kept.
        other_bytes: Allocated when a step begins, by no unit: on a rank, and on that of the last stage.
        rank_bytes: Parameters and optimizer states of its units, by which the tails of other layouts are taken.
        room: The memory that a rank may reserve.
        cached_bytes: The most that a recorded rank reserved and had not allocated.
    """

    units: Sequence[Unit]
    stages: Sequence[Sequence[int]]
    num_micro_batches: int
    transfer_us: float
    is_stream_by_peer: bool
    boundary_bytes: float
    is_torch: bool
    lead_us: Sequence[float]
    tail_us: Sequence[tuple[float, float]]
    tail_share: float
    other_bytes: tuple[float, float]
    rank_bytes: Sequence[float]
    room: Room
    cached_bytes: int

    @property
    def is_split(self) -> bool:
        """Whether some backwards were recorded in two parts: inputs, then weights."""
        return any("I" in unit.costs for unit in self.units)


def read_pipeline(runs: Sequence[Run], pricing: Pricing) -> PipelineModel:
    """The units of a job that ran on a rank of each stage.

    Raises:
        JobError: Runs of stages are missing, or the step does not run each unit equally often.
    """
    _, ranks = check_one_job(runs)
    check_every_stage(runs)
    if len(ranks) < 2:
        raise JobError("a pipeline has a rank of each stage", "fakedist profile --rank stages -o RUNS ... makes them")
    models, tables = price_together(ranks, pricing)
    read = [_Rank(ranks[rank], of_rank, models) for rank, of_rank in tables]
    if len({rank.number for rank in read}) > 1:
        raise JobError("the ranks ran different numbers of micro-batches", "give runs of one job's ranks")
    keys = _ordered(read)
    owner = [rank for _, rank, _ in keys]
    begins = [at for at in range(len(keys)) if not at or owner[at] != owner[at - 1]]
    kept_bytes, others = [float(rank.kept_bytes[1:].sum()) for rank in read], [rank.other_bytes for rank in read]
    return PipelineModel(
        units=[read[rank].unit(row) for _, rank, row in keys],
        stages=[range(*ends) for ends in zip(begins, [*begins[1:], len(keys)], strict=True)],
        num_micro_batches=read[0].number,
        transfer_us=float(np.mean(np.concatenate([rank.transfers_us for rank in read]))),
        is_stream_by_peer=max(rank.num_streams for rank in read) > 1,
        boundary_bytes=max(rank.received_bytes for rank in read),
        is_torch=read[0].is_torch,
        lead_us=[rank.lead_us for rank in read],
        tail_us=[rank.tail_us for rank in read],
        tail_share=max(rank.tail_bytes / max(kept, 1.0) for rank, kept in zip(read, kept_bytes, strict=True)),
        other_bytes=(max([*others[: owner[-1]], *others[owner[-1] + 1 :]]), others[owner[-1]]),
        rank_bytes=kept_bytes,
        room=room_of_run(read[0].run),
        cached_bytes=max(rank.run.peak_reserved_bytes - rank.run.peak_allocated_bytes for rank in read),
    )


def _ordered(read: Sequence[_Rank]) -> list[tuple[tuple[float, int], int, int]]:
    """A key, the rank's place and the layer's row of each unit, in the order of a forward.

    Layers that are numbered through the job are in the order of their numbers, whatever ranks they are on.
    """
    numbers = [rank.numbers[row] for rank in read for row in rank.units if rank.numbers[row] >= 0]
    is_through = len(set(numbers)) == len(numbers)
    keys = []
    for place, rank in enumerate(read):
        last = -1.0
        for position, row in enumerate(rank.units):
            last = float(rank.numbers[row]) if rank.numbers[row] >= 0 else last
            keys.append(((last if is_through else float(place), position), place, row))
    return sorted(keys)


def unit_rows(names: Sequence[str], parents: Sequence[int]) -> tuple[Array, Array]:
    """By row of ``layers``, the row of the unit that it is in (0 for none), and the number in its name (-1 for none).

    The outermost module whose name ends in a number is a unit; so is one that has none within it and is in none.
    """
    found = [_NUMBERED.search(name) for name in names]
    unit, holds = np.zeros(len(names), "i8"), np.zeros(len(names), bool)
    for row, parent in enumerate(parents):
        if row and unit[parent]:
            unit[row] = unit[parent]
        elif found[row]:
            unit[row] = row
    for row in range(len(names) - 1, 0, -1):
        holds[parents[row]] |= holds[row] | (unit[row] > 0)
    for row, parent in enumerate(parents):
        if row and not unit[row]:
            unit[row] = unit[parent] or (0 if holds[row] or not parent else row)
    return unit, np.array([int(match[1]) if match else -1 for match in found])


class _Rank:
    """A recorded rank, cut into passes."""

    def __init__(self, run: Run, tables: Mapping[str, pd.DataFrame], models: Models) -> None:
        self.run = run
        layers = run.table("layers")
        self.names = layers["name"].astype(str).tolist()
        self.of_layer, self.numbers = unit_rows(self.names, layers["parent"].tolist())
        launches = from_first_transfer(tables["launches"], tables["calls"])
        self._time(launches, tables, models)
        self.passes = self._passes(launches, tables["work"])
        forwards = self.passes[self.passes["kind"] == "F"]
        self.units = forwards["unit"].drop_duplicates().tolist()
        counts = self.passes.groupby(["unit", "kind"]).size().unstack(fill_value=0)
        counts = counts.reindex(columns=["F", "B", "I", "W"], fill_value=0)
        self.number = int(counts["F"].max()) if len(counts) else 0
        is_whole = (counts["F"] == self.number) & (counts["B"] + counts["I"] == self.number)
        is_whole &= counts["I"] == counts["W"]
        if not self.number or not is_whole.all():
            name = self.names[counts.index[~is_whole][0]] if len(counts) else "no layer"
            raise JobError(
                f"rank {run.summary.rank}: {name} does not run once forward and backward for each micro-batch",
                "a schedule can be planned of a step of equal micro-batches, without CUDA graphs",
            )
        usual_us = forwards.loc[forwards["unit"] == self.units[0], "host_us"].median()
        self.lead_us = max(float(forwards["host_us"].iloc[0] - usual_us), 0.0)
        self._weigh()

    def _time(self, launches: pd.DataFrame, tables: Mapping[str, pd.DataFrame], models: Models) -> None:
        """How long each launch makes the step on the GPU, and on the host, and how long transfers take."""
        prices = StepPrices(models.prices, models.network.experts, models.host.costs)
        work, of_work = tables["work"], launches["work"].to_numpy("i8")
        counts = np.bincount(of_work[of_work >= 0], minlength=len(work))
        communication = communication_for({**tables, "launches": launches}, models.gpu, models.network)
        step = StepLaunches(launches, work, prices.price(work, counts), communication)
        calls = tables["calls"]
        pairs = calls.loc[calls["operation"].astype(str).str.startswith(_POINT_TO_POINT), "sequence"]
        self.is_pair = launches["call"].isin(pairs).to_numpy(bool)
        durations = np.nan_to_num(step.place(prices.host).time_us)
        self.num_streams = launches.loc[self.is_pair & (of_work >= 0), "stream"].nunique()
        self.transfers_us = durations[self.is_pair & (of_work >= 0)]
        durations = np.where(self.is_pair, 0.0, durations)
        self.added_us, self.host_us = (np.zeros(len(launches)) for _ in range(2))
        without_host = step.timeline.place(durations, scaled(prices.host, 0.0))
        self.added_us[of_work >= 0] = np.diff(np.maximum.accumulate(without_host.ends_us), prepend=0.0)
        self.host_us = np.diff(step.timeline.place(durations * 0.0, prices.host).passed_us, prepend=0.0)

    def _passes(self, launches: pd.DataFrame, work: pd.DataFrame) -> pd.DataFrame:
        """The passes: unit, kind, first and last operation, and the times of their launches."""
        phase = launches["phase"].astype(str)
        is_forward = ((phase == "forward") & ~launches["recompute"].astype(bool)).to_numpy(bool)
        is_inside = phase.isin(("forward", "backward")).to_numpy(bool)
        of_work = launches["work"].to_numpy("i8")
        unit = self.of_layer[launches["layer"].to_numpy("i8")]
        is_product = (work["family"].astype(str) == "gemm").to_numpy(bool) & (work["batch"] <= 1).to_numpy(bool)
        makes = np.where(is_product, np.where(work["layout"].astype(str) == "NT", 1, -1), 0)[of_work] * (of_work >= 0)
        token = list(zip(launches["layer"].tolist(), of_work.tolist(), strict=True))
        rows = np.flatnonzero((of_work >= 0) & (phase != "optimizer").to_numpy(bool))
        inside = rows[is_inside[rows] & ~self.is_pair[rows]]
        rows = rows[rows <= inside[-1]] if len(inside) else rows[:0]
        cuts: list[list[int]] = [[]]
        for row in rows.tolist():
            last = cuts[-1]
            known = next((at for at in last if unit[at]), -1)
            if self.is_pair[row]:
                if known >= 0:
                    cuts.append([])
                continue
            if known >= 0 and is_inside[row]:
                is_other = is_forward[row] != is_forward[known]
                if is_other or (unit[row] and (unit[row] != unit[known] or token[row] == token[known])):
                    cuts.append([])
            cuts[-1].append(row)
        cuts = [part for cut in cuts if cut for part in _parts(cut, makes, unit)]
        ends = [0, *(cut[-1] + 1 for cut in cuts)]
        op = launches["op"].to_numpy("i8")
        made = []
        for begin, cut in zip(ends, cuts, strict=False):
            known = next((at for at in cut if unit[at]), cut[0])
            kind = "F" if is_forward[known] else _kind(makes[cut], made[-1][1] if made else "B")
            times = (float(self.added_us[begin : cut[-1] + 1].sum()), float(self.host_us[begin : cut[-1] + 1].sum()))
            made.append((int(unit[known]), kind, int(op[cut].min()), int(op[cut].max()), *times))
        self.tail_us = (float(self.added_us[ends[-1] :].sum()), float(self.host_us[ends[-1] :].sum()))
        return pd.DataFrame(made, columns=["unit", "kind", "first", "last", "us", "host_us"])

    def _weigh(self) -> None:
        """The memory of each pass, and what stays."""
        blocks, events = self.run.table("blocks"), self.run.table("events")
        allocated = events["allocated_bytes"].to_numpy("f8")
        step = int(self.run.table("launches")["step"].iloc[0])
        own = blocks[blocks["step"] == step]
        op, made = own["op"].to_numpy("i8"), own["alloc_event"].to_numpy("i8")
        if not len(own) or op[-1] < self.passes["last"].max():
            raise JobError(
                f"the memory of the timed step of rank {self.run.summary.rank} was not recorded", "record it to its end"
            )
        over = np.append(made, len(allocated))
        starts = over[np.searchsorted(op, self.passes["first"], "left")]
        ends = over[np.searchsorted(op, self.passes["last"], "right")]
        levels = np.append(allocated[0] * 0, allocated)  # before each event
        peaks = [levels[begin : end + 1].max() - levels[begin] for begin, end in zip(starts, ends, strict=True)]
        self.passes = self.passes.assign(net=levels[ends] - levels[starts], peak=peaks)
        after = int(ends[-1])
        calls = self.run.table("calls")
        received = calls[(calls["step"] == step) & (calls["operation"].astype(str) == "recv")]
        self.received_bytes = float(received["bytes_out"].median()) if len(received) else 0.0
        files = self.run.table("frames")["filename"].astype(str)
        self.is_torch = bool(files.str.contains("/torch/distributed/pipelining/").any())
        next_step = blocks.loc[blocks["step"] > step, "alloc_event"]
        close = int(next_step.min()) if len(next_step) else len(allocated)
        stays = blocks["free_event"] > after
        unit = self.of_layer[blocks["layer"].to_numpy("i8")]
        is_kept = ((blocks["alloc_event"] < starts[0]) & stays).to_numpy(bool)
        is_gradient = stays & (blocks["step"] == step) & (blocks["alloc_event"] < after)
        is_gradient = (is_gradient & (blocks["category"].astype(str) == "gradient")).to_numpy(bool)
        size = blocks["bytes"].to_numpy("f8")
        self.kept_bytes = np.bincount(unit[is_kept], size[is_kept], len(self.names))
        self.gradient_bytes = np.bincount(unit[is_gradient], size[is_gradient], len(self.names))
        self.other_bytes = float(levels[starts[0]] - self.kept_bytes[1:].sum())
        self.tail_bytes = float(levels[after : close + 1].max() - levels[starts[0]] - self.gradient_bytes.sum())

    def unit(self, row: int) -> Unit:
        """The unit of a row of ``layers``."""
        own = self.passes[self.passes["unit"] == row]
        costs = {}
        for kind, of_kind in own.groupby("kind"):
            later = of_kind.iloc[1:] if len(of_kind) > 1 else of_kind
            costs[str(kind)] = Cost(
                float(of_kind["us"].median()),
                float(of_kind["host_us"].median()),
                float(later["net"].median()),
                float(later["peak"].median()),
                float(of_kind["peak"].iloc[0]),
            )
        return Unit(
            name=self.names[row],
            is_layer=bool(self.numbers[row] >= 0),
            costs=_balanced(costs),
            kept_bytes=int(self.kept_bytes[row]),
            gradient_bytes=int(self.gradient_bytes[row]),
        )


def _parts(rows: list[int], makes: Array, unit: Array) -> list[list[int]]:
    """The rows of a pass; those of two if all gradients of weights come before all others, or after them.

    One backward of several products makes both gradients of one after the other.
    """
    weights, inputs = ([at for at, row in enumerate(rows) if makes[row] == sign] for sign in (1, -1))
    if min(len(weights), len(inputs)) < 2 or (weights[-1] > inputs[0] and inputs[-1] > weights[0]):
        return [rows]
    last = min(weights[-1], inputs[-1])
    cut = next((at for at in range(last + 1, len(rows)) if unit[rows[at]]), len(rows))
    return [rows[:cut], rows[cut:]]


def _kind(makes: Array, before: str) -> str:
    """B, I or W, by the gradients that the products of a backward make; one without any is as the last."""
    has_weights, has_inputs = bool((makes > 0).any()), bool((makes < 0).any())
    if not has_weights and not has_inputs:
        return before if before != "F" else "B"
    return "B" if has_weights and has_inputs else "W" if has_weights else "I"


def _balanced(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """The costs with backwards that leave nothing of what their forward saved."""
    made = dict(costs)
    saved = costs["F"].net_bytes
    if "B" in made:
        made["B"] = replace(made["B"], net_bytes=-saved)
    if "I" in made:
        made["W"] = replace(made["W"], net_bytes=-saved - made["I"].net_bytes)
    return made
