"""Sections of a run's page: how many of their rows are shown, and when one is left out."""

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import jinja2
import pytest
from rich.console import Console

from fakedist.cli import main
from fakedist.report.content.memory import layer_sheet
from fakedist.report.content.run import run_report
from fakedist.report.page import run_charts
from fakedist.report.page.run_charts import phase_bars
from fakedist.report.render.html import load_page, write_page
from fakedist.report.render.terminal import render
from fakedist.results.building import build_tables
from fakedist.results.opening import open_run
from fakedist.rundir.directory import load_manifest, write_manifest
from tests.unit.analysis.recorded import GIB, MIB, HandMade, wrote_nothing
from tests.unit.analysis.test_segments import fragmented
from tests.unit.report import handmade
from tests.unit.report.handmade import built, ended_well
from tests.unit.report.reading import PageText, page, read_page

HOSTILE = ("<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "🔥 {{ 7 * 7 }} </td>", "x" * 10_000)


def terminal_rows(run: Path) -> list[list[str]]:
    """Every line of the terminal's report, cut into cells."""
    stream = StringIO()
    render(run_report(run, is_full=True), Console(file=stream, width=2_000))
    return [re.split(r"\s{2,}", line.strip()) for line in stream.getvalue().splitlines()]


def read(run: Path) -> PageText:
    return read_page(page(open_run(run)))


def test_a_loaded_page_reads_and_compiles_no_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = handmade.ended_well(tmp_path / "run")
    load_page()
    monkeypatch.setattr(jinja2.Environment, "compile", None)
    assert read(run).tables


def test_the_verdict_names_the_top_advice_who_holds_most_and_the_files(tmp_path: Path) -> None:
    run = handmade.ended_well(tmp_path / "run")
    found = read(run)
    assert found.figures["advice"].startswith("up to 821.51 MiB less reserved, estimated: use expandable segments")
    words = " ".join(" ".join(found.words).split())
    assert "most, by layer, own 104.00 MiB 51.4% layers.0-2.mlp x3" in words
    assert "most, by line" in words
    write_page(open_run(run), run / "report.html")
    there = read_page((run / "report.html").read_text())
    (run / "trace.json.gz").unlink(missing_ok=True)
    names = [each for each in there.fetched if not each.startswith("#")]
    assert names == ["data:,", *(["trace.json.gz"] if "trace.json.gz" in names else []), "memory_snapshot.pickle"]
    (run / "trace.json.gz").touch()
    assert "trace.json.gz" in read_page(page(open_run(run), run)).fetched
    assert "trace.json.gz" not in read_page(page(open_run(run), tmp_path)).fetched  # kept elsewhere


def test_a_run_that_broke_off_fits_so_far(tmp_path: Path) -> None:
    made = HandMade()
    made.op("init", 0)
    made.alloc(0, MIB)
    made.ended("exception", 1, "RuntimeError: <b>no</b>")
    run = built(made, tmp_path / "run", "exit", gpu_memory_bytes=1 << 36)
    found = read(run)
    assert found.figures["left"].endswith("until the rank ended: exception (RuntimeError: <b>no</b>) after 0 steps.")
    assert "fits so far" in found.words
    assert "  fits so far, headroom" in "\n".join("  ".join(["", *row]) for row in terminal_rows(run))
    whole = read(handmade.ended_well(tmp_path / "well"))
    assert "fits" in whole.words
    assert "(2 steps recorded; validation and saving did not run), headroom" in " ".join(whole.words)
    assert "left" not in whole.figures


def test_notes_name_files_as_everything_else_does(tmp_path: Path) -> None:
    made = HandMade()
    rows = [("aten.item", "/env/lib/python3.11/site-packages/lib/a.py", 3, 1, 5)]
    made.record("invented", rows=rows)
    made.record("note", note={"code": "told", "text": "seen at /job/train.py:7: once"})
    run = built(made, tmp_path / "run")
    words = " ".join(read(run).words)
    assert "first at lib/a.py:3, because" in words
    assert "seen at train.py:7: once" in words
    assert "/env/" not in words
    assert "first at lib/a.py:3, because" in " ".join(cell for row in terminal_rows(run) for cell in row)


def test_the_page_draws_the_segments_with_the_most_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fragmented()
    made.ended()
    run = built(made, tmp_path / "run")
    text = page(open_run(run))
    assert 'id="segment-map"' in text
    assert "are not drawn" not in text
    monkeypatch.setattr(run_charts, "MOST_SEGMENTS", 2)
    (chart,) = run_charts.RunCharts(open_run(run)).segments()
    assert len(chart.data().figures["segments"]["data"][0]["x"]) == 2  # type: ignore[union-attr]
    assert "3 segments with less free memory are not drawn" in page(open_run(run))
    build_tables(empty := wrote_nothing(tmp_path / "nothing"))
    assert 'id="segment-map"' not in page(open_run(empty))


def test_a_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    found = read(handmade.ended_well(tmp_path / "run"))
    assert [each for each in found.fetched if not each.startswith("#")] == ["data:,"]
    assert found.handlers == []
    assert len(found.scripts) == 3


def test_hostile_names_are_text(tmp_path: Path) -> None:
    made = HandMade()
    root = made.layer(HOSTILE[0], HOSTILE[1])
    layers = [made.layer(name, name, root) for name in HOSTILE[1:]]
    for number, (name, layer) in enumerate(zip(HOSTILE, [root, *layers], strict=True)):
        stack = made.stack((f"/job/{name}.py", 1, name))
        made.op("forward", 1, layer, name=name)
        made.alloc(number * 64 * MIB, 32 * MIB, stack=stack)
    made.record("groups", rows=[(0, HOSTILE[0], HOSTILE[1], (0, 1), 0, 0, HOSTILE[2])])
    made.record("calls", rows=[(0, HOSTILE[2], 0, 1, 1, HOSTILE[0], False, 0, 1, 0, -1, 0, 0)])
    made.record("note", note={"code": "told", "text": HOSTILE[0]})
    made.ended(outcome="exception", code=1, message=HOSTILE[1])
    found = read(built(made, tmp_path / "run", arguments=HOSTILE))
    assert len(found.scripts) == 3
    assert not any("alert" in script for script in found.scripts)
    assert found.handlers == []
    words = " ".join(found.words)
    assert all(" ".join(name.split()) in " ".join(words.split()) for name in HOSTILE)


def test_a_run_that_never_reached_the_gpu_makes_a_page(tmp_path: Path) -> None:
    run = wrote_nothing(tmp_path / "run")
    build_tables(run)
    found = read(run)
    assert "nothing was allocated on the GPU" in " ".join(found.words)
    assert "blocks" not in found.tables


def test_report_writes_the_same_page_where_it_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = handmade.ended_well(tmp_path / "run")
    report = ["report", str(run), "--format", "html", "-o"]
    assert main([*report, str(tmp_path / "a page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a page.html'}\n"
    text = (tmp_path / "a page.html").read_text()
    assert text.startswith("<!doctype html>")
    assert not list(tmp_path.glob(".*"))
    write_page(open_run(run), tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == text
    assert main([*report, str(tmp_path / "a page.html" / "a.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_secrets_of_the_command_line_are_not_in_the_page(tmp_path: Path) -> None:
    run = handmade.ended_well(tmp_path / "run")
    command = ["/bin/fakedist", "profile", "--env", "HF_TOKEN=hf_hunter2", "--env", "A=b c"]
    write_manifest(run, replace(load_manifest(run), command=command))
    words = " ".join(" ".join(read(run).words).split())
    assert "fakedist profile --env HF_TOKEN=... --env 'A=b c'" in words
    assert "hunter2" not in page(open_run(run))


def test_phases_of_the_script_have_bars_and_a_table_and_other_pages_have_neither(tmp_path: Path) -> None:
    made = HandMade()
    for at, name in enumerate(("rollout <i>", "sleep")):
        made.op()
        made.alloc(at * 64 * MIB, 32 * MIB)
        used = {"peak_used_bytes": 400 * MIB, "backed_bytes": 100 * MIB, "others_bytes": at * 200 * MIB}
        made.record("named_phase", name=name, step=1, first_op=at, end_op=at + 1, **used)
    made.ended()
    run = open_run(built(made, tmp_path / "run"))
    found, text = read_page(page(run)), page(run)
    rows = found.tables["named-phases"]
    assert [row[0] for row in rows] == ["phase", "rollout <i>", "sleep"]
    assert dict(zip(rows[0], rows[2], strict=True))["hand-over: allocated"] == "32.00 MiB"
    chart = phase_bars(run.summary)
    assert chart is not None
    bars = [[(part.style, part.value / chart[0].widest) for part in bar.parts if part.value] for bar in chart[0].bars]
    assert bars == [
        [("k-parameter", 0.25), ("rest", 0.75)],
        [("k-parameter", 0.25), ("k-optimizer_state", 0.5), ("rest", 0.25)],
    ]
    assert [bar.name for bar in chart[0].bars] == ["rollout <i>, step 1", "sleep, step 1"]
    assert [name for name, _ in chart[0].legend][-1] == "more at its peak"
    assert '<section id="device"' in text
    without = page(open_run(handmade.ended_well(tmp_path / "none")))
    assert '<section id="device"' not in without
    assert 'id="named-phases"' not in without


def test_of_many_phases_those_that_used_most_have_bars(tmp_path: Path) -> None:
    made = HandMade()
    made.op()
    made.alloc(0, 32 * MIB)
    for at in range(50):
        used = max(at, 20) * MIB  # the first 21 used as much
        made.record("named_phase", name=str(at), step=1, first_op=0, end_op=1, peak_used_bytes=used)
    made.ended()
    chart = phase_bars(open_run(built(made, tmp_path / "run")).summary)
    assert chart is not None
    names = [bar.name for bar in chart[0].bars]
    assert names == [f"{at}, step 1" for at in (*range(11), *range(21, 50))]
    assert chart[1] == 10


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
