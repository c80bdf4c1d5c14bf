"""trace.json.gz: Chrome's trace event format, in which the slices of a track nest."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakedist.cost_model.breakdown import timed
from fakedist.cost_model.step_axis import bars, kind_runs, layer_runs, trace_events
from fakedist.results.building import build_tables
from fakedist.results.opening import open_run
from fakedist.rundir.directory import load_manifest
from fakedist.rundir.notes import Note
from fakedist.rundir.schema import KINDS
from tests.unit.analysis.recorded import GIB, MIB, HandMade, new_run, wrote_nothing
from tests.unit.cost_model.times_by_hand import NAN, kernel, model, record, table

Event = dict[str, Any]
EXPOSED = "exposed communication: the step waits"


def trace_of(run: Path) -> dict[str, Any]:
    found = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))
    assert isinstance(found, dict)
    return found


def tracks(events: list[Event]) -> dict[tuple[int, str], list[Event]]:
    """Slices and instants by process and name of their track."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "Xi":
            found[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return found


def assert_they_nest(slices: list[Event]) -> None:
    """Every slice lies inside of the one it began in, to the nanosecond."""
    open_until: list[int] = []
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        begin = round(event["ts"] * 1000)
        end = begin + round(event["dur"] * 1000)
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], event
        open_until.append(end)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks forward and back on one stream, a known and an unknown collective next to them."""
    made = HandMade()
    root = made.layer("(Net)", "Net")
    blocks = [made.layer(f"layers.{at}", "Block", root) for at in range(2)]
    linears = [made.layer(f"layers.{at}.up", "Linear", block) for at, block in enumerate(blocks)]
    made.op("init", 0)
    rows = []
    for number in range(40):
        op = made.op("forward" if number < 20 else "backward", 1, linears[number // 10 % 2])
        made.alloc(number * MIB, MIB)
        more: dict[str, Any] = {"phase": "forward" if number < 20 else "backward", "launch_us": number * 7.0}
        rows.append(kernel(10.1 + number * 7.3, 7.123, layer=linears[number // 10 % 2], op=op, **more))
    made.step(1)
    rows.append(kernel(30.0, 12.0, "communication", stream=9, call=0, op=3))
    rows.append(kernel(60.0, NAN, "communication", stream=9, call=1, op=5))
    made.record("groups", rows=[(0, "0", "tp", (0, 1), 0, 1, "nccl")])
    calls = [
        (at, name, 0, MIB, MIB, "float32", False, 0, 3, 0, -1, 0, 0)
        for at, name in enumerate(("all_reduce", "barrier"))
    ]
    made.record("calls", rows=calls)
    made.others.append(record(*rows))
    made.ended()
    directory = made.write(new_run(tmp_path_factory.mktemp("runs") / "run"))
    build_tables(directory)
    return directory


CALLS = "tp all_reduce, tp barrier (0x9)"


def test_it_is_the_format_that_viewers_read(run: Path) -> None:
    found = trace_of(run)
    assert found["displayTimeUnit"] == "ms"
    assert (found["otherData"]["source"], found["otherData"]["rank"]) == ("estimated", "rank 1 of 8")
    needed = {"X": {"ts", "dur", "tid"}, "i": {"ts", "s", "tid"}, "C": {"ts", "args"}, "M": {"args"}}
    for event in found["traceEvents"]:
        assert {"ph", "name", "pid"} | needed[event["ph"]] <= set(event)
    processes = [e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["GPU, estimated by model: step 2", "host: the recorded run, wall time of this machine"]


def test_the_slices_of_a_trace_are_kernels_layers_and_phases_and_nest(run: Path) -> None:
    found = tracks(trace_of(run)["traceEvents"])
    assert {name for _, name in found} == {
        "phases", "layers", EXPOSED, "stream 0", CALLS, "steps",
    }  # fmt: skip
    for events in found.values():
        assert_they_nest([event for event in events if event["ph"] == "X"])
    slices = tracks(trace_of(run)["traceEvents"])[1, "stream 0"]
    assert [event["ts"] for event in slices] == pytest.approx([10.1 + 7.3 * at for at in range(40)])
    assert [event["dur"] for event in slices] == pytest.approx([7.123] * 40)
    assert slices[15]["args"] == {"phase": "forward", "layer": "layers.1.up", "operation": "aten.gemm.default"}
    assert [event["name"] for event in found[1, "phases"]] == ["forward", "backward"]
    half = ["(Net)", "layers.0", "layers.0.up", "layers.1", "layers.1.up"]
    assert [event["name"] for event in found[1, "layers"]] == half * 2
    net = found[1, "layers"][0]
    assert (net["ts"], net["ts"] + net["dur"]) == pytest.approx((10.1, 10.1 + 19 * 7.3 + 7.123))


def test_a_collective_shows_its_exposed_parts_or_that_its_duration_is_not_known(run: Path) -> None:
    known, unknown = tracks(trace_of(run)["traceEvents"])[1, CALLS]
    assert (known["ph"], known["name"], known["dur"]) == ("X", "tp all_reduce", 12)
    assert (unknown["ph"], unknown["name"], unknown["ts"]) == ("i", "tp barrier", 60)
    assert unknown["args"]["duration"] == "not known"
    found = tracks(trace_of(run)["traceEvents"])
    parts = found[1, EXPOSED]  # a collective of 30 to 42 us, while kernels of 7.123 us begin every 7.3 us
    assert {event["name"] for event in parts} == {"tp all_reduce"}
    gaps = [(10.1 + 7.3 * at + 7.123, 10.1 + 7.3 * (at + 1)) for at in (2, 3)]
    ends = [(event["ts"], event["ts"] + event["dur"]) for event in parts]
    assert [end for pair in ends for end in pair] == pytest.approx([end for pair in gaps for end in pair], abs=1e-3)
    known = found[1, CALLS][0]["args"]
    assert known["exposed, us"] == pytest.approx(2 * 0.177)
    assert known["hidden, us"] == pytest.approx(12 - 2 * 0.177)


def test_memory_stands_where_its_operation_was_launched(run: Path) -> None:
    counters = [e for e in trace_of(run)["traceEvents"] if e["ph"] == "C" and e["pid"] == 1]
    assert [c["args"]["reserved"] for c in counters] == [GIB] * 41
    found = [(c["ts"], c["args"]["allocated"]) for c in counters]
    assert found == [(0, 0), *((7 * at, (at + 1) * MIB) for at in range(40))]


def test_a_run_without_kernels_has_its_steps_and_memory(tmp_path: Path) -> None:
    made = HandMade()
    made.op("forward", 1)
    made.alloc(0, MIB)
    made.step(1)
    made.ended()
    run = made.write(new_run(tmp_path / "run"))
    build_tables(run)
    events = trace_of(run)["traceEvents"]
    assert {event["pid"] for event in events} == {2}
    assert [e["args"]["allocated"] for e in events if e["ph"] == "C"] == [0, MIB]
    run = wrote_nothing(tmp_path / "nothing")
    build_tables(run)
    assert trace_of(run)["traceEvents"] == []


def test_names_are_text_whatever_is_in_them(tmp_path: Path) -> None:
    made = HandMade()
    layer = made.layer('</script>"\\ \N{PILE OF POO}')
    made.others.append(record(kernel(0, 5, name='k"<\n>', layer=layer)))
    made.ended()
    run = made.write(new_run(tmp_path / "run"))
    build_tables(run)
    (event,) = tracks(trace_of(run)["traceEvents"])[1, "stream 0"]
    assert (event["name"], event["args"]["layer"]) == ('k"<\n>', '</script>"\\ \N{PILE OF POO}')


def test_what_a_trace_leaves_out_is_told(run: Path) -> None:
    assert "left out" not in trace_of(run)["otherData"]
    assert not [note for note in load_manifest(run).notes if "trace.json.gz" in note.text]
    opened = open_run(run)
    names = ("kernels", "host", "launches", "work", "layers", "calls", "groups", "ranges", "events", "spans")
    notes: list[Note] = []
    events = trace_events({name: opened.table(name) for name in names}, None, notes, most_bars=5)
    slices = tracks([json.loads(event) for event in events])[1, "layers"]
    assert len(slices) == 5
    assert_they_nest(slices)
    total = len(tracks(trace_of(run)["traceEvents"])[1, "layers"])
    left_out, merged = (note.text for note in notes)
    assert left_out == f"trace.json.gz leaves out the {total - 5:,} shortest of {total:,} slices of its track of layers"
    assert merged.startswith("trace.json.gz shows the 42 kernels of its streams as ")


def test_few_kernels_are_a_bar_each_and_neighbours_are_one() -> None:
    ready = timed(table(kernel(5, 1, stream=2), kernel(0, 3), kernel(4, NAN, "communication")))
    found = bars(ready, 10)
    assert found[["start_us", "first", "num_kernels"]].to_numpy().tolist() == [[0, 1, 1], [4, 2, 1], [5, 0, 1]]
    assert found["known"].tolist() == [True, False, True]
    rows = [kernel(at * 1.0, 1.0, layer=at // 100, name=f"k{at}") for at in range(1_000)]
    rows[250]["duration_us"] = 1.5
    found = bars(timed(table(*rows)), 20)
    assert found["num_kernels"].tolist() == [100] * 10
    assert found["first"].iloc[2] == 250  # the longest of them names the bar
    found = bars(timed(table(kernel(0, 1), kernel(6, 1), kernel(27, 1), kernel(39_999, 1))), 3)
    assert found["num_kernels"].tolist() == [2, 1, 1]  # 5 us between the first two, 20 us before the third
    found = bars(timed(table(*(kernel(*when, stream=stream) for when in ((0, 10), (8, 5)) for stream in (0, 1)))), 10)
    assert found["end_us"].tolist() == [8, 13] * 2


@pytest.mark.parametrize("most", [50, 200])
def test_many_kernels_become_few_bars_that_cover_the_same_time(most: int) -> None:
    rows = [kernel(at * 10.0, 9.9, layer=at // 10 % 12, stream=at % 2) for at in range(2_000)]
    rows += [kernel(at * 500.0, NAN, "communication", stream=5) for at in range(7)]
    ready = timed(table(*rows))
    found = bars(ready, most)
    assert len(found) <= most + 20
    assert found["num_kernels"].sum() == 2_007
    assert (found["known"] == 0).sum() == 7  # none of unknown duration is lost in another
    for _, of_stream in found.groupby("stream"):
        assert (of_stream["start_us"].to_numpy()[1:] >= of_stream["end_us"].to_numpy()[:-1]).all()
    assert found["end_us"].max() == pytest.approx(1999 * 10 + 9.9)


def test_runs_of_layers_nest_and_are_cut_by_what_comes_between() -> None:
    rows = [kernel(0, 5, layer=4), kernel(5, 5, layer=5), kernel(12, 3, layer=4), kernel(20, 5, "optimizer")]
    rows.append(kernel(0, 100, "communication", stream=9, layer=7))
    ready = timed(table(*rows))
    found = layer_runs(ready, model()["parent"].to_numpy())
    at_top = found[found["depth"] == 0]
    assert at_top[["layer", "start_us", "end_us"]].to_numpy().tolist() == [[1, 0, 15]]
    leaves = found[found["depth"] == 3]
    assert leaves[["layer", "start_us", "end_us"]].to_numpy().tolist() == [[4, 0, 5], [5, 5, 10], [4, 12, 15]]
    assert [KINDS[int(kind)] for kind in kind_runs(ready)["kind"]] == ["forward"]
    again = [kernel(0, 5, phase="backward", recompute=True, layer=4), kernel(5, 5, phase="backward", layer=4)]
    runs = layer_runs(timed(table(*again)), model()["parent"].to_numpy())
    assert runs["depth"].tolist() == [0, 1, 2, 3, 2, 3]  # the layer is cut in two, the model is not
    assert [KINDS[int(kind)] for kind in runs["kind"]] == ["backward"] * 2 + ["recompute"] * 2 + ["backward"] * 2
    assert np.isfinite(found[["start_us", "end_us"]].to_numpy()).all()
