import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fakedist
from fakedist.cli import main
from fakedist.errors import ExitCode, JobError, RunDirectoryError
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.results.building import build_tables
from fakedist.results.job_time import stages_of_job, time_job
from fakedist.rundir.launch_records import WorkRow
from fakedist.rundir.records import StepRecord
from tests.unit.analysis.recorded import GPU, new_run
from tests.unit.cost_model.launches_by_hand import PRODUCT, launch, record
from tests.unit.report.handmade import ended_well, recorded

EMBEDDING = WorkRow("gather", "kernel", "copy", "aten.embedding.default", 0.0, 1e6, "bf16", m=4096)
SEND = WorkRow("send", "collective", "communication", "send", float("nan"), float("nan"))
RECV = SEND._replace(name="recv", operation="recv")
NUM_BATCHES = 6
ACTIVATION = 1 << 10


def stage(
    directory: Path, rank: int, *, batches: int = NUM_BATCHES, gpu: str = "h100-80g", chunks: int = 1, **job: Any
) -> Path:
    """The run of rank 0 or 4 of 8: GPipe with two equal stages of so many chunks, whose transfers are small."""
    made = recorded()
    samples = {"samples": 2 * batches, "sample_shape": "1024"}  # of one rank, all micro-batches
    made.others = [replace(each, **samples) if isinstance(each, StepRecord) else each for each in made.others]
    made.gpu = replace(GPU, model=find_gpu(gpu))
    rows: list[dict[str, Any]] = []
    calls: list[tuple[Any, ...]] = []

    def transfer(work: WorkRow, op: int) -> None:
        stream, event = 7 + len(calls) % 2, 2 * len(calls) + 1
        rows.append(launch(what="stream_records", event=event))
        rows.append(launch(what="stream_waits", event=event, stream=stream))
        rows.append(launch(work, stream=stream, call=len(calls), num_operations=0))
        if work is RECV:
            rows.append(launch(what="stream_records", event=event + 1, stream=stream))
            rows.append(launch(what="stream_waits", event=event + 1))
        num_bytes = (ACTIVATION, 0) if work is SEND else (0, ACTIVATION)
        calls.append((len(calls), work.name, 1, *num_bytes, "bfloat16", False, 0, op, 0, 1 if rank == 0 else 0, 0, 0))

    op = made.op("forward", 2)
    for number in range(batches):
        if rank == 0:
            rows.append(launch(EMBEDDING, layer=1, op=1000 + number, num_operations=0))
        else:
            transfer(RECV, op)
        rows.append(launch(PRODUCT, layer=4, op=2000 + number, num_operations=0))
        rows += [launch(PRODUCT, layer=5, num_operations=0) for _ in range(9)]
        for _ in range(chunks if rank == 0 else 0):
            transfer(SEND, op)
    for _ in range(batches):
        if rank == 0:
            transfer(RECV, op)
        rows += [launch(PRODUCT, layer=4, phase="backward", num_operations=0) for _ in range(20)]
        if rank == 4:
            transfer(SEND, op)
    groups = [
        (0, "0", "default_pg", tuple(range(8)), 0, rank, "nccl"),
        (1, str(rank), "PP", (0, 4), 0, rank // 4, "nccl"),
        (2, "9", "TP", (rank, rank + 1), 0, 0, "nccl"),
        (3, "10", "DP", (rank, rank + 2), 0, 0, "nccl"),
    ]
    made.record("groups", rows=groups)
    made.record("calls", rows=calls)
    made.others.append(record(rows))
    made.ended()
    run = made.write(new_run(directory, rank=rank, **job))
    build_tables(run)
    return run


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("stages")
    return [stage(folder / f"rank{rank}", rank) for rank in (0, 4)]


def test_the_bubble_of_equal_stages_is_the_formulas(stages: list[Path]) -> None:
    job = time_job(stages)
    expected = 1 / (NUM_BATCHES + 1)
    step = job.summary
    for each in step.stages:
        assert each.bubble_us / step.step_us == pytest.approx(expected, abs=0.02)
        assert each.num_exchanged == 2 * NUM_BATCHES
        parts = (each.compute_us, each.communication_us, each.bubble_us, each.host_us, each.wait_us)
        assert sum(parts) == pytest.approx(step.step_us)
    assert [note.code for note in step.notes] == ["host_time"]
    most_us = max(each.compute_us for each in step.stages)  # some of it longer next to a transfer
    assert 0.999 * most_us < step.least_us <= most_us
    assert step.step_low_us is not None
    assert step.step_high_us is not None
    assert step.step_low_us < step.step_us < step.step_high_us
    assert time_job(stages[::-1]).summary == step
    assert time_job(stages, "b200").summary.step_us < 0.7 * step.step_us


def test_tokens_and_flops_of_the_whole_job_are_counted(stages: list[Path]) -> None:
    step = time_job(stages).summary
    done = step.throughput
    assert done.tokens_per_step == 4096 * NUM_BATCHES * 2
    assert done.num_micro_batches == NUM_BATCHES
    assert done.tokens_per_s_per_gpu == pytest.approx(4096 * NUM_BATCHES * 2 / (step.step_us * 1e-6) / 8)
    flops = 3 * 10 * NUM_BATCHES * PRODUCT.flops
    for rate in done.rates:
        assert rate.tflops_per_gpu == pytest.approx(flops / (step.step_us * 1e-6) / 1e12)
        assert rate.mfu == pytest.approx(rate.tflops_per_gpu * 1e12 / find_gpu("h100-80g").peak_flops["bf16"])
    assert [rate.convention for rate in done.rates] == ["Megatron-LM", "torchtitan"]
    assert (done.samples_per_step, done.sample_shape) == (2 * NUM_BATCHES * 2, "1024")
    assert done.samples_per_s_per_gpu == pytest.approx(4 * NUM_BATCHES / (step.step_us * 1e-6) / 8)
    given = time_job(stages, tokens_per_step=1000).summary.throughput
    assert (given.tokens_per_step, given.tokens_from) == (1000, "given")


def test_one_stage_alone_says_what_is_missing(stages: list[Path]) -> None:
    step = time_job(stages[:1]).summary
    assert step.throughput.rates == []
    assert [note.code for note in step.notes] == ["exchanges_elsewhere", "flops_not_counted", "host_time"]
    assert step.notes[1].text.endswith("they need the runs of the stages [0, 4]")
    later = time_job(stages[1:]).summary
    assert later.throughput.tokens_per_step is None
    assert "tokens_not_known" in [note.code for note in later.notes]


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"arguments": ("--layers", "9")}, "script's arguments is empty in one and --layers 9 in the other"),
        ({"world_size": 16}, "the world size is 8 in one and 16 in the other"),
        ({"gpu": "b200"}, "ran for different GPUs: h100-80g and b200"),
        ({"batches": NUM_BATCHES + 2}, "rank 0 recorded 6 micro-batches, and rank 4 8"),
    ],
)
def test_runs_that_are_not_of_one_job_are_refused(
    stages: list[Path], tmp_path: Path, other: dict[str, Any], error: str
) -> None:
    with pytest.raises(JobError, match=error):
        time_job([stages[0], stage(tmp_path / "other", 4, **other)], micro_batches=20 if "batches" in other else None)


