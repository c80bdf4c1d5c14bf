"""The text of a report, to the letter. To renew the expected texts after an intended change:

python -m tests.unit.report.render.test_terminal
"""

import io
import re
import tempfile
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fakedist.errors import RunDirectoryError
from fakedist.report.content.run import SECTIONS, _advice_lines, run_report
from fakedist.report.render.markdown import report_markdown
from fakedist.report.render.terminal import render
from fakedist.results.building import build_tables
from fakedist.results.opening import open_run
from fakedist.rundir import notes, time_notes
from fakedist.rundir.directory import load_manifest, write_manifest
from fakedist.rundir.step_time import PathPart, TimeGain
from fakedist.rundir.summary import Advice, OutOfMemory, Remedy
from tests.unit.analysis.recorded import GIB, MIB, HandMade, new_run, wrote_nothing
from tests.unit.report.handmade import built, ended_well, measured, out_of_memory, timed

EXPECTED = Path(__file__).parent / "expected"
CASES = [(ended_well, 80), (ended_well, 160), (out_of_memory, 80), (out_of_memory, 160)]
CASES += [(timed, 80), (timed, 120), (measured, 120)]
SHARDED = "keep the logits sharded over the 8 ranks of mesh_tp (loss parallel)"
CHECKPOINTED = "checkpoint layers.0-79 (TransformerBlock)"


