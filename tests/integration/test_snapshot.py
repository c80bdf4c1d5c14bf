"""memory_snapshot.pickle is what torch's own tools read, and says of the segments what the allocator says."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist, clean_environment

JOB = Path(__file__).parent / "jobs" / "held_memory.py"
#: Every function of torch's that reads a snapshot, on the one given.
READ = """
import pickle, sys
from torch.cuda import _memory_viz as viz
data = pickle.load(open(sys.argv[1], "rb"))
same = lambda text: text
for found in (viz.trace_plot(data), viz.trace_plot(data, plot_segments=True), viz.trace_plot(data, filter_freed=True),
              viz.segment_plot(data), viz.segsum(data), viz.segments(data, same), viz.memory(data, same)):
    assert len(found) > 1000, found
assert "held_memory.py" in viz.memory(data, same)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, run_fakedist: RunFakedist) -> Path:
    """The run, with what the allocator said of its segments in ``segments.json``."""
    directory = tmp_path_factory.mktemp("snapshot")
    options = ("--world-size", "4", "--rank", "0", "--device", "virtual", "--json", "-o", directory / "run")
    summary = run_fakedist("profile", *options, JOB, directory / "segments.json", cwd=directory).json()
    assert not [note for note in summary["notes"] if note["code"] == "peak_differs"]
    return directory


def test_segments_and_blocks_are_the_allocators_own(run: Path) -> None:
    def told(segment: dict[str, Any]) -> dict[str, Any]:
        keys = ("address", "size", "requested_size", "state")
        return {**segment, "blocks": [[block[key] for key in keys] for block in segment["blocks"]]}

    found = pickle.loads((run / "run" / "memory_snapshot.pickle").read_bytes())
    expected = json.loads((run / "segments.json").read_text())
    assert len(expected) > 10
    ours = [told(segment) for segment in found["segments"]]
    assert [{key: segment[key] for key in expected[0]} for segment in ours] == expected


def test_torchs_own_tools_read_it(run: Path) -> None:
    command = [sys.executable, "-c", READ, str(run / "run" / "memory_snapshot.pickle")]
    finished = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
