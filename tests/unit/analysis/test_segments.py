"""Segments at the peaks, from hand-made histories: what adds up, what is a hole, and what keeps a segment.

Blocks that change hands inside of compiled graphs: whose they are at the peak.
"""

import pickle
import pickletools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fakedist.analysis.blocks import build_blocks, event_places
from fakedist.analysis.recording import Recording
from fakedist.analysis.segments import build_snapshot, segment_table
from fakedist.results.building import make_tables
from fakedist.results.summing_up import reserved_moments
from fakedist.rundir.directory import SNAPSHOT_NAME
from fakedist.rundir.memory_records import GeneratedRecord
from fakedist.rundir.rows import HolderRow, LineRow
from fakedist.rundir.schema import MOMENTS
from fakedist.rundir.summary import ReservedMoment
from fakedist.traces.snapshot_reading import read_foreign
from tests.unit.analysis.recorded import BASE, GIB, KIB, MIB, HandMade
from tests.unit.traces.test_snapshot_reading import entry, free, held, segment


def table(recording: Recording, moment: str = "peak_reserved") -> pd.DataFrame:
    found = segment_table(recording, build_blocks(recording))
    return found[found["moment"] == moment].reset_index(drop=True)


def moments(recording: Recording) -> list[ReservedMoment]:
    blocks = build_blocks(recording)
    return reserved_moments(make_tables(recording, blocks, event_places(recording)))


def fragmented() -> HandMade:
    """A segment that one block of 4 MiB keeps, one that is full, an empty one, and one of small blocks."""
    made = HandMade()
    made.op("init", 0)
    line = made.stack(("/job/train.py", 7, "main"))
    made.event("segment_free", 0, GIB)
    for at, size in ((1, 100), (2, 64), (3, 20)):
        made.event("segment_alloc", at * GIB, size * MIB)
    made.event("segment_alloc", 4 * GIB, 2 * MIB, stream=5)
    made.alloc(GIB, 30 * MIB)
    made.alloc(GIB + 30 * MIB, 4 * MIB, stack=line)
    made.alloc(2 * GIB, 64 * MIB)
    made.alloc(3 * GIB, 20 * MIB)
    made.alloc(4 * GIB, KIB)
    made.free(GIB, 30 * MIB)
    made.free(3 * GIB, 20 * MIB)
    made.op("forward", 1)
    made.event("segment_alloc", 5 * GIB, 2 * GIB)
    made.alloc(5 * GIB, 2 * GIB)
    return made


def test_the_parts_of_a_segment_add_up_and_say_what_holds_it(tmp_path: Path) -> None:
    recording = fragmented().read(tmp_path)
    replay = build_blocks(recording).replay
    for moment in MOMENTS:
        found = table(recording, moment)
        event = found["event"].iloc[0]
        assert found["bytes"].sum() == replay.reserved_bytes[event]
        assert found["allocated_bytes"].sum() == replay.allocated_bytes[event]
    found = table(recording)
    columns = ["address", "state", "pool", "stream", "free_bytes", "num_holes", "largest_hole_bytes", "block"]
    assert list(found[columns].itertuples(index=False, name=None)) == [
        (BASE + GIB, "pinned", "large", 0, 96 * MIB, 2, 66 * MIB, 1),
        (BASE + 3 * GIB, "empty", "large", 0, 20 * MIB, 1, 20 * MIB, -1),
        (BASE + 4 * GIB, "small", "small", 5, 2 * MIB - KIB, 1, 2 * MIB - KIB, 4),
        (BASE + 2 * GIB, "used", "large", 0, 0, 0, 0, 2),
        (BASE + 5 * GIB, "used", "large", 0, 0, 0, 0, 5),
    ]


def test_an_empty_segment_has_the_pool_that_it_served(made: HandMade) -> None:
    made.op()
    made.event("segment_alloc", 2 * GIB, 64 * MIB)  # as with another size of small segments
    made.alloc(2 * GIB, KIB)
    made.free(2 * GIB, KIB)
    made.alloc(0, GIB)
    assert table(made.read(), "peak_allocated")["pool"].tolist() == ["small", "large"]


