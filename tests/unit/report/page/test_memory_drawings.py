"""The page's drawings, unpacked as the page unpacks them, against the tables."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakedist.report.figures.memory_figures import read_curve
from fakedist.report.page.drawings import Pack, add_refusal, add_reserved, add_spans, add_timeline, add_times
from fakedist.results.opening import open_run
from tests.unit.analysis.recorded import GIB, MIB, HandMade
from tests.unit.report import handmade
from tests.unit.report.handmade import built


def unpacked(text: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    block = gzip.decompress(base64.b64decode(text))
    length = int.from_bytes(block[:4], "little")
    header = json.loads(block[4 : 4 + length])
    found = {}
    for name, (kind, at, count) in header["arrays"].items():
        width = int(kind[1])
        data = np.frombuffer(block, "u1", count * width, 4 + length + at)
        if kind[0] == "u":
            data = data.reshape(width, count).T
        found[name] = np.ascontiguousarray(data).view(f"<{kind}").ravel().tolist()
    return header["meta"], found


@pytest.mark.parametrize("values", [[], [0, 255], [256, 1], [1 << 16, 3], [1 << 40, 5], [0.5, -1.0]])
def test_numbers_come_back(values: list[float]) -> None:
    pack = Pack()
    pack.meta["x"] = "<&>\u2028"
    pack.add("before", [1, 2, 3])
    pack.add("values", np.array(values))
    meta, found = unpacked(pack.text())
    assert meta == {"x": "<&>\u2028"}
    assert found == {"before": [1, 2, 3], "values": values}


def test_the_timeline_is_the_allocators_own_curve(tmp_path: Path) -> None:
    run = open_run(handmade.ended_well(tmp_path / "run"))
    pack = Pack()
    curve = read_curve(run)
    add_timeline(pack, run, curve)
    add_reserved(pack, curve)
    add_spans(pack, run, curve)
    meta, found = unpacked(pack.text())
    change, at = [0.0] * meta["num_moves"], 0
    freed = set()
    for kind, life in zip(found["block_kind"], found["block_life"], strict=True):
        while at in freed:
            at += 1
        change[at] += found["kind_bytes"][int(kind)]
        if life:
            change[at + int(life)] -= found["kind_bytes"][int(kind)]
            freed.add(at + int(life))
        at += 1
    events = run.table("events")
    curve = events[events["action"].isin(("alloc", "free_requested"))]["allocated_bytes"]
    assert np.cumsum(change).tolist() == curve.tolist()
    assert found["reserved_bytes"] == [1 << 30]
    phases = [meta["phases"][int(phase)] for phase in found["span_phase"][:4]]
    assert phases == ["init", "forward", "backward", "optimizer"]
    assert found["span_step"][:4] == [0, 1, 1, 1]
    assert found["span_move"][:2] == [0, 4]


def test_reserved_memory_changes_at_the_move_that_needed_it(tmp_path: Path) -> None:
    made = HandMade()
    made.op("forward", 1)
    made.alloc(0, MIB)  # move 0, in the first segment
    made.alloc(MIB, MIB)  # move 1
    made.event("segment_alloc", 2 * GIB, GIB)
    made.alloc(2 * GIB, GIB)  # move 2, in the second
    made.free(2 * GIB, GIB)  # move 3
    made.event("segment_free", 2 * GIB, GIB)
    made.alloc(2 * MIB, MIB)  # move 4
    made.ended()
    directory = built(made, tmp_path / "run")
    run = open_run(directory)
    pack = Pack()
    add_reserved(pack, read_curve(run))
    _, found = unpacked(pack.text())
    assert found["reserved_move"] == [0, 2, 4]
    assert found["reserved_bytes"] == [GIB, 2 * GIB, GIB]


def test_the_axes_of_time_are_those_of_the_recording_and_of_the_timed_step(tmp_path: Path) -> None:
    run = open_run(handmade.timed(tmp_path / "run"))
    curve, pack = read_curve(run), Pack()
    add_times(pack, run, curve)
    meta, found = unpacked(pack.text())
    events = run.table("events")
    moved = events[events["action"].isin(("alloc", "free_requested"))]["time_us"]
    assert found["wall_move"] == list(range(curve.num_moves))
    assert found["wall_us"] == (moved - moved.iloc[0]).tolist()
    if "step_us" in found:
        assert found["step_us"] == sorted(found["step_us"])
        assert meta["timed"] == {"step": 3, "source": "estimated"}


def test_the_refusal_is_the_move_that_did_not_fit(tmp_path: Path) -> None:
    run, pack = open_run(handmade.out_of_memory(tmp_path / "full")), Pack()
    curve = read_curve(run)
    assert add_refusal(pack, run, curve) == "the refusal"
    assert pack.meta["refusal"] == {"move": curve.num_moves - 1, "text": "refused: 90.00 GiB for addmm.default"}
    run, pack = open_run(handmade.ended_well(tmp_path / "well")), Pack()
    assert add_refusal(pack, run, read_curve(run)) == ""
    assert "refusal" not in pack.meta
