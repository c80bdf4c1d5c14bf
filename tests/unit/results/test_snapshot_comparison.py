"""Two memory snapshots of torch side by side, and a snapshot with a run.

A memory snapshot of a real GPU, a training step of a course's GPT: every figure was counted in the file itself.
"""

from __future__ import annotations

import functools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from fakedist.analysis.stack_lines import script_lines
from fakedist.cli import main
from fakedist.report.content.change_sheets import comparison_sheets
from fakedist.report.content.comparison import comparison_object, comparison_report
from fakedist.report.render.html import report_page
from fakedist.report.render.markdown import report_markdown
from fakedist.results.comparison import SnapshotComparison, open_comparison
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.rundir.directory import SNAPSHOT_NAME, import_manifest
from fakedist.rundir.rows import FrameRow
from tests.support.real_files import real_file
from tests.unit.analysis.recorded import MIB
from tests.unit.report.reading import read_page
from tests.unit.report.two_runs import run_of
from tests.unit.report.two_snapshots import snapshot_of

BEFORE = [(12, 4 * MIB)] * 3 + [(30, 2 * MIB)]
AFTER = [(12, 4 * MIB)] * 5 + [(30, 3 * MIB), (50, 7 * MIB)]


def compared(tmp_path: Path, before: Any = BEFORE, after: Any = AFTER, **more: Any) -> SnapshotComparison:
    found = open_comparison(
        snapshot_of(tmp_path / "a.pickle", before), snapshot_of(tmp_path / "b.pickle", after, **more)
    )
    assert isinstance(found, SnapshotComparison)
    return found


@pytest.mark.parametrize("more", [{}, {"file": "/tmp/elsewhere/model.py"}, {"function": "other"}])
def test_changes_add_up_to_that_of_the_peak_however_they_are_told(tmp_path: Path, more: dict[str, str]) -> None:
    comparison = compared(tmp_path, **more)
    assert [run.peak_allocated_bytes for run in comparison.runs.values()] == [14 * MIB, 30 * MIB]
    for table in (comparison.lines, comparison.sizes, comparison.kinds):
        assert table["change_bytes"].sum() == 16 * MIB
    assert comparison.figures["change_bytes"].tolist() == [16 * MIB, 0]


def test_blocks_are_told_by_line_and_by_size(tmp_path: Path) -> None:
    comparison = compared(tmp_path)
    lines = comparison.lines[["line", "num_a", "num_b", "change_bytes", "what"]].to_numpy().tolist()
    assert lines == [
        ["/job/model.py:12 (forward)", 3, 5, 8 * MIB, "grew"],
        ["/job/model.py:50 (forward)", 0, 1, 7 * MIB, "appeared"],
        ["/job/model.py:30 (forward)", 1, 1, MIB, "grew"],
    ]
    sizes = comparison.sizes[["line", "block_bytes", "num_a", "num_b", "what"]].to_numpy().tolist()
    assert ["/job/model.py:30 (forward)", 2 * MIB, 1, 0, "gone"] in sizes
    assert ["/job/model.py:30 (forward)", 3 * MIB, 0, 1, "appeared"] in sizes
    assert comparison.kinds[["what", "num_lines", "num_a", "num_b"]].to_numpy().tolist() == [
        ["appeared", 1, 0, 1],
        ["grew", 2, 4, 6],
    ]


def test_a_checkout_that_moved_changes_no_line(tmp_path: Path) -> None:
    moved = [(line + 3, size) for line, size in BEFORE]
    comparison = compared(tmp_path, after=moved, file="/tmp/elsewhere/model.py")
    assert comparison.lines["what"].tolist() == ["same", "same"]
    assert sorted(comparison.lines["was"]) == ["/job/model.py:12 (forward)", "/job/model.py:30 (forward)"]
    assert comparison.sizes.empty
    assert comparison.why == "the peak is the same, 14.00 MiB"


LINE_30, SAME = "/job/model.py:30 (forward)", "the peak is the same, 14.00 MiB"


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (AFTER, "+16.00 MiB at the peak: 2 more blocks from /job/model.py:12 (forward), +8.00 MiB"),
        (BEFORE[1:], "-4.00 MiB at the peak: 1 fewer block from /job/model.py:12 (forward), -4.00 MiB"),
        (BEFORE[:3], "-2.00 MiB at the peak: 1 block from /job/model.py:30 (forward), only in A, -2.00 MiB"),
        ([*BEFORE[:3], (30, 5 * MIB)], f"+3.00 MiB at the peak: larger blocks from {LINE_30}, +3.00 MiB"),
        ([*BEFORE[:2], (12, 2 * MIB), (30, 4 * MIB)], f"{SAME}, but made of different blocks"),
    ],
)
def test_the_reason_is_one_line(tmp_path: Path, after: list[tuple[int, int]], told: str) -> None:
    assert compared(tmp_path, after=after).why == told


