"""Kinds of kernels: what is known of their times. ``make accuracy-kinds`` writes the table of docs/accuracy/results.md.

A run of ``tests/integration/jobs/many_operations.py`` on a virtual H100 has a range for each of its operations. A row
of the table is what estimates of some kernels rest on:

- *known*: measured, or as fast as what was measured, with an interval.
- *bounded*: the arithmetic is known, its speed is an assumption; the interval begins at the roofline.
- *not known*: the arithmetic is not known. There is no time, and all that it may take widens the step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fakedist
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.models.spec import GpuSpec
from fakedist.results.run import Run

ROOT = Path(__file__).parent.parent.parent
JOB = ROOT / "tests" / "integration" / "jobs" / "many_operations.py"
PAGE = ROOT / "docs" / "accuracy" / "results.md"
BEGIN, END = "<!-- make accuracy-kinds: begin -->", "<!-- make accuracy-kinds: end -->"
_PREFIX, _BACKWARD = "case:", " backward"
_MOST_NAMED = 4
#: Of products' assumptions, those that hold for all types.
_LEFT_OUT = (
    "; not below the roofline|; assumed: (as fast as TN|a batch like more rows|adding to the result costs its bytes)"
)
_ORDER = ("known", "bounded", "not known")

Facts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Operation:
    """An operation of the job, with its kernels on a GPU.

    Attributes:
        name: What the job calls it.
        kernels: Its rows of the table ``kernels``.
        least_us: Its roofline, by the job's own arithmetic.
    """

    name: str
    kernels: pd.DataFrame
    least_us: float

    @property
    def time_us(self) -> float:
        """How long its kernels take."""
        return float(self.kernels["duration_us"].sum())

    @property
    def most_us(self) -> float:
        """The upper ends of their intervals."""
        return float(self.kernels["high_us"].sum())

    @property
    def is_known(self) -> bool:
        """Whether all of its kernels have a time."""
        return bool(self.kernels["duration_us"].notna().all())


def arguments(directory: Path, *more: str) -> list[str]:
    flags = ["--world-size", "8", "--rank", "0", "--gpu-memory", "unlimited", "--steps", "2", "--no-page"]
    return ["profile", *flags, "-o", str(directory / "run"), str(JOB), str(directory / "facts.json"), *more]


def operations(run: Run, facts: Facts, gpu: GpuSpec) -> list[Operation]:
    """The operations that ran, on a GPU."""
    kernels, ranges = run.table("kernels"), run.table("ranges")
    found = []
    for name, first, end in ranges[["name", "first_launch", "end_launch"]].itertuples(index=False, name=None):
        if not str(name).startswith(_PREFIX):
            continue
        case = str(name).removeprefix(_PREFIX)
        own = facts[case.removesuffix(_BACKWARD)]
        if "skipped" in own:
            continue
        least = own["backward"] if case.endswith(_BACKWARD) else own
        compute = least["flops"] / (gpu.peak(least["dtype"]) or np.inf)
        least_us = max(compute, least["bytes"] / gpu.memory_bandwidth) * 1e6
        launched = kernels["launch"].to_numpy()
        found.append(Operation(case, kernels[(launched >= first) & (launched < end)], least_us))
    return found


def kinds(found: list[Operation]) -> pd.DataFrame:
    """Facts on the kernels.

    Returns:
        A row for each basis of an estimate: state, basis, operations (names), kernels, low and high: the median of the
        ends of their intervals over their times.
    """
    rows = pd.concat([each.kernels.assign(case=each.name) for each in found], ignore_index=True)
    rows = rows[rows["family"] != "communication"]
    rows = rows.assign(basis=rows["basis"].astype(str).str.replace(_LEFT_OUT, "", regex=True))
    table = []
    for basis, own in rows.groupby("basis", sort=True):
        state = "not known" if not basis else "bounded" if str(basis).startswith("no measurement") else "known"
        low, high = ((own[side] / own["duration_us"]).median() for side in ("low_us", "high_us"))
        table.append((state, str(basis), list(dict.fromkeys(own["case"])), len(own), low, high))
    made = pd.DataFrame(table, columns=["state", "basis", "operations", "kernels", "low", "high"])
    return made.sort_values("state", key=lambda states: states.map(_ORDER.index), kind="stable", ignore_index=True)


def markdown(table: pd.DataFrame, skipped: list[str]) -> str:
    lines = ["| | the estimate rests on | kernels | interval | operations |", "|---|---|---:|---:|---|"]
    for row in table.to_dict("records"):
        names = row["operations"]
        named = ", ".join(names[:_MOST_NAMED]) + (
            f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else ""
        )
        interval = f"{row['low'] - 1:+.0%} to {row['high'] - 1:+.0%}" if row["state"] != "not known" else "no time"
        basis = row["basis"] or "nothing: the arithmetic depends on values that are not known"
        lines.append(f"| {row['state']} | {basis} | {row['kernels']} | {interval} | {named} |")
    if skipped:
        lines.append(
            f"\nRefused by name, because the virtual GPU does not answer their library's calls: {', '.join(skipped)}."
        )
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        command = [sys.executable, "-m", "fakedist", *arguments(directory)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        facts = json.loads((directory / "facts.json").read_text())
        found = operations(fakedist.open(directory / "run"), facts, find_gpu("h100-80g"))
        text = markdown(kinds(found), [name for name, own in facts.items() if "skipped" in own])
    print(text)
    page = PAGE.read_text()
    if BEGIN not in page or END not in page:
        sys.exit(f"{PAGE} lacks the marks {BEGIN} and {END}")
    head, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
