"""The data behind the page's drawings of a step's time: the timeline by stream, its layers, roofline and table."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.layer_table import with_children
from fakedist.analysis.recording import Array
from fakedist.analysis.times.kernel_kinds import timed
from fakedist.analysis.times.merging import bars, kind_runs, layer_runs, longest_runs
from fakedist.analysis.times.trace import call_texts
from fakedist.report.page.memory_drawings import kinds_of_rows
from fakedist.report.page.pack import Pack
from fakedist.report.text.time_wording import short_kernel
from fakedist.results.run import Run
from fakedist.run.schema import FAMILIES, KINDS
from fakedist.run.step_time import Peaks, StepTime

#: Limits for the bars of the timeline (all streams together) and the intervals of its layers: about 10 bytes each.
MOST_BARS = 60_000
MOST_RUNS = 40_000
MOST_POINTS = 300
_COLUMNS = (
    *("name", "family", "stream", "start_us", "duration_us", "operation", "phase", "recompute", "layer", "call"),
    *("flops", "moved_bytes", "bound"),
)
_TICKS = 1 << 31  # per step: 1 ns each in a step of 2 s, and the same bytes for any duration
#: Columns of the table of layers: figures with children, which the page sums itself when a folded row is expanded.
LAYER_FIGURES = ("forward_us", "recompute_us", "backward_us", "optimizer_us", "other_us", "total_us", "launch_gap_us")


def read_kernels(run: Run) -> pd.DataFrame:
    """The table ``kernels`` in the form that the drawings need.

    Raises:
        RunDirectoryError: It is missing or damaged.
    """
    return timed(run.table("kernels", _COLUMNS))


def add_kernels(pack: Pack, run: Run, kernels: pd.DataFrame, layers: pd.DataFrame, time: StepTime) -> None:
    """Add the timeline: bars by stream, with the layers and phases above them.

    Args:
        pack: Where the data go.
        run: The run.
        kernels: The result of :func:`read_kernels`.
        layers: The table ``layers``.
        time: Where the time goes.
    """
    step_us = time.step_us or 1.0
    tick = max(step_us / _TICKS, 1e-3)
    found = bars(kernels, MOST_BARS)
    rows = kernels.iloc[found["first"].to_numpy("i8")]
    names, labels = _bar_names(run, rows)
    keys = {
        "family": rows["family"].to_numpy("i8"),
        "kind": rows["kind"].to_numpy("i8"),
        "layer": rows["layer"].to_numpy("i8"),
        "name": names,
        "known": found["known"].to_numpy("i8"),
    }
    of_bar, first = kinds_of_rows(keys)
    pack.add("bar_kind", of_bar)
    pack.add("bar_num", found["num_kernels"].to_numpy())
    for name, values in keys.items():
        pack.add(f"bars_{name}", values[first])
    streams, stream = np.unique(found["stream"].to_numpy("u8"), return_inverse=True)
    pack.add("bar_stream", stream)
    _add_times(pack, "bar", found, tick)
    all_runs = layer_runs(kernels, layers["parent"].to_numpy())
    runs = longest_runs(all_runs, MOST_RUNS)
    for name in ("layer", "kind", "depth"):
        pack.add(f"run_{name}", runs[name].to_numpy("i8"))
    _add_times(pack, "run", runs, tick)
    phases = kind_runs(kernels)
    pack.add("part_kind", phases["kind"].to_numpy("i8"))
    _add_times(pack, "part", phases, tick)
    pack.meta |= {"families": FAMILIES, "kinds": KINDS, "streams": [f"stream {at}" for at in range(len(streams))]}
    pack.meta |= {"kernels": labels, "tick_us": tick, "step_us": step_us, "num_kernels": len(kernels)}
    pack.meta |= {"merged": len(found) < len(kernels), "runs_left_out": len(all_runs) - len(runs)}
    pack.meta.setdefault("layers", layers["name"].astype(str).tolist())


def _add_times(pack: Pack, prefix: str, table: pd.DataFrame, tick: float) -> None:
    start = np.round(np.maximum(table["start_us"].to_numpy("f8"), 0.0) / tick).astype("i8")
    end = np.round(np.maximum(table["end_us"].to_numpy("f8"), 0.0) / tick).astype("i8")
    pack.add(f"{prefix}_start", start)
    pack.add(f"{prefix}_length", np.maximum(end - start, 0))


def _bar_names(run: Run, rows: pd.DataFrame) -> tuple[Array, list[str]]:
    """For each bar, the index of its label: the kernel's name, or the name of the collective it is a copy for."""
    text = rows["name"].astype(str).map(lambda name: short_kernel(name, 120))
    if (rows["call"] >= 0).any():
        calls = call_texts(run.table("calls", ["sequence", "operation", "group"]), run.table("groups"))
        text = rows["call"].map(calls).fillna(text)
    places, labels = pd.factorize(text)
    return places, [str(label) for label in labels]


def add_layer_times(pack: Pack, times: pd.DataFrame, layers: pd.DataFrame) -> None:
    """Add figures of every layer with children, in whole nanoseconds, for folded rows that are expanded."""
    for name in LAYER_FIGURES:
        own = times["own_us" if name == "total_us" else name].to_numpy("f8")
        pack.add(f"time_{name}", np.round(with_children(layers, own) * 1e3).astype("i8"))
    pack.add("time_own_us", np.round(times["own_us"].to_numpy() * 1e3).astype("i8"))


def roofline(run: Run, peaks: Peaks | None) -> dict[str, object] | None:
    """Points and roofs of the roofline: kernels with known operations and bytes, by name, shape and layer; or None."""
    names = run.table("kernel_names")
    known = names[(names["flops"] > 0) & (names["moved_bytes"] > 0) & (names["flops_us"] > 0)]
    if not len(known) or not peaks:
        return None
    rows = known[known["family"] != "communication"].head(MOST_POINTS).to_dict("records")
    points = [
        {
            "name": ", ".join(filter(None, (short_kernel(row["name"], 120), row["shape"], row["layer"]))),
            "family": row["family"],
            "us": row["time_us"],
            "times": row["num_kernels"],
            "intensity": row["flops"] / row["moved_bytes"],
            "rate": row["flops"] / (row["flops_us"] * 1e-6),
        }
        for row in rows
    ]
    return {
        "points": points,
        "flops": peaks.flops,
        "bytes_per_s": peaks.bytes_per_s,
        "left_out": len(known) - len(rows),
    }
