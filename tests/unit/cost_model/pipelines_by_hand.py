"""Recorded steps of pipelines, made from the order in which a schedule of torch.distributed.pipelining acts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from fakedist.analysis.launches import launch_table, work_table
from fakedist.rundir.launch_records import WorkRow
from tests.unit.cost_model.launches_by_hand import ALL_REDUCE, COPY, PRODUCT, launch, record

SEND = ALL_REDUCE._replace(name="send", operation="send")
RECV = ALL_REDUCE._replace(name="recv", operation="recv")
INPUT_GRADIENT = PRODUCT._replace(operation="input gradient", layout="NN")
WEIGHT_GRADIENT = PRODUCT._replace(operation="weight gradient", layout="NT")
#: Rows of the table groups.
_FORWARD, _BACKWARD, _REPLICAS = range(3)


class Act(NamedTuple):
    """A rank's work on one micro-batch: F, B (both gradients), I (of the input) or W (of the weights)."""

    kind: str
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Shape:
    """A pipeline: its ranks, stages of each, and micro-batches."""

    schedule: str
    num_ranks: int
    num_chunks: int
    micro_batches: int

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        if "V" in self.schedule and stage >= self.num_ranks:
            return 2 * self.num_ranks - 1 - stage
        return stage % self.num_ranks

    def acts(self, rank: int) -> list[Act]:
        """A rank's actions, in order, as torch's schedule has it."""
        from fakedist.extras.plan.torch_orders import order_of  # imports torch, which takes three seconds

        made = order_of(self.schedule, self.num_ranks, self.num_chunks, self.micro_batches)
        return [Act(*action) for action in made[1][rank] if action[0] in ("F", "B", "I", "W")]


class Recording:
    """The step of one rank, as it is recorded. Sends and receives are on streams of their own."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.shape, self.rank = shape, rank
        self.rows: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []

    def tables(self) -> Mapping[str, pd.DataFrame]:
        """The tables launches, work, calls and groups."""
        seen: dict[tuple[str, int], int] = {}
        for act in self.shape.acts(self.rank):
            number = seen.get((act.kind, act.stage), 0)
            seen[act.kind, act.stage] = number + 1
            self.act(act, is_first=number == 0, is_last=number == self.shape.micro_batches - 1)
        self.rows.append(launch(COPY, phase="optimizer"))
        made = record(self.rows)
        ranks = f"0-{self.shape.num_ranks - 1}"
        groups = [(str(row), name, "nccl", self.shape.num_ranks, self.rank, ranks) for row, name in enumerate("FB")]
        groups.append(("2", "DP", "nccl", 2, 0, f"{self.rank},{self.rank + 100}"))
        names = ["name", "description", "backend", "size", "group_rank", "ranks"]
        return {
            "launches": launch_table(made),
            "work": work_table(made),
            "calls": pd.DataFrame(self.calls),
            "groups": pd.DataFrame(groups, columns=names),
        }

    def act(self, act: Act, *, is_first: bool, is_last: bool) -> None:
        """Forward or backward of one micro-batch. The first adds to no gradient, the last reduces them."""
        layer, last = 1 + act.stage, self.shape.num_stages - 1
        if act.kind == "F":
            self.receive(act.stage - 1, _FORWARD)
            self.rows += [launch(COPY, layer=layer), launch(PRODUCT, layer=layer)]
            self.send(act.stage + 1, _FORWARD)
            return
        if act.kind in "BI":
            if act.stage < last:
                self.receive(act.stage + 1, _BACKWARD)
            self.rows.append(launch(INPUT_GRADIENT, layer=layer, phase="backward"))
        if act.kind in "BW":
            work = WEIGHT_GRADIENT._replace(accumulates=not is_first)
            self.rows.append(launch(work, layer=layer, phase="backward"))
            if is_last:
                self.call(ALL_REDUCE, _REPLICAS, -1, 9)
        if act.kind in "BI" and act.stage:
            self.send(act.stage - 1, _BACKWARD)

    def receive(self, stage: int, group: int) -> None:
        """Wait for what a stage sends, unless this rank has that stage."""
        if stage >= 0 and self.shape.rank_of(stage) != self.rank:
            event = self.call(RECV, group, self.shape.rank_of(stage), 7 + group)
            self.rows.append(launch(what="stream_waits", event=event, phase="forward"))

    def send(self, stage: int, group: int) -> None:
        """Give a stage what it waits for, unless this rank has that stage."""
        if stage < self.shape.num_stages and self.shape.rank_of(stage) != self.rank:
            self.call(SEND, group, self.shape.rank_of(stage), 11 + group)

    def call(self, work: WorkRow, group: int, peer: int, stream: int) -> int:
        """A call that begins after what was computed. Returns the event of its end."""
        begin, end = 2 * len(self.rows) + 1, 2 * len(self.rows) + 2
        self.rows.append(launch(what="stream_records", event=begin))
        self.rows.append(launch(what="stream_waits", event=begin, stream=stream))
        self.rows.append(launch(work, stream=stream, call=len(self.calls), num_operations=0))
        self.rows.append(launch(what="stream_records", event=end, stream=stream))
        sizes = {"bytes_in": 1 << 20, "bytes_out": 1 << 20, "step": 2, "phase": "forward"}
        self.calls.append(
            {"sequence": len(self.calls), "operation": work.operation, "group": group, "peer": peer} | sizes
        )
        return end
