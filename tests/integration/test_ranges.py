"""The ranges of a script among the launches of its timed step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.support.runs import ProfileOnce

JOB = Path(__file__).parent / "jobs" / "ranges.py"


def test_ranges_have_the_kernels_that_were_launched_in_them(profile_once: ProfileOnce) -> None:
    run = profile_once(JOB)
    time, kernels = run.summary["time"], run.table("kernels")
    ranges = run.table("ranges").set_index("name")

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
    with gzip.open(run.path / "trace.json.gz") as file:
        tracks = [each for each in json.load(file)["traceEvents"] if each["name"] == "thread_name"]
    assert any(each["args"]["name"].startswith("ranges of the script") for each in tracks)
