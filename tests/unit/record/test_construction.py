"""The memory of models that have not run: noted as it comes, and marked once its module has a name."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fakedist.record.construction import Construction, Made
from fakedist.record.copies import Copies
from fakedist.record.marks import Marks
from fakedist.record.module_names import KEEP_LAYER, LayerTable
from fakedist.record.position import Position
from fakedist.record.unseen import Unseen
from fakedist.rundir.schema import CATEGORIES
from tests.support.on_device import all_on_device


class Built:
    """Models that are built while construction is watched, and what is marked of them."""

    def __init__(self) -> None:
        self.position, self.layers = Position(), LayerTable()
        self.marks = Marks(self.position, self.layers)
        self.reports: list[Made | None] = []
        copies = Copies(self.layers, self.marks)
        self.construction = Construction(self.position, self.layers, self.marks, copies, self.reports.append)

    def marked(self, *, is_over: bool = False) -> set[tuple[str, int, int]]:
        """Layer, operation and bytes of each new mark."""
        self.construction.mark(is_over=is_over)
        taken = self.marks.take()
        categories, layers = memoryview(taken.category).cast("B"), memoryview(taken.layer).cast("i")
        ops, sizes = memoryview(taken.op).cast("q"), memoryview(taken.size).cast("q")
        assert {CATEGORIES[category] for category in categories} <= {"parameter"}
        names = ["" if layer == KEEP_LAYER else self.layers.name(layer) for layer in layers]
        return set(zip(names, ops, sizes, strict=True))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[Built]:
    all_on_device(monkeypatch)
    built = Built()
    with built.construction.watching(Unseen()):
        yield built
    assert nn.Module._apply.__module__ == nn.Module.__module__


def test_tensors_that_modules_register_are_marked_once_the_modules_have_names(built: Built) -> None:
    built.position.cells.op = 3
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    assert built.marked() == set()
    built.layers.layer(model[0])
    linear = {("(Linear)", 2, 48), ("(Linear)", 2, 12)}
    assert built.marked() == linear
    assert built.marked() == set()
    built.layers.layer(model[1])
    norm = "(BatchNorm1d)"
    assert built.marked() == {(norm, 2, 12), (norm, 2, 8)}  # its buffers, too: the count of batches has 8 bytes


def test_at_the_end_modules_that_never_ran_are_marked_and_those_that_are_gone_keep_their_layer(built: Built) -> None:
    model = nn.Linear(4, 3)
    nn.Linear(4, 5)
    gc.collect()
    assert built.marked() == set()
    assert built.marked(is_over=True) == {("(Linear)", -1, 48), ("(Linear)", -1, 12), ("", -1, 80), ("", -1, 20)}
    assert built.marked(is_over=True) == set()
    assert model.in_features == 4


def test_the_first_module_that_registers_a_tensor_has_it(built: Built) -> None:
    first, second = nn.Linear(4, 3), nn.Embedding(3, 4)
    second.weight = first.weight
    built.layers.layer(first)
    assert built.marked() == {("(Linear)", -1, 48), ("(Linear)", -1, 12)}
    built.layers.layer(second)
    assert built.marked() == {("(Embedding)", -1, 48)}  # its own weight, which is gone


@pytest.mark.parametrize("when", ["in a step", "in a forward"])
def test_modules_that_are_built_later_are_not_construction(built: Built, when: str) -> None:
    layer = built.layers.layer(nn.Module())
    if when == "in a step":
        built.position.step = 1
    else:
        built.position.module_begins(layer)
    model = nn.Linear(4, 3)
    model.half()
    model.load_state_dict({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)})
    assert built.reports == []
    assert built.marked(is_over=True) == set()


def test_moved_parameters_are_noted_before_and_after_and_with_all_that_the_move_makes(built: Built) -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    built.position.cells.op = 5
    made: list[torch.Tensor] = []

    def to_half(tensor: torch.Tensor) -> torch.Tensor:
        report = built.reports[-1]
        assert report is not None
        made.append(torch.zeros(100))
        report((made[-1], "no tensor"))
        return tensor.half()

    model._apply(to_half)
    assert len(built.reports) == 2  # once for the whole model
    assert built.reports[-1] is None
    for module in model:
        built.layers.layer(module)
    marked = {(op, size) for _, op, size in built.marked()}
    assert marked == {(-1, 48), (-1, 24), (4, 48), (4, 24), (4, 400), (4, 12)}
    assert len(made) == 2


def test_a_checkpoints_tensors_belong_to_the_modules_that_they_are_for(built: Built) -> None:
    linear = nn.Linear(4, 3, bias=False)
    model = nn.Sequential(nn.Sequential(linear))
    built.layers.layer(linear)
    built.marked()
    built.position.cells.op = 9
    own = {"0.0.weight": torch.zeros(3, 4), "0.0.extra": torch.zeros(5)}
    model.load_state_dict(own | {"1.weight": torch.zeros(7), "0.0.text": "no tensor"}, strict=False)
    assert built.marked() == {("(Linear)", 8, 48), ("(Linear)", 8, 20)}
