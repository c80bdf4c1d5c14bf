"""Snapshots as torch writes them: of 2.1, of today, cut by the ring, without a history, of several devices."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakedist.analysis.blocks import build_blocks
from fakedist.traces import snapshot_reading
from fakedist.traces.foreign_files import read_snapshot
from fakedist.traces.snapshot_reading import ForeignSnapshot, Histories, NoSnapshotError
from tests.unit.analysis.recorded import MIB

FRAMES = [
    {"filename": "/site/torch/nn/linear.py", "line": 5, "name": "forward"},
    {"filename": "/job/model.py", "line": 12, "name": "forward"},
]


def read_foreign(snapshot: dict[str, Any], device: int | None = None) -> ForeignSnapshot:
    """Read a copy: reading empties the histories."""
    return snapshot_reading.read_foreign(copy.deepcopy(snapshot), device)


def test_reading_empties_the_histories_whose_events_take_most_of_the_memory() -> None:
    snapshot = {"segments": at_the_end(), "device_traces": [history(), history()[:3]]}
    notes = snapshot_reading.read_foreign(snapshot).notes
    assert snapshot["device_traces"] == [[], []]
    assert any("also has a history of cuda:1" in note.text for note in notes)


def test_events_of_a_large_snapshot_are_taken_while_it_is_unpickled(tmp_path: Path) -> None:
    def trained(num: int) -> list[dict[str, Any]]:
        lines = ([*FRAMES[:1], FRAMES[1] | {"line": line}] for line in range(num))
        return [row | {"frames": own} for own in lines for row in history()]

    whole = {"segments": at_the_end(), "device_traces": [trained(3_000), [], trained(5_000)]}
    (path := tmp_path / "large.pickle").write_bytes(pickle.dumps(whole))
    histories = Histories()
    unpickled: Any = read_snapshot(path, histories.watch)
    left = [len(trace) for trace in unpickled["device_traces"]]
    assert left[0] == 0
    assert left[2] < 5_000
    taken = snapshot_reading.read_foreign(unpickled, 2, histories).recording
    plain = read_foreign(whole, 2).recording
    assert taken.frames == plain.frames
    assert len(taken.stacks) == len(taken.frames) - 1 == 5_000
    for name, column in plain.device_events.items():
        assert np.array_equal(taken.device_events[name], column), name


@pytest.mark.parametrize("skipped", ["free_requested", "free_completed"])
def test_of_the_two_events_of_a_free_one_may_be_skipped(skipped: str) -> None:
    trace = [row for row in history() if row["action"] != skipped]
    assert curves({"segments": at_the_end(), "device_traces": [trace]}) == curves(
        {"segments": at_the_end(), "device_traces": [history()]}
    )


@pytest.mark.parametrize(("skipped", "called"), [("alloc", "allocations"), ("free", "frees")])
def test_of_a_history_without_allocations_or_frees_the_end_is_shown(skipped: str, called: str) -> None:
    trace = [row for row in history() * 2 if not row["action"].startswith(skipped)]
    found = read_foreign({"segments": at_the_end(), "device_traces": [trace]})
    assert f"the snapshot's history has no {called} (skip_actions left them out)" in found.notes[0].text
    assert build_blocks(found.recording).replay.allocated_bytes.max() == 3 * 4 * MIB


def test_a_frame_without_a_line_has_that_of_python_unsigned() -> None:
    frames = [FRAMES[0] | {"line": line} for line in ((1 << 64) - 1, -1, None)]
    (row,) = read_foreign({"segments": [], "device_traces": [[entry("alloc", 5, 5, frames=frames)]]}).recording.frames
    assert row.line == 0


def entry(action: str, addr: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 1, "frames": FRAMES, **more}


def segment(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    total = sum(block["size"] for block in blocks)
    return {"device": 0, "address": 1 << 30, "total_size": total, "stream": 0, "blocks": list(blocks), **more}


def held(size: int, **more: Any) -> dict[str, Any]:
    return {"size": size, "requested_size": size, "state": "active_allocated", "frames": FRAMES, **more}


def free(size: int, **more: Any) -> dict[str, Any]:
    return {"size": size, "requested_size": 0, "state": "inactive", **more}


def history() -> list[dict[str, Any]]:
    """A segment of 64 MiB; four blocks of 4 MiB, of which the second and the first are freed; a fifth one."""
    base = 1 << 30
    trace = [entry("segment_alloc", base, 64 * MIB)]
    trace += [entry("alloc", base + at * 4 * MIB, 4 * MIB) for at in range(4)]
    for at in (1, 0):
        trace += [entry(f"free_{what}", base + at * 4 * MIB, 4 * MIB) for what in ("requested", "completed")]
    return [*trace, entry("alloc", base, 4 * MIB)]


def at_the_end() -> list[dict[str, Any]]:
    base = 1 << 30
    blocks = [held(4 * MIB, address=base), free(4 * MIB, address=base + 4 * MIB)]
    blocks += [held(4 * MIB, address=base + at * 4 * MIB) for at in (2, 3)]
    return [segment(*blocks, free(48 * MIB, address=base + 16 * MIB))]


def curves(snapshot: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Allocated and reserved bytes after each event."""
    replay = build_blocks(read_foreign(snapshot).recording).replay
    return list(replay.allocated_bytes), list(replay.reserved_bytes)


