"""The script's own ranges (NVTX, ``record_function``) in the timed step: what was launched in each, and its time."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.run.launch_records import LaunchesRecord, RangeRow
from fakedist.run.launch_schema import RANGES
from fakedist.run.step_time import RangeTime

_PLACES = list(RangeRow._fields)


def recorded_ranges(record: LaunchesRecord | None) -> pd.DataFrame:
    """The columns of the table ``ranges`` that need no times.

    Args:
        record: The launches; None if there are none.
    """
    rows = pd.DataFrame([] if record is None else record.ranges, columns=_PLACES)
    return rows.astype({"name": object} | dict.fromkeys(_PLACES[1:], "int64"))


def range_table(ranges: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """The table ``ranges``.

    Args:
        ranges: Columns ``RangeRow._fields``.
        kernels: The result of :func:`fakedist.analysis.times.kernel_kinds.timed`.
    """
    ordered = kernels[kernels["launch"] >= 0].sort_values("launch", kind="stable")
    launch = ordered["launch"].to_numpy()
    first, end = (np.searchsorted(launch, ranges[name].to_numpy()) for name in ("first_launch", "end_launch"))
    sums = {
        "num_kernels": ordered["is_compute"].to_numpy(bool),
        "kernel_us": np.where(ordered["is_compute"], ordered["known_us"], 0.0),
        "num_unknown": (ordered["is_compute"] & ~ordered["is_known"]).to_numpy(bool),
        "num_calls": ordered["is_call"].to_numpy(bool),
    }
    found = ranges[_PLACES].copy()
    for name, values in sums.items():
        whole = np.concatenate([[0], np.cumsum(values)])
        found[name] = (whole[end] - whole[first]).astype("f8" if name == "kernel_us" else "i8")
    host, start = ordered["launch_us"].to_numpy("f8"), ordered["start_us"].to_numpy("f8")
    until = start + ordered["known_us"].to_numpy("f8")
    inside = list(zip(first.tolist(), end.tolist(), strict=True))
    nothing = float("nan")
    found["begin_us"] = [host[a] if a < b else nothing for a, b in inside]
    found["end_us"] = [host[b - 1] if a < b else nothing for a, b in inside]
    found["gpu_begin_us"] = [start[a:b].min() if a < b else nothing for a, b in inside]
    found["gpu_end_us"] = [until[a:b].max() if a < b else nothing for a, b in inside]
    return found[[column.name for column in RANGES.columns]].astype(dict.fromkeys(("begin_us", "end_us"), "f8"))


def range_lanes(ranges: pd.DataFrame, most: int) -> pd.DataFrame:
    """The ranges as bars on the GPU, those that overlap below each other: outer ones above those that they contain.

    Args:
        ranges: The table ``ranges``.
        most: Rows to keep, the longest.

    Returns:
        Columns name, lane, start_us, end_us, num_kernels, kernel_us, num_calls, by start. Ranges without kernels are
        left out.
    """
    table = ranges.assign(start_us=ranges["gpu_begin_us"], end_us=ranges["gpu_end_us"])
    table["long_us"] = table["end_us"] - table["start_us"]
    found = table[table["long_us"] > 0].nlargest(most, "long_us").sort_index()
    found = found.sort_values(["start_us", "long_us"], ascending=[True, False], kind="stable")
    reached: list[float] = []
    lanes = []
    for start, end in zip(found["start_us"].tolist(), found["end_us"].tolist(), strict=True):
        lane = next((at for at, until in enumerate(reached) if until <= start), len(reached))
        reached[lane : lane + 1] = [end]
        lanes.append(lane)
    columns = ["name", "lane", "start_us", "end_us", "num_kernels", "kernel_us", "num_calls"]
    return found.assign(lane=np.array(lanes, "i8"))[columns].reset_index(drop=True)


def by_range(ranges: pd.DataFrame) -> list[RangeTime]:
    """Ranges of one name together, most kernel time first.

    Args:
        ranges: The table ``ranges``.
    """
    rows = ranges.assign(gpu_us=ranges["gpu_end_us"] - ranges["gpu_begin_us"])
    found = []
    for name, each in rows.groupby("name", sort=False):
        found.append(
            RangeTime(
                name=str(name),
                num_ranges=len(each),
                depth=int(each["depth"].min()),
                num_kernels=int(each["num_kernels"].sum()),
                num_unknown=int(each["num_unknown"].sum()),
                kernel_us=float(each["kernel_us"].sum()),
                gpu_us=float(each["gpu_us"].sum()),
                num_calls=int(each["num_calls"].sum()),
            )
        )
    return sorted(found, key=lambda row: -row.kernel_us)
