"""The tables of a run's memory, and what the verdict makes of memory outside the caching allocator."""

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fakedist.report.content.memory import (
    engine_sheet,
    engine_sleep_sheet,
    line_sheet,
    named_phase_sheet,
    outside_blocks,
    phase_sheet,
)
from fakedist.report.content.report_blocks import Facts
from fakedist.report.content.run import run_report
from fakedist.report.render.markdown import report_markdown
from fakedist.results.opening import open_run
from fakedist.results.verdict import span_text, verdict
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.schema import CATEGORIES
from fakedist.rundir.step_time import RangeTime
from fakedist.rundir.summary import Communicator, EngineMemory, EngineSleep, NamedPhase, Outside, PhasePeak, Summary
from tests.unit.analysis.recorded import GIB, MIB, HandMade
from tests.unit.report.handmade import built, ended_well, summary_of_nothing
from tests.unit.report.reading import page

LLAMA, LOSS = "/usr/lib/python3/dist-packages/transformers/llama.py", "/usr/lib/python3/dist-packages/fused/loss.py"


def rows(made: HandMade, directory: Path) -> list[list[str]]:
    whole = line_sheet(open_run(built(made, directory / "run")))
    assert whole is not None
    sheet = whole.shortened
    cells = zip(*(column.cells for column in sheet.columns), strict=True)
    return [[column.name for column in sheet.columns], *map(list, cells)]


def test_a_line_has_its_backward_and_the_lines_of_libraries_that_it_calls(tmp_path: Path) -> None:
    made = HandMade()
    calls, computes = ("/job/train.py", 44, "step"), ("/job/train.py", 45, "step")
    stacks = [made.stack((LLAMA, line, "forward"), calls) for line in (7, 9)]
    stacks += [made.stack((LOSS, 3, "loss"), computes), made.stack()]
    for number, (stack, size) in enumerate(zip((*stacks, -1), (32, 16, 8, 24, 4), strict=True)):
        op = made.op("backward" if number == 3 else "forward", name="aten.add.Tensor")
        made.alloc(number * 64 * MIB, size * MIB, stack=stack, mark=(CATEGORIES[0],))
    no_stack = (-1).to_bytes(4, "little", signed=True)
    made.record("nodes", frames=[], stacks=[], op=_q(2), thread=_q(1), sequence=_q(5), stack=no_stack)
    made.record("node_runs", op=_q(3), thread=_q(1), sequence=_q(5))
    made.ended()
    assert op == 4
    assert rows(made, tmp_path) == [
        ["line", "bytes", "share", "in backward", "blocks"],
        ["train.py:44 (step)", "48.00 MiB", "57.1%", "-", "2"],
        ["  transformers/llama.py:7 (forward)", "32.00 MiB", "38.1%", "-", "1"],
        ["  transformers/llama.py:9 (forward)", "16.00 MiB", "19.0%", "-", "1"],
        ["fused/loss.py:3 (loss), from train.py:45 (step)", "32.00 MiB", "38.1%", "24.00 MiB", "2"],
        ["add.Tensor", "4.00 MiB", "4.8%", "-", "1"],
    ]


def _named(made: HandMade, name: str, first_op: int, *in_use: int) -> None:
    keys = ("peak_used_bytes", "backed_bytes", "outside_bytes", "others_bytes")
    used = {key: size * MIB for key, size in zip(keys, in_use, strict=False)}
    made.record("named_phase", name=name, step=1, first_op=first_op, end_op=len(made.ops), **used)


def test_the_scripts_phases_have_what_was_held_and_what_was_in_use(tmp_path: Path) -> None:
    made = HandMade()
    _named(made, "before", 0)
    made.op()
    made.alloc(0, 64 * MIB)
    _named(made, "rollout", 0, 300, 100, 20, 40)
    made.op()
    made.alloc(64 * MIB, 32 * MIB)
    made.op()
    made.free(64 * MIB, 32 * MIB)
    _named(made, "train", 1, 250, 90)
    made.op()
    _named(made, "sync", 3)
    made.record("taken", device=0, peak_bytes=0, by_owner={}, backed_bytes=GIB - 200 * MIB)
    made.ended()
    run = open_run(built(made, tmp_path / "run"))
    sheet = named_phase_sheet(run.summary)
    cells = [list(row) for row in zip(*(column.cells for column in sheet.columns), strict=True)]
    handover = ["hand-over: allocated", "hand-over: reserved"]
    names = ["peak in use", "peak allocated", "peak reserved", "end: allocator", "end: outside", "end: others"]
    assert [column.name for column in sheet.columns] == ["phase", "step", *handover, *names]
    assert cells == [
        ["before", "1", "-", "-", "-", "-", "-", "-", "-", "-"],
        ["rollout", "1", "-", "-", "300.00 MiB", "64.00 MiB", "1.00 GiB", "100.00 MiB", "20.00 MiB", "40.00 MiB"],
        ["train", "1", "64.00 MiB", "1.00 GiB", "250.00 MiB", "96.00 MiB", "1.00 GiB", "90.00 MiB", "-", "-"],
        ["sync", "1", "64.00 MiB", "1.00 GiB", "-", "64.00 MiB", "1.00 GiB", "-", "-", "-"],
    ]
    assert run.summary.asleep_bytes == 200 * MIB