def test_one_rank_twice_no_run_and_an_unknown_group_are_refused(stages: list[Path]) -> None:
    with pytest.raises(JobError, match="rank 0 is given twice"):
        time_job([stages[0], stages[0]])
    with pytest.raises(JobError, match="is not the run of a rank of a job"):
        time_job([stages[0], fakedist.open(stages[0] / "memory_snapshot.pickle")])
    with pytest.raises(JobError, match="no run was given"):
        time_job([])
    with pytest.raises(JobError, match="no collectives on a group 'EP'"):
        time_job(stages, what_if="separate=EP")


def test_a_run_without_launches_or_with_fewer_calls_says_so(stages: list[Path], tmp_path: Path) -> None:
    made = recorded()
    made.gpu = replace(GPU, model=find_gpu("h100-80g"))
    made.ended()
    run = made.write(new_run(tmp_path / "run", rank=4))
    build_tables(run)
    with pytest.raises(RunDirectoryError, match="has no launches to price"):
        time_job([stages[0], run])
    short = stage(tmp_path / "short", 4, batches=NUM_BATCHES - 1)
    notes = {note.code: note.text for note in time_job([stages[0], short]).summary.notes}
    assert notes["unmatched_calls"].startswith("1 call of rank 0 with the other ranks has no other side")