def test_free_memory_in_segments_is_told_first(tmp_path: Path) -> None:
    comparison = compared(tmp_path, after=BEFORE, segment_bytes=128 * MIB)
    assert comparison.look_first == [
        "+64.00 MiB reserved without a tensor in it: free in half-empty segments, +64.00 MiB"
    ]
    reserved = comparison.reserved.set_index("name")["change_bytes"].to_dict()
    assert reserved == {"reserved": 64 * MIB, "allocated": 0, "pinned": 64 * MIB}
    segments = comparison.segments[["kind", "segment_bytes", "num_a", "num_b"]].to_numpy().tolist()
    assert segments == [["large", 128 * MIB, 0, 1], ["large", 64 * MIB, 1, 0]]


def test_blocks_without_a_stack_are_a_row_of_their_own(tmp_path: Path) -> None:
    comparison = compared(tmp_path, after=[*BEFORE, (0, 6 * MIB)])
    assert comparison.why == "+6.00 MiB at the peak: 1 block from (no stack recorded), only in B, +6.00 MiB"
    assert comparison.look_first[0].startswith("+6.00 MiB at the peak has no line of the script")


def test_a_history_that_starts_late_is_told_before_the_figures(tmp_path: Path) -> None:
    (warning,) = compared(tmp_path, kept=2).warnings
    assert warning.startswith("B: 5 blocks were alive before the history begins")


def test_a_run_and_its_own_snapshot_are_the_same(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a")
    for paths in ((run, run / SNAPSHOT_NAME), (run / SNAPSHOT_NAME, run)):
        comparison = open_comparison(*paths)
        assert isinstance(comparison, SnapshotComparison)
        assert comparison.why == "the peak is the same, 73.00 MiB"
        assert set(comparison.lines["what"]) == set(comparison.segments["what"]) == {"same"}
        assert comparison.sizes.empty
        assert comparison.look_first == comparison.warnings == []
    other = run_of(tmp_path / "b", activation=12 * MIB, line=20)
    comparison = open_comparison(run, other / SNAPSHOT_NAME)
    assert comparison.why == "+12.00 MiB at the peak: larger blocks from model.py:20 (forward), +12.00 MiB"
    assert "73.00 MiB" in {word.strip() for word in read_page(report_page(comparison_report(comparison))).words}


def test_every_way_of_printing_starts_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    comparison = compared(tmp_path)
    paths = [str(tmp_path / "a.pickle"), str(tmp_path / "b.pickle")]
    assert main(["compare", *paths]) == 0
    text = capsys.readouterr().out
    assert text.startswith(comparison.why)
    for sheet in comparison_sheets(comparison, all_rows=False):
        assert f"\n{sheet.title}\n" in text
    assert main(["compare", *paths, "--format", "markdown"]) == 0
    assert capsys.readouterr().out == report_markdown(comparison_report(comparison))
    assert main(["compare", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(comparison_object(comparison), allow_nan=False))
    assert "layers" in found["lacks"]


def test_the_page_has_both_histories_and_no_word_of_steps(tmp_path: Path) -> None:
    text = report_page(comparison_report(compared(tmp_path)))
    read = read_page(text)
    memory = next(rows for name, rows in read.tables.items() if name.startswith("sheet-"))
    assert memory[1][:3] == ["peak allocated", "14.00 MiB", "30.00 MiB"]
    assert "Both histories" in text
    assert "Both runs over the steps" not in text
    assert "step 0" not in text


def test_empty_snapshots_are_compared(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    full = snapshot_of(tmp_path / "full", BEFORE)
    for other, why in (
        (tmp_path / "b", "the peak is the same, 0 B"),
        (full, "+14.00 MiB at the peak: 3 blocks from /job/model.py:12 (forward), only in B, +12.00 MiB"),
    ):
        comparison = open_comparison(tmp_path / "a", other)
        assert comparison.why == why
        assert report_markdown(comparison_report(comparison, all_rows=True))
        assert report_page(comparison_report(comparison))
        assert "+16.00" not in json.dumps(comparison_object(comparison))


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (b"cos\nsystem\n(S'touch made'\ntR.", "tries to run os.system"),
        (b"{}", "is not a Chrome trace"),
        (b"", "is not a memory snapshot"),
        (pickle.dumps({"segments": 3, "device_traces": "x"}), "is not a memory snapshot"),
    ],
)
def test_what_is_no_snapshot_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hostile: bytes, said: str
) -> None:
    (tmp_path / "b.pickle").write_bytes(hostile)
    assert main(["compare", str(snapshot_of(tmp_path / "a.pickle", BEFORE)), str(tmp_path / "b.pickle")]) == 1
    first = capsys.readouterr().err.splitlines()[0]
    assert "b.pickle" in first
    assert said in first


