"""A whole check, of ranks whose runs are made by hand: what fails, what does not fit, and what is written.

The difference from another check: each rank's figures, the reasons, and the lines that hold more.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fakedist.check.checking import Checked, Running, check, difference, difference_blocks, former_runs
from fakedist.check.config import read_config
from fakedist.check.outputs import check_report
from fakedist.check.running import RankToRun
from fakedist.errors import CheckError, ScriptError
from fakedist.launcher.executors.task import Task, TaskResult
from fakedist.options import Job
from fakedist.report.content.report_blocks import Report
from fakedist.report.render.markdown import report_markdown
from fakedist.rundir.outcome import Outcome
from tests.unit.analysis.recorded import MIB
from tests.unit.check.conftest import Runs

HEAD = '[[check.jobs]]\nname = "net"\nscript = "train.py"\nworld_size = 8\nranks = [0, 1]\n'


@dataclass
class ByHand:
    """An executor whose ranks leave runs with these settings behind, or nothing, and end like this."""

    run_of: Runs
    runs: dict[int, dict[str, Any] | None]
    outcome: Outcome = Outcome.STOPPED
    code: int = 0
    failure: str = ""
    is_closed: bool = False

    def run(self, tasks: Iterable[Task | None]) -> Iterator[TaskResult]:
        for task in tasks:
            assert task is not None
            settings = self.runs[task.job.rank]
            if settings is not None:
                task.directory.parent.mkdir(exist_ok=True)
                shutil.copytree(self.run_of(**settings).path, task.directory)
            known: dict[str, Any] = {
                "directory": task.directory,
                "host": "",
                "worker": "",
                "peak_rss_bytes": 0,
                "output": "printed",
            }
            ending: dict[str, Any] = {"outcome": Outcome.STOPPED, "code": 0, "failure": ""}
            if task.job.rank == 1:
                ending = {"outcome": self.outcome, "code": self.code, "failure": self.failure}
            yield TaskResult(key=task.key, wall_s=1.5, **known, **ending)

    def close(self) -> None:
        self.is_closed = True


def checked(folder: Path, limits: str, executor: ByHand, *, update: bool = False) -> Checked:
    (folder / "train.py").write_text("pass\n")
    (folder / "fakedist.toml").write_text(HEAD + limits)
    finished: list[tuple[str, float]] = []
    runs = folder / f"runs{len(list(folder.iterdir()))}"
    running = Running(runs, executor, lambda rank, seconds: finished.append((rank.name, seconds)), lambda job: None)
    found = check(read_config(folder / "fakedist.toml"), running, update=update)
    assert executor.is_closed
    assert len(finished) == 2 - len(found.failures)
    return found


def test_a_baseline_is_written_where_nothing_is_exceeded_and_only_if_it_changed(tmp_path: Path, run: Runs) -> None:
    limits = 'max_increase = "1%"\n'
    with pytest.raises(CheckError, match="does not exist"):
        checked(tmp_path, limits, ByHand(run, {}))
    same: dict[int, Any] = {0: {"rank": 0}, 1: {}}
    grown = {0: {"rank": 0}, 1: {"activation": 12 * MIB}}
    (path,) = checked(tmp_path, limits, ByHand(run, same), update=True).updated
    before = path.read_bytes()
    assert checked(tmp_path, limits, ByHand(run, same), update=True).updated == []
    found = checked(tmp_path, limits, ByHand(run, grown))
    assert (found.exit_code, {finding.rank for finding in found.exceeded}) == (3, {1})
    over = checked(tmp_path, limits + 'budgets = { peak_allocated = "80 MiB" }', ByHand(run, grown), update=True)
    assert (over.exit_code, over.updated, path.read_bytes()) == (3, [], before)
    (path.parent / "net.json").write_bytes(before)
    (written,) = checked(tmp_path, limits, ByHand(run, grown), update=True).updated
    assert written.read_bytes() != before


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ((None, Outcome.ERROR, 7, "?"), "the run could not start (exit 7)"),
        (({}, Outcome.ERROR, 7, "?"), "the run could not start (exit 7)"),
        (({}, Outcome.EXCEPTION, 1, "KeyError"), "the script failed: KeyError"),
        (({}, Outcome.EXIT, 3, "said no"), "the script failed with exit code 3: said no"),
        (({}, Outcome.TIMEOUT, 1, "60 s"), "the script did not end in time: 60 s"),
        (({"ended": "killed"}, Outcome.KILLED, 137, "signal 9"), "the script was killed"),
    ],
)
def test_a_rank_that_failed_is_named_and_nothing_is_judged(
    tmp_path: Path, run: Runs, ending: tuple[Any, Outcome, int, str], message: str
) -> None:
    settings, outcome, code, reason = ending
    executor = ByHand(run, {0: {}, 1: settings}, outcome, code, reason)
    found = checked(tmp_path, 'budgets = { peak_allocated = "1 MiB" }', executor)
    (failure,) = found.failures
    assert failure.message == f"net rank 1: {message}"
    assert (failure.output, found.judged, found.exit_code) == ("printed", [], 1)


def test_a_rank_that_does_not_fit_is_judged_all_the_same(tmp_path: Path, run: Runs) -> None:
    runs: dict[int, Any] = {0: {}, 1: {"ended": "out_of_memory"}}
    found = checked(tmp_path, "", ByHand(run, runs, Outcome.OUT_OF_MEMORY, 4, "CUDA out of memory"))
    assert (len(found.misfits), found.exit_code, found.failures) == (1, 4, [])
    assert found.misfits[0].startswith("net rank 1 does not fit the GPU")


@pytest.mark.parametrize(("activation", "code"), [(8 * MIB, 0), (9 * MIB, 5)])
def test_a_job_whose_calls_have_to_match_fails_where_they_do_not(
    tmp_path: Path, run: Runs, activation: int, code: int
) -> None:
    found = checked(
        tmp_path, "match = true", ByHand(run, {0: {"rank": 0}, 1: {"rank": 1, "activation": activation}}), update=True
    )
    assert (found.exit_code, len(found.updated)) == (code, 0 if code else 1)
    if code:
        (mismatch,) = found.mismatches
        assert mismatch.text.startswith(
            "net: calls of ranks 0,1 do not match: they differ in bytes: rank 0: all_reduce"
        )
        assert mismatch.line == "/job/model.py:12 (forward)"


def test_a_script_that_does_not_compile_is_refused_before_any_rank_runs(tmp_path: Path, run: Runs) -> None:
    (tmp_path / "fakedist.toml").write_text(HEAD)
    (tmp_path / "train.py").write_text("def")
    with pytest.raises(ScriptError, match="job 'net': the script does not compile; nothing was run"):
        check(read_config(tmp_path / "fakedist.toml"), Running(tmp_path / "runs", ByHand(run, {})), update=False)


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
    assert not any(map(text_of(same).count, ("->", "Lines that hold more", "Collectives that changed")))
    assert same.lines.empty
    assert difference_blocks([]) == []


def test_the_limits_of_a_ranks_figures_name_the_rank_and_the_check(run: Runs) -> None:
    found = difference("net rank 0", run(), run(ended="exception")).warnings
    assert found == ["net rank 0 now ended after 2 steps, exception: its figures end there"]


def checked_against(folder: Path, run: Runs, against: Path) -> Checked:
    (folder / "train.py").write_text("pass\n")
    (folder / "fakedist.toml").write_text(HEAD)
    executor = ByHand(run, {0: {"activation": 12 * MIB}, 1: {}})
    running = Running(folder / "runs", executor, can_run=lambda job: None, against=against)
    return check(read_config(folder / "fakedist.toml"), running, update=False)


def test_a_check_is_compared_with_the_runs_of_another(tmp_path: Path, run: Runs) -> None:
    shutil.copytree(run().path, tmp_path / "before/net-rank0")
    found = checked_against(tmp_path, run, tmp_path / "before")
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
