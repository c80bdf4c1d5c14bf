"""The page's section about time: the terminal's numbers, in a page that stays small."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fakedist.report.content.time import top_kernels
from fakedist.report.figures.time_figures import read_kernels
from fakedist.report.page import drawings
from fakedist.report.page.drawings import Pack
from fakedist.report.page.run_charts import limit_bars
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.rundir.schema import FAMILIES
from fakedist.rundir.step_time import PathPart, RankThroughput, StepLimit
from fakedist.units import format_us
from tests.unit.analysis.recorded import HandMade
from tests.unit.cost_model.times_by_hand import kernel, record
from tests.unit.report.handmade import built, ended_well, overlapping, ranged, timed
from tests.unit.report.reading import PageText, page, read_page

HOSTILE = '<script>alert("k")</script>'


class Kept(Pack):
    def __init__(self) -> None:
        super().__init__()
        self.arrays: dict[str, list[float]] = {}

    def add(self, name: str, values: object) -> None:
        self.arrays[name] = np.asarray(values).tolist()
        super().add(name, values)


def read(run: Path) -> PageText:
    return read_page(page(open_run(run)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return timed(tmp_path_factory.mktemp("runs") / "run")


def test_the_layers_at_the_peak_have_their_times_beside_their_bytes(run: Path) -> None:
    table = read(run).tables["layer-table"]
    assert table[0][-3:] == ["forward, estimated", "recompute, estimated", "backward, estimated"]
    mlps = next(row for row in table if row[0].startswith("layers.0-2.mlp"))
    assert mlps[-3:] == ["195 µs"] * 3


def test_a_run_without_times_has_no_section(tmp_path: Path) -> None:
    text = page(open_run(ended_well(tmp_path / "run")))
    assert '<section id="time"' not in text
    assert 'href="#time"' not in text


def drawn(found: Run) -> Kept:
    """The arrays of the drawing of a run's kernels."""
    pack = Kept()
    drawings.add_kernels(pack, found, read_kernels(found), found.table("layers"), found.time.summary())
    return pack


def test_the_drawing_has_every_kernel_where_it_is(run: Path) -> None:
    found = open_run(run)
    pack, kernels = drawn(found), read_kernels(found)
    tick = pack.meta["tick_us"]
    ordered = kernels.sort_values(["stream", "start_us"])
    assert np.multiply(pack.arrays["bar_start"], tick) == pytest.approx(ordered["start_us"].to_numpy(), abs=1e-3)
    length = ordered["duration_us"].fillna(0).to_numpy()
    assert np.multiply(pack.arrays["bar_length"], tick) == pytest.approx(length, abs=2e-3)
    kinds = [int(kind) for kind in pack.arrays["bar_kind"]]
    families = [FAMILIES[int(pack.arrays["bars_family"][kind])] for kind in kinds]
    assert families == [FAMILIES[at] for at in ordered["family"]]
    labels = {pack.meta["kernels"][int(pack.arrays["bars_name"][kind])] for kind in kinds}
    assert {"default_pg all_reduce", "tp all_gather_into_tensor"} <= labels
    assert not pack.meta["merged"]


def test_a_collective_says_how_much_of_it_compute_hides(tmp_path: Path) -> None:
    pack = drawn(open_run(overlapping(tmp_path / "run")))
    assert np.multiply(pack.arrays["bar_hidden"], pack.meta["tick_us"]) == pytest.approx([0, 0, 40])


def test_the_scripts_ranges_are_lanes_and_a_table(tmp_path: Path) -> None:
    found = open_run(ranged(tmp_path / "run"))
    pack, time = drawn(found), found.time.summary()
    assert [pack.meta["ranges"][int(name)] for name in pack.arrays["range_name"]] == ["<b>outer</b>", "inner"]
    assert (pack.arrays["range_lane"], pack.arrays["range_kernels"]) == ([0, 1], [2, 1])
    busy = np.multiply(pack.arrays["range_busy"], pack.meta["tick_us"])
    assert busy == pytest.approx([row.kernel_us for row in time.ranges], abs=1e-2)
    rows = read(found.path).tables["ranges"]
    assert [row[:3] for row in rows[1:]] == [["<b>outer</b>", "1", "2"], ["inner", "1", "1"]]
    assert rows[1][3:5] == [format_us(time.kernel_us), "100.0%"]