def test_a_block_that_another_stream_still_uses_is_neither_free_nor_allocated(made: HandMade) -> None:
    made.op()
    made.alloc(0, 300 * MIB)
    made.event("free_requested", 0, 300 * MIB)
    made.alloc(400 * MIB, 400 * MIB - 24)
    made.event("free_completed", 0, 300 * MIB)
    recording = made.read()
    (row,) = table(recording, "peak_allocated").itertuples()
    assert (row.allocated_bytes, row.waiting_bytes, row.free_bytes) == (400 * MIB, 300 * MIB, 324 * MIB)
    assert (row.num_holes, row.largest_hole_bytes, row.num_blocks) == (2, 224 * MIB, 2)
    assert moments(recording)[1].rounding_bytes == 24
    assert moments(recording)[1].unused == {"used": 324 * MIB, "waiting": 300 * MIB}


def test_the_parts_add_up_to_what_is_not_allocated(tmp_path: Path) -> None:
    first, second = moments(fragmented().read(tmp_path))
    assert first.rounding_bytes == 0
    assert first.unused == {"empty": 20 * MIB, "small": 2 * MIB - KIB, "pinned": 96 * MIB}
    for moment in (first, second):
        assert sum(moment.unused.values()) == moment.reserved_bytes - moment.allocated_bytes
    assert (first.moment, first.step, first.phase) == ("peak_reserved", 1, "forward")
    assert first.taken_for is not None
    assert first.taken_for.bytes == 2 * GIB
    assert second.taken_for is None
    (kept_segment,) = first.held
    assert (kept_segment.free_bytes, kept_segment.bytes, kept_segment.num_blocks) == (96 * MIB, 100 * MIB, 1)
    assert (kept_segment.block.bytes, kept_segment.block.line) == (4 * MIB, "/job/train.py:7 (main)")


def test_pages_of_an_expandable_segment_are_one_row_and_its_holes_count(made: HandMade) -> None:
    made.op()
    made.event("segment_free", 0, GIB)
    for page in range(3):
        made.event("segment_map", 2 * GIB + page * 20 * MIB, 20 * MIB, stream=7)
    made.alloc(2 * GIB, 50 * MIB)
    made.event("segment_map", 4 * GIB, 2 * MIB, stream=7)
    made.alloc(4 * GIB, KIB)
    made.event("segment_map", 2 * GIB + 60 * MIB, GIB, stream=7)
    rows = table(made.read())
    columns = ["bytes", "state", "is_expandable", "pool", "stream", "num_holes"]
    assert list(rows[columns].itertuples(index=False, name=None)) == [
        (GIB + 60 * MIB, "expandable", True, "large", 7, 1),
        (2 * MIB, "expandable", True, "small", 7, 1),
    ]


def test_private_pools_are_told_apart(made: HandMade) -> None:
    made.op()
    made.event("segment_alloc", 2 * GIB, GIB)
    made.alloc(2 * GIB, MIB * 3)
    made.pools[0] = [(1, 4, 0)]
    found = table(made.read()).set_index("address")
    assert found.loc[BASE + 2 * GIB, ["private_pool", "state"]].tolist() == ["4,0", "private"]
    assert found.loc[BASE, ["private_pool", "state"]].tolist() == ["", "empty"]


def test_without_memory_there_are_no_segments(tmp_path: Path) -> None:
    recording = HandMade().read(tmp_path)
    assert segment_table(recording, build_blocks(recording)).empty
    assert moments(recording) == []


def history() -> list[dict[str, Any]]:
    """Two segments, of which the first is given back in the end; blocks in both."""
    first, second = 1 << 30, 2 << 30
    trace = [entry("segment_alloc", first, 64 * MIB), entry("alloc", first, 40 * MIB)]
    trace += [entry("segment_alloc", second, 32 * MIB, pool_id=(0, 3)), entry("alloc", second, 8 * MIB)]
    trace += [entry("alloc", second + 8 * MIB, 4 * MIB)]
    trace += [entry(f"free_{what}", first, 40 * MIB) for what in ("requested", "completed")]
    return [*trace, entry("segment_free", first, 64 * MIB), entry("alloc", second + 12 * MIB, 2 * MIB)]


