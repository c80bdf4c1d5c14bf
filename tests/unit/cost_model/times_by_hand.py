"""Kernels written by hand, for tests of everything that reads their table."""

import dataclasses
from typing import Any

import pandas as pd

from fakedist.rundir.encoding import Columns
from fakedist.rundir.schema import BOUNDS, FAMILIES, PHASES
from fakedist.rundir.step_time import KernelSource, Peaks
from fakedist.rundir.trace_records import KernelsRecord

NAN = float("nan")
FIGURES = ("start_us", "duration_us", "launch_us", "flops", "moved_bytes", "low_us", "high_us")
H100 = Peaks({"bf16": 989.4e12, "fp32": 66.9e12}, bytes_per_s=3.352e12)
SOURCE = KernelSource("estimated", "model", 2, "NVIDIA H100 80GB HBM3", 0.0)


def kernel(start_us: float, duration_us: float, family: str = "gemm", **more: Any) -> dict[str, Any]:
    """A row of the table ``kernels``: a matrix product of a forward on the default stream, unless told otherwise."""
    known: dict[str, Any] = {"name": f"{family}_kernel", "family": family, "stream": 0, "grid": "1,1,1"}
    known |= {"start_us": start_us, "duration_us": duration_us, "launch_us": NAN, "block": "128,1,1", "step": 2}
    known |= {"operation": f"aten.{family}.default", "op": -1, "phase": "forward", "recompute": False, "layer": 0}
    known |= {"low_us": NAN, "high_us": NAN, "shape": "", "basis": "", "launch": -1}
    return known | {"call": -1, "flops": NAN, "moved_bytes": NAN, "bound": ""} | more


def table(*kernels: dict[str, Any]) -> pd.DataFrame:
    found = pd.DataFrame(kernels, columns=list(kernel(0, 0)))
    types = {"stream": "uint64", "layer": "int32", "recompute": "bool", "call": "int64"}
    return found.astype(types | dict.fromkeys(FIGURES, "f8")).assign(path_us=NAN)


def record(*kernels: dict[str, Any], **source: Any) -> KernelsRecord:
    columns, texts = Columns(KernelsRecord), {"": 0}
    places = {"family": FAMILIES, "phase": PHASES, "bound": BOUNDS}
    for row in kernels:
        coded = {name: known.index(row[name]) for name, known in places.items()}
        for name in ("name", "grid", "block", "operation"):
            coded[name] = texts.setdefault(row[name], len(texts))
        columns.add(**row | coded, path_us=NAN)
    return columns.made(source=dataclasses.replace(SOURCE, **source), texts=list(texts))


def model() -> pd.DataFrame:
    """The table ``layers`` of three equal blocks with two linear layers each, below a root: rows 0 to 11."""
    rows = [("", "", -1), ("(Net)", "Net", 0), ("layers", "ModuleList", 1)]
    for number in range(3):
        block = len(rows)
        rows.append((f"layers.{number}", "Block", 2))
        rows += [(f"layers.{number}.{name}", "Linear", block) for name in ("up", "down")]
    return pd.DataFrame(rows, columns=["name", "class_name", "parent"])
