"""The chart of segments: its bars are the table's bytes, and names are text."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fakedist
from fakedist.report.figures.look import FREE, STYLE_NAMES
from fakedist.report.figures.memory_figures import drawn_blocks, has_segments, segment_map
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.units import MIB
from tests.unit.analysis.recorded import HandMade
from tests.unit.analysis.test_segments import fragmented
from tests.unit.report.handmade import built

EVIL = '<a href="javascript:alert(1)">x</a>'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = fragmented()
    made.ended()
    return open_run(built(made, tmp_path_factory.mktemp("runs") / "run"))


def test_rows_are_segments_and_bars_in_them_are_what_is_allocated(run: Run) -> None:
    figure = run.figures.segments()
    rows = figure.data[0]
    assert rows.name == "free"
    assert sum(rows.x) * MIB == run.peak_reserved_bytes
    bars = {int(at): width for each in figure.data[1:] for at, width in zip(each.y, each.x, strict=True)}
    assert sum(bars.values()) * MIB == run.summary.reserved[0].allocated_bytes
    (pinning,) = [each.base[0] for each in figure.data[1:] if 0 in each.y]
    assert (bars[0], pinning) == (4, 30)  # in the segment with the most free memory, behind what was freed
    assert figure.layout.yaxis.ticktext[0] == "96.00 MiB"
    assert FREE in {each.marker.color for each in figure.data} <= STYLE_NAMES.keys()


def test_it_says_how_many_segments_are_not_drawn(run: Run) -> None:
    assert "; 3 segments with less free memory are not drawn" in segment_map(run, most=2).layout.title.text
    assert len(segment_map(run, most=2).data[0].x) == 2


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


def test_a_wrong_moment_names_the_right_ones(run: Run) -> None:
    with pytest.raises(ValueError, match="'peak_reserved' or 'peak_allocated'"):
        run.figures.segments(moment="end")


def test_a_snapshot_has_it_without_layers(run: Run) -> None:
    found = fakedist.open(run.path / "memory_snapshot.pickle").figures.segments()
    assert sum(found.data[0].x) * MIB == run.peak_reserved_bytes
    assert "step" not in str(found.data[1].customdata)


def test_a_run_without_memory_has_none(tmp_path: Path) -> None:
    run = open_run(built(HandMade(), tmp_path / "run"))
    assert list(run.figures.segments().data[0].x) == []
    assert not has_segments(run)
