"""Launches written by hand, for tests of everything that reads their record."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fakedist.cost_model.hosts import HostCosts
from fakedist.rundir.encoding import Columns
from fakedist.rundir.launch_records import LAUNCH_KINDS, LaunchesRecord, WorkRow
from fakedist.rundir.schema import PHASES


@dataclass(frozen=True)
class Host(HostCosts):
    """How long the host takes; nothing, unless told otherwise."""

    operation_us: float = 0.0
    launch_us: float = 0.0
    graph_us: float = 0.0


COPY = WorkRow("elementwise", "kernel", "elementwise", "aten.add.Tensor", 0.0, 1e9, "bf16", threads=128)
PRODUCT = WorkRow(
    *("nvjet", "product", "gemm", "aten.mm.default", 2.0 * 4096**3, 3.0 * 2 * 4096**2, "bf16"),
    batch=1,
    m=4096,
    n=4096,
    k=4096,
    layout="TN",
    a_bytes=2.0,
    b_bytes=2.0,
    d_bytes=2.0,
)
UNKNOWN = WorkRow("mystery", "kernel", "other", "", float("nan"), float("nan"), "bf16")
ALL_REDUCE = WorkRow("all_reduce", "collective", "communication", "all_reduce", float("nan"), float("nan"))


def launch(work: WorkRow | None = None, what: str = "", **fields: Any) -> dict[str, Any]:
    """A row of the log: a launch of this work on the default stream, or an event or wait."""
    row: dict[str, Any] = {"what": what or (work.kind if work else ""), "work": work, "stream": 0, "event": 0}
    row |= {"num_operations": int(work is not None), "graph": 0, "device": 0, "grid": "", "block": "", "op": -1}
    return (
        row
        | {"phase": "forward", "recompute": False, "layer": 0, "call": -1, "thread": 0}
        | {"allocator": "", "host_work": ""}
        | fields
    )


def record(launches: Sequence[dict[str, Any]], step: int = 2) -> LaunchesRecord:
    """The journal's record of these rows."""
    work: dict[WorkRow, int] = {}
    texts: dict[str, int] = {"": 0}
    columns = Columns(LaunchesRecord)
    for row in launches:
        coded = {"what": LAUNCH_KINDS.index(row["what"]), "phase": PHASES.index(row["phase"])}
        coded["work"] = -1 if row["work"] is None else work.setdefault(row["work"], len(work))
        coded |= {name: texts.setdefault(row[name], len(texts)) for name in ("grid", "block", "allocator", "host_work")}
        columns.add(**row | coded)
    return columns.made(step=step, work_rows=list(work), texts=list(texts))
