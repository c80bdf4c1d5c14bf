import pickle
import pickletools
from pathlib import Path
from typing import Any

from fakedist.analysis.blocks import build_blocks
from fakedist.analysis.segments import build_snapshot
from fakedist.rundir.directory import SNAPSHOT_NAME
from tests.unit.analysis.recorded import BASE, GIB, KIB, MIB, HandMade


def snapshot(made: HandMade, directory: Path) -> dict[str, Any]:
    recording = made.read(directory)
    build_snapshot(directory, recording, build_blocks(recording))
    loaded = pickle.loads((directory / SNAPSHOT_NAME).read_bytes())
    assert isinstance(loaded, dict)
    return loaded


def test_events_are_written_as_torch_writes_them(made: HandMade, tmp_path: Path) -> None:
    made.op()
    made.alloc(0, 1000, stream=9, stack=made.stack(("/job/train.py", 3, "main"), ("/job/run.py", 1, "<module>")))
    made.free(0, 1000)
    made.event("oom", 5, 1 << 40)
    (trace,) = snapshot(made, tmp_path)["device_traces"]
    frames = [
        {"filename": "/job/train.py", "line": 3, "name": "main"},
        {"filename": "/job/run.py", "line": 1, "name": "<module>"},
    ]
    assert [entry["action"] for entry in trace] == ["segment_alloc", "alloc", "free_requested", "free_completed", "oom"]
    assert trace[1] == {"action": "alloc", "addr": BASE, "size": 1000, "stream": 9, "time_us": 0, "frames": frames}
    assert trace[2]["frames"] == []
    assert trace[4]["device_free"] == BASE + 5


def test_devices_that_were_not_used_have_empty_traces(made: HandMade, tmp_path: Path) -> None:
    made.alloc(0, MIB, device=2)
    found = snapshot(made, tmp_path)
    assert [len(trace) for trace in found["device_traces"]] == [0, 0, 2]
    assert [segment["device"] for segment in found["segments"]] == [2]


def test_blocks_fill_their_segment_without_a_gap(made: HandMade, tmp_path: Path) -> None:
    made.event("segment_alloc", 2 * GIB, 2 * MIB, stream=7)
    made.event("segment_alloc", 3 * GIB, 20 * MIB)
    made.event("segment_free", 3 * GIB, 20 * MIB)
    made.op()
    made.alloc(4 * MIB, 2 * MIB)
    made.alloc(0, 4 * MIB)
    made.alloc(6 * MIB, MIB)
    made.alloc(2 * GIB, 100 * KIB)
    made.free(4 * MIB, 2 * MIB)
    large, small = snapshot(made, tmp_path)["segments"]
    assert [(block["address"] - BASE, block["size"], block["state"]) for block in large["blocks"]] == [
        (0, 4 * MIB, "active_allocated"),
        (4 * MIB, 2 * MIB, "inactive"),
        (6 * MIB, MIB, "active_allocated"),
        (7 * MIB, GIB - 7 * MIB, "inactive"),
    ]
    assert (large["total_size"], large["allocated_size"], large["requested_size"]) == (GIB, 5 * MIB, 5 * MIB)
    assert (small["stream"], small["segment_type"], small["is_expandable"]) == (7, "small", False)


def test_pages_of_an_expandable_segment_are_one_segment_while_nothing_is_missing_between_them(
    made: HandMade, tmp_path: Path
) -> None:
    made.op()
    for page in range(3):
        made.event("segment_map", 2 * GIB + page * 20 * MIB, 20 * MIB, stream=7)
    made.alloc(2 * GIB, 30 * MIB, stream=7)
    made.alloc(2 * GIB + 50 * MIB, 10 * MIB, stream=7)
    _, whole = snapshot(made, tmp_path / "whole")["segments"]
    assert (whole["total_size"], whole["is_expandable"], whole["stream"]) == (60 * MIB, True, 7)
    assert [block["size"] for block in whole["blocks"]] == [30 * MIB, 20 * MIB, 10 * MIB]
    made.event("segment_unmap", 2 * GIB + 30 * MIB, 20 * MIB, stream=7)
    made.free(2 * GIB, 30 * MIB, stream=7)
    _, front, back = snapshot(made, tmp_path / "cut")["segments"]
    assert (front["total_size"], back["address"] - BASE - 2 * GIB, back["total_size"]) == (30 * MIB, 50 * MIB, 10 * MIB)


def test_a_history_of_many_numbers_and_stacks_is_what_plain_dicts_say(made: HandMade, tmp_path: Path) -> None:
    stacks = [made.stack(("/job/ünï.py", line, "f"), ("/job/run.py", 1, "<module>")) for line in range(300)]
    made.op()
    wide = [1, 127, 128, 255, 256, 1 << 31, (1 << 47) - 512, (1 << 63) - 1]
    for number, size in enumerate(wide):
        made.event("alloc", number * GIB, size, stream=size, stack=stacks[number * 40])
    made.event("alloc", 0, 512, stream=(1 << 64) - 1)
    recording = made.read()
    events = recording.events[0]
    (trace,) = snapshot(made, tmp_path / "again")["device_traces"]
    assert [entry["size"] for entry in trace] == events["size"].tolist()
    assert [entry["stream"] for entry in trace] == events["stream"].tolist()
    assert [entry["addr"] for entry in trace] == events["address"].tolist()
    assert [[frame["line"] for frame in entry["frames"]] for entry in trace if entry["frames"]] == [
        [number * 40, 1] for number in range(len(wide))
    ]
    assert trace[1]["frames"][0]["filename"] == "/job/ünï.py"


def test_the_pickle_uses_only_what_memory_viz_can_read(made: HandMade, tmp_path: Path) -> None:
    # The opcodes that unpickle() of pytorch's torch/utils/viz/MemoryViz.js knows.
    known = "APPEND APPENDS BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST LONG1 LONG_BINGET MARK PROTO SETITEM"
    known += " SETITEMS STOP TUPLE TUPLE1 TUPLE2 TUPLE3 NEWFALSE NEWTRUE NONE BINPUT LONG_BINPUT BINUNICODE EMPTY_TUPLE"
    made.op()
    made.alloc(0, 3 * GIB, stream=9, stack=made.stack(("/job/train.py", 3, "main")))
    snapshot(made, tmp_path)
    opcodes = {found.name for found, _, _ in pickletools.genops((tmp_path / SNAPSHOT_NAME).read_bytes())}
    assert opcodes <= set(known.split())
