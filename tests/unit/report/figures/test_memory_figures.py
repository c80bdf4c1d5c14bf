"""Charts of memory and of segments: their numbers are the run's, and names are text."""

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fakedist
from fakedist.report.figures.look import FREE, STYLE_NAMES
from fakedist.report.figures.memory_figures import (
    drawn_blocks,
    has_segments,
    highest_moves,
    layer_bars,
    least_between,
    named_bands,
    read_curve,
    segment_map,
)
from fakedist.report.page import assets
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.rundir.records import EngineRecord
from fakedist.rundir.schema import CATEGORIES
from fakedist.units import GIB, MIB, format_bytes
from tests.unit.analysis.recorded import HandMade
from tests.unit.analysis.test_segments import fragmented
from tests.unit.report.handmade import built, ended_well
from tests.unit.report.reading import page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(ended_well(tmp_path_factory.mktemp("runs") / "run"))


def test_the_categories_of_the_timeline_add_up_to_what_is_allocated(run: Run) -> None:
    curves = {each.name: np.asarray(each.y) for each in run.figures.timeline().data}
    names = {name.replace("_", " ") for name in CATEGORIES} & set(curves)
    assert len(names) > 1
    assert sum(curves[name] for name in names) == pytest.approx(curves["allocated"])
    assert (curves["reserved"] >= curves["allocated"]).all()


@pytest.mark.parametrize("axis", ["event", "time"])
def test_the_timeline_shows_the_peak(run: Run, axis: str) -> None:
    figure = run.figures.timeline(axis=axis)
    peak = next(each for each in figure.data if each.name == "peak")
    assert peak.y[0] * MIB == run.peak_allocated_bytes
    if axis == "event":  # in time, this run's phases are too narrow for names
        assert {shape.label.text for shape in figure.layout.shapes} >= {"init"}
    assert [each.text for each in figure.layout.annotations] == [
        f"<b>peak {format_bytes(run.peak_allocated_bytes)}</b>"
    ]


def test_a_peak_between_two_points_is_drawn() -> None:
    allocated = np.full(100_000, 5)
    allocated[77_777] = 9
    chosen = highest_moves(allocated, 100)
    assert 77_777 in chosen
    assert len(chosen) <= 102
    assert {0, 99_999} <= set(chosen.tolist())
    held = np.array([3, 9, 1, 7, 8, 2, 6])
    assert least_between(held, np.array([0, 1, 4])).tolist() == [3, 1, 2]


def _phased(directory: Path, names: dict[str, tuple[int, int]]) -> Run:
    """A run of 8 moves, each in an operation of its own: 1, 2, 4 and 8 MiB and then back to nothing."""
    made = HandMade()
    for exponent in range(4):
        made.op()
        made.alloc(exponent * 16 * MIB, 2**exponent * MIB)
    for exponent in reversed(range(4)):
        made.op()
        made.free(exponent * 16 * MIB, 2**exponent * MIB)
    for name, (first, end) in names.items():
        made.record("named_phase", name=name, step=1, first_op=first, end_op=end, peak_used_bytes=GIB)
    made.ended()
    return open_run(built(made, directory / "-".join(names)))


_PHASES = {"inner": (1, 2), "outer": (1, 3), "nothing": (4, 4), "sync<b>": (6, 8)}


def test_the_scripts_phases_are_stretches_of_moves_outer_ones_first(tmp_path: Path) -> None:
    run = _phased(tmp_path, _PHASES)
    bands = named_bands(run, read_curve(run))
    assert bands.to_numpy().tolist() == [["outer", 1, 3, 0], ["inner", 1, 2, 1], ["sync<b>", 6, 8, 0]]
    shapes = {shape.label.text: (shape.x0, shape.x1, shape.y0) for shape in run.figures.timeline().layout.shapes}
    assert shapes["outer"] == (1, 3, pytest.approx(1.06))
    assert shapes["inner"] == (1, 2, pytest.approx(1.12))
    assert shapes["sync&lt;b&gt;"][:2] == (6, 7), "the last move ends the axis"