def crowded(directory: Path) -> Path:
    """A run that does not fit, with all that a report can have: a remedy, advice, gains and warnings."""
    run = timed(directory)
    manifest = load_manifest(run)
    assert manifest.summary is not None
    assert manifest.summary.time is not None
    line = "/job/.venv/lib/python3.11/site-packages/megatron/core/fusions/fused_softmax.py:335 (forward)"
    layer = "decoder.layers.0.self_attention.core_attention.scale_mask_softmax.(Softmax)"
    needs: Any = {"needs_low_bytes": 60 * GIB, "needs_high_bytes": 88 * GIB, "fits": "may fit"}
    price: Any = {
        "price_us": 0.0,
        "step_share": 0.0,
        "step_share_high": 0.24,
        "price_high_us": 2e5,
        "spent_on": "copies",
    }
    remedy = Remedy(rules=["a", "b"], titles=[SHARDED, CHECKPOINTED], gives_bytes=GIB, unpriced=[], **needs | price)
    advice = [
        Advice("rule", title, "", GIB, gives_low_bytes=GIB // 2, **needs | price)
        for title in (SHARDED, CHECKPOINTED, "offload the saved activations of layers.0-79 (TransformerBlock)")
    ]
    time = manifest.summary.time
    gains = [
        TimeGain(f"{number} times the NIC bandwidth", "", time.step_us * (1 - number / 100)) for number in (9, 8, 7)
    ]
    path = [PathPart("kernels", "", "", "", 0, 1, time.step_us)]
    summary = replace(
        manifest.summary,
        fits=False,
        peak_reserved_bytes=91 * GIB,
        out_of_memory=OutOfMemory(
            GIB, layer, "aten._softmax.default", line, 78 * GIB, 79 * GIB, 1, "forward", 80 * GIB, True
        ),
        remedy=remedy,
        advice=advice,
        time=replace(time, gains=gains, critical_path=path, collector_us=time.step_us / 50),
        notes=[
            notes.stopped_before_the_end(2, "", []),
            notes.values_made_up(4, "/job/model.py:12"),
            time_notes.host_clock_disturbed(2.3),
            notes.experts_made_up("aten.topk.default", "/job/model.py:12", "/job/model.py:12"),
            notes.not_answered("cuMemAdvise", 3),
        ],
    )
    write_manifest(run, replace(manifest, summary=summary))
    return run


SHORT_CASES = [(make, width) for make in (crowded, timed) for width in (80, 100, 120)] + [(out_of_memory, 80)]


def short(run: Path, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with chdir(run.parent):  # what has room depends on how long its path is
        render(run_report(Path(run.name)), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def text(run: Path, width: int = 160, *, all_layers: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    render(run_report(run, all_layers=all_layers, is_full=True), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().replace(str(run), "RUN")


@pytest.mark.parametrize(("make", "width"), CASES)
def test_a_report_is_this_text(tmp_path: Path, make: Callable[[Path], Path], width: int) -> None:
    assert text(make(tmp_path / "run"), width) == (EXPECTED / f"{make.__name__}_{width}.txt").read_text()


@pytest.mark.parametrize(("make", "width"), SHORT_CASES)
def test_a_short_report_is_this_text_of_at_most_40_lines(
    tmp_path: Path, make: Callable[[Path], Path], width: int
) -> None:
    shown = short(make(tmp_path / "run"), width)
    assert shown == (EXPECTED / f"short_{make.__name__}_{width}.txt").read_text()
    assert sum(-(-max(len(line), 1) // width) for line in shown.splitlines()) <= 40


def test_a_short_report_has_the_gravest_warning_and_counts_the_others(tmp_path: Path) -> None:
    lines = short(crowded(tmp_path / "run"), 80).splitlines()[-3:]
    assert [line.split()[0] for line in lines if line] == ["cuMemAdvise", "5"]
    assert lines[-1].startswith("5 notes, 3 more of them warnings, and every table: ")


@pytest.mark.parametrize("make", [ended_well, timed, measured])
@pytest.mark.parametrize("width", [80, 160])
def test_no_line_but_paths_and_messages_is_wider_than_the_terminal(
    tmp_path: Path, width: int, make: Callable[[Path], Path]
) -> None:
    lines = text(make(tmp_path / "run"), width, all_layers=True).splitlines()
    assert [line for line in lines if len(line) > width and not line.startswith("run ")] == []
    assert [line for line in lines if line != line.rstrip()] == []


def test_of_many_steps_the_first_the_last_and_that_of_the_peak_are_shown(tmp_path: Path) -> None:
    for number, peak in ((10, 5), (5, 2)):
        made = HandMade()
        for step in range(number):
            made.op("forward", step)
            made.alloc(0, (3 if step == peak else 1) * GIB // 4)
            made.free(0, (3 if step == peak else 1) * GIB // 4)
            made.step(step)
        made.ended()
        shown = text(built(made, tmp_path / f"run{number}"))
        steps = re.findall(r"^ *(\d+)  forward", shown, re.MULTILINE)
        assert steps[:4] == ["0", "1", str(peak), str(number - 1)]
        assert f"{peak}  forward <- peak" in shown
        assert ("6 of the steps 2 to 8 are only in --json" if number == 10 else "step 3 is only in --json") in shown


def test_every_layer_is_shown_on_request(tmp_path: Path) -> None:
    run = ended_well(tmp_path / "run")
    for name in ("layers.0.mlp", "layers.1.mlp", "layers.2.mlp"):
        assert f"\n{name} " in text(run, all_layers=True)
        assert f"\n{name} " not in text(run)
    assert "--all-rows" in text(run)
    assert "--all-rows" not in text(run, all_layers=True)


def test_a_run_that_only_just_does_not_fit_says_by_how_much(tmp_path: Path) -> None:
    made = HandMade()
    made.op()
    made.event("segment_alloc", 2 * GIB, 80 * GIB)
    made.ended()
    run = built(made, tmp_path / "run")
    shown = text(run)
    assert "  does not fit: it takes 81.00 GiB, 1.00 GiB more than the GPU has\n" in shown
    assert "Largest blocks" not in shown  # there was none


def test_a_rank_that_died_at_once_has_a_report_without_tables(tmp_path: Path) -> None:
    run = wrote_nothing(tmp_path / "run")
    build_tables(run)
    shown = text(run)
    assert "device  virtual: never reached, torch unknown\nended   killed after 0 steps\n" in shown
    assert "By phase" not in shown
    assert "fits" not in shown
    assert "the rank ended without its last record" in shown


def test_names_with_brackets_are_text_and_no_style(tmp_path: Path) -> None:
    made = HandMade()
    layer = made.layer("[red]mlp[/]")
    made.op("forward", 1, layer, name="aten.mm.default")
    made.alloc(0, GIB)
    made.record("note", note={"code": "told", "text": "see [bold]here[/bold]"})
    made.ended()
    shown = text(built(made, tmp_path / "run", arguments=("[a]",)))
    assert "job     train.py [a]\n" in shown
    assert "\n[red]mlp[/] " in shown
    assert "  - see [bold]here[/bold]\n" in shown


def test_tables_are_computed_where_profile_was_killed_before_it_could(tmp_path: Path) -> None:
    run = ended_well(tmp_path / "whole")
    unfinished = HandMade().write(new_run(tmp_path / "run"))
    assert not (unfinished / "tables").exists()
    assert text(unfinished).startswith("job     train.py\n")
    assert not (unfinished / "tables").exists()
    (run / "tables" / "layers.parquet").write_bytes(b"PAR1")
    with pytest.raises(RunDirectoryError, match=r"layers.parquet cannot be read"):
        text(run)


@pytest.mark.parametrize("make", [ended_well, out_of_memory, timed, measured])
def test_the_short_report_has_the_verdict_and_the_largest_lines(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    run = make(tmp_path / "run")
    shown, full = short(run, 120), text(run, 120)
    verdict = next(line for line in full.splitlines() if line.lstrip().startswith(("fits", "does not fit")))
    assert verdict in shown
    assert "\nline at the peak " in shown
    assert "every table: fakedist report run --full; a part: --section memory|time|findings|advice|notes\n" in shown


def test_a_section_is_printed_alone_and_in_full(tmp_path: Path) -> None:
    run = timed(tmp_path / "run")
    headings = {}
    for section in SECTIONS:
        console = Console(file=io.StringIO(), width=160, color_system=None, force_terminal=False)
        render(run_report(run, section=section), console)
        assert isinstance(console.file, io.StringIO)
        headings[section] = console.file.getvalue()
    assert "Time of step" in headings["time"]
    assert "Peak memory" not in headings["time"]
    assert "Peak memory" in headings["memory"]
    assert "Time by layer" not in headings["memory"]
    assert "no figure is in doubt" in headings["notes"]


def test_the_short_report_leaves_out_a_change_that_gives_nothing_by_itself(tmp_path: Path) -> None:
    summary = open_run(out_of_memory(tmp_path / "run")).summary
    pieces = [Advice("checkpoint", f"change {number}", "", number * MIB, gives_low_bytes=0) for number in range(6)]
    shown = "\n".join(_advice_lines(replace(summary, advice=pieces), []))
    assert re.findall(r"change \d", shown) == [f"change {number}" for number in range(1, 4)]


def test_the_section_of_findings_says_that_there_are_none(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160, color_system=None, force_terminal=False)
    render(run_report(HandMade().write(new_run(tmp_path / "run")), section="findings"), console)
    assert isinstance(console.file, io.StringIO)
    assert "no rule of docs/findings.md saw a fault in this run" in console.file.getvalue()


@pytest.mark.parametrize(("capacity", "is_time_first"), [(79 << 30, True), (3 << 29, False)])
def test_what_shortens_the_step_comes_first_where_memory_has_room(
    tmp_path: Path, capacity: int, is_time_first: bool
) -> None:
    run = timed(tmp_path / "run")
    manifest = load_manifest(run)
    summary = manifest.summary
    assert summary is not None
    assert summary.time is not None
    step_us = summary.time.step_us
    ways = {"b200": step_us / 2, "h200": 0.75 * step_us}  # the limit names the first
    gains = [TimeGain(gpu, f"--gpu {gpu}", us) for gpu, us in ways.items()]
    path = [PathPart("kernels", "", "", "", 0, 1, step_us)]
    time = replace(summary.time, gains=gains, critical_path=path)
    advice = [Advice("checkpoint", "recompute", "", 64 * MIB, gives_low_bytes=64 * MIB)]
    changed = replace(summary, capacity_bytes=capacity, estimated_outside=None, time=time, advice=advice)
    write_manifest(run, replace(manifest, summary=changed))
    shown, full, markdown = short(run, 120), text(run, 160), report_markdown(run_report(run))
    assert (shown.index("step -25.0%") < shown.index("less allocated: recompute")) is is_time_first
    assert (full.index("the step, estimated: limited") < full.index("less, estimated: recompute")) is is_time_first
    assert (markdown.index("the step, estimated: lim") < markdown.index("less, estimated: recompute")) is is_time_first


if __name__ == "__main__":
    EXPECTED.mkdir(exist_ok=True)
    for make_, width_ in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            (EXPECTED / f"{make_.__name__}_{width_}.txt").write_text(text(make_(Path(scratch) / "run"), width_))
    for make_, width_ in SHORT_CASES:
        with tempfile.TemporaryDirectory() as scratch:
            (EXPECTED / f"short_{make_.__name__}_{width_}.txt").write_text(short(make_(Path(scratch) / "run"), width_))
