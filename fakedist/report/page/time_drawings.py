"""The data behind the page's drawings of a step's time: kernels by stream, layers, and the table of layers."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.layer_table import with_children
from fakedist.analysis.times.covering import hidden_us
from fakedist.analysis.times.merging import bars, kind_runs, layer_runs, longest_runs
from fakedist.report.figures.kernel_figures import bar_labels, drawn_ranges
from fakedist.report.page.memory_drawings import kinds_of_rows
from fakedist.report.page.pack import Pack
from fakedist.results.run import Run
from fakedist.run.schema import FAMILIES, KINDS
from fakedist.run.step_time import StepTime

#: Limits for the bars of the timeline (all streams together) and the intervals of its layers: about 10 bytes each.
MOST_BARS = 60_000
MOST_RUNS = 40_000
#: The script's own ranges, the longest.
MOST_RANGES = 20_000
_TICKS = 1 << 31  # per step: 1 ns each in a step of 2 s, and the same bytes for any duration
#: Columns of the table of layers: figures with children, which the page sums itself when a folded row is expanded.
LAYER_FIGURES = (*(f"{kind}_us" for kind in KINDS), "total_us", "launch_gap_us")


def add_kernels(pack: Pack, run: Run, kernels: pd.DataFrame, layers: pd.DataFrame, time: StepTime) -> None:
    """Add the timeline: bars by stream, with the layers and phases above them.

    Args:
        pack: Where the data go.
        run: The run.
        kernels: The result of :func:`fakedist.report.figures.kernel_figures.read_kernels`.
        layers: The table ``layers``.
        time: Where the time goes.
    """
    step_us = time.step_us or 1.0
    tick = max(step_us / _TICKS, 1e-3)
    found = bars(kernels, MOST_BARS)
    rows = kernels.iloc[found["first"].to_numpy("i8")]
    names, labels = bar_labels(run, rows)
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
    is_call = (keys["family"] == FAMILIES.index("communication")) & found["known"].to_numpy(bool)
    pack.add("bar_hidden", np.where(is_call, np.round(hidden_us(found, kernels) / tick), 0).astype("i8"))
    all_runs = layer_runs(kernels, layers["parent"].to_numpy())
    runs = longest_runs(all_runs, MOST_RUNS)
    for name in ("layer", "kind", "depth"):
        pack.add(f"run_{name}", runs[name].to_numpy("i8"))
    _add_times(pack, "run", runs, tick)
    _add_ranges(pack, run, tick)
    phases = kind_runs(kernels)
    pack.add("part_kind", phases["kind"].to_numpy("i8"))
    _add_times(pack, "part", phases, tick)
    pack.meta |= {"families": FAMILIES, "kinds": KINDS, "streams": [f"stream {at}" for at in range(len(streams))]}
    pack.meta |= {"kernels": labels, "tick_us": tick, "step_us": step_us, "num_kernels": len(kernels)}
    pack.meta |= {"merged": len(found) < len(kernels), "runs_left_out": len(all_runs) - len(runs)}
    pack.meta.setdefault("layers", layers["name"].astype(str).tolist())


def _add_ranges(pack: Pack, run: Run, tick: float) -> None:
    """Add the script's own ranges, for lanes above the kernels."""
    ranges = drawn_ranges(run, MOST_RANGES)
    name, names = pd.factorize(ranges["name"].astype(str))
    pack.add("range_name", name)
    for column in ("lane", "num_kernels", "num_calls"):
        pack.add(f"range_{column.removeprefix('num_')}", ranges[column].to_numpy("i8"))
    pack.add("range_busy", np.round(ranges["kernel_us"].to_numpy("f8") / tick).astype("i8"))
    _add_times(pack, "range", ranges, tick)
    pack.meta["ranges"] = [str(each) for each in names]


def _add_times(pack: Pack, prefix: str, table: pd.DataFrame, tick: float) -> None:
    start = np.round(np.maximum(table["start_us"].to_numpy("f8"), 0.0) / tick).astype("i8")
    end = np.round(np.maximum(table["end_us"].to_numpy("f8"), 0.0) / tick).astype("i8")
    pack.add(f"{prefix}_start", start)
    pack.add(f"{prefix}_length", np.maximum(end - start, 0))


def add_layer_times(pack: Pack, times: pd.DataFrame, layers: pd.DataFrame) -> None:
    """Add figures of every layer with children, in whole nanoseconds, for folded rows that are expanded."""
    for name in LAYER_FIGURES:
        own = times["own_us" if name == "total_us" else name].to_numpy("f8")
        pack.add(f"time_{name}", np.round(with_children(layers, own) * 1e3).astype("i8"))
    pack.add("time_own_us", np.round(times["own_us"].to_numpy() * 1e3).astype("i8"))
