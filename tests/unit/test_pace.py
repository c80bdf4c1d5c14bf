"""bench/pace.py fails where fakedist got slower than in the lines that were kept. Nothing is timed here."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.bench import ROOT, bench_module

FACTS = {
    "date": "2026-11-28",
    "commit": "abc12345",
    "machine": "A (2 cores)",
    "python": "3.12",
    "torch": "2.15.0",
}
TIMES = {"bare_ms": 40.0, "recorded_ms": 100.0, "fake_ms": 1_000.0, "demo_ms": 12_000.0, "no_kernels_ms": 8_000.0}


@pytest.fixture(scope="module")
def pace() -> ModuleType:
    return bench_module("pace")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A file that has the header alone."""
    path = tmp_path / "pace.csv"
    path.write_text((ROOT / "bench/pace.csv").read_text().partition("\n")[0] + "\n")
    return path


def test_the_kept_file_has_the_columns_and_every_line_has_figures(pace: ModuleType) -> None:
    with pace.KEPT.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert tuple(pace.KEPT.read_text().partition("\n")[0].split(",")) == pace.COLUMNS
    assert all(float(line[name]) > 0 for line in lines for name in (*pace.RATIOS, *pace.TIMES))


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds(pace: ModuleType) -> None:
    busy = {name: value * 3 for name, value in TIMES.items()}  # the machine was, in all of that round
    figures = pace.medians([TIMES, busy, TIMES | {"bare_ms": 80.0}])
    assert figures["bare/fake"] == 0.04
    assert figures["recorded/bare"] == 2.5
    assert figures["recorded/fake"] == 0.1
    assert figures["demo/no_kernels"] == 1.5
    assert figures["demo/fake"] == 12
    assert figures["bare_ms"] == 80


def test_a_kept_line_is_read_again(pace: ModuleType, kept: Path) -> None:
    figures = pace.medians([TIMES])
    pace.keep(kept, figures, FACTS)
    (line,) = pace.lines_of(kept, "3.12", "2.15.0")
    assert {name: line[name] for name in FACTS} == FACTS
    assert {name: float(line[name]) for name in figures} == figures


def test_lines_of_another_python_or_torch_and_those_before_the_last_ten_do_not_count(
    pace: ModuleType, kept: Path
) -> None:
    for ratio in (0.1, 0.1, *(1.0 + step / 10 for step in range(10))):
        pace.keep(kept, dict.fromkeys(pace.RATIOS, ratio) | TIMES, FACTS)
        pace.keep(kept, dict.fromkeys(pace.RATIOS, 7.0) | TIMES, FACTS | {"python": "3.11"})
        pace.keep(kept, dict.fromkeys(pace.RATIOS, 8.0) | TIMES, FACTS | {"torch": "2.14.1"})
    assert pace.usual_ratios(pace.lines_of(kept, "3.12", "2.15.0")) == pytest.approx(dict.fromkeys(pace.RATIOS, 1.45))
    assert pace.usual_ratios(pace.lines_of(kept, "3.13", "2.15.0")) == {}


def test_only_more_than_a_fifth_above_the_usual_ratio_is_too_high(pace: ModuleType) -> None:
    usual = dict.fromkeys(pace.RATIOS, 1.0)
    assert pace.slower(usual | {"bare/fake": 1.21, "demo/fake": 1.19, "recorded/bare": 0.1}, usual) == {"bare/fake"}
    assert pace.slower(usual, {}) == set()


def test_a_ratio_fails_that_is_too_high_when_it_is_measured_once_more(
    pace: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = dict.fromkeys(pace.RATIOS, 1.0)
    slow, other = usual | {"bare/fake": 2.0, "demo/fake": 2.0}, usual | {"demo/fake": 1.5, "recorded/bare": 1.5}
    measured = iter([slow, other, slow])
    assert pace.judge(lambda: next(measured), usual) == (other, {"demo/fake"})
    assert next(measured) is slow  # not a third time
    assert "once more, because of bare/fake, demo/fake" in capsys.readouterr().out
    measured = iter([slow, usual])
    assert pace.judge(lambda: next(measured), usual) == (usual, set())
    measured = iter([usual])
    assert pace.judge(lambda: next(measured), usual) == (usual, set())
    assert capsys.readouterr().out == "measuring once more, because of bare/fake, demo/fake\n"


def test_the_command_fails_where_it_got_slower_and_keeps_a_line_where_it_is_asked_to(
    pace: ModuleType, kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pace, "KEPT", kept)
    monkeypatch.setattr(pace, "measure_round", lambda directory: TIMES)
    assert pace.main(["--rounds", "2"]) == 0
    assert "compared with nothing" in capsys.readouterr().out
    assert pace.main(["--keep"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(pace, "measure_round", lambda directory: TIMES | {"demo_ms": 15_000.0})
    assert pace.main([]) == 1
    printed = capsys.readouterr().out
    assert "demo/fake           15.000   usually  12.000   +25.0%   SLOWER" in printed
    assert "bare/fake            0.040   usually   0.040    +0.0%\n" in printed
    assert len(kept.read_text().splitlines()) == 2


def test_the_commit_says_whether_files_differ_from_it(pace: ModuleType, tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "bench").mkdir()
    for name in ("bench/pace.csv", "code.py"):
        (tmp_path / name).write_text("one\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout[:8]
    (tmp_path / "bench/pace.csv").write_text("two\n")
    assert pace.commit_of(tmp_path) == commit
    (tmp_path / "code.py").write_text("two\n")
    assert pace.commit_of(tmp_path) == f"{commit}+"
