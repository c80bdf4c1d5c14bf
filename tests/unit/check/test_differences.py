"""The difference from another check: each rank's figures, the reasons, and the lines that hold more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fakedist.check.checking import Checked, Running, check, difference, difference_blocks, former_runs
from fakedist.check.config import read_config
from fakedist.check.outputs import check_report
from fakedist.check.running import RankToRun
from fakedist.errors import CheckError
from fakedist.options import Job
from fakedist.report.content.report_blocks import Report
from fakedist.report.render.markdown import report_markdown
from tests.unit.analysis.recorded import MIB
from tests.unit.check.conftest import Runs
from tests.unit.check.test_checking import HEAD, ByHand


def text_of(*differences: Any) -> str:
    return report_markdown(Report("check", difference_blocks(differences), dict)).replace("\\", "")


def test_a_rank_that_grew_has_its_figures_reasons_and_lines(run: Runs) -> None:
    before, now = run(gemm_us=100), run(gemm_us=140, activation=12 * MIB, line=20)
    text = text_of(difference("net rank 0", before, now))
    (row,) = [line for line in text.splitlines() if line.startswith("| net rank 0 | ") and "µs" in line]
    assert "73.00 MiB -> 85.00 MiB (+16.4%)" in row
    assert "330 µs -> 450 µs (+36.4%)" in row
    assert "16.00 MiB -> 24.00 MiB (+50.0%)" in row, "bytes in and out of the all-reduce"
    assert "+12.00 MiB at the peak: activations of layers.*.mlp" in text
    assert "| net rank 0 | model.py:20 (forward) | layers.*.mlp | +12.00 MiB |" in text
    assert "| net rank 0 | tp | all_reduce | 1 | +8.00 MiB |" in text


def test_a_rank_that_is_the_same_is_one_row_without_reasons(run: Runs) -> None:
    same = difference("net rank 0", run(gemm_us=100), run(gemm_us=100))
    text = text_of(same)
    assert "->" not in text
    assert "Lines that hold more" not in text
    assert "Collectives that changed" not in text
    assert same.lines.empty
    assert difference_blocks([]) == []


def checked(folder: Path, run: Runs, against: Path) -> Checked:
    (folder / "train.py").write_text("pass\n")
    (folder / "fakedist.toml").write_text(HEAD)
    executor = ByHand(run, {0: {"activation": 12 * MIB}, 1: {}})
    running = Running(folder / "runs", executor, can_run=lambda job: None, against=against)
    return check(read_config(folder / "fakedist.toml"), running, update=False)


def test_a_check_is_compared_with_the_runs_of_another(tmp_path: Path, run: Runs) -> None:
    shutil.copytree(run().path, tmp_path / "before/net-rank0")
    found = checked(tmp_path, run, tmp_path / "before")
    assert [rank.name for rank in found.differences] == ["net rank 0"]
    assert found.notes == [f"net rank 1 has no complete run in {tmp_path}/before, so it is not compared"]
    (plain,) = json.loads(json.dumps(check_report(found).data()))["differences"]
    assert plain["figures"]["peak"] == {"before": 73 * MIB, "now": 85 * MIB}
    assert plain["lines"][0]["change_bytes"] == 12 * MIB
    assert "Since the other check" in report_markdown(check_report(found))


def test_runs_that_failed_are_not_compared_and_none_at_all_is_an_error(tmp_path: Path, run: Runs) -> None:
    shutil.copytree(run(ended="exception").path, tmp_path / "net-rank0")
    rank = RankToRun("net rank 0", Job(world_size=8, rank=0, target="train.py"), tmp_path / "net-rank0")
    assert former_runs([rank], tmp_path) == {}
    with pytest.raises(CheckError, match="has no run of these jobs: expected net-rank1") as caught:
        former_runs([RankToRun("net rank 1", rank.job, tmp_path / "net-rank1")], tmp_path)
    assert caught.value.hint.startswith("fakedist check --runs")
