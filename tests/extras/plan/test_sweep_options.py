"""``fakedist sweep --auto``: which layouts are legal, their commands, and that no pruned one would have won."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from fakedist.errors import SweepError
from fakedist.extras.plan.sweep_options import with_axes
from fakedist.launcher.executors.task import Task, TaskResult
from fakedist.options import JobProgram
from fakedist.rundir.outcome import Outcome
from fakedist.sweep import sweeping
from fakedist.sweep.command import PricedFor, Texts
from fakedist.sweep.plan import CommandLineSettings, SweepPlan, sweep_of_command
from fakedist.sweep.point_rows import RankKind, RankResult, Row, Status, StepEstimate
from fakedist.sweep.sweep_directory import Sweep
from fakedist.sweep.sweeping import SweepListener, run_sweep
from fakedist.units import GIB
from tests.unit.sweep.fake_executor import FakeExecutor, result
from tests.unit.sweep.rows_by_hand import step

MEGATRON = (
    *("--num-layers", "12", "--num-attention-heads=16", "--num-query-groups", "4", "--seq-length", "4096"),
    *("--global-batch-size", "64", "--micro-batch-size", "1", "--recompute-granularity", "full"),
    *("--recompute-method", "block", "--recompute-num-layers", "2", "--bf16"),
)
SCRIPT = ("tp=--tp", "replicas=--dp-replicate:1,2", "mbs=--batch:1,2,4", "checkpoint=--ac:full,selective,none")


def planned(
    *auto: str,
    arguments: Sequence[str] = (),
    axes: Sequence[str] = (),
    derived: Sequence[str] = (),
    conditions: Sequence[str] = (),
    **options: str,
) -> SweepPlan:
    sizes = {name: Texts((text,)) for name, text in (options or {"world_size": "16"}).items()}
    settings = CommandLineSettings(axes, derived, conditions, options=sizes)
    return sweep_of_command(*with_axes({"flags": auto}, JobProgram("train.py", tuple(arguments)), settings))


def values(plan: SweepPlan) -> set[tuple[object, ...]]:
    return {tuple(value for _, value in point.values) for point in plan.points()}


def command(plan: SweepPlan, **point: object) -> list[str]:
    (found,) = (one for one in plan.points() if dict(one.values) == point)
    return list(plan.command.at(plan.space, found).job.arguments)


def test_megatrons_legal_layouts_divide_the_world_the_model_and_the_batch() -> None:
    plan = planned("megatron", arguments=MEGATRON, axes=("checkpoint=full",))
    sizes = (1, 2, 4, 8, 16)
    assert values(plan) == {
        (tp, pp, mbs, "full")
        for tp, pp, mbs in product(sizes[:4], sizes, sizes[:4])
        if 16 % (tp * pp) == 0 and 4 % tp == 0 and 12 % pp == 0 and 64 % (16 // (tp * pp) * mbs) == 0
    }


def test_experts_and_context_are_swept_where_the_command_has_their_flags() -> None:
    dense = planned("megatron", arguments=MEGATRON)
    assert [axis.name for axis in dense.space.axes] == ["tp", "pp", "mbs", "checkpoint"]
    mixture = planned("megatron", arguments=(*MEGATRON, "--num-experts=6", "--expert-model-parallel-size", "1"))
    assert {point[2] for point in values(mixture)} == {1, 2}  # 4 does not divide 6 experts
    long = planned("megatron", arguments=MEGATRON, axes=("cp=1,4", "tp=4", "pp=1"))
    assert {point[2] for point in values(long)} == {1, 4}


def test_a_point_has_its_flags_in_place_of_the_commands_and_records_few_micro_batches() -> None:
    plan = planned("megatron", arguments=MEGATRON)
    words = command(plan, tp=2, pp=2, mbs=1, checkpoint="selective")
    assert [words[words.index(flag) + 1] for flag in ("--tensor-model-parallel-size", "--micro-batch-size")] == [
        "2",
        "1",
    ]
    assert words[words.index("--recompute-granularity") + 1] == "selective"
    assert words.count("--micro-batch-size") == 1
    assert not {"--recompute-method", "--recompute-num-layers"} & set(words)
    assert words[words.index("--global-batch-size") + 1] == "32"  # 4 for each of 2 stages, of 4 replicas
    point = next(one for one in plan.points() if dict(one.values) == {"tp": 2, "pp": 2, "mbs": 1, "checkpoint": "none"})
    assert plan.counts_at(point) == (None, 16)
    assert "--recompute-granularity" not in command(plan, tp=2, pp=2, mbs=1, checkpoint="none")


def test_a_scripts_own_flags_make_axes_and_given_facts_conditions() -> None:
    plan = planned(*SCRIPT, arguments=("--tp", "8", "--seq-len", "64"), derived=("kv_heads=2",))
    assert {point[0] for point in values(plan)} == {1, 2}
    assert len(values(plan)) == 2 * 2 * 3 * 3
    assert command(plan, tp=2, replicas=1, mbs=4, checkpoint="none") == [
        *("--seq-len", "64", "--tp", "2", "--dp-replicate", "1", "--batch", "4", "--ac", "none")
    ]
    assert len(values(planned(*SCRIPT, conditions=("tp == 1",), axes=("mbs=8",)))) == 2 * 3


def test_tensor_parallelism_stays_inside_a_node() -> None:
    assert {tp for (tp,) in values(planned("tp=--tp", world_size="64", gpus_per_node="4"))} == {1, 2, 4}
    assert {tp for (tp,) in values(planned("tp=--tp", nnodes="6", gpus_per_node="6"))} == {1, 2}
    assert {tp for (tp,) in values(planned("tp=--tp", world_size="2"))} == {1, 2}


def test_torchtitans_flags_are_known() -> None:
    plan = planned("torchtitan", arguments=("--training.seq_len", "8192"))
    assert [axis.name for axis in plan.space.axes] == ["tp", "replicas", "mbs"]
    assert "--parallelism.tensor_parallel_degree" in command(plan, tp=8, replicas=2, mbs=1)


@pytest.mark.parametrize(
    ("auto", "said"),
    [
        ("deepspeed", "zero_optimization.stage"),
        ("accelerate", "PARALLELISM_CONFIG_TP_SIZE"),
        ("megatrom", "megatron"),
        ("tpp=--tp", "tp"),
        ("tp=tp", "has no flag"),
        ("checkpoint=--ac", "has no values"),
    ],
)
def test_what_it_does_not_know_is_refused_with_what_to_type(auto: str, said: str) -> None:
    with pytest.raises(SweepError) as raised:
        planned(auto)
    assert said in f"{raised.value.message} {raised.value.hint}"


def test_it_needs_one_number_of_ranks() -> None:
    with pytest.raises(SweepError, match="the number of ranks"):
        planned("tp=--tp", world_size="{gpus}")


class Ended(FakeExecutor):
    """Ends each rank at once, and writes nothing."""

    def _ended(self, task: Task) -> TaskResult:
        return result(task, Outcome.STOPPED)


def swept(
    directory: Path, plan: SweepPlan, held_gib: Callable[[list[str]], float], monkeypatch: pytest.MonkeyPatch
) -> tuple[Sweep, list[Row], list[str]]:
    """A sweep of ranks that hold so many GiB of 80, its rows as they came, and what it said."""
    executor = Ended(directory)

    def judge(result: TaskResult, rank: int, run: Path, sweep: Path, context: int | None, **_: object) -> RankResult:
        arguments = list(executor.tasks[-1].job.arguments)
        held = held_gib(arguments)
        kind, outcome = (
            (RankKind.OUT_OF_MEMORY, Outcome.OUT_OF_MEMORY) if held * 1.1 > 79.5 else (RankKind.RAN, Outcome.STOPPED)
        )
        speed = held * (1.5 if "none" in arguments else 1)
        return RankResult(
            rank=rank,
            kind=kind,
            outcome=outcome,
            peak_allocated_bytes=int(held * GIB),
            peak_reserved_bytes=int(held * 1.1 * GIB),
            context_bytes=GIB // 2,
            capacity_bytes=80 * GIB,
            wall_s=speed,
        )

    def estimate(
        folders: Sequence[Path], ranks: Sequence[RankResult], *others: PricedFor | int | None
    ) -> tuple[StepEstimate, str]:
        return step(ranks[0].wall_s), ""

    rows: list[Row] = []
    monkeypatch.setattr(sweeping, "judge", judge)
    monkeypatch.setattr(sweeping, "write_results", lambda directory: None)
    said: list[str] = []
    listener = SweepListener(lambda number: None, lambda row, known: rows.append(row), said.append)
    found = run_sweep(plan, directory, executor, listener, check=lambda job: None, estimate=estimate)
    return found, rows, said


def size(arguments: list[str], flag: str) -> int:
    return int(arguments[arguments.index(flag) + 1])


def dense(arguments: list[str]) -> float:
    kept = {"full": 2, "selective": 6, "none": 12}[arguments[arguments.index("--ac") + 1]]
    return 10 * size(arguments, "--dp-replicate") + kept * size(arguments, "--batch") / size(arguments, "--tp")


def heavy(arguments: list[str]) -> float:
    return 45 * size(arguments, "--dp-replicate") + dense(arguments)


def gathered(arguments: list[str]) -> float:
    """Where tensor parallelism holds more than it saves."""
    return dense(arguments) + 30 * (size(arguments, "--tp") > 1)


@pytest.mark.parametrize("held", [dense, heavy, gathered])
def test_no_pruned_point_would_have_won(
    held: Callable[[list[str]], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    monkeypatch.chdir(tmp_path)
    plan = planned(*SCRIPT, derived=("kv_heads=4",), axes=("mbs=1,2,4,8,16,32",))
    sweep, rows, said = swept(tmp_path / "auto", plan, held, monkeypatch)
    every, *_ = swept(tmp_path / "every", replace(plan, grows=frozenset()), held, monkeypatch)
    statuses = {row.values: row.status for row in every.rows}
    pruned = [row for row in sweep.rows if row.status is Status.PRUNED]
    assert len(pruned) >= 8
    assert {statuses[row.values] for row in pruned} == {Status.DOES_NOT_FIT}
    assert sweep.ranking.best is not None
    assert every.ranking.best is not None
    assert sweep.ranking.best.row.values == every.ranking.best.row.values
    assert len(sweep.rows) == len(every.rows) == len(rows) == 108
    proofs = {row.label for row in every.rows if held(row.command.split()) + 0.5 > 80}
    assert all(row.reason.partition(",")[0].removeprefix("holds no less than ") in proofs for row in pruned)
    assert said == []
    again, came, _ = swept(tmp_path / "auto", replace(plan, grows=frozenset()), held, monkeypatch)
    assert {row.values: row.status for row in again.rows} == statuses
    assert sum(row.values in {other.values for other in pruned} for row in came) == len(pruned)


def late(arguments: list[str]) -> float:
    """Where a script holds less with batches of 64."""
    return dense(arguments) if size(arguments, "--batch") < 64 else 20


@pytest.mark.parametrize(
    ("checkpoint", "held", "refuted"),
    [
        ("none,full", dense, "mbs=1 checkpoint=full than at tp=1 mbs=1 checkpoint=none"),
        ("full,none", late, "mbs=64 checkpoint=full than at tp=1 mbs=8 checkpoint=full"),
    ],
)
def test_an_order_that_a_recorded_point_refutes_prunes_nothing(
    checkpoint: str,
    held: Callable[[list[str]], float],
    refuted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    monkeypatch.chdir(tmp_path)
    plan = planned(
        "tp=--tp:1", "mbs=--batch:1,4,8,16,64", f"checkpoint=--ac:{checkpoint}", arguments=("--dp-replicate", "1")
    )
    sweep, _, said = swept(tmp_path / "auto", plan, held, monkeypatch)
    every, *_ = swept(tmp_path / "every", replace(plan, grows=frozenset()), held, monkeypatch)
    assert len(said) == 1
    assert said[0].startswith("no point was pruned: a rank holds less at tp=1 ")
    assert refuted in said[0]
    assert {row.values: row.status for row in sweep.rows} == {row.values: row.status for row in every.rows}