def test_the_critical_path_is_a_table_of_layers_and_groups(run: Path) -> None:
    opened = open_run(run)
    assert "critical-path" not in read(run).tables, "of a trace it is not known what streams wait for"
    time = opened.summary.time
    parts = [
        PathPart("kernels", "layers.0-2.up", "", "", 3, 6, 700.0),
        PathPart("collectives", "", "dp", "all_gather", 0, 2, 200.0),
        PathPart("host", "", "", "", 1, 4, 90.0),
        PathPart("idle", "", "", "", 0, 0, 10.0),
    ]
    opened.summary = replace(opened.summary, time=replace(time, step_us=1000.0, critical_path=parts))
    rows = read_page(page(opened)).tables["critical-path"]
    assert rows[1:] == [
        ["kernels", "layers.0-2.up x3", "6", "700 µs", "70.0%"],
        ["all_gather", "dp", "2", "200 µs", "20.0%"],
        ["host", "(outside of modules)", "4", "90.0 µs", "9.0%"],
        ["idle", "", "-", "10.0 µs", "1.0%"],
    ]


def test_layers_that_are_opened_have_the_figures_of_their_row(run: Path) -> None:
    pack, found = Kept(), open_run(run)
    times, layers = found.table("layer_times"), found.table("layers")
    drawings.add_layer_times(pack, times, layers)
    assert pack.arrays["time_total_us"] == (times["total_us"] * 1e3).round().tolist()
    assert pack.arrays["time_forward_us"][1] == 195_000 == sum(pack.arrays["time_forward_us"][7:10])


def test_names_of_kernels_are_text(tmp_path: Path) -> None:
    made = HandMade()
    layer = made.layer(HOSTILE)
    made.others.append(record(kernel(0, 5, name=HOSTILE, layer=layer)))
    made.ended()
    run = built(made, tmp_path / "run")
    found = read(run)
    assert len(found.scripts) == 3  # ours, plotly.js and the numbers
    assert found.tables["top-kernels"][1][0] == HOSTILE
    assert found.tables["time-table"][1][0].strip() == HOSTILE


def test_a_page_of_many_kernels_says_that_neighbours_are_one_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawings, "MOST_BARS", 50)
    made = HandMade()
    layers = [made.layer(f"l{at}") for at in range(5)]
    made.others.append(record(*(kernel(at * 2.0, 1.9, layer=layers[at % 5], name=f"k{at}") for at in range(2_000))))
    made.ended()
    run = built(made, tmp_path / "run")
    pack = drawn(open_run(run))
    assert pack.meta["merged"]
    assert len(pack.arrays["bar_kind"]) <= 60
    assert sum(pack.arrays["bar_num"]) == 2_000 == pack.meta["num_kernels"]
    assert len(pack.meta["kernels"]) <= 60  # names of bars, not of kernels


def test_a_step_that_generates_says_how_much_of_it_decodes(tmp_path: Path) -> None:
    made = HandMade()
    made.op("generation", 2)
    made.others.append(
        record(kernel(0.0, 2e3, phase="generation"), kernel(4e3, 2e3, phase="generation"), kernel(6e3, 2e3))
    )
    found = open_run(built(made, tmp_path / "run"))
    assert found.summary.timed is not None
    assert found.summary.timed[0].generation_us == 6e3
    text = page(found)
    assert "75.0%, the step decodes" in text
    assert "--p-generation" in text


def bar_us(pack: Kept) -> np.ndarray:
    """The time of the kernels in each bar."""
    ticks = np.add(pack.arrays["bar_length"], pack.arrays["bar_more"]) - pack.arrays["bar_less"]
    return np.multiply(ticks, pack.meta["tick_us"])