def test_the_command_prints_the_job_in_every_format(
    stages: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(path) for path in stages]
    assert main(["time", *runs]) == 0
    text = capsys.readouterr().out
    assert "Step of the job, estimated" in text
    assert "rank 0 binds memory" in text
    assert " of all GPUs, 49,152 tokens a step" in text
    assert main(["time", *runs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][1]["rank"] == 4
    assert main(["time", *runs, "--format", "markdown"]) == 0
    assert "| rank | stage | peak reserved |" in capsys.readouterr().out
    assert main(["time", *runs, "--format", "html", "-o", str(tmp_path / "step.html")]) == 0
    page = (tmp_path / "step.html").read_text()
    assert "rank 0 binds memory" in page
    assert not re.search(r'(?:src|href)="http', page)


def test_further_micro_batches_take_what_a_longer_run_takes(stages: list[Path], tmp_path: Path) -> None:
    longer = [stage(tmp_path / f"rank{rank}", rank, batches=NUM_BATCHES + 4) for rank in (0, 4)]
    found, recorded = time_job(stages, micro_batches=NUM_BATCHES + 4).summary, time_job(longer).summary
    for name in ("step_us", "step_low_us", "step_high_us"):
        assert getattr(found, name) == getattr(recorded, name)
    for mine, other in zip(found.stages, recorded.stages, strict=True):
        assert replace(mine, run_directory=other.run_directory) == other
    assert found.throughput == recorded.throughput
    assert [note.code for note in found.notes] == ["micro_batches_repeated", "host_time"]
    assert "6 micro-batches were recorded" in found.notes[0].text


def test_what_ifs_of_a_job_are_told_each_on_its_own(
    stages: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["time", *map(str, stages), "--what-if", "bandwidth=nvlink:0.001x", "--what-if", "no-overlap"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    slower, apart = found["what_ifs"]
    assert [slower["what_if"], apart["what_if"]] == ["bandwidth=nvlink:0.001x", "no-overlap"]
    assert slower["step_us"] == pytest.approx(found["step_us"] + slower["change_us"])
    assert slower["change_us"] > 0
    assert time_job(stages, what_if="no-overlap").summary.step_us == apart["step_us"] >= found["step_us"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "What if, estimated, each on its own" in text
    assert "bandwidth=nvlink:0.001x, rank " in text
    assert main([*command, "--format", "html", "-o", str(tmp_path / "step.html")]) == 0
    assert ">no-overlap<" in (tmp_path / "step.html").read_text()


@pytest.mark.parametrize(
    ("number", "options", "says"),
    [
        (2, ["--micro-batches", "5"], "rank 0 recorded 6 micro-batches, and 5 is fewer"),
        (2, ["--format", "csv"], "--format csv is for one run, and 2 were given"),
        (2, ["--all-rows"], "--all-rows is for one run"),
        (2, ["--tokens-per-step", "0"], "--tokens-per-step"),
        (1, ["--micro-batches", "12", "--format", "csv"], "--format csv is for one run, not for the step of a job"),
    ],
)
def test_options_of_one_run_are_refused_for_a_job(
    stages: list[Path], number: int, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["time", *map(str, stages[:number]), *options]) == ExitCode.USAGE
    assert says in capsys.readouterr().err


def test_the_figure_has_a_lane_for_each_rank_and_a_notebook_a_row(stages: list[Path]) -> None:
    job = fakedist.time_job(stages)
    figure = job.figure()
    assert {bar.name for bar in figure.data} == {"forward", "backward", "communication", "bubble"}
    assert {str(label) for bar in figure.data for label in bar.y} == {"stage 0, rank 0", "stage 1, rank 4"}
    assert job.stages()["rank"].tolist() == [0, 4]
    assert job.stages()["stage"].tolist() == [0, 1]
    assert "\n  ranks: 0, 4 of 8\n" in repr(job)
    shown = job._repr_html_()
    assert "<th>slowest</th><td>rank " in shown
    assert "<th>bubble_us</th>" in shown


def test_the_stages_are_the_ranks_of_the_pipelines_group(stages: list[Path], tmp_path: Path) -> None:
    found = stages_of_job(stages[1])
    assert (found.ranks, found.group, found.why) == ((0, 4), "PP", "its name is PP")
    with pytest.raises(JobError, match="the groups of rank 1 show no pipeline") as raised:
        stages_of_job(ended_well(tmp_path / "run"))
    assert raised.value.hint == "name the ranks to run: --rank 0,64"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["stages", "--with-peers"], "--with-peers is for one rank, and --rank stages runs several"),
        (["stages", "--format", "markdown"], "--format markdown is for one rank, and stages were asked for"),
        (["distinct", "--format", "markdown"], "--format markdown is for one rank, and distinct ranks were asked for"),
        (["all"], "--rank all would run 256 ranks: --rank distinct runs those of each kind, --rank 0-255 runs all"),
    ],
)
def test_options_of_one_rank_are_refused_for_several(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["profile", "--world-size", "256", "--device", "virtual", "--rank", *options, "train.py"])
    assert code == ExitCode.USAGE
    assert says in capsys.readouterr().err
