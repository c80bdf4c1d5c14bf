"""``fakedist sweep --auto``: which layouts are legal, their commands, and that no pruned one would have won."""

from __future__ import annotations

import json
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
DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 9,
    "zero_optimization": {"stage": 0, "overlap_comm": True},
}
SCRIPT = ("tp=--tp", "replicas=--dp-replicate:1,2", "mbs=--batch:1,2,4", "checkpoint=--ac:full,selective,none")


def planned(
    *auto: str,
    arguments: Sequence[str] = (),
    axes: Sequence[str] = (),
    derived: Sequence[str] = (),
    conditions: Sequence[str] = (),
    **options: str,
) -> SweepPlan:
    given = options if "nnodes" in options else {"world_size": "16"} | options
    sizes = {name: Texts((text,)) for name, text in given.items()}
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


def test_deepspeeds_axes_are_keys_of_a_file_that_each_point_has_of_its_own(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(DEEPSPEED))
    plan = planned("deepspeed", "pp=--stages:1,2", arguments=("--deepspeed_config", str(config)))
    assert values(plan) == {
        (stage, mbs, pp)
        for stage, mbs, pp in product(range(4), (1, 2, 4, 8), (1, 2))
        if 64 % (16 // pp * mbs) == 0 and (pp == 1 or stage < 2)
    }
    point = next(one for one in plan.points() if dict(one.values) == {"stage": 3, "mbs": 1, "pp": 1})
    run = plan.command.at(plan.space, point)
    ((_, text),) = run.files
    assert json.loads(text) == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 3, "overlap_comm": True},
    }
    assert run.placed(tmp_path / "files").arguments == (
        *("--deepspeed_config", str(tmp_path / "files/ds.json"), "--stages", "1"),
    )
    assert plan.counts_at(point) == (None, 4)
    auto = DEEPSPEED | {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    config.write_text(json.dumps(auto))
    left = planned("deepspeed", arguments=(f"--deepspeed={config}",))
    assert [axis.name for axis in left.space.axes] == ["stage"]
    assert left.counts_at(left.points()[0]) == (None, None)


def test_accelerates_axes_are_variables() -> None:
    plan = planned("accelerate", "mbs=--batch:1", axes=("tp=1,4",), env="FSDP_VERSION=1")
    point = next(
        one for one in plan.points() if dict(one.values) == {"tp": 4, "replicas": 2, "mbs": 1, "checkpoint": "full"}
    )
    run = plan.command.at(plan.space, point)
    assert dict(run.job.environment) == {
        "PARALLELISM_CONFIG_TP_SIZE": "4",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
    }
    assert run.job.arguments == ("--batch", "1")
    assert {dict(one.values)["replicas"] for one in plan.points() if dict(one.values)["tp"] == 4} == {1, 2}


def test_torchtitans_flags_are_known() -> None:
    plan = planned("torchtitan", arguments=("--training.seq_len", "8192"))
    assert [axis.name for axis in plan.space.axes] == ["tp", "replicas", "mbs"]
    assert "--parallelism.tensor_parallel_degree" in command(plan, tp=8, replicas=2, mbs=1)


@pytest.mark.parametrize(
    ("auto", "said"),
    [
        ("deepspeed", "--deepspeed_config config.json"),
        ("mbs=ds.json#train_micro_batch_size_per_gpu", "no argument is ds.json"),
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


Seconds = Callable[[list[str]], tuple[float, float]]


def usual(arguments: list[str]) -> tuple[float, float]:
    """Seconds of kernels, and of communication that they do not hide; that falls with replicas up to two."""
    tp, mbs, replicas = (size(arguments, flag) for flag in ("--tp", "--batch", "--dp-replicate"))
    again = {"full": 4 / 3, "selective": 1.15, "none": 1.0}[arguments[arguments.index("--ac") + 1]]
    kernels = (mbs / tp) * (1 + 0.05 * tp) * again + 0.01 * replicas
    communication = 4 / tp / replicas + 0.5 * (replicas > 2)
    return kernels, max(communication - 0.6 * kernels, 0.02 * communication)


def swept(
    directory: Path,
    plan: SweepPlan,
    held_gib: Callable[[list[str]], float],
    monkeypatch: pytest.MonkeyPatch,
    seconds: Seconds = usual,
) -> tuple[Sweep, list[Row], list[str]]:
    """A sweep of ranks that hold so many GiB of 80, its rows as they came, and what it said."""
    executor = Ended(directory)

    def judge(result: TaskResult, rank: int, run: Path, sweep: Path, context: int | None, **_: object) -> RankResult:
        arguments = list(executor.tasks[-1].job.arguments)
        held = held_gib(arguments)
        kind, outcome = (
            (RankKind.OUT_OF_MEMORY, Outcome.OUT_OF_MEMORY) if held * 1.1 > 79.5 else (RankKind.RAN, Outcome.STOPPED)
        )
        return RankResult(
            rank=rank,
            kind=kind,
            outcome=outcome,
            peak_allocated_bytes=int(held * GIB),
            peak_reserved_bytes=int(held * 1.1 * GIB),
            context_bytes=GIB // 2,
            capacity_bytes=80 * GIB,
            output=" ".join(arguments),
        )

    def estimate(
        folders: Sequence[Path], ranks: Sequence[RankResult], *others: PricedFor | int | None
    ) -> tuple[StepEstimate, str]:
        arguments = ranks[0].output.split()
        kernels, others = seconds(arguments)
        tokens = size(arguments, "--batch") / size(arguments, "--tp")
        return step(1000 * tokens / (kernels + others), least=kernels / (kernels + others)), ""

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
    script = (SCRIPT[0], "replicas=--dp-replicate:1,2,4", *SCRIPT[2:])
    plan = planned(*script, derived=("kv_heads=4",), axes=("mbs=1,2,4,8,16,32",))
    sweep, rows, said = swept(tmp_path / "auto", plan, held, monkeypatch)
    every, *_ = swept(tmp_path / "every", replace(plan, grows={}), held, monkeypatch)
    known = {row.values: row for row in every.rows}
    by_memory, by_time = (
        [row for row in sweep.rows if row.status is status] for status in (Status.PRUNED, Status.SLOWER)
    )
    assert len(by_memory) >= 16
    assert len(by_time) >= 8
    assert sweep.ranking.best is not None
    assert every.ranking.best is not None
    best = every.ranking.best
    assert sweep.ranking.best.row.values == best.row.values
    assert {known[row.values].status for row in by_memory} == {Status.DOES_NOT_FIT}
    speeds = every.ranking.speeds
    assert all(speeds[known[row.values].id].value <= best.speed.value for row in by_time if known[row.values].step)
    assert len(sweep.rows) == len(every.rows) == len(rows) == 162
    proofs = {row.label for row in every.rows if held(row.command.split()) + 0.5 > 80}
    assert all(row.reason.partition(",")[0].removeprefix("holds no less than ") in proofs for row in by_memory)
    assert said == []
    again, came, _ = swept(tmp_path / "auto", replace(plan, grows={}), held, monkeypatch)
    assert {row.values: row.status for row in again.rows} == {row.values: row.status for row in every.rows}
    left_out = {row.values for row in (*by_memory, *by_time)}
    assert sum(row.values in left_out for row in came) == len(left_out)


def late(arguments: list[str]) -> float:
    """Where a script holds less with batches of 64."""
    return dense(arguments) if size(arguments, "--batch") < 64 else 20


def swapped(arguments: list[str]) -> tuple[float, float]:
    """Where the script computes less with its "full" recomputation."""
    kernels, others = usual(arguments)
    return kernels / 2 if "full" in arguments else kernels, others


@pytest.mark.parametrize(
    ("checkpoint", "held", "seconds", "refuted"),
    [
        ("none,full", dense, usual, "memory along checkpoint: a rank holds less at tp=1 mbs=1 checkpoint=full than at"),
        ("full,none", late, usual, "memory along mbs: a rank holds less at tp=1 mbs=64 checkpoint=full than at"),
        (
            "full,none",
            dense,
            swapped,
            "time along checkpoint: a rank computes less at tp=1 mbs=1 checkpoint=full than at",
        ),
    ],
)
def test_an_order_that_a_recorded_point_refutes_prunes_nothing_along_its_axis(
    checkpoint: str,
    held: Callable[[list[str]], float],
    seconds: Seconds,
    refuted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    monkeypatch.chdir(tmp_path)
    plan = planned(
        "tp=--tp:1", "mbs=--batch:1,4,8,16,64", f"checkpoint=--ac:{checkpoint}", arguments=("--dp-replicate", "1")
    )
    sweep, _, said = swept(tmp_path / "auto", plan, held, monkeypatch, seconds)
    every, *_ = swept(tmp_path / "every", replace(plan, grows={}), held, monkeypatch, seconds)
    assert any(text.startswith(f"no point was pruned by {refuted}") for text in said)
    fits = {row.values for row in every.rows if row.status is Status.FITS}
    assert not any(row.status is Status.PRUNED and row.values in fits for row in sweep.rows)
    if "memory along mbs" in refuted or "time" in refuted:
        status = Status.PRUNED if "memory" in refuted else Status.SLOWER
        assert not any(row.status is status for row in sweep.rows)
    assert sweep.ranking.best is not None
    assert every.ranking.best is not None
    assert sweep.ranking.best.row.values == every.ranking.best.row.values
