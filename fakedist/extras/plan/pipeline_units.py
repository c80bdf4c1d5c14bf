"""The units of a pipelined model, from a recorded rank of each stage: what each takes forward and backward.

A unit is a repeated layer, or a module before or after them with what follows it: an embedding, a head with its loss.
A rank's launches of the timed step are cut into passes, each of one unit, forward or backward, for one micro-batch. A
pass takes what it adds to the end of the rank's step, placed alone. The allocations between its first operation and
its last say what it leaves allocated, and how much more it needs meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.cost_model.estimated import Models, communication_for
from fakedist.cost_model.hosts import scaled
from fakedist.cost_model.job.micro_batches import backward_kind, backward_parts, repeated_passes, unit_rows
from fakedist.cost_model.job.schedules import Wire
from fakedist.cost_model.step import StepLaunches, StepPrices
from fakedist.errors import JobError
from fakedist.options.pricing import Pricing
from fakedist.results.job_ranks import check_one_job
from fakedist.results.job_time import check_every_stage, price_together
from fakedist.results.run import Run

#: A layer that keeps so many times less than another has its parameters in a buffer that others share.
_UNLIKE = 4
_TORCH = "/torch/distributed/pipelining/"


class Cost(NamedTuple):
    """A pass of a unit for one micro-batch: its times on the GPU and on the host, *estimated*.

    ``net_bytes`` is how much more is allocated after it than before, ``peak_bytes`` the most during it.
    """

    us: float
    host_us: float = 0.0
    net_bytes: float = 0.0
    peak_bytes: float = 0.0


@dataclass(frozen=True)
class Unit:
    """A layer, or a module before or after the layers.

    Attributes:
        name: As the rank that has it calls it.
        place: Of the rank that recorded it, in the pipeline.
        is_layer: It is one of the repeated layers.
        costs: By kind of pass: F, B (both gradients), I (the gradients of inputs), W (those of weights). Kinds that
            were not recorded follow from the others.
        is_split: I and W were recorded.
        kept_bytes: Allocated throughout a step: parameters and optimizer states.
        gradient_bytes: From its first backward of a step until the optimizer has run.
    """

    name: str
    place: int
    is_layer: bool
    costs: Mapping[str, Cost]
    is_split: bool
    kept_bytes: float
    gradient_bytes: float


@dataclass(frozen=True)
class PipelineModel:
    """A recorded pipeline as units, in the order in which a micro-batch passes through them.

    Attributes:
        stages: The recorded stages: numbers of units. Neighbouring stages of one rank are one.
        ranks: Those that ran, in the order of the pipeline.
        last_rank: The place of the one with the last stage.
        received_bytes: What a stage receives of a micro-batch.
    """

    units: Sequence[Unit]
    stages: Sequence[Sequence[int]]
    ranks: Sequence[RecordedRank]
    last_rank: int
    wire: Wire
    received_bytes: float


def read_pipeline(runs: Sequence[Run], pricing: Pricing) -> PipelineModel:
    """The units of a job that ran on a rank of each stage.

    Raises:
        JobError: Runs of stages are missing, or the step does not run each unit equally often.
    """
    _, by_rank = check_one_job(runs)
    check_every_stage(runs)
    models, tables = price_together(by_rank, pricing)
    ranks = [RecordedRank(by_rank[rank], of_rank, models) for rank, of_rank in tables]
    if len(ranks) < 2 or len({rank.num_micro_batches for rank in ranks}) > 1:
        raise JobError("a pipeline has a rank of each stage", "fakedist profile --rank stages -o RUNS ... makes them")
    units = _ordered(ranks)
    begins = [at for at in range(len(units)) if not at or units[at][0] != units[at - 1][0]]
    split_us, whole_us = np.sum([ranks[place].split_us(row) for place, row in units], axis=0)
    share = split_us / whole_us if whole_us else 1.0
    transfers_us = np.concatenate([rank.transfers_us for rank in ranks])
    return PipelineModel(
        units=[ranks[place].unit(place, row, share) for place, row in units],
        stages=[range(*ends) for ends in zip(begins, [*begins[1:], len(units)], strict=True)],
        ranks=ranks,
        last_rank=units[-1][0],
        wire=Wire(float(np.median(transfers_us)), max(rank.num_streams for rank in ranks) > 1),
        received_bytes=max(rank.received_bytes for rank in ranks),
    )


def _ordered(ranks: Sequence[RecordedRank]) -> list[tuple[int, int]]:
    """The rank's place and the layer's row of each unit, in the order of a forward.

    Layers that are numbered through the job are in the order of their numbers, whatever ranks they are on.
    """
    numbers = [rank.numbers[row] for rank in ranks for row in rank.rows if rank.numbers[row] >= 0]
    keys = []
    for place, rank in enumerate(ranks):
        last = -1
        for position, row in enumerate(rank.rows):
            last = rank.numbers[row] if rank.numbers[row] >= 0 else last
            keys.append((last if len(set(numbers)) == len(numbers) else place, position, place, row))
    return [key[2:] for key in sorted(keys)]


class RecordedRank:
    """A rank of a pipeline, its timed step cut into passes.

    Attributes:
        rows: Of ``layers``, of its units, in the order of a forward.
        num_micro_batches: Of the step.
        transfers_us: What each send and receive takes.
        num_streams: That it sends and receives on.
        received_bytes: What it receives at once; 0 for nothing.
        lead_us: The host before the first forward.
        tail_us: Its step after its last backward, with its optimizer: on the GPU, and on the host.
        kept_bytes: Parameters and optimizer states, by row of ``layers``; those of no unit at 0.
        other_bytes: Allocated when a step begins, by no unit.
        tail_bytes: Allocated after the last backward, above ``kept_bytes`` and gradients.
        is_torch: torch.distributed.pipelining ran it.
        is_attributed: Each of its layers has bytes of its own, and does not share a buffer with others.
    """

    def __init__(self, run: Run, tables: Mapping[str, pd.DataFrame], models: Models) -> None:
        self.run = run
        self.names = run.table("layers")["name"].astype(str).tolist()
        units, self.numbers = unit_rows(self.names, run.table("layers")["parent"].tolist())
        launches = tables["launches"].assign(op=_numbered(tables["launches"]["op"]))
        self._unit_of = _joined(np.array(units), self.numbers, launches)
        self._time(launches, tables, models)
        self._passes = self._cut(launches, tables["work"])
        forwards = self._passes[self._passes["kind"] == "F"]
        counts = self._passes.groupby(["unit", "kind"]).size().unstack(fill_value=0)
        counts = counts.reindex(columns=list("FBIW"), fill_value=0)
        self.rows = forwards["unit"].drop_duplicates().tolist()
        self.num_micro_batches = number = int(counts["F"].max()) if len(counts) else 0
        is_whole = (counts["F"] == number) & (counts["B"] + counts["I"] == number) & (counts["I"] == counts["W"])
        if not number or not is_whole.all():
            name = self.names[counts.index[~is_whole][0]] if number else "nothing"
            raise JobError(
                f"rank {run.summary.rank}: {name} does not run once forward and backward for each micro-batch",
                "record a step of equal micro-batches, without CUDA graphs",
            )
        own = forwards.loc[forwards["unit"] == self.rows[0], "host_us"]
        self.lead_us = max(float(own.iloc[0] - own.median()), 0.0)
        self.is_torch = bool(run.table("frames")["filename"].astype(str).str.contains(_TORCH).any())
        self._weigh()

    def _time(self, launches: pd.DataFrame, tables: Mapping[str, pd.DataFrame], models: Models) -> None:
        """How much longer each launch makes the step on the GPU, and on the host, and what transfers take."""
        prices = StepPrices(models.prices, models.network.experts, models.host.costs)
        work, calls, of_work = tables["work"], tables["calls"], launches["work"].to_numpy("i8")
        self._has_work = of_work >= 0
        counts = np.bincount(of_work[self._has_work], minlength=len(work))
        communication = communication_for({**tables, "launches": launches}, models.gpu, models.network)
        step = StepLaunches(launches, work, prices.price(work, counts), communication)
        pairs = calls[calls["operation"].astype(str).str.startswith(("send", "recv"))]
        self._is_pair = launches["call"].isin(pairs["sequence"]).to_numpy(bool)
        durations = np.nan_to_num(step.place(prices.host).time_us)
        self.num_streams = launches.loc[self._is_pair & self._has_work, "stream"].nunique()
        self.transfers_us = durations[self._is_pair & self._has_work]
        received = pairs[(pairs["step"] == launches["step"].iloc[0]) & (pairs["operation"].astype(str) == "recv")]
        self.received_bytes = float(received["bytes_out"].median()) if len(received) else 0.0
        durations = np.where(self._is_pair, 0.0, durations)
        ends = step.timeline.place(durations, scaled(prices.host, 0.0)).ends_us
        self._us = np.zeros(len(launches))
        self._us[self._has_work] = np.diff(np.maximum.accumulate(ends), prepend=0.0)
        self._host_us = np.diff(step.timeline.place(durations * 0.0, prices.host).passed_us, prepend=0.0)

    def _cut(self, launches: pd.DataFrame, work: pd.DataFrame) -> pd.DataFrame:
        """The passes: unit, kind, first and last operation, and their times."""
        phase, of_work = launches["phase"].astype(str), launches["work"].to_numpy("i8")
        is_forward = ((phase == "forward") & ~launches["recompute"].astype(bool)).to_numpy(bool)
        is_inside = phase.isin(("forward", "backward")).to_numpy(bool)
        unit = self._unit_of[launches["layer"].to_numpy("i8")]
        is_product = ((work["family"].astype(str) == "gemm") & (work["batch"] <= 1)).to_numpy(bool)
        makes = np.where(is_product, np.where(work["layout"].astype(str) == "NT", 1, -1), 0)[of_work] * self._has_work
        names = (work["name"].astype(str) + work["operation"].astype(str)).to_numpy(str)[of_work]
        token = list(zip(launches["layer"].tolist(), names.tolist(), strict=True))
        rows = np.flatnonzero(self._has_work & (phase != "optimizer").to_numpy(bool))
        last = max(rows[is_inside[rows] & ~self._is_pair[rows]], default=-1)
        cuts: list[list[int]] = [[]]
        for row in rows[rows <= last].tolist():
            known = next((at for at in cuts[-1] if unit[at]), None)
            is_other = known is not None and is_inside[row] and is_forward[row] != is_forward[known]
            is_other |= known is not None and is_inside[row] and unit[row] not in (0, unit[known])
            if known is not None and (self._is_pair[row] or is_other):
                cuts.append([])
            cuts[-1] += [] if self._is_pair[row] else [row]
        cuts = [part for cut in cuts for part in repeated_passes(cut, token, unit)]
        passes = [part for cut in cuts for part in backward_parts(cut, makes, unit)]
        ends = [0, *(rows[-1] + 1 for rows in passes)]
        us, host_us = (np.append(0.0, np.cumsum(times))[[*ends, len(launches)]] for times in (self._us, self._host_us))
        kinds: list[str] = []
        for cut in passes:
            known = next((at for at in cut if unit[at]), cut[0])
            kinds.append("F" if is_forward[known] else backward_kind(makes[cut], kinds[-1] if kinds else "F"))
        op = launches["op"].to_numpy("f8")
        self.tail_us = (float(us[-1] - us[-2]), float(host_us[-1] - host_us[-2]))
        return pd.DataFrame(
            {
                "unit": [max(unit[cut]) for cut in passes],
                "kind": kinds,
                "first": [op[cut].min() for cut in passes],
                "last": [op[cut].max() for cut in passes],
                "us": np.diff(us)[:-1],
                "host_us": np.diff(host_us)[:-1],
            }
        )

    def _weigh(self) -> None:
        """The memory of each pass, and what stays."""
        blocks, step = self.run.table("blocks"), int(self.run.table("launches")["step"].iloc[0])
        is_own = (blocks["step"] == step).to_numpy(bool)
        op, made = _numbered(blocks["op"])[is_own], blocks["alloc_event"].to_numpy("i8")[is_own]
        if not len(op) or op[-1] < self._passes["last"].max():
            raise JobError(f"rank {self.run.summary.rank} has no memory of its timed step", "record it to its end")
        levels = np.append(0.0, self.run.table("events")["allocated_bytes"].to_numpy("f8"))  # before each event
        over = np.append(made, len(levels) - 1)
        starts = over[np.searchsorted(op, self._passes["first"].to_numpy(), "left")]
        ends = over[np.searchsorted(op, self._passes["last"].to_numpy(), "right")]
        starts = np.maximum(starts, np.append(0, ends[:-1]))
        peaks = [levels[begin : end + 1].max() - levels[begin] for begin, end in zip(starts, ends, strict=True)]
        self._passes = self._passes.assign(net_bytes=levels[ends] - levels[starts], peak_bytes=peaks)
        later = blocks.loc[blocks["step"] > step, "alloc_event"]
        size, unit = blocks["bytes"].to_numpy("f8"), self._unit_of[blocks["layer"].to_numpy("i8")]
        stays = blocks["free_event"] > ends[-1]
        is_kept = stays & (blocks["alloc_event"] < starts[0])
        is_gradient = (
            stays & is_own & (blocks["alloc_event"] < ends[-1]) & (blocks["category"].astype(str) == "gradient")
        )
        self.kept_bytes, self._gradients = (
            np.bincount(unit, size * own, len(self.names)) for own in (is_kept, is_gradient)
        )
        kept = [self.kept_bytes[row] for row in self.rows if self.numbers[row] >= 0]
        self.is_attributed = min(kept, default=0.0) * _UNLIKE > max(kept, default=0.0)
        self.other_bytes = float(levels[starts[0]] - self.kept_bytes[1:].sum())
        most = levels[ends[-1] : int(min(later, default=len(levels))) + 1].max()
        self.tail_bytes = float(most - levels[starts[0]] - self._gradients.sum())

    def _costs(self, row: int) -> dict[str, Cost]:
        """The recorded passes of a unit, by kind: times and bytes of most, the largest peak."""
        own = self._passes[self._passes["unit"] == row].groupby("kind")
        usual, peaks = own[["us", "host_us", "net_bytes"]].median(), own["peak_bytes"].max()
        return {str(kind): Cost._make([*usual.loc[kind], peaks[kind]]) for kind in usual.index}

    def split_us(self, row: int) -> tuple[float, float]:
        """How long a unit's gradients of inputs take, and both; nothing if they were recorded together."""
        costs = self._costs(row)
        return (costs["I"].us, costs["I"].us + costs["W"].us) if "I" in costs else (0.0, 0.0)

    def unit(self, place: int, row: int, share: float) -> Unit:
        """The unit of a row of ``layers``. A backward that was recorded whole is for this share one of inputs."""
        costs = self._costs(row)
        is_split, saved = "I" in costs, costs["F"].net_bytes
        if is_split:
            inputs, weights = costs["I"], costs["W"]._replace(net_bytes=-saved - costs["I"].net_bytes)
            peak = max(inputs.peak_bytes, inputs.net_bytes + weights.peak_bytes)
            costs["W"] = weights
            costs.setdefault("B", Cost(inputs.us + weights.us, inputs.host_us + weights.host_us, peak_bytes=peak))
        costs["B"] = whole = costs["B"]._replace(net_bytes=-saved)
        if not is_split:
            costs |= {"I": whole._replace(us=whole.us * share), "W": Cost(whole.us * (1 - share))}
        name, number = self.names[row], self.numbers[row]
        return Unit(name, place, number >= 0, costs, is_split, self.kept_bytes[row], self._gradients[row])


def _joined(unit: Array, numbers: Sequence[int], launches: pd.DataFrame) -> Array:
    """The units with one for all modules before the layers, and one for all that follow a layer."""
    is_forward = (launches["phase"].astype(str) == "forward") & ~launches["recompute"].astype(bool)
    seen = pd.unique(unit[launches.loc[is_forward, "layer"].to_numpy("i8")]).tolist()
    layers = [at for at, row in enumerate(seen) if numbers[row] >= 0]
    others = [(at, row) for at, row in enumerate(seen) if row and numbers[row] < 0]
    for own in ([row for at, row in others if layers and (at > layers[0]) == is_after] for is_after in (False, True)):
        unit = np.where(np.isin(unit, own), max(own, default=0), unit)
    return unit


def _numbered(op: pd.Series) -> Array:
    """The numbers of operations; of what none of torch's operations made, that of the last one and a half."""
    number = op.to_numpy("f8")
    return np.where(number < 0, np.maximum.accumulate(number) + 0.5, number)