def test_a_whole_history_is_played_as_it_was() -> None:
    snapshot = {"segments": at_the_end(), "device_traces": [history()]}
    allocated, reserved = curves(snapshot)
    assert [bytes_ // MIB for bytes_ in allocated] == [0, 4, 8, 12, 16, 12, 12, 8, 8, 12]
    assert set(reserved) == {64 * MIB}
    assert read_foreign(snapshot).num_before == 0


@pytest.mark.parametrize("kept", range(1, 10))
def test_what_a_ring_forgot_is_put_in_front(kept: int) -> None:
    whole = curves({"segments": at_the_end(), "device_traces": [history()]})
    cut = {"segments": at_the_end(), "device_traces": [history()[-kept:]]}
    allocated, reserved = curves(cut)
    assert allocated[-kept:] == whole[0][-kept:]
    assert reserved[-kept:] == whole[1][-kept:]
    found = read_foreign(cut)
    assert found.num_before == whole[0][-kept - 1] // (4 * MIB)
    assert ("alive before the history begins" in found.notes[0].text) == bool(found.num_before)


def test_blocks_of_torch_2_1_have_no_address_and_keep_frames_in_their_history() -> None:
    old = {key: value for key, value in held(4 * MIB).items() if key not in ("frames", "requested_size")}
    old["history"] = [{"addr": 1, "real_size": 4_000_000, "frames": FRAMES}]
    found = read_foreign({"segments": [segment(free(2 * MIB), old, free(2 * MIB))], "device_traces": [[]]})
    blocks = build_blocks(found.recording).frame
    assert blocks[["address", "bytes", "stack"]].to_numpy().tolist() == [[(1 << 30) + 2 * MIB, 4 * MIB, 0]]
    assert found.recording.frames[1] == ("/job/model.py", 12, "forward")
    assert any("has no history" in note.text for note in found.notes)


def test_unknown_actions_and_fields_are_left_out_and_what_is_missing_counts_as_0() -> None:
    trace = [*history(), entry("teleport", 5, 5), {"action": "oom", "size": 9, "device_free": 3, "later": object()}]
    found = read_foreign({"segments": at_the_end(), "device_traces": [trace], "novelty": {"x": 1}})
    assert {
        "entries of the unknown action 'teleport' were left out: 1",
        "out of memory 1 time, last when 9 B were requested, with 3 B of the GPU free",
    } <= {note.text for note in found.notes}
    assert len(found.recording.device_events["op"]) == 11
    trace = [{"action": "alloc", "size": 512}, entry("alloc", 1 << 20, 512, time_us=None, stream=None, frames=None)]
    columns = (found := read_foreign({"segments": [], "device_traces": [trace]})).recording.device_events
    assert "the snapshot has no segments" in found.notes[0].text
    assert columns["address"].tolist() == [0, 1 << 20]
    assert columns["time_us"].tolist() == columns["stream"].tolist() == [0, 0]
    assert columns["op"].tolist() == columns["stack"].tolist()[1:] * 2 == [-1, -1]


def test_settings_addresses_and_the_device_with_most_memory_are_read() -> None:
    found = read_foreign({
        "segments": [segment(held(MIB), device=3), segment(held(3 * MIB), device=1), segment(held(MIB), device=3)],
        "device_traces": [], "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:4"},
    })  # fmt: skip
    assert found.recording.gpu is not None
    assert (found.recording.gpu.device_index, found.recording.gpu.alloc_conf) == (1, "max_split_size_mb:4")
    trace = [entry("alloc", -16, 512, stream=7, frames=["aten::mm"]), entry("free_requested", -16, 512, frames=None)]
    recording = read_foreign({"segments": [], "device_traces": [trace]}).recording
    assert recording.device_events["address"].tolist() == [(1 << 64) - 16] * 2
    assert recording.device_events["stream"].tolist() == [7, 0]
    assert recording.device_events["stack"].tolist() == [0, -1]
    assert recording.frames == [("", 0, "aten::mm")]
    assert (recording.num_events_before, recording.segments_before) == (0, [])


