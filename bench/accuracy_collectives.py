"""How close estimated collectives are to measured ones that were left out: part of ``make accuracy-times``.

- In one NVLink domain: every third message size is left out, and estimated from its neighbours; then every number of
  GPUs between the least and the most; then the most; then the whole GPU model.
- Between nodes: each shape (1, 2, 4, 8 GPUs on each of ten nodes) is left out in turn, and estimated with latencies
  that are fitted to the other three.

Writes the table of docs/accuracy/results.md between its two marks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.cost_model.collectives.collective_times import FABRICS, CollectiveTimes, Fabric, load_collectives
from fakedist.cost_model.nccl.settings import GroupShape
from fakedist.gpu.models.catalogue import GPUS

PAGE = Path(__file__).parent.parent / "docs" / "accuracy" / "results.md"
BEGIN, END = "<!-- make accuracy-collectives: begin -->", "<!-- make accuracy-collectives: end -->"
NDR = FABRICS["dgx-h100-ndr"]
NODES = 10
#: Messages from this size on count: smaller ones take the call's latency, which scatters between collectors.
LEAST_BYTES = 1 << 16
RINGS = ("all_gather", "reduce_scatter", "all_reduce")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Closeness:
    """How close the estimates of one group of left-out messages are: a row of the table."""

    where: str
    operation: str
    errors: Floats
    spread: float

    def row(self) -> str:
        """The row, as Markdown."""
        sizes = np.abs(np.expm1(self.errors))
        inside = (np.abs(self.errors) <= self.spread).mean()
        interval = f"{np.expm1(-self.spread):+.0%} to {np.expm1(self.spread):+.0%}"
        return (
            f"| {self.where} | {self.operation} | {len(self.errors):,} | {np.median(sizes):.1%} | "
            f"{np.quantile(sizes, 0.95):.1%} | {interval} | {inside:.0%} |"
        )


def main() -> None:
    """Write the table."""
    logs = load_collectives()
    found = [*in_domain(logs), *over_nodes(logs)]
    head = "| where | collective | left out | median error | 95th percentile | 90 % interval | held by |\n"
    table = head + "|---|---|---:|---:|---:|---:|---:|\n" + "\n".join(each.row() for each in found)
    print(table)
    page = PAGE.read_text()
    if BEGIN not in page or END not in page:
        sys.exit(f"{PAGE} lacks the marks {BEGIN} and {END}")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")


def in_domain(logs: pd.DataFrame) -> list[Closeness]:
    """Left-out sizes of messages, and left-out numbers of GPUs, in one NVLink domain."""
    found = []
    for gpu, rows in logs[logs["nodes"] == 1].groupby("gpu"):
        rows = rows[rows["operation"] != "send"].sort_values("bytes")
        place = rows.groupby(["operation", "gpus_per_node"]).cumcount(ascending=False)
        left = rows[(place % 3 == 1)]
        found.append(_judged(str(gpu), "sizes of messages", logs.drop(left.index), left))
        counts = np.sort(rows["gpus_per_node"].unique())[1:-1]
        parts = [rows[rows["gpus_per_node"] == count] for count in counts]
        if parts:
            judged = [_judged(str(gpu), "", logs.drop(part.index), part) for part in parts]
            errors = np.concatenate([each.errors for each in judged])
            found.append(replace(judged[0], operation="numbers of GPUs", errors=errors))
            most = rows[rows["gpus_per_node"] == rows["gpus_per_node"].max()]
            found.append(_judged(str(gpu), "the most GPUs", logs.drop(most.index), most))
        found.append(_judged(str(gpu), "the GPU model", logs[logs["gpu"] != gpu], rows))
    return found


def over_nodes(logs: pd.DataFrame) -> list[Closeness]:
    """Left-out shapes of ten nodes."""
    rows = logs[logs["nodes"] == NODES]
    found = []
    for gpus, held in rows.groupby("gpus_per_node"):
        rest = rows[rows["gpus_per_node"] != gpus]
        fabric = fitted(rest)
        for operation, own in held.groupby("operation"):
            if operation != "send":
                found.append(
                    _judged("h100-80g", str(operation), logs, own, fabric=fabric, where=f"{NODES} x {gpus} h100-80g")
                )
    return found


def fitted(rows: pd.DataFrame) -> Fabric:
    """The fabric of ten nodes with latencies fitted to some of their rings."""
    bare = CollectiveTimes(GPUS["h100-80g"], replace(NDR, hop_us=0.0, local_hop_us=0.0))
    sides, steps = [], []
    for operation, num_bytes, gpus, time_us in _shapes(rows[rows["operation"].isin(RINGS)]):
        passes = 2 if operation == "all_reduce" else 1
        transfer = bare.time(operation, num_bytes, GroupShape(NODES * gpus, NODES, gpus)).time_us
        sides.append((time_us - transfer) / time_us)
        steps.append((passes * (NODES - 1) / time_us, NODES * (gpus - 1) / time_us))
    hop, local = np.linalg.lstsq(np.array(steps), np.array(sides))[0]
    return replace(NDR, hop_us=max(float(hop), 0.1), local_hop_us=max(float(local), 0.1))


def _judged(
    gpu: str,
    operation: str,
    logs: pd.DataFrame,
    held: pd.DataFrame,
    *,
    fabric: Fabric = NDR,
    where: str = "",
) -> Closeness:
    times = CollectiveTimes(GPUS[gpu], fabric, logs)
    errors, spread = [], 0.0
    nodes = int(held["nodes"].iloc[0])
    for name, num_bytes, gpus, time_us in _shapes(held[held["bytes"] >= LEAST_BYTES]):
        found = times.time(name, num_bytes, GroupShape(nodes * gpus, nodes, gpus))
        errors.append(np.log(time_us / found.time_us))
        spread = found.spread
    return Closeness(where or f"in one domain, {gpu}", operation, np.array(errors), spread)


def _shapes(rows: pd.DataFrame) -> list[tuple[str, float, int, float]]:
    columns = [rows[name].tolist() for name in ("operation", "bytes", "gpus_per_node", "time_us")]
    return list(zip(*columns, strict=True))


if __name__ == "__main__":
    main()