@pytest.mark.parametrize("most", [60_000, 20])
def test_bars_add_up_to_their_kernels_also_where_they_overlap_or_merge(
    run: Path, monkeypatch: pytest.MonkeyPatch, most: int, tmp_path: Path
) -> None:
    monkeypatch.setattr(drawings, "MOST_BARS", most)
    made = HandMade()
    layer = made.layer("l")
    made.others.append(record(*(kernel(at * 2.0, 2.5 if at % 2 else 1.1, layer=layer) for at in range(100))))
    made.ended()
    for directory in (run, built(made, tmp_path / "overlapping")):
        found = open_run(directory)
        pack = drawn(found)
        assert bar_us(pack).sum() == pytest.approx(read_kernels(found)["known_us"].sum(), abs=0.1)


def test_what_the_lanes_hold_of_a_row_is_what_its_table_says(run: Path) -> None:
    found = open_run(run)
    pack = drawn(found)
    kinds = np.array(pack.arrays["bar_kind"], int)
    row = np.array(pack.arrays["bars_row"], int)[kinds]
    for number, (name, time_us, num) in enumerate(
        top_kernels(found)[["name", "time_us", "num_kernels"]].itertuples(index=False), 1
    ):
        assert bar_us(pack)[row == number].sum() == pytest.approx(time_us, abs=1e-2), name
        assert np.array(pack.arrays["bar_num"])[row == number].sum() == num


def test_the_critical_path_in_the_lanes_is_that_of_the_table(tmp_path: Path) -> None:
    found = open_run(ranged(tmp_path / "run"))
    pack, time = drawn(found), found.time.summary()
    on_gpu = sum(part.time_us for part in time.critical_path if part.kind in ("kernels", "collectives"))
    assert pack.meta["has_path"]
    assert np.multiply(sum(pack.arrays["bar_path"]), pack.meta["tick_us"]) == pytest.approx(on_gpu, abs=1e-2)
    assert not drawn(open_run(timed(tmp_path / "traced"))).meta["has_path"]


def test_a_run_of_an_earlier_version_has_no_path_and_is_shown(run: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    old = shutil.copytree(run, tmp_path / "old")
    file = old / "tables" / "kernels.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).drop_columns(["path_us"]), file)
    assert open_run(old).table("kernels")["path_us"].isna().all()
    assert not drawn(open_run(old)).meta["has_path"]


def test_the_limits_of_a_step_are_bars_on_its_scale_with_their_intervals(run: Path) -> None:
    time = open_run(run).summary.time
    assert time is not None
    limits = [
        StepLimit("collectives", "dp", 4, 1_710e3, 1_200e3, 2_420e3),
        StepLimit("kernels", "", 0, 895e3, 800e3, 1_000e3),
        StepLimit("host", "", 0, 179e3, 90e3, 300e3),
    ]
    found = replace(time, step_us=1_790e3, step_low_us=None, step_high_us=None, limits=limits)
    chart = limit_bars(found)
    assert [(bar.name, bar.text, bar.more) for bar in chart.bars] == [
        ("the step", "1.79 s", ""),
        ("dp over the NICs", "1.71 s", "(1.20 to 2.42)"),
        ("kernels", "895.0 ms", "(800.0 ms to 1.00 s)"),
        ("the host", "179.0 ms", "(90.0 to 300.0)"),
    ]
    assert [bar.parts[0].value for bar in chart.bars] == [1_790e3, 1_710e3, 895e3, 179e3]


def test_the_card_has_the_rates_of_the_job_and_the_limits_and_no_wall_time_of_this_machine(tmp_path: Path) -> None:
    opened = open_run(timed(tmp_path / "run"))
    time = opened.summary.time
    assert time is not None
    path = [PathPart("kernels", "", "", "", 1, 1, time.step_us)]
    limits = [StepLimit("kernels", "", 0, time.step_us, time.step_us, time.step_us)]
    rate = RankThroughput(8_192, "all of them", 573.0)
    known = replace(time, model_flops=1e12, step_flops_utilisation=0.26, throughput=rate)
    known = replace(known, limits=limits, critical_path=path)
    summary = replace(opened.summary, time=known)
    text = page(Run(opened.path, opened.manifest, summary, opened._tables))
    card = text[text.index('<section id="verdict"') : text.index("</section>")]
    assert 'data-figure="MFU">26.0%<' in card
    assert 'data-figure="tokens/s">573<' in card
    assert "on its own, each part would take: kernels 1.00 ms<" in text
    assert "wall time" not in card
    assert "Limits side by side" in text
