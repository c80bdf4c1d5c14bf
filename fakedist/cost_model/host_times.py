"""The host on a step's time line: what it launches too late, and where it waits for the GPU.

The GPU is idle behind a late host for one of two reasons. The host had stopped to wait for the GPU, so that nothing was
left to run when it went on; or its own work between two launches takes longer than what it launches. A wait gives the
host's delay: every later launch comes by that much later. Late launches use the delay up, and count for the last wait
before them. On one stream, all of this is exactly what a host that never waits would save.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.memory_tables import Fold
from fakedist.analysis.recording import Array
from fakedist.cost_model.timeline import Placed
from fakedist.rundir.schema import KINDS
from fakedist.rundir.step_time import HostPart
from fakedist.rundir.table_rows import TABLES

#: The host's moments are sums, so a wait of less than this is one of rounding.
_LEAST_US = 1e-6
#: The names of waits outside of any operation.
_SYNCHRONIZES = {
    "host_waits_for_device": "synchronize (device)",
    "host_waits": "synchronize (stream)",
    "event": "synchronize (event)",
}
_WAITS, _QUEUE = "waits for the GPU", "waits for a place in the launch queue"
HOST_WAITS = ("host_waits", "host_waits_for_device", "host_reads")
HOST_MOMENTS = ("begin_us", "reached_us", "passed_us")


def host_table(placed: Placed, launches: pd.DataFrame, late_us: Array, tail_us: float) -> pd.DataFrame:
    """The table ``host`` of a placed step.

    Args:
        late_us: For each row of ``launches``, how long the GPU was idle until the host launched it.
        tail_us: How long the GPU is idle at the end of the step, when only the host works.
    """
    begin = np.concatenate([[0.0], placed.passed_us[:-1]])[: len(placed.passed_us)]
    waited = placed.passed_us - placed.reached_us
    waited = np.where(waited > _LEAST_US, waited, 0.0)
    idle = np.zeros(len(begin))
    delay = 0.0
    last = -1
    is_wait = _waits(launches)
    for row in np.flatnonzero((waited > 0) | (late_us > 0)).tolist():
        if waited[row] and not is_wait[row]:
            delay = (
                0.0  # the launch queue is full: the host is as far ahead as it can be, whatever it waited for before
            )
            continue
        follows = min(float(late_us[row]), delay)
        if follows:
            idle[last] += follows
            delay -= follows
        if waited[row]:
            delay = delay + float(waited[row])
            last = row
    if last >= 0:
        idle[last] += min(tail_us, delay)
    columns = (begin, placed.reached_us, placed.passed_us, late_us, idle)
    return pd.DataFrame(dict(zip(TABLES["host"].names, columns, strict=True)))


def _waits(launches: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """The rows at which the host waits for the GPU; at others, it can only wait for a place in the launch queue."""
    return launches["what"].astype(str).isin(HOST_WAITS).to_numpy(bool)


def layers_host_us(host: pd.DataFrame, launches: pd.DataFrame, num_layers: int) -> Array:
    """The host's own time for the launches of each layer, waits left out."""
    own = (host["reached_us"] - host["begin_us"]).to_numpy("f8")
    layer = launches["layer"].to_numpy("i8") if len(host) else np.zeros(0, "i8")
    return np.bincount(layer, own, num_layers)


