"""The lines that hold most at the peak."""

from pathlib import Path

from fakedist.report.text.memory_sheets import line_sheet
from fakedist.results.opening import open_run
from fakedist.rundir.schema import CATEGORIES
from tests.unit.analysis.recorded import MIB, HandMade
from tests.unit.report.handmade import built

LLAMA, LOSS = "/usr/lib/python3/dist-packages/transformers/llama.py", "/usr/lib/python3/dist-packages/fused/loss.py"


def rows(made: HandMade, directory: Path) -> list[list[str]]:
    sheet = line_sheet(open_run(built(made, directory / "run")), 5)
    assert sheet is not None
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


def _q(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True)
