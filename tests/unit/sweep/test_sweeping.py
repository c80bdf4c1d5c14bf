from __future__ import annotations

import errno
import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fakedist import extras
from fakedist.errors import FakedistError, JobError, SweepError
from fakedist.launcher.checked_script import check_script
from fakedist.launcher.executors.task import Task
from fakedist.options import Job
from fakedist.results.run import Run
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.plain import to_plain
from fakedist.rundir.tables import read_table, write_table
from fakedist.sweep.plan import CommandLineSettings, SourceDigests, find_ground, sweep_of_file
from fakedist.sweep.point_rows import RankKind, RankResult, Row, Status, StepEstimate, estimate_step
from fakedist.sweep.sheets import reasons
from fakedist.sweep.sweep_directory import JOURNAL_NAME, Sweep, open_sweep
from fakedist.sweep.sweeping import SweepListener, next_rank, run_sweep
from tests.unit.results.test_job_time import stage
from tests.unit.sweep.fake_executor import (
    CRASHED,
    INTERRUPTED,
    KILLED_ITSELF,
    LOST,
    OUT_OF_MEMORY,
    RAISED,
    RAN,
    REFUSED,
    FakeExecutor,
)
from tests.unit.sweep.rows_by_hand import step

SWEEP = """
script = "train.py"
arguments = ["--tp", "{tp}", "--mbs", "{mbs}"]
world_size = 8
headroom = "0%"
[axes]
tp = [1, 2]
mbs = [1, 2]
"""


class SweepLog:
    def __init__(self) -> None:
        self.rows: list[tuple[Row, bool]] = []
        self.remarks: list[str] = []
        self.number = 0

    def begins(self, number: int) -> None:
        self.number = number

    def listener(self) -> SweepListener:
        return SweepListener(self.begins, lambda row, known: self.rows.append((row, known)), self.remarks.append)