def test_a_hand_over_is_from_where_the_last_phase_began_or_ended(tmp_path: Path) -> None:
    run = _phased(tmp_path, _PHASES)
    table = run.table("named_phases").set_index("phase")
    events = [(2, 3), (2, 4), (5, 5), (9, 13)]  # a segment is the first event, and each free is two
    assert list(zip(table["first_event"], table["end_event"], strict=True)) == events
    handover = table["handover_allocated_bytes"] // MIB
    assert handover.to_dict() == {"inner": 1, "outer": 1, "nothing": 15, "sync<b>": 15}
    peaks = table["peak_allocated_bytes"] // MIB
    assert peaks.to_dict() == {"inner": 3, "outer": 7, "nothing": 15, "sync<b>": 3}
    later = _phased(tmp_path, {"outer": (5, 8), "within": (6, 7)}).table("named_phases")
    assert (later["handover_allocated_bytes"] // MIB).tolist() == [15, 7], "from outer's begin"
    assert (later["peak_allocated_bytes"] // MIB).tolist() == [7, 3]


def _shared(directory: Path, *, names: list[str], rows: Sequence[tuple[object, ...]], phases: bool = True) -> Run:
    """A run with what is in use of its GPU: changes, bytes of its own, and those of other processes by name."""
    made = HandMade()
    made.op()
    made.alloc(0, MIB)
    if phases:
        for name, first, end in (("in<b>", 3, 4), ("out", 2, 5), ("nothing", 5, 5)):
            common = {"step": 1, "first_op": 0, "end_op": 1}
            made.record("named_phase", name=name, first_change=first, end_change=end, **common)
    if rows:
        made.record("device_use", processes=names, rows=rows)
    made.ended()
    return open_run(built(made, directory / "run"))


_USE = [(1, MIB, 0, (0, 0)), (2, MIB, 3 * MIB, (5 * MIB, 0)), (3, MIB, 0, (5 * MIB, 9 * MIB)), (7, MIB, 0, (0, 0))]


def test_the_use_of_the_device_adds_up_over_processes_with_its_peak_and_phases(tmp_path: Path) -> None:
    run = _shared(tmp_path, names=["a<b>.py", "a<b>.py"], rows=_USE)
    figure = run.figures.device()
    curves = {each.name: (np.asarray(each.y) * MIB).tolist() for each in figure.data}
    own, outside = (f"this process: {part}" for part in ("the allocator's segments", "outside of the allocator"))
    assert {name: [size // MIB for size in curve] for name, curve in curves.items()} == {
        own: [1, 1, 1, 1, 1],
        outside: [0, 3, 0, 0, 0],
        "a&lt;b&gt;.py": [0, 5, 5, 0, 0],
        "a&lt;b&gt;.py (2)": [0, 0, 9, 0, 0],
        "in use": [1, 9, 15, 1, 1],
        "peak": [15],
    }
    assert np.asarray(figure.data[0].x).tolist() == [1, 2, 3, 7, 8], "the end is as wide as a change"
    used = next(each for each in figure.data if each.meta == "used")
    assert list(used.text) == ["", "· out", "· in&lt;b&gt;", "", ""]
    shapes = {shape.label.text: (shape.x0, shape.x1, round(shape.y0, 2)) for shape in figure.layout.shapes}
    assert shapes == {"out": (2, 5, 0.88), "in&lt;b&gt;": (3, 4, 0.94)}, "below what is within it"
    assert figure.layout.yaxis.domain == (0, 0.88)
    table = run.table("device_use")
    assert table["process"].unique().tolist() == ["", "a<b>.py", "a<b>.py (2)"]
    assert 'id="device-use"' in page(run)


@pytest.mark.parametrize("process", ["", "EngineCore"])
def test_a_kv_cache_is_a_part_of_its_own_while_it_has_memory(tmp_path: Path, process: str) -> None:
    made = HandMade()
    made.op()
    made.alloc(0, MIB)
    sizes = dict.fromkeys([field.name for field in fields(EngineRecord)], 0) | {"num_blocks": 7, "block_bytes": 4 * MIB}
    sizes |= {"enforce_eager": False, "can_sleep": True}
    engine = sizes | {
        "process": process,
        "model_config": "",
        "version": "0.33.0",
        "cache_dtype": "fp8",
        "utilization": 0.5,
        "total_bytes": 80 * GIB,
    }
    made.record("engine", **engine)
    for changes in [(2, -1), (2, 3), (5, -1)]:  # a process that was killed says of no end
        made.record("engine_cache", first_change=changes[0], end_change=changes[1], process=process)
    held = [(1, 30 * MIB), (2, 30 * MIB), (3, 2 * MIB), (5, 20 * MIB), (9, 30 * MIB)]
    others = [name for name in ["a.py", process] if process]
    rows = [(change, 0, 0, (7, bytes_)) if process else (change, bytes_, 0, ()) for change, bytes_ in held]
    made.record("device_use", processes=others, rows=rows)
    made.ended()
    run = open_run(built(made, tmp_path / "run"))
    table = run.table("device_use").astype({"part": str, "process": str})
    of_engine = table[table["process"] == process].pivot_table("bytes", "change", "part") // MIB
    assert of_engine["KV cache"].tolist() == [0, 28, 0, 0, 28], (
        "not once the engine has given it back, on its way to sleep"
    )
    assert of_engine["all" if process else "allocator"].tolist() == [30, 2, 2, 20, 2]
    assert f"{process or 'this process'}: vLLM's KV cache" in [line.name for line in run.figures.device().data]


def test_a_page_of_a_rank_without_memory_has_what_other_processes_use(tmp_path: Path) -> None:
    made = HandMade()
    made.op()
    made.record("device_use", processes=["engine.py"], rows=[(1, 0, 0, (2 * GIB,)), (2, 0, 0, (GIB,))])
    made.ended()
    text = page(open_run(built(made, tmp_path / "run")))
    assert 'id="device-use"' in text
    assert 'data-figure="peak_allocated">2.00 GiB</div>' in text


@pytest.mark.parametrize(("rows", "phases"), [([(*row[:3], ()) for row in _USE], False), ([], True)])
def test_the_page_has_no_use_of_the_device_where_it_says_nothing_more(
    tmp_path: Path, rows: Sequence[tuple[object, ...]], phases: bool
) -> None:
    run = _shared(tmp_path, names=[], rows=rows, phases=phases)
    assert 'id="device-use"' not in page(run)
    if rows:
        assert len(run.figures.device().layout.shapes) == 0
    else:
        with pytest.raises(ValueError, match="does not have what was in use of a virtual GPU"):
            run.figures.device()


def test_a_run_without_phases_of_the_script_has_no_stretches_of_them(run: Run) -> None:
    assert named_bands(run, read_curve(run)).empty


@pytest.mark.parametrize("kind", ["icicle", "treemap"])
def test_the_boxes_of_the_peak_add_up_to_it(run: Run, kind: str) -> None:
    boxes = run.figures.peak_by_layer(kind=kind).data[0]
    assert sum(boxes.values) == run.peak_allocated_bytes
    assert set(boxes.parents[1:]) <= set(boxes.ids)
    assert [row[2] for row in boxes.customdata if row[0] == "layers.0-2.mlp"] == ["<br>3 layers"]
    own = {row[0]: value for row, value in zip(boxes.customdata, boxes.values, strict=True)}
    assert own["layers.0-2.mlp: parameter"] == 48 << 20
    assert own["layers.0-2.mlp"] == 0
    assert not any(name.startswith("(Transformer): ") for name in own)  # it holds nothing that no layer below it holds


def test_bars_of_layers_show_the_bytes_of_each_category(run: Run) -> None:
    figure = run.figures.layers()
    parameters = next(each for each in figure.data if each.name == "parameter")
    held = dict(zip(parameters.customdata, parameters.x, strict=True))
    assert held["layers.0-2.mlp"] * GIB == 48 << 20


def test_two_runs_are_drawn_on_one_axis(run: Run) -> None:
    figure = run.figures.compared_with(run)
    assert [max(each.y) * MIB for each in figure.data if each.meta] == [run.peak_allocated_bytes] * 2
    a, b = (each for each in figure.data if each.meta)
    assert list(a.y) == list(b.y)


def test_names_of_layers_are_text(tmp_path: Path) -> None:
    made = HandMade()
    made.op("forward", 1, made.layer('<a href="javascript:alert(1)">x</a>'))
    made.alloc(0, MIB)
    evil = open_run(built(made, tmp_path / "run"))
    assert "alert(1)" in layer_bars(evil).to_json()
    assert "<a" not in layer_bars(evil).to_json() + evil.figures.peak_by_layer().to_json()


@pytest.mark.parametrize(
    ("chart", "wrong"),
    [("timeline", {"axis": "steps"}), ("peak_by_layer", {"kind": "sunburst"}), ("calls", {"unit": "x"})],
)
def test_a_wrong_choice_names_the_right_ones(run: Run, chart: str, wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=" or "):
        getattr(run.figures, chart)(**wrong)


def test_the_timeline_of_a_snapshot_is_coloured_by_line(run: Run) -> None:
    snapshot = fakedist.open(run.path / "memory_snapshot.pickle")
    names = {each.name for each in snapshot.figures.timeline().data} - {"least", "between"}
    assert names >= {"everything else", "allocated", "reserved", "peak"}
    assert "/job/model.py:12 (forward)" in names  # blocks have the colours of their lines


def test_the_colours_of_charts_are_those_of_the_page() -> None:
    style = (Path(assets.__file__).parent / "templates" / "style.css").read_text()
    light = style[: style.index(":root[data-theme")]
    in_style = dict(re.findall(r"--([\w-]+): ([^;]+);", light))
    for colour, name in STYLE_NAMES.items():
        written = in_style[name] if not in_style[name].startswith("var") else colour
        assert same_colour(written, colour), (name, written, colour)


def same_colour(css: str, colour: str) -> bool:
    """True if two ways of writing a colour mean one: "rgb(255 255 255 / .38)" is "rgba(255, 255, 255, 0.38)"."""
    numbers = [[float(each) for each in re.findall(r"[\d.]+", text)] for text in (css, colour)]
    return css == colour or (css.startswith("rgb") and numbers[0] == numbers[1])


EVIL = '<a href="javascript:alert(1)">x</a>'


@pytest.fixture(scope="module")
def in_segments(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = fragmented()
    made.ended()
    return open_run(built(made, tmp_path_factory.mktemp("runs") / "run"))


def test_rows_are_segments_and_bars_in_them_are_what_is_allocated(in_segments: Run) -> None:
    figure = in_segments.figures.segments()
    rows = figure.data[0]
    assert rows.name == "free"
    assert sum(rows.x) * MIB == in_segments.peak_reserved_bytes
    bars = {int(at): width for each in figure.data[1:] for at, width in zip(each.y, each.x, strict=True)}
    assert sum(bars.values()) * MIB == in_segments.summary.reserved[0].allocated_bytes
    (pinning,) = [each.base[0] for each in figure.data[1:] if 0 in each.y]
    assert (bars[0], pinning) == (4, 30)  # in the segment with the most free memory, behind what was freed
    assert figure.layout.yaxis.ticktext[0] == "96.00 MiB"
    assert FREE in {each.marker.color for each in figure.data} <= STYLE_NAMES.keys()


def test_it_says_how_many_segments_are_not_drawn(in_segments: Run) -> None:
    assert "; 3 segments with less free memory are not drawn" in segment_map(in_segments, most=2).layout.title.text
    assert len(segment_map(in_segments, most=2).data[0].x) == 2


def test_narrow_blocks_share_a_bar_that_counts_them() -> None:
    blocks = pd.DataFrame({"segment": 0, "offset_bytes": np.arange(0, 100) * 1024, "bytes": 512})
    blocks = blocks.assign(is_waiting=False, category="other", layer="", phase="", step=0, operation="", line="")
    (row,) = drawn_blocks(blocks, 1 << 40).itertuples()
    assert (row.num_blocks, row.bytes, row.start, row.end) == (100, 51_200, 0, 99 * 1024 + 512)
    assert len(drawn_blocks(blocks, 100 * 1024)) == 100


def test_names_are_text(tmp_path: Path) -> None:
    made = HandMade()
    stack = made.stack((f"/job/{EVIL}.py", 1, EVIL))
    made.op("forward", 1, made.layer(EVIL), name=EVIL)
    made.alloc(0, 2 * MIB, stack=stack)
    made.ended()
    found = open_run(built(made, tmp_path / "run")).figures.segments().to_json()
    assert "alert(1)" in found
    assert "<a" not in found


def test_a_wrong_moment_names_the_right_ones(in_segments: Run) -> None:
    with pytest.raises(ValueError, match="'peak_reserved' or 'peak_allocated'"):
        in_segments.figures.segments(moment="end")


def test_a_snapshot_has_it_without_layers(in_segments: Run) -> None:
    found = fakedist.open(in_segments.path / "memory_snapshot.pickle").figures.segments()
    assert sum(found.data[0].x) * MIB == in_segments.peak_reserved_bytes
    assert "step" not in str(found.data[1].customdata)


def test_a_run_without_memory_has_none(tmp_path: Path) -> None:
    run = open_run(built(HandMade(), tmp_path / "run"))
    assert list(run.figures.segments().data[0].x) == []
    assert not has_segments(run)