def host_bars(host: pd.DataFrame, launches: pd.DataFrame, work: pd.DataFrame) -> pd.DataFrame:
    """The host over time in the form of the table ``kernels``: operations that launch, and waits.

    Columns start_us, known_us, stream (the host's thread), name, layer, kind (index in ``KINDS``), is_compute (false
    while it waits), is_known, num_launches. Launches of one operation in a row are one bar.
    """
    rows = launches.iloc[: len(host)].reset_index(drop=True)
    phase = rows["phase"].astype(str)
    kinds = phase.where(phase.isin(KINDS), "other").mask(rows["recompute"].to_numpy(bool), "recompute")
    kind = kinds.map(KINDS.index).to_numpy("i8")
    operations = np.array(_operations(rows, work, np.arange(len(rows)))[0], object)
    begin, reached, passed = (host[name].to_numpy("f8") for name in HOST_MOMENTS)
    own = np.flatnonzero(reached > begin)
    waits = np.flatnonzero(passed - reached > _LEAST_US)
    op = rows["op"].to_numpy("i8")[own]
    thread = host_threads(rows)
    follows = (begin[own][1:] == reached[own][:-1]) & (op[1:] == op[:-1]) & (op[1:] >= 0)
    follows &= np.diff(thread[own]) == 0
    first = np.flatnonzero(np.concatenate([[True], ~follows])[: len(own)])
    last = np.append(first[1:], len(own))[: len(first)] - 1
    at = np.concatenate([own[first], waits])
    start = np.concatenate([begin[own[first]], reached[waits]])
    until = np.concatenate([reached[own[last]], passed[waits]])
    is_own = np.arange(len(at)) < len(first)
    has_work = np.concatenate([[0], np.cumsum(rows["work"].to_numpy("i8") >= 0)])
    num = np.concatenate([has_work[own[last] + 1] - has_work[own[first]], np.zeros(len(waits), "i8")])
    table = pd.DataFrame(
        {
            "start_us": start,
            "known_us": until - start,
            "stream": thread[at],
            "name": np.where(
                is_own, operations[at], np.where(_waits(rows)[at], _WAITS + ": " + operations[at], _QUEUE)
            ),
            "layer": rows["layer"].to_numpy("i8")[at],
            "kind": kind[at],
            "is_compute": is_own,
            "is_known": np.ones(len(at), bool),
            "num_launches": num,
        }
    )
    return table.sort_values("start_us", kind="stable").reset_index(drop=True)


def host_threads(launches: pd.DataFrame) -> npt.NDArray[np.uint64]:
    """The host's thread of each launch; 0, the main one, where it is not known."""
    if "thread" not in launches:
        return np.zeros(len(launches), "u8")
    return launches["thread"].fillna(0.0).to_numpy().astype("u8")


def thread_titles(threads: npt.NDArray[np.uint64]) -> dict[int, str]:
    """By thread of the host, in order: "host" for the main one, "host, thread 1" for others."""
    return {int(thread): f"host, thread {thread}" if thread else "host" for thread in np.unique(threads)}


def host_parts(host: pd.DataFrame, launches: pd.DataFrame) -> list[HostPart]:
    """The host's time by phase, in the order of ``KINDS``, and its waits. Together they are when it was done."""
    if not len(host):
        return []
    phase = launches["phase"].astype(str)
    kinds = phase.where(phase.isin(KINDS), "other").mask(launches["recompute"].to_numpy(bool), "recompute")
    own = (host["reached_us"] - host["begin_us"]).to_numpy("f8")
    sums = pd.Series(own).groupby(kinds.to_numpy(object)).sum()
    waited = (host["passed_us"] - host["reached_us"]).to_numpy("f8")
    is_wait = _waits(launches)
    waits = [(_WAITS, float(waited[is_wait].sum())), (_QUEUE, float(waited[~is_wait].sum()))]
    times = [*((kind, float(sums.get(kind, 0.0))) for kind in KINDS), *waits]
    return [HostPart(name, us) for name, us in times if us > _LEAST_US]


def host_waits(host: pd.DataFrame, tables: Mapping[str, pd.DataFrame], folds: list[Fold]) -> pd.DataFrame:
    """The waits of the host for the GPU by line and operation, by what the GPU is idle after them, then by their time.

    Columns: those of ``fakedist.rundir.step_time.HostWait``. ``tables`` are ``launches``, ``work``, and with lines
    ``operation_stacks`` and ``stacks``.
    """
    launches = tables["launches"]
    waited = (host["passed_us"] - host["reached_us"]).to_numpy("f8")
    rows = np.flatnonzero((waited > _LEAST_US) & _waits(launches))
    op = launches["op"].to_numpy("i8")
    lines = lines_of_operations(tables)
    # A wait outside of any operation is known to be behind the operation before it.
    before = pd.Series(np.where(op >= 0, op, -1), dtype="i8").replace(-1, np.nan).ffill().fillna(-1).to_numpy("i8")
    operations, copies = _operations(launches, tables["work"], rows)
    what = launches["what"].astype(str).to_numpy(object)
    table = pd.DataFrame(
        {
            "line": [lines.get(number, "") for number in before[rows].tolist()],
            "is_after": op[rows] < 0,
            "kind": [_kind(*names) for names in zip(what[rows], operations, copies, strict=True)],
            "operation": operations,
            "layer": _folded(launches["layer"].to_numpy("i8")[rows], folds),
            "num_waits": np.ones(len(rows), "i8"),
            "wait_us": waited[rows],
            "idle_us": host["idle_us"].to_numpy("f8")[rows],
        }
    )
    return _summed(table, ["line", "is_after", "kind", "operation"], ["num_waits", "wait_us", "idle_us"], "idle_us")


