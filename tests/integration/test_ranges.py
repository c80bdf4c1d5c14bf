"""The ranges of a script among the launches of its timed step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pandas as pd

from tests.conftest import RunFakedist

JOB = Path(__file__).parent / "jobs" / "ranges.py"


def test_ranges_have_the_kernels_that_were_launched_in_them(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--world-size", "8", "--rank", "0", "--device", "virtual", "--json", "-o", run)
    time = run_fakedist("profile", *options, JOB).json()["time"]
    ranges = pd.read_parquet(run / "tables" / "ranges.parquet").set_index("name")
    kernels = pd.read_parquet(run / "tables" / "kernels.parquet")

    assert sorted(ranges.index) == ["backward", "forward", "iteration", "net", "update"]
    assert ranges.loc["iteration", "num_kernels"] == time["num_kernels"]
    assert ranges["depth"].to_dict() == {"iteration": 0, "forward": 1, "net": 2, "backward": 1, "update": 1}
    for name, phase in (("backward", "backward"), ("update", "optimizer")):
        inside = kernels[
            kernels["launch"].between(ranges.loc[name, "first_launch"], ranges.loc[name, "end_launch"] - 1)
        ]
        of_phase = kernels[kernels["phase"] == phase]
        assert set(of_phase["launch"]) <= set(inside["launch"])
    parts = ranges.loc[["forward", "backward", "update"], "kernel_us"].sum()
    assert abs(parts - ranges.loc["iteration", "kernel_us"]) < 1e-6
    assert time["ranges"][0]["name"] == "iteration"
    with gzip.open(run / "trace.json.gz") as file:
        tracks = [each for each in json.load(file)["traceEvents"] if each["name"] == "thread_name"]
    assert any(each["args"]["name"].startswith("ranges of the script") for each in tracks)
