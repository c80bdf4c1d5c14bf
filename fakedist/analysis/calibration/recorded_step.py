"""The launches of a recorded step, and the kernels of a trace, as matching wants them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.analysis.calibration.matching import Traced
from fakedist.analysis.calibration.signatures import (
    Sequence,
    Signature,
    SignatureKind,
    operation_name,
    plain_name,
)
from fakedist.analysis.traces.intervals import Ints
from fakedist.analysis.traces.process_trace import ProcessTrace
from fakedist.run.families import kernel_family
from fakedist.run.launch_records import WorkRow

#: What launches of these kinds are in a trace. Collectives are left out: their time is not a kernel's.
_KINDS: dict[str, SignatureKind] = {
    "kernel": "kernel",
    "product": "product",
    "library": "library",
    "copy": "copy",
    "fill": "fill",
    "host_reads": "copy",
}
#: Operations whose tensors are the operands; "add" has what is added before them.
_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_scaled_mm")


@dataclass(frozen=True)
class RecordedStep:
    """The launches of a recorded step that a trace of the job can contain.

    Attributes:
        launches: The launches, in order.
        work: The row of the table ``work`` of each.
        works: The table ``work``.
    """

    launches: Sequence
    work: Ints
    works: list[WorkRow]


def recorded_step(launches: pd.DataFrame, work: pd.DataFrame) -> RecordedStep:
    """The recorded step.

    Args:
        launches: The table ``launches``.
        work: The table ``work``.
    """
    works = [WorkRow(*row) for row in work[list(WorkRow._fields)].itertuples(index=False, name=None)]
    kept = launches[launches["what"].isin(list(_KINDS)) & (launches["work"] >= 0)]
    by_value: dict[tuple[int, str], Signature] = {}
    found = []
    for row, grid in zip(kept["work"].tolist(), kept["grid"].tolist(), strict=True):
        key = (row, grid)
        if key not in by_value:
            by_value[key] = _signature(works[row], grid)
        found.append(by_value[key])
    return RecordedStep(Sequence.of(found), kept["work"].to_numpy(np.int64), works)


def _signature(work: WorkRow, grid: str) -> Signature:
    kind: SignatureKind = _KINDS[work.kind]
    is_read = work.kind == "host_reads"
    if is_read and not work.name.startswith("Memcpy"):
        kind = "library"  # all kernels of an operation that the host knew the result of
    name = plain_name(work.name) if kind in ("copy", "fill") else work.name
    operations = (operation_name(work.operation),) if work.operation else ()
    num_bytes = -1
    if kind in ("copy", "fill") and not is_read and work.moved_bytes == work.moved_bytes:
        num_bytes = int(work.moved_bytes)
    sizes = _sizes(work.m, work.n, work.k) if work.k and not work.groups else ()
    return Signature(kind, name, work.family, operations, grid if kind == "kernel" else "", num_bytes, sizes)


def traced_kernels(trace: ProcessTrace) -> Traced:
    """The trace's kernels without communication, and without graphs that were traced as a whole."""
    within, chains, chain = trace.operations()
    activity = trace.activity
    inputs = np.where(within >= 0, trace.inputs[within], -1) if len(trace.inputs) else np.full(len(within), -1)
    bytes_ = activity.columns["bytes"]
    if trace.tool != "nsys":  # whose reader counts what a copy within the GPU reads and writes
        both = np.array(["DtoD" in name for name in activity.names] or [False])[activity.name]
        bytes_ = np.where(both & (bytes_ > 0), 2 * bytes_, bytes_)
    keys = np.stack([activity.name, activity.shape, chain, np.where(activity.is_copy, bytes_, -1), inputs])
    distinct, place = np.unique(keys, axis=1, return_inverse=True)
    place = place.ravel()
    signatures = [
        _traced_signature(
            activity.names[name], activity.shapes[shape][0], chains[of], size, _product(trace, row, chains[of])
        )
        for name, shape, of, size, row in distinct.T.tolist()
    ]
    computes = np.array([each.family != "communication" for each in signatures] or [False])[place]
    kept = np.flatnonzero(computes & ~activity.is_graph)
    duration = (activity.columns["end"] - activity.columns["start"]) / 1000
    return Traced(Sequence(signatures, place[kept]), duration[kept], within[kept])


def _traced_signature(
    name: str, grid: str, operations: tuple[str, ...], num_bytes: int, sizes: tuple[int, ...]
) -> Signature:
    kind: SignatureKind = "kernel"
    stands_in = any(each.startswith("fakedist::") for each in operations)  # for a collective
    if name.startswith(("Memcpy", "Memset")):
        kind = "copy" if name.startswith("Memcpy") else "fill"
        return Signature(kind, plain_name(name), "communication" if stands_in else "copy", operations, "", num_bytes)
    family = "communication" if stands_in else kernel_family(name, operations[0] if operations else "")
    return Signature("kernel", name, family, operations, grid, -1, sizes if family == "gemm" else ())


def _product(trace: ProcessTrace, inputs: int, operations: tuple[str, ...]) -> tuple[int, ...]:
    """The sizes of a product from those of its operation's tensors; empty if they tell none."""
    if inputs < 0 or not operations or operations[0] not in _PRODUCTS:
        return ()
    matrices = [each for each in trace.shapes[inputs] if len(each) in (2, 3)]
    a, b = (matrices[-2:] if "add" in operations[0] else matrices[:2]) if len(matrices) > 1 else ((0, 0), (1, 1))
    return _sizes(a[-2], b[-1], a[-1]) if a[-1] == b[-2] else ()


def _sizes(m: int, n: int, k: int) -> tuple[int, int, int]:
    """Libraries may compute the transposed product: m and n in ascending order, then k."""
    return min(m, n), max(m, n), k
