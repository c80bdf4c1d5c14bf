"""Blocks that change hands inside of compiled graphs: whose they are at the peak."""

from pathlib import Path

import pytest

from fakedist.analysis.blocks import build_blocks
from fakedist.rundir.memory_records import GeneratedRecord
from fakedist.rundir.rows import HolderRow, LineRow
from tests.unit.analysis.recorded import BASE, MIB, HandMade

CODE = "/cache/inductor/ab/cab.py"


class Job:
    """A forward's graph (lines 10 to 19) and its backward's (20 to 29), both of a model with two layers.

    The forward makes A at line 10 for ``up``, which becomes ``down``'s at line 12, and is saved. The backward is given
    it; from line 22 on it holds ``up``'s gradient.
    """

    def __init__(self) -> None:
        self.made = made = HandMade()
        self.model, self.up, self.down = (made.layer(name, parent=0) for name in ("(Net)", "up", "down"))
        lines = [(10, 0), (14, 1), (21, 1), (24, 0)]
        held = [(10, 12, 1), (-1, 22, 0)]
        made.record("generated", number=0, filename=CODE, lines=lines, holders=held)
        made.record("placings", rows=[(0, (self.up, self.down, self.model))])

    def at(self, line: int) -> int:
        return self.made.stack(("torch.py", 1, "empty"), (CODE, line, "call"), ("train.py", 3, "main"))

    def run(self, *, forward_bytes: int, backward_bytes: tuple[int, int]) -> None:
        made = self.made
        forward = made.op(layer=self.model, name="inductor::graph")
        made.record("graphs", rows=[(forward, 0, 0)])
        made.alloc(0, 8 * MIB, stack=self.at(10))
        made.alloc(8 * MIB, forward_bytes, stack=self.at(14))
        made.free(8 * MIB, forward_bytes)
        made.region(forward, forward)
        backward = made.op("backward", layer=self.model, name="inductor::graph")
        made.record("graphs", rows=[(backward, 0, 0)])
        made.record("held", rows=[(backward, BASE, 22, self.up)])
        for line, size in zip((21, 24), backward_bytes, strict=True):
            made.alloc(16 * MIB, size, stack=self.at(line))
            made.free(16 * MIB, size)
        made.mark(0, "gradient", self.up, 8 * MIB)
        made.op("optimizer")

    def first_block(self, directory: Path) -> tuple[int, str]:
        blocks = build_blocks(self.made.read(directory))
        return int(blocks.frame["layer"][0]), str(blocks.frame["category"][0])


@pytest.mark.parametrize(
    ("peak", "sizes", "layer", "category"),
    [
        # Line 14 runs after line 12: the memory is what the forward saves.
        ("in the forward", (4 * MIB, (MIB, MIB)), "down", "activation"),
        ("before the backward reuses it", (MIB, (4 * MIB, MIB)), "down", "activation"),
        ("when it holds the gradient", (MIB, (MIB, 4 * MIB)), "up", "gradient"),
    ],
)
def test_a_block_is_of_who_holds_it_at_the_peak(
    peak: str, sizes: tuple[int, tuple[int, int]], layer: str, category: str, tmp_path: Path
) -> None:
    job = Job()
    job.run(forward_bytes=sizes[0], backward_bytes=sizes[1])
    assert job.first_block(tmp_path) == (getattr(job, layer), category), peak


def test_before_it_changes_hands_a_block_is_a_temporary_of_who_made_it(tmp_path: Path) -> None:
    job = Job()
    lines, holders = [LineRow(10, 0), LineRow(14, 1)], [HolderRow(10, 16, 1)]  # only after the peak, at line 14
    job.made.others[0] = GeneratedRecord(0, CODE, lines, holders)
    job.run(forward_bytes=4 * MIB, backward_bytes=(MIB, MIB))
    assert job.first_block(tmp_path) == (job.up, "temporary")


def test_what_an_operation_in_a_graph_allocates_is_told_by_the_line_that_calls_it(tmp_path: Path) -> None:
    job = Job()
    made = job.made
    made.record("graphs", rows=[(made.op(layer=job.model, name="inductor::graph"), 0, 0)])
    made.op(layer=job.model, name="aten.attention.default")
    made.alloc(0, MIB, stack=job.at(14))
    outside = made.op(layer=job.model)
    made.alloc(MIB, MIB, stack=made.stack(("train.py", 4, "main")), op=outside)
    frame = build_blocks(made.read(tmp_path)).frame
    assert list(frame["layer"]) == [job.down, job.model]


def test_a_gradient_is_found_though_the_graph_that_made_it_has_a_smaller_number_than_what_it_called(
    made: HandMade,
) -> None:
    layer = made.layer("up")
    graph = made.op("backward", name="inductor::graph")
    made.op("backward")
    made.alloc(0, MIB)
    made.free(0, MIB)
    made.alloc(0, 2 * MIB, op=graph)
    made.mark(0, "gradient", layer, 2 * MIB)
    frame = made.blocks().frame
    assert list(frame["category"].astype(str)) == ["temporary", "gradient"]