def _q(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True)


def test_a_phase_that_ends_in_the_timed_step_has_a_time() -> None:
    sizes = dict.fromkeys([field.name for field in fields(NamedPhase)][4:], 0)
    rows = [NamedPhase("rollout", step, end, 0, **sizes) for step, end in ((0, 1), (1, 2), (2, 3))]
    rows += [
        NamedPhase("sync", 2, 2, 0, **sizes),
        NamedPhase("sync", 2, 2, 0, **sizes),
        NamedPhase("idle", 2, 2, 0, **sizes),
    ]
    spans = [RangeTime("rollout", 1, 0, 8, 0, 900.0, 1000.0, 0), RangeTime("sync", 2, 0, 0, 0, 0.0, 300.0, 4)]
    timed = (SimpleNamespace(ranges=spans), SimpleNamespace(step=2, source="estimated"))
    sheet = named_phase_sheet(cast(Summary, SimpleNamespace(named_phases=rows, timed=timed, kernels=timed[1])))
    (time,) = [column for column in sheet.columns if column.name == "time"]
    assert list(time.cells) == ["-", "1.00 ms", "-", "150 µs", "150 µs", "-"]
    assert any(remark.startswith("time, estimated") for remark in sheet.remarks)


ENGINE = EngineMemory(
    process="",
    version="0.33.0",
    utilization=0.5,
    max_model_len=4096,
    cache_dtype="bfloat16",
    enforce_eager=True,
    can_sleep=True,
    weights_bytes=3 * GIB,
    activations_bytes=2 * GIB,
    graphs_bytes=0,
    num_blocks=100,
    block_tokens=16,
    cache_bytes=35 * GIB,
    peak_awake_bytes=60 * GIB,
    peak_asleep_bytes=30 * GIB,
    peak_phase="rollout",
    least_utilization=0.07,
    largest_utilization=0.75,
    largest_in_addition=0.74,
    largest_num_blocks=1157,
    largest_cache_bytes=55 * GIB,
    unknown_because="",
)


def test_the_engine_has_a_row_for_this_run_and_one_for_the_largest_share() -> None:
    sheet = engine_sheet(ENGINE, cast(Outside, SimpleNamespace(context_bytes=1)))
    cells = [list(row) for row in zip(*(column.cells for column in sheet.columns), strict=True)]
    assert cells == [
        ["this run", "0.5", "100", "35.00 GiB"],
        ["largest that fits", "0.75", "1,157", "55.00 GiB"],
    ]
    assert sheet.remarks == [
        "the engine measured 3.00 GiB of weights, 2.00 GiB of activations; its KV cache is in bfloat16",
        "with the KV cache at most 60.00 GiB was in use in rollout, without it 30.00 GiB",
        "from 0.07 on it starts with room for one request of 4,096 tokens",
        "0.74 fits in addition to the most that CUDA's context and NCCL may take",
    ]


def test_what_an_engine_keeps_asleep_has_its_kinds_the_largest_first() -> None:
    kept = {"tensors": 3 * MIB, "private pools": 200 * MIB}
    sheet = engine_sleep_sheet([EngineSleep("EngineCore", "level 1", 12, 2 * GIB, kept)])
    assert [column.cells[0] for column in sheet.columns] == [
        *("EngineCore: level 1", "12", "2.00 GiB", "203.00 MiB"),
        "200.00 MiB private pools, 3.00 MiB tensors",
    ]
    assert len(sheet.remarks) == 1
    assert "other tensors" in engine_sleep_sheet([EngineSleep("", "level 1", 1, 0, kept)]).remarks[1]


def test_an_engine_beside_a_context_that_is_not_known_says_so() -> None:
    remarks = engine_sheet(replace(ENGINE, largest_in_addition=None), None).remarks
    assert remarks[-1] == "no share fits in addition to the most that NCCL may take (CUDA's context is not known)"


def test_an_engine_whose_largest_share_is_not_known_says_why() -> None:
    sheet = engine_sheet(
        replace(
            ENGINE, largest_utilization=None, largest_num_blocks=0, largest_cache_bytes=0, unknown_because="no end"
        ),
        None,
    )
    assert [column.cells[1] for column in sheet.columns] == ["largest that fits", "-", "-", "-"]
    assert sheet.remarks[-1] == "the largest share is not known: no end"