def at_the_end() -> list[dict[str, Any]]:
    blocks = [held(8 * MIB), held(4 * MIB), held(2 * MIB), free(18 * MIB)]
    return [segment(*blocks) | {"address": 2 << 30, "segment_pool_id": (0, 3)}]


@pytest.mark.parametrize("kept", range(1, 10))
def test_a_snapshot_has_the_segments_from_before_its_history(kept: int) -> None:
    cut = read_foreign({"segments": at_the_end(), "device_traces": [history()[-kept:]]}).recording
    found = table(cut).set_index("address")
    if kept > 1:  # the first segment is still there
        state = "used" if kept > 3 else "empty"  # the block was freed before the history
        assert found.loc[1 << 30, ["bytes", "state"]].tolist() == [64 * MIB, state]
    assert found.loc[2 << 30, ["bytes", "private_pool"]].tolist() == [32 * MIB, "0,3"]
    assert found["bytes"].sum() == (96 if kept > 1 else 32) * MIB


def test_a_snapshot_that_contradicts_itself_has_one_segment_of_unknown_address() -> None:
    wrong = [*at_the_end(), segment(held(5 * MIB), free(MIB)) | {"address": (2 << 30) + MIB}]
    found = table(read_foreign({"segments": wrong, "device_traces": [history()[-3:]]}).recording)
    assert found[["address", "state", "pool", "num_holes"]].to_numpy().tolist() == [[0, "unknown", "unknown", 0]]
    assert found["bytes"].sum() - found["allocated_bytes"].sum() == found["free_bytes"].sum()


@pytest.mark.parametrize("address", [-1, -(1 << 62), (1 << 63) - 1, None])
def test_addresses_that_no_gpu_has_make_no_error(address: object) -> None:
    wrong = [segment(held(5 * MIB), free(MIB)) | {"address": address}]
    trace = [entry("segment_unmap", address, 1 << 50), *history()[-3:]]  # type: ignore[arg-type]
    table(read_foreign({"segments": wrong, "device_traces": [trace]}).recording)


