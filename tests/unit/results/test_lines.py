"""Bytes and times by line: of its own, in a backward, with its calls, and of what has no line."""

import dataclasses
import json
import re
from array import array
from pathlib import Path
from typing import Any

import pytest

import fakedist
from fakedist.cli import main
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.results.lines import Lines, lines_of
from tests.unit.analysis.recorded import GPU, MIB, HandMade
from tests.unit.cost_model import launches_by_hand
from tests.unit.cost_model.launches_by_hand import PRODUCT, launch
from tests.unit.report.handmade import built

TORCH = ("/site-packages/torch/nn/modules/linear.py", 134, "forward")
MODEL, OTHER, MAIN = ("/job/model.py", 12, "forward"), ("/job/model.py", 30, "gelu"), ("/job/train.py", 3, "main")
HOSTILE = ("/job/<b>.py", 1, "\x1b[2J")
DOCUMENT = Path(__file__).parents[3] / "docs/editors.md"


def run_with_lines(directory: Path) -> Path:
    """A forward of two operations, the first of which has a node; one operation without Python, one of another file."""
    made = HandMade()
    made.gpu = dataclasses.replace(GPU, model=find_gpu("h100-80g"))
    stacks = [made.stack(*frames) for frames in ([TORCH, MODEL, MAIN], [OTHER, MODEL, MAIN], [HOSTILE, MAIN], [])]
    ops = [made.op("forward", 2), made.op("forward", 2)]
    made.alloc(0, 8 * MIB, stack=stacks[0])
    made.alloc(8 * MIB, MIB, stack=stacks[1])
    ops.append(made.op("backward", 2))
    made.alloc(16 * MIB, 4 * MIB)
    made.alloc(24 * MIB, 2 * MIB, op=made.op("backward", 2))
    ops += [made.op("optimizer", 2), made.op("other", 2)]
    node = {"op": packed("q", ops[0]), "thread": packed("Q", 1), "sequence": packed("q", 7)}
    made.record("nodes", frames=[], stacks=[], **node, stack=packed("i", -1))
    made.record("node_runs", op=packed("q", ops[2]), thread=packed("Q", 1), sequence=packed("q", 7))
    called = [stacks[0], stacks[1], stacks[3], stacks[2], stacks[3]]
    made.record("operation_stacks", op=packed("q", *ops), stack=packed("i", *called))
    phases = ("forward", "forward", "backward", "optimizer", "other")
    launches = [launch(PRODUCT, op=op, phase=phase) for op, phase in zip(ops, phases, strict=True)]
    made.others.append(launches_by_hand.record([*launches, launch(PRODUCT, op=ops[0])]))
    made.step(2)
    made.ended()
    return built(made, directory)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_with_lines(tmp_path_factory.mktemp("lines") / "run")


def packed(code: str, *values: int) -> bytes:
    return array(code, values).tobytes()


@pytest.fixture(scope="module")
def lines(path: Path) -> Lines:
    return lines_of(fakedist.open(path))


def row(lines: Lines, frame: tuple[str, int, str]) -> Any:
    return lines.table.set_index(["file", "line", "function"]).loc[frame]


def test_a_line_has_what_it_allocates_itself_and_in_its_backward(lines: Lines) -> None:
    own = ["allocated_bytes", "backward_bytes", "num_blocks"]
    assert row(lines, MODEL)[own].tolist() == [12 * MIB, 4 * MIB, 2]
    assert row(lines, OTHER)[own].tolist() == [MIB, 0, 1]
    assert row(lines, MAIN)[own].tolist() == [0, 0, 0]
    assert lines.without_line["allocated_bytes"] == 2 * MIB


def test_a_line_has_the_kernels_that_it_launches_itself_and_in_its_backward(lines: Lines) -> None:
    us = row(lines, OTHER)["kernel_us"]
    assert us > 0
    assert row(lines, MODEL)[["kernel_us", "backward_us", "num_kernels"]].tolist() == pytest.approx([3 * us, us, 3])
    assert row(lines, HOSTILE)[["kernel_us", "backward_us", "num_kernels"]].tolist() == pytest.approx([us, 0, 1])
    assert lines.without_line["kernel_us"] == pytest.approx(us)


def test_a_line_has_the_sums_of_what_it_calls_once(lines: Lines) -> None:
    us = row(lines, OTHER)["kernel_us"]
    totals = ["total_allocated_bytes", "total_kernel_us"]
    assert row(lines, MODEL)[totals].tolist() == pytest.approx([13 * MIB, 4 * us])
    assert row(lines, MAIN)[totals].tolist() == pytest.approx([13 * MIB, 5 * us])
    assert TORCH[0] not in set(lines.table["file"])


def test_the_sums_of_lines_are_those_of_the_run(path: Path, lines: Lines) -> None:
    run = fakedist.open(path)
    held = lines.table["allocated_bytes"].sum() + lines.without_line["allocated_bytes"]
    assert held == run.peak_allocated_bytes
    assert run.time is not None
    us = lines.table["kernel_us"].sum() + lines.without_line["kernel_us"]
    assert us == pytest.approx(run.time.kernels()["duration_us"].sum())


def test_the_object_has_the_keys_of_the_document(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lines", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema"], shown["times"], shown["timed_step"]) == (1, "estimated", 2)
    first = shown["lines"][0]
    assert (first["file"], first["line"], first["function"]) == MODEL
    assert first["allocated_share"] == pytest.approx(12 / 15)
    tables = re.findall(r"^\| key \|.*\n\|.*\n((?:\|.*\n)+)", DOCUMENT.read_text(), flags=re.MULTILINE)
    first_cells = (" ".join(row.split("|")[1] for row in table.splitlines()) for table in tables)
    of_object, of_line = (set(re.findall(r"`(\w+)`", cells)) for cells in first_cells)
    assert of_object == set(shown)
    assert of_line == set(first)
    assert set(shown["without_line"]) < of_line