def test_what_a_snapshot_calls_its_files_stays_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = compared(tmp_path, file="\x1b[31m<script>alert(1)</script>.py")
    assert "<script>alert" not in report_page(comparison_report(comparison))
    for form in ("text", "markdown", "json"):
        assert main(["compare", str(tmp_path / "a.pickle"), str(tmp_path / "b.pickle"), "--format", form]) == 0
        assert "\x1b" not in capsys.readouterr().out


def test_a_run_without_memory_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run")
    summary = json.loads((run / "run.json").read_text())["summary"]
    import_manifest(run, tmp_path / "x.sqlite", "nsys")
    nothing = {"peak_allocated_bytes": 0, "peak_reserved_bytes": 0}
    values = json.loads((run / "run.json").read_text()) | {"summary": summary | nothing}
    (run / "run.json").write_text(json.dumps(values))
    assert main(["compare", str(snapshot_of(tmp_path / "a.pickle", BEFORE)), str(run)]) == 1
    assert "has no memory to compare: fakedist nsys imported it" in capsys.readouterr().err.splitlines()[0]


#: Line of the script: MiB at the peak, and blocks.
LINES = {
    "nn_utils.py:6 (softmax)": (6144.0, 24),
    "model.py:39 (forward)": (3236.1, 329),
    "model.py:434 (scaled_dot_product_attention)": (3128.0, 46),
    "model.py:532 (silu)": (1472.0, 46),
    "model.py:102 (forward)": (752.0, 47),
    "model.py:399 (forward)": (736.0, 23),
    "model.py:427 (scaled_dot_product_attention)": (384.0, 48),
}


@functools.cache
def opened() -> Run:
    return open_run(real_file("course-gpt-medium-1024.pickle"))


def test_the_peak_is_the_files_and_so_is_what_was_there_before_its_history() -> None:
    run = opened()
    events, blocks = run.table("events"), run.table("blocks")
    assert run.peak_allocated_bytes == 24_211_100_672
    before = blocks[blocks["operation"].astype(str) == "from before the history"]
    assert int(before["bytes"].sum()) == 5_099_827_200
    num_before = int(before["alloc_event"].max()) + 1
    assert len(events) - num_before == 22_331
    assert int(events["allocated_bytes"].to_numpy().argmax()) - num_before == 3_737


def test_lines_at_the_peak_hold_what_they_hold() -> None:
    run = opened()
    blocks, stacks = run.table("blocks"), run.table("stacks")
    frames = [FrameRow(*row) for row in run.table("frames").itertuples(index=False)]
    lines = [line.rpartition("/")[2] for line in script_lines(frames, stacks["frames"])]
    held = blocks[blocks["at_peak"]].assign(
        line=[lines[stack] if stack >= 0 else "" for stack in blocks["stack"][blocks["at_peak"]]]
    )
    sums = held.groupby("line")["bytes"].agg(["sum", "size"])
    for line, (mib, count) in LINES.items():
        assert (round(float(sums["sum"][line]) / 2**20, 1), int(sums["size"][line])) == (mib, count)
    backward = held[(held["line"] == "") & (held["phase"] == "backward")]["bytes"]
    assert (round(backward.sum() / 2**20, 1), len(backward)) == (1395.1, 14)


def test_phases_steps_and_layers_are_inferred() -> None:
    run = opened()
    assert run.table("spans")["phase"].astype(str).tolist() == ["init", "forward", "backward", "optimizer"]
    spans = run.table("spans").set_index("phase")["first_event"]
    peak = int(run.table("events")["allocated_bytes"].to_numpy().argmax())
    # The peak is near the begin of the backward.
    assert 0 < peak - spans["backward"] < 0.05 * (spans["optimizer"] - spans["backward"])
    assert [note.code for note in run.summary.notes] == ["snapshot_starts_late", "snapshot_inferred"]
    layers = run.layers()
    repeats = dict(zip(layers["name"], layers["num_repeats"], strict=True))
    assert repeats["nsys_profile:142.model:253.0-23"] == 24
    assert repeats["nsys_profile:142.model:253.0-23.model:382"] == 24


def test_categories_are_those_of_adamw_in_fp32() -> None:
    """Its two states are as large as the parameters, and it makes them anew in each step."""
    held = opened().summary.by_category
    assert held["parameter"] == pytest.approx(4 * 423_183_360, rel=0.002)
    assert held["optimizer_state"] == pytest.approx(2 * held["parameter"], rel=0.002)
    assert held["activation"] > 0.7 * opened().peak_allocated_bytes
