"""Sections of a run's page: how many of their rows are shown, and when one is left out."""

from pathlib import Path

from fakedist.report.content.memory import layer_sheet
from fakedist.results.building import build_tables
from fakedist.results.opening import open_run
from tests.unit.analysis.recorded import GIB, MIB, HandMade, wrote_nothing
from tests.unit.report.handmade import built, ended_well
from tests.unit.report.reading import page


def test_of_very_many_layers_the_largest_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    made = HandMade()
    for number in range(1_010):
        made.op("forward", 1, made.layer(f"odd{number}", "Linear"))
        made.alloc(number * MIB, 512 * (1 + number))
    sheet = layer_sheet(open_run(built(made, tmp_path / "run")), all_layers=False)
    assert (len(sheet.rows), sheet.columns[0].cells[0]) == (1_000, "odd10")
    assert "and 11 more, in tables/layers.parquet" in sheet.remarks  # one is what is outside of modules


def test_sections_without_anything_are_left_out(tmp_path: Path) -> None:
    build_tables(nothing := wrote_nothing(tmp_path / "nothing"))
    whole, empty = page(open_run(ended_well(tmp_path / "run"))), page(open_run(nothing))
    for name in ("memory", "peak", "segments", "layers", "communication", "advice"):
        assert f'<section id="{name}"' in whole
        assert f'<section id="{name}"' not in empty
        assert f'href="#{name}"' not in empty
    assert '<section id="device"' not in whole


def test_the_bar_of_the_verdict_marks_what_the_gpu_has_where_more_is_reserved(tmp_path: Path) -> None:
    made = HandMade()
    made.op()
    made.alloc(0, 20 * GIB)
    made.event("segment_alloc", 2 * GIB, 100 * GIB)
    made.ended()
    text = page(open_run(built(made, tmp_path / "run", gpu_memory_bytes=80 * GIB)))
    gauge = text[text.index('<div class="gauge">') : text.index('<ul class="legend">')]
    assert '<b style="left:' in gauge
    assert '<b style="left:' not in page(open_run(ended_well(tmp_path / "well")))