def test_a_segment_has_its_largest_block_and_if_it_served_nothing_the_pool_of_its_size(made: HandMade) -> None:
    made.op()
    made.alloc(0, 8 * MIB)
    made.alloc(512 * MIB, 4 * MIB)
    for at, size in ((2, 2), (3, 4), (4, 64), (5, 64)):
        made.event("segment_alloc", at * GIB, size * MIB)
    made.alloc(4 * GIB, MIB)
    made.alloc(5 * GIB, MIB + 512)
    made.alloc(5 * GIB + 2 * MIB, 30 * MIB)
    made.event("segment_alloc", 6 * GIB, 64 * MIB)
    made.alloc(6 * GIB, 32 * MIB)  # half of it
    rows = table(made.read(), "peak_allocated").set_index("address")
    rows.index = [(at - BASE) // GIB for at in rows.index]
    assert rows["block"].to_dict() == {0: 0, 2: -1, 3: -1, 4: 2, 5: 4, 6: 5}
    assert rows["pool"].to_dict() == {0: "large", 2: "small", 3: "large", 4: "small", 5: "large", 6: "large"}
    assert rows["state"].to_dict() == {0: "pinned", 2: "empty", 3: "empty", 4: "small", 5: "pinned", 6: "used"}
    assert rows["num_blocks"].to_dict() == {0: 2, 2: 0, 3: 0, 4: 1, 5: 2, 6: 1}


def test_blocks_that_are_more_than_was_reserved_have_no_segments() -> None:
    small = segment(held(5 * MIB)) | {"total_size": MIB}
    assert table(read_foreign({"segments": [small], "device_traces": [[entry("snapshot", 0, 0)]]}).recording).empty


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


CODE = "/cache/inductor/ab/cab.py"


class Job:
    """A forward's graph (lines 10 to 19) and its backward's (20 to 29), both of a model with two layers.

    The forward makes A at line 10 for ``up``, which becomes ``down``'s at line 12, and is saved. The backward is given
    it; from line 22 on it holds ``up``'s gradient.
    """

    def __init__(self) -> None:
        self.made = made = HandMade()
        self.model, self.up, self.down = (made.layer(name, parent=0) for name in ("(Net)", "up", "down"))
        lines = [(10, 0), (14, 1), (21, 1), (24, 0)]
        held = [(10, 12, 1), (-1, 22, 0)]
        made.record("generated", number=0, filename=CODE, lines=lines, holders=held)
        made.record("placings", rows=[(0, (self.up, self.down, self.model))])

    def at(self, line: int) -> int:
        return self.made.stack(("torch.py", 1, "empty"), (CODE, line, "call"), ("train.py", 3, "main"))

    def run(self, *, forward_bytes: int, backward_bytes: tuple[int, int]) -> None:
        made = self.made
        forward = made.op(layer=self.model, name="inductor::graph")
        made.record("graphs", rows=[(forward, 0, 0)])
        made.alloc(0, 8 * MIB, stack=self.at(10))
        made.alloc(8 * MIB, forward_bytes, stack=self.at(14))
        made.free(8 * MIB, forward_bytes)
        made.region(forward, forward)
        backward = made.op("backward", layer=self.model, name="inductor::graph")
        made.record("graphs", rows=[(backward, 0, 0)])
        made.record("held", rows=[(backward, BASE, 22, self.up)])
        for line, size in zip((21, 24), backward_bytes, strict=True):
            made.alloc(16 * MIB, size, stack=self.at(line))
            made.free(16 * MIB, size)
        made.mark(0, "gradient", self.up, 8 * MIB)
        made.op("optimizer")

    def first_block(self, directory: Path) -> tuple[int, str]:
        blocks = build_blocks(self.made.read(directory))
        return int(blocks.frame["layer"][0]), str(blocks.frame["category"][0])


@pytest.mark.parametrize(
    ("peak", "sizes", "layer", "category"),
    [
        # Line 14 runs after line 12: the memory is what the forward saves.
        ("in the forward", (4 * MIB, (MIB, MIB)), "down", "activation"),
        ("before the backward reuses it", (MIB, (4 * MIB, MIB)), "down", "activation"),
        ("when it holds the gradient", (MIB, (MIB, 4 * MIB)), "up", "gradient"),
    ],
)
def test_a_block_is_of_who_holds_it_at_the_peak(
    peak: str, sizes: tuple[int, tuple[int, int]], layer: str, category: str, tmp_path: Path
) -> None:
    job = Job()
    job.run(forward_bytes=sizes[0], backward_bytes=sizes[1])
    assert job.first_block(tmp_path) == (getattr(job, layer), category), peak


def test_before_it_changes_hands_a_block_is_a_temporary_of_who_made_it(tmp_path: Path) -> None:
    job = Job()
    lines, holders = [LineRow(10, 0), LineRow(14, 1)], [HolderRow(10, 16, 1)]  # only after the peak, at line 14
    job.made.others[0] = GeneratedRecord(0, CODE, lines, holders)
    job.run(forward_bytes=4 * MIB, backward_bytes=(MIB, MIB))
    assert job.first_block(tmp_path) == (job.up, "temporary")


def test_what_an_operation_in_a_graph_allocates_is_told_by_the_line_that_calls_it(tmp_path: Path) -> None:
    job = Job()
    made = job.made
    made.record("graphs", rows=[(made.op(layer=job.model, name="inductor::graph"), 0, 0)])
    made.op(layer=job.model, name="aten.attention.default")
    made.alloc(0, MIB, stack=job.at(14))
    outside = made.op(layer=job.model)
    made.alloc(MIB, MIB, stack=made.stack(("train.py", 4, "main")), op=outside)
    frame = build_blocks(made.read(tmp_path)).frame
    assert list(frame["layer"]) == [job.down, job.model]


def test_a_gradient_is_found_though_the_graph_that_made_it_has_a_smaller_number_than_what_it_called(
    made: HandMade,
) -> None:
    layer = made.layer("up")
    graph = made.op("backward", name="inductor::graph")
    made.op("backward")
    made.alloc(0, MIB)
    made.free(0, MIB)
    made.alloc(0, 2 * MIB, op=graph)
    made.mark(0, "gradient", layer, 2 * MIB)
    frame = made.blocks().frame
    assert list(frame["category"].astype(str)) == ["temporary", "gradient"]