def test_the_device_with_the_longest_history_is_shown_and_an_empty_snapshot_is_empty() -> None:
    found = read_foreign({"segments": [segment(held(MIB), device=1)], "device_traces": [history()[:1], history()]})
    assert found.recording.device == 1
    assert any("also has a history of cuda:0" in note.text for note in found.notes)
    for traces in ([], [[]]):
        assert build_blocks(read_foreign({"segments": [], "device_traces": traces}).recording).frame.empty


SHARED: list[Any] = ["x"]
for _ in range(60):
    SHARED = [SHARED, SHARED]  # its text has 2 ** 60 letters

WRONG = {
    "a segment is not a dict": {"segments": [7]},
    "the list for a segment is not a list": {"segments": {}},
    "device_traces is not a list": {"device_traces": 7},
    "a history is not a list": {"device_traces": [None]},
    "an event is not a dict": {"device_traces": [["alloc"]]},
    "an action is not a text": {"device_traces": [[entry("alloc", 5, 5) | {"action": SHARED}]]},
    "a stack is not a list": {"device_traces": [[entry("alloc", 5, 5, frames=7)]]},
    "a frame is neither a dict nor a text": {"device_traces": [[entry("alloc", 5, 5, frames=[SHARED])]]},
    "'filename' of a frame is not a text": {"device_traces": [[entry("alloc", 5, 5, frames=[{"filename": SHARED}])]]},
    "a line must be an integer": {"device_traces": [[entry("alloc", 5, 5, frames=[{"line": 10**30}])]]},
    "'size' of an entry must be an integer": {"device_traces": [[entry("alloc", 5, -5)]]},
    "'size' of an entry must be an integer from 0 to 1,125": {"device_traces": [[entry("alloc", 5, 1 << 60)]]},
    "'addr' of an entry must be an integer": {"device_traces": [[entry("alloc", 1 << 70, 5)]]},
    "a value of an event must be an integer": {"device_traces": [[entry("alloc", 5, 5, stream="x")]]},
    "its events move 2,": {"device_traces": [[entry("alloc", 5, 1 << 50)] * 2049]},
    "'blocks' of a segment is not a list": {"segments": [segment() | {"blocks": 7}]},
    "its segments have 30,000,000 blocks": {"segments": [segment() | {"blocks": [held(5)] * 30_000}] * 1000},
    "'device' of an entry must be an integer from 0 to 1,023": {"segments": [segment(device=1 << 70)]},
    "the allocator's settings is not a text": {"allocator_settings": {"PYTORCH_ALLOC_CONF": [SHARED]}},
}


@pytest.mark.parametrize("said", WRONG)
def test_what_torch_never_writes_is_refused(said: str) -> None:
    with pytest.raises(NoSnapshotError, match=f"^{said}"):
        read_foreign({"segments": [], "device_traces": []} | WRONG[said])


def test_texts_are_cut_and_lone_surrogates_written_out() -> None:
    frames = [{"filename": "\udcff.py" + "a" * 5_000_000, "line": 1, "name": "\ud800"}]
    (row,) = read_foreign({"segments": [], "device_traces": [[entry("alloc", 5, 5, frames=frames)]]}).recording.frames
    assert row.filename[:9] == "\\udcff.py"
    assert len(row.filename) < 5000
    assert row.function == "\\ud800"