def late_launches(host: pd.DataFrame, tables: Mapping[str, pd.DataFrame], folds: list[Fold]) -> pd.DataFrame:
    """The launches that come too late by line, the longest idle time of the GPU first.

    Columns: those of ``fakedist.rundir.step_time.LateLaunches``. ``tables`` as for :func:`host_waits`.
    """
    launches = tables["launches"]
    late = host["late_us"].to_numpy("f8")
    rows = np.flatnonzero(late > _LEAST_US)
    lines = lines_of_operations(tables)
    table = pd.DataFrame(
        {
            "line": [lines.get(number, "") for number in launches["op"].to_numpy("i8")[rows].tolist()],
            "layer": _folded(launches["layer"].to_numpy("i8")[rows], folds),
            "num_launches": np.ones(len(rows), "i8"),
            "late_us": late[rows],
        }
    )
    return _summed(table, ["line"], ["num_launches", "late_us"], "late_us")


def _summed(table: pd.DataFrame, keys: list[str], sums: list[str], weight: str) -> pd.DataFrame:
    """Rows with the same keys together. Of several layers, the one with the most weight, and how many there are."""
    groups = table.groupby(keys, sort=False)
    by_layer = table.groupby([*keys, "layer"], sort=False)[sums].sum().reset_index()
    most = by_layer.sort_values([weight, sums[-2]], ascending=False, kind="stable").drop_duplicates(keys)
    made = groups[sums].sum().assign(num_layers=groups["layer"].nunique()).reset_index()
    made = made.merge(most[[*keys, "layer"]], on=keys)
    made = made[[*keys, "layer", "num_layers", *sums]]
    order = [weight, sums[-2]]
    return made.sort_values(order, ascending=False, kind="stable").reset_index(drop=True)


def lines_of_operations(tables: Mapping[str, pd.DataFrame]) -> dict[int, str]:
    """The line of each operation: of a backward, that of the forward. Empty where stacks are not known."""
    if "operation_stacks" not in tables or "stacks" not in tables:
        return {}
    called = tables["operation_stacks"]
    lines = tables["stacks"]["line"].astype(str).tolist()
    stacks = zip(called["op"].tolist(), called["stack"].tolist(), strict=True)
    return {op: lines[stack] for op, stack in stacks if stack >= 0}


def _operations(
    launches: pd.DataFrame, work: pd.DataFrame, rows: npt.NDArray[np.int64]
) -> tuple[list[str], list[bool]]:
    """The operation that waits in each row, or how the host waits outside of one; whether it copied to the GPU."""
    of_work, op = launches["work"].to_numpy("i8"), launches["op"].to_numpy("i8")
    names = work["operation"].astype(str).tolist()
    over_link = work["over_host_link"].tolist()
    known = np.flatnonzero((of_work >= 0) & (op >= 0))
    of_op = dict(zip(op[known].tolist(), of_work[known].tolist(), strict=True))
    what = launches["what"].astype(str).tolist()
    event = launches["event"].to_numpy("u8")
    operations, copies = [], []
    for row in rows.tolist():
        # What a wait without an operation waits for may have none either: torch.tensor(3.0, device="cuda").
        behind = int(of_work[row - 1]) if row and op[row] < 0 and op[row - 1] < 0 else -1
        number = int(of_work[row]) if of_work[row] >= 0 else of_op.get(int(op[row]), behind)
        kind = "event" if what[row] == "host_waits" and event[row] else what[row]
        operations.append((names[number] if number >= 0 else "") or _SYNCHRONIZES.get(kind, ""))
        copies.append(number >= 0 and bool(over_link[number]) and what[row] == "host_waits")
    return operations, copies


def _kind(what: str, operation: str, is_copy: bool) -> str:
    if what == "host_reads" or (not is_copy and operation not in _SYNCHRONIZES.values()):
        return "read"
    return "copy" if is_copy else "synchronize"


def _folded(layer: npt.NDArray[np.int64], folds: list[Fold]) -> list[str]:
    of_layer = {own: fold.name for fold in folds for own in fold.layers}
    return [of_layer[number] for number in layer.tolist()]