STEP = replace(step(125.0), bubble_from="placed")
MADE: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of two pipeline stages, made once."""
    folder = tmp_path_factory.mktemp("made")
    for rank in (0, 4):
        stage(folder / f"rank{rank}", rank)
    MADE[:] = [folder]
    return folder


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script, in a directory where sweeps run."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").write_text("pass\n")
    monkeypatch.chdir(tmp_path / "job")
    return tmp_path / "job"


def same_step(*given: object) -> tuple[StepEstimate, str]:
    return STEP, ""


def run(
    directory: Path,
    outcome: Callable[[Task], str] = lambda task: RAN,
    text: str = SWEEP,
    made: Path | None = None,
    *,
    prepare: Callable[[FakeExecutor], None] = lambda executor: None,
    **settings: object,
) -> tuple[Sweep, FakeExecutor, SweepLog]:
    """Run a sweep of a script that is all that is checked. No step is priced unless ``priced`` is set."""
    Path("sweep.toml").write_text(text)
    fresh, estimate = bool(settings.pop("fresh", False)), estimate_step if settings.pop("priced", False) else same_step
    plan = sweep_of_file(Path("sweep.toml"), CommandLineSettings(settings=settings))
    executor, told = FakeExecutor(made or MADE[0], outcome), SweepLog()
    prepare(executor)
    sweep = run_sweep(plan, directory, executor, told.listener(), fresh=fresh, check=check_script, estimate=estimate)
    return sweep, executor, told


def ranks(tasks: Sequence[Task]) -> list[int]:
    return [task.job.rank for task in tasks]


def argument(task: Task, name: str) -> int:
    return int(task.job.arguments[task.job.arguments.index(name) + 1])


def statuses(sweep: Sweep) -> dict[tuple[object, ...], Status]:
    return {tuple(value for _, value in row.values): row.status for row in sweep.rows}


def test_each_point_runs_the_first_and_the_last_stage(tmp_path: Path) -> None:
    sweep, executor, told = run(tmp_path / "s", text=SWEEP.replace("mbs = [1, 2]", "mbs = [1]"), priced=True)
    assert ranks(executor.tasks) == [0, 4] * 2
    assert executor.tasks[1].job.tapes == (str(executor.tasks[0].directory),)
    assert executor.is_closed
    assert told.number == len(told.rows) == len(sweep.rows) == 2
    for row in sweep.rows:
        assert row.status is Status.FITS
        assert row.has_every_stage
        assert row.step is not None
        assert (row.step.bubble_from, row.step.mfu is not None) == ("placed", True)
        assert row.step.tokens_per_s_per_gpu == pytest.approx(row.step.tokens_per_step / row.step.step_us * 1e6 / 8)  # type: ignore[operator]
        assert row.fullest is not None
        assert row.fullest.total_bytes == (
            row.fullest.peak_reserved_bytes + row.fullest.nccl_high_bytes + row.fullest.context_bytes
        )


def test_listed_ranks_run(tmp_path: Path) -> None:
    _, executor, _ = run(tmp_path / "s", ranks="4", keep=None)
    assert ranks(executor.tasks) == [4] * 4


def test_points_that_ran_do_not_run_again_and_new_values_of_an_axis_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, _ = run(tmp_path / "s")
    monkeypatch.setenv("SSH_TTY", "/dev/pts/7")  # a variable of the terminal changes nothing
    monkeypatch.setenv("COLUMNS", "81")
    again, executor, told = run(tmp_path / "s")
    assert executor.tasks == []
    assert all(known for _, known in told.rows)
    assert again.rows == first.rows
    sweep, executor, _ = run(tmp_path / "s", text=SWEEP.replace("tp = [1, 2]", "tp = [2, 4]"))
    assert {argument(task, "--tp") for task in executor.tasks} == {4}
    assert {dict(row.values)["tp"] for row in sweep.rows} == {2, 4}


@pytest.mark.parametrize("change", ["model.py", "variable NVTE_FLASH_ATTN", "versions", "fresh"])
def test_a_change_runs_every_point_again_and_is_named(
    tmp_path: Path, job: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "s")
    if change == "model.py":
        (job / change).write_text("x = 1\n")
    elif change.startswith("variable"):
        monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    elif change == "versions":
        monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    _, executor, told = run(tmp_path / "s", fresh=change == "fresh")
    assert len(executor.tasks) == 8
    assert change == "fresh" or change in told.remarks[0]


def test_another_version_of_fakedist_is_another_ground() -> None:
    job = Job(world_size=8, rank=0, target="train.py")
    assert find_ground(job).differences(find_ground(job, "9.9.9").parts) == ["versions"]


def test_a_sweep_that_was_killed_goes_on(tmp_path: Path) -> None:
    class KilledError(Exception):
        pass

    def killed(task: Task) -> str:
        if argument(task, "--tp") == 2 and task.job.rank == 4:
            raise KilledError
        return RAN

    with pytest.raises(KilledError):
        run(tmp_path / "s", killed)
    journal = tmp_path / "s" / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"row":{"id":"')  # killed while it wrote
    assert len(open_sweep(tmp_path / "s").rows) == 2
    sweep, executor, _ = run(tmp_path / "s")
    assert [(argument(task, "--mbs"), task.job.rank) for task in executor.tasks] == [(1, 4), (2, 0), (2, 4)]
    assert {row.status for row in sweep.rows} == {Status.FITS}
    assert all(line and json.loads(line) for line in journal.read_text().splitlines())


def test_an_interrupted_sweep_has_a_table_and_goes_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "s", lambda task: INTERRUPTED if argument(task, "--mbs") == 2 else RAN)
    assert (tmp_path / "s" / "sweep.parquet").exists()
    _, executor, _ = run(tmp_path / "s")
    ran = [(argument(task, "--tp"), argument(task, "--mbs")) for task in executor.tasks]
    assert ran == [(1, 2), (1, 2), (2, 1), (2, 1), (2, 2), (2, 2)]


def test_a_share_that_cannot_be_known_says_why_and_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(run: Run) -> float:
        raise JobError("there is nothing to draw", "")

    monkeypatch.setattr(extras, "shares", lambda: {"half": lambda run: 0.5, "none": unknown})
    sweep, executor, _ = run(tmp_path / "s", shares=["half", "none"], ranks="0")
    assert len(executor.tasks) == 4
    (rank,) = sweep.rows[0].ranks
    assert rank.shares == {"half": 0.5, "none": "there is nothing to draw"}
    assert (sweep.rows[0].share("half"), sweep.rows[0].share("none")) == (0.5, None)
    journal = tmp_path / "s" / JOURNAL_NAME
    kept = [line for line in journal.read_text().splitlines(keepends=True) if not line.startswith('{"row"')]
    journal.write_text("".join(kept))
    again, executor, _ = run(tmp_path / "s", shares=["half", "none"], ranks="0")
    assert (executor.tasks, again.rows[0].ranks) == ([], sweep.rows[0].ranks)
    plain, _, _ = run(tmp_path / "plain", ranks="0")
    assert "shares" not in (tmp_path / "plain" / JOURNAL_NAME).read_text()
    assert plain.rows[0].ranks[0].shares == {}


def test_what_went_wrong_is_a_row(tmp_path: Path) -> None:
    kinds = {(1, 1): OUT_OF_MEMORY, (1, 2): REFUSED, (1, 4): RAISED, (2, 1): LOST}
    text = SWEEP.replace("mbs = [1, 2]", "mbs = [1, 2, 4]")
    sweep, executor, _ = run(
        tmp_path / "s", lambda task: kinds.get((argument(task, "--tp"), argument(task, "--mbs")), RAN), text=text
    )
    rows = {tuple(value for _, value in row.values): row for row in sweep.rows}
    assert statuses(sweep) == {
        (1, 1): Status.DOES_NOT_FIT,
        (1, 2): Status.INVALID,
        (1, 4): Status.FAILED,
        (2, 1): Status.FAILED,
        (2, 2): Status.FITS,
        (2, 4): Status.FITS,
    }
    assert rows[1, 1].reason.startswith("out of memory")
    assert (rows[1, 2].reason, rows[1, 2].line) == (
        "AssertionError: heads cannot be divided by tp",
        "/job/train.py:7 (main)",
    )
    assert rows[2, 1].reason == "the worker was lost"
    assert ranks(executor.tasks) == [0, 0, 0, 0, 0, 4, 0, 4]
    # What could not start runs again. What failed by itself does not.
    assert [argument(task, "--tp") for task in run(tmp_path / "s", text=text)[1].tasks] == [2, 2]


def test_a_rank_that_a_signal_killed_runs_once_more_and_the_row_says_so(tmp_path: Path) -> None:
    ran: Counter[tuple[int, int]] = Counter()

    def ends(task: Task) -> str:
        tp = argument(task, "--tp")
        ran[tp, task.job.rank] += 1
        if tp == 1 and task.job.rank == 4:
            return CRASHED if ran[tp, 4] == 1 else RAN
        return {1: RAN, 2: CRASHED, 4: KILLED_ITSELF}[tp]

    text = SWEEP.replace("mbs = [1, 2]", "mbs = [1]").replace("tp = [1, 2]", "tp = [1, 2, 4]")
    sweep, executor, _ = run(tmp_path / "s", ends, text=text)
    assert ran == {(1, 0): 1, (1, 4): 2, (2, 0): 2, (4, 0): 1}
    assert len({task.key for task in executor.tasks}) == len(executor.tasks)
    rows = {dict(row.values)["tp"]: row for row in sweep.rows}
    assert [(each.rank, each.first_try) for each in rows[1].ranks] == [(0, ""), (4, "killed by SIGSEGV")]
    assert rows[1].status is Status.FITS
    assert (rows[2].status, rows[2].ranks[0].first_try) == (Status.FAILED, "killed by SIGSEGV")
    assert (rows[4].status, rows[4].ranks[0].first_try) == (Status.FAILED, "")
    assert "2 ranks ran a second time: the first was killed by SIGSEGV" in list(reasons(sweep.rows))


def test_prices_make_rows_and_no_runs(tmp_path: Path) -> None:
    text = SWEEP.replace("mbs = [1, 2]", 'mbs = [1]\nfabric = ["p5-efa", "dgx-h100-ndr"]')
    text = text.replace("tp = [1, 2]", "tp = [1]").replace("[axes]", 'fabric = "{fabric}"\n[axes]')
    sweep, executor, _ = run(tmp_path / "s", text=text, priced=True)
    assert len(executor.tasks) == 2
    assert len(sweep.rows) == 2
    assert {row.step.fabric for row in sweep.rows if row.step} == {"p5-efa", "dgx-h100-ndr"}
    later = text.replace('"dgx-h100-ndr"]', '"dgx-h100-ndr", "dgx-a100-hdr"]')
    again, executor, _ = run(tmp_path / "s", text=later, priced=True)
    assert executor.tasks == []
    assert len(again.rows) == 3


def test_runs_go_in_the_end_if_none_is_kept(tmp_path: Path) -> None:
    run(tmp_path / "s", keep="none")
    assert not (tmp_path / "s" / "runs").exists()
    assert len(run(tmp_path / "kept", keep="all")[0].rows) == len([*(tmp_path / "kept" / "runs").iterdir()])


def test_runs_that_were_kept_are_priced_anew_and_do_not_run_again(tmp_path: Path) -> None:
    run(tmp_path / "s", ranks="0")
    sweep, executor, _ = run(tmp_path / "s", ranks="0", micro_batches="4")
    assert executor.tasks == []
    assert len(sweep.rows) == 4


def test_two_sweeps_do_not_share_a_directory(tmp_path: Path) -> None:
    def nested(task: Task) -> str:
        with pytest.raises(SweepError, match="is in use by another sweep"):
            run(tmp_path / "s")
        return RAN

    run(tmp_path / "s", nested)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("script", "train.py"),
        ("directory", "neither empty nor a sweep's directory"),
        ("journal", "journal.jsonl"),
    ],
)
def test_a_sweep_that_cannot_begin_leaves_no_executor_open(
    tmp_path: Path, wrong: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s").mkdir()
    if wrong == "script":
        monkeypatch.chdir(tmp_path)  # where it is not
    elif wrong == "directory":
        (tmp_path / "s" / "thesis.tex").touch()
    else:
        (tmp_path / "s" / "journal.jsonl").write_text("{}\n")
    Path("sweep.toml").write_text(SWEEP)
    executor, plan = FakeExecutor(MADE[0]), sweep_of_file(Path("sweep.toml"), CommandLineSettings())
    with pytest.raises(FakedistError, match=message):
        run_sweep(plan, tmp_path / "s", executor, SweepLog().listener(), check=check_script)
    assert executor.is_closed
    assert executor.tasks == []


def test_a_damaged_journal_is_refused_with_its_line(tmp_path: Path) -> None:
    run(tmp_path / "s")
    journal = tmp_path / "s" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([*lines[:2], lines[2][:-30] + "\n", *lines[3:]]))
    with pytest.raises(SweepError, match=r"journal.jsonl, line 3 cannot be read"):
        run(tmp_path / "s")
    sources = to_plain(SourceDigests({}, None))
    journal.write_text("".join(lines) + json.dumps({"things": {"digest": "7", "read": sources}}) + "\n")
    with pytest.raises(SweepError, match="things is not a kind of entry"):
        run(tmp_path / "s")


@pytest.mark.parametrize(
    "damage",
    [
        {"values": []},
        {"values": [["tp", 3], ["mbs", 1]]},
        {"values": [["tp", 1], ["tp", 1]]},
        {"ranks": []},
        {"step": {**to_plain(STEP), "step_us": 0.0}},
        {"step": {**to_plain(STEP), "tokens_per_s_per_gpu": -1.0}},
    ],
    ids=lambda damage: " ".join(damage),
)
def test_a_row_that_no_sweep_writes_is_refused_with_its_file(tmp_path: Path, damage: dict[str, object]) -> None:
    run(tmp_path / "s")
    journal = tmp_path / "s" / "journal.jsonl"
    *lines, last = map(json.loads, journal.read_text().splitlines())
    lines.append({"row": last["row"] | damage})
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SweepError, match=r"journal\.jsonl"):
        open_sweep(tmp_path / "s")


def test_an_axis_may_get_another_name(tmp_path: Path) -> None:
    run(tmp_path / "s")
    renamed = SWEEP.replace("tp = [1, 2]", "tensor = [1, 2]").replace("{tp}", "{tensor}")
    sweep, executor, _ = run(tmp_path / "s", text=renamed)
    assert executor.tasks == []
    assert {dict(row.values)["tensor"] for row in open_sweep(tmp_path / "s").rows} == {1, 2}
    assert sweep.frame()["tensor"].tolist() == [1, 1, 2, 2]


def test_a_full_disk_leaves_a_journal_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            run(tmp_path / "s")
    assert len(open_sweep(tmp_path / "s").rows) == 1
    assert len(run(tmp_path / "s")[0].rows) == 4


def test_every_stage_runs_for_the_best_alone(tmp_path: Path) -> None:
    made = tmp_path / "three"
    for rank, of in ((0, 0), (2, 4), (4, 4)):
        shutil.copytree(MADE[0] / f"rank{of}", made / f"rank{rank}")
        groups = read_table(made / f"rank{rank}", "groups").to_pydict()
        groups["ranks"] = [ranks.replace("0,4", "0,2,4") for ranks in groups["ranks"]]
        write_table(made / f"rank{rank}", "groups", groups)
    one_fits = SWEEP.replace("tp = [1, 2]", "tp = [1]")
    for which, expected in (("stages:1", [0, 4, 0, 4, 2]), ("ends", [0, 4, 0, 4])):
        sweep, executor, _ = run(tmp_path / which, text=one_fits, ranks=which, made=made)
        assert ranks(executor.tasks) == expected
        assert [row.has_every_stage for row in sweep.rows].count(True) == int(which == "stages:1")


WIDE = SWEEP.replace("tp = [1, 2]", 'tp = "1..64"').replace("mbs = [1, 2]", 'mbs = "1..64"')


def test_as_many_points_run_as_trials_and_a_larger_number_goes_on(tmp_path: Path) -> None:
    for trials, num_new in ((3, 3), (5, 2)):
        sweep, executor, _ = run(tmp_path / "s", text=WIDE, trials=trials)
        assert (len(executor.tasks), len(sweep.rows)) == (2 * num_new, trials)


def ended(*ranks: int) -> dict[int, RankResult]:
    """Ranks of a pipeline of four that ended well. Rank 0 knows the pipeline."""
    found = {}
    for rank in ranks:
        pipeline = () if rank else (0, 2, 4, 6)
        found[rank] = RankResult(rank=rank, kind=RankKind.RAN, outcome=Outcome.STOPPED, pipeline=pipeline)
    return found


@pytest.mark.parametrize(
    ("every_stage", "ran", "later"),
    [(False, [0], 6), (False, [0, 6], None), (True, [0], 2), (True, [0, 6], 2), (True, [0, 2, 4], 6)],
)
def test_stages_run_in_the_order_of_the_pipeline(
    every_stage: bool, ran: list[int], later: int | None, tmp_path: Path
) -> None:
    (tmp_path / "sweep.toml").write_text('script = "train.py"\nworld_size = 8\n')
    plan = sweep_of_file(tmp_path / "sweep.toml", CommandLineSettings())
    assert next_rank(plan, ended(*ran), every_stage=every_stage) == later


def listing(files: dict[str, Sequence[str]], names: Sequence[str] = ("optional",)) -> Callable[[FakeExecutor], None]:
    """Have the executor leave the list of the files that a point with this ``--tp`` read."""

    def list_sources(executor: FakeExecutor) -> None:
        executor.sources = lambda task: "".join(
            [f"file {Path(file).resolve()}\n" for file in files[str(argument(task, "--tp"))]]
            + [f"name {name}\n" for name in names]
        )

    return list_sources


def test_a_point_runs_again_only_if_a_file_that_it_read_changed(tmp_path: Path, job: Path) -> None:
    for name in ("model.py", "unused.py", "plot.py"):
        (job / name).write_text("x = 0\n")
    outside = tmp_path / "package.py"
    outside.write_text("y = 0\n")
    reads = listing({"1": ["train.py", "model.py"], "2": ["train.py", str(outside)]})

    def tasks_after(change: Callable[[], object]) -> tuple[set[object], list[str]]:
        change()
        _, executor, told = run(tmp_path / "s", prepare=reads)
        return {argument(task, "--tp") for task in executor.tasks}, told.remarks

    assert tasks_after(lambda: None)[0] == {1, 2}
    assert tasks_after((job / "unused.py").unlink) == (set(), [])
    assert tasks_after(lambda: (job / "plot.py").write_text("x = 1\n")) == (set(), [])
    assert tasks_after(lambda: (job / "new.py").write_text("x = 1\n")) == (set(), [])
    changed, (remark,) = tasks_after(lambda: (job / "model.py").write_text("x = 1\n"))
    assert changed == {1}
    assert remark == f"the points that read these files run again, as they changed: {job.resolve() / 'model.py'}"
    assert tasks_after(lambda: outside.write_text("y = 1\n"))[0] == {2}
    assert tasks_after(lambda: (job / "optional.py").write_text("x = 1\n"))[0] == {1, 2}  # they tried to import it
    (job / "optional.py").unlink()
    (job / "optional").mkdir()
    assert tasks_after(lambda: (job / "optional" / "__init__.py").write_text("x = 1\n"))[0] == {1, 2}
    assert tasks_after((job / "train.py").touch) == (set(), [])
    assert tasks_after(lambda: (job / "train.py").write_text("2\n"))[0] == {1, 2}
    assert tasks_after(lambda: None) == (set(), [])


def test_all_files_count_for_a_point_that_failed_or_started_another_python(tmp_path: Path, job: Path) -> None:
    for directory, outcome, lines in (("s", RAISED, ""), ("t", RAN, "started\n")):
        (job / "model.py").write_text("x = 0\n")

        def lists(executor: FakeExecutor, lines: str = lines) -> None:
            executor.sources = lambda task: f"file {job.resolve() / 'train.py'}\n{lines}"

        assert len(run(tmp_path / directory, lambda task, outcome=outcome: outcome, prepare=lists)[1].tasks) >= 4
        (job / "model.py").write_text("x = 1\n")
        assert len(run(tmp_path / directory, prepare=lists)[1].tasks) == 8