def summary(reserved: int, low: float, high: float, fits: bool = True, measured_bytes: int | None = None) -> Summary:
    low_bytes, high_bytes = int(low * GIB), int(high * GIB)
    one = Communicator("tp", 8, 8, 1, (1, 1), parts={}, low_bytes=low_bytes, high_bytes=high_bytes)
    outside = Outside(
        low_bytes,
        high_bytes,
        None,
        "",
        "2.30.7",
        nccl_environment={},
        communicators=[one] if high else [],
        num_unused_groups=2,
        left_out=["CUDA context: not known for this GPU"],
        measured_bytes=measured_bytes,
    )
    return replace(
        summary_of_nothing(),
        exit=Ending(Outcome.STOPPED, 0),
        fits=fits,
        capacity_bytes=80 * GIB,
        peak_reserved_bytes=reserved * GIB,
        estimated_outside=outside,
    )


def figures(outside: Outside) -> list[tuple[str, str, str]]:
    (facts,) = (block for block in outside_blocks(outside) if isinstance(block, Facts))
    return [(fact.name, fact.text, fact.more) for fact in facts.rows]


FITS = "fits (0 steps recorded), headroom 10.00 GiB"
HINT = "; --reserve 2048MiB shows what PyTorch does with the rest"
UNSURE = "1.00 GiB is not reserved, but NCCL takes"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (summary(70, 1, 2), f"{FITS}, 1.00 to 2.00 GiB of it for NCCL, estimated: 8.00 to 9.00 GiB is left"),
        (summary(70, 0, 0), FITS),
        (replace(summary(70, 0, 0), estimated_outside=None), FITS),
        (summary(79, 0.5, 2), f"may not fit: {UNSURE} 512.00 MiB to 2.00 GiB, estimated{HINT}"),
        (summary(79, 1.5, 2, fits=False), f"does not fit: {UNSURE} 1.50 to 2.00 GiB, estimated"),
        (summary(81, 1.5, 2, fits=False), "does not fit: it takes 81.00 GiB, 1.00 GiB more than the GPU has"),
    ],
)
def test_the_verdict_has_one_headroom_and_is_certain_where_the_estimate_decides_nothing(
    found: Summary, text: str
) -> None:
    said = verdict(found, "")
    assert said is not None
    assert said.word + said.more == text
    assert said.fits == ("does not" not in text)
    assert said.is_sure == ("may not" not in text)


def test_page_and_markdown_have_the_section_with_every_communicator(tmp_path: Path) -> None:
    run = open_run(ended_well(tmp_path / "run"))
    text = page(run)
    assert '<section id="outside"' in text
    assert "default_pg" in text[text.index('id="communicators"') :]
    assert "NVLink SHARP 256.00 MiB" in text or "made of, at most" in text
    assert "- CUDA context: not known for NVIDIA H100 80GB HBM3" in report_markdown(run_report(run))


def test_measured_and_estimated_stand_apart() -> None:
    found = summary(70, 1, 2, measured_bytes=GIB)
    assert found.estimated_outside is not None
    rows = {name: figure for name, figure, _ in figures(found.estimated_outside)}
    assert rows == {"NCCL": "1.00 to 2.00 GiB", "on this GPU": "1.00 GiB"}


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(GIB, GIB, "1.00 GiB"), (GIB, 3 * GIB, "1.00 to 3.00 GiB"), (1 << 20, GIB, "1.00 MiB to 1.00 GiB")],
)
def test_a_span_has_its_unit_once(low: int, high: int, text: str) -> None:
    assert span_text(low, high) == text


def test_what_the_script_took_is_told_apart_and_measured() -> None:
    found = summary(70, 0, 0)
    assert found.estimated_outside is not None
    taken = {"user buffers": GIB, "extensions": GIB // 2}
    owned = replace(found.estimated_outside, low_bytes=GIB, high_bytes=GIB, taken=taken, taken_bytes=GIB)
    assert ("user buffers", "1.00 GiB", "measured: the most at one time") in figures(owned)
    said = verdict(replace(found, estimated_outside=owned), "")
    assert said is not None
    assert (
        said.word + said.more == f"{FITS}, 1.00 GiB of it for user buffers and extensions, measured: 9.00 GiB is left"
    )
    full = replace(found, estimated_outside=owned, peak_reserved_bytes=80 * GIB - 1, fits=False)
    assert "user buffers and extensions take 1.00 GiB, measured" in getattr(verdict(full, ""), "more", "")


def test_of_thousands_of_steps_a_page_has_the_first_the_last_and_the_peak() -> None:
    phases = [PhasePeak(step, phase, 9, 9, 9) for step in range(1, 5_001) for phase in ("forward", "backward")]
    one_of_many = SimpleNamespace(by_phase=phases, peak_step=2_500, peak_phase="forward", steps=[], world_size=None)
    sheet = phase_sheet(cast(Summary, one_of_many))
    assert len(sheet.columns[0].cells) == len(sheet.rows) == 2 * 401
    assert [row.is_marked for row in sheet.rows].count(True) == 1
    assert sheet.remarks == ["of 5,000 steps, 4,599 are only in --json"]
