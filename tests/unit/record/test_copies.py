"""The search for copies among all objects, and the names that variables give them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fakedist.record.alive import all_alive
from fakedist.record.copies import Copies, variable_name
from fakedist.record.marks import Marks
from fakedist.record.module_names import LayerTable
from fakedist.record.position import Position
from fakedist.rundir.schema import ALIKE, CATEGORIES


class Held(dict[str, int]):
    pass


def test_lists_and_dicts_are_found_by_what_they_hold() -> None:
    kept = [Held(one=1), Held(one=1, two=2), [1, 2], (1, 2)]
    holders = set(map(id, all_alive().holding({2})))
    assert [id(holder) in holders for holder in kept] == [False, True, True, False]


def test_a_search_keeps_nothing_alive() -> None:
    held = Held()
    gone = weakref.ref(held)
    gc.disable()
    try:
        living = all_alive()
        assert id(held) in map(id, living.of(lambda kind: kind is Held))
        del held, living
        assert gone() is None
    finally:
        gc.enable()


class Proxy:
    """As torch.distributed.reduce_op, and what loads a module late: whatever it is asked, it does something."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"asked for {name}")


class ModelEMA:
    """Keeps a copy where its name says nothing."""

    def __init__(self, held: object) -> None:
        self.module = held


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, dict[str, int]]]:
    """The allocator's statistics. All tensors say that they are on a device, and more is allocated than is known."""
    gc.collect()  # models of other tests
    stats = {"allocated_bytes": {"all": {"current": 1 << 20}}}
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda device: stats, raising=False)
    return stats


class Copied:
    """A model that ran, and what a search for its copies marks."""

    def __init__(self) -> None:
        self.layers = LayerTable()
        self.marks = Marks(Position(), self.layers)
        self.model = nn.Linear(4, 3)
        self.marks.module(self.model, self.layers.layer(self.model))
        self.marks.scan(self.model)
        self.copies = Copies(self.layers, self.marks)
        self.marks.take()
        self._op = 0

    def found(self) -> list[tuple[str, str, int]]:
        """Category, layer and bytes of each piece that is marked."""
        self._op += 1
        self.copies.mark(self._op)
        taken = self.marks.take()
        columns = [
            memoryview(taken.category).cast("B"),
            memoryview(taken.layer).cast("i"),
            memoryview(taken.size).cast("q"),
        ]
        return [
            (CATEGORIES[category] if category < len(CATEGORIES) else ALIKE, self.layers.name(layer), size)
            for category, layer, size in zip(*(column.tolist() for column in columns), strict=True)
        ]


@pytest.mark.usefixtures("allocated")
def test_a_copy_is_marked_under_the_name_of_the_variable_that_holds_it() -> None:
    copied = Copied()
    target, other = nn.Linear(4, 3), nn.Linear(4, 5)
    target.buffers = target.parameters = []  # type: ignore[assignment]  # as Megatron's DistributedDataParallel
    name = "copy of the parameters (target)"
    assert copied.found() == [("other", name, 48), ("other", name, 12)]
    assert copied.copies.modules >= {target}
    assert other not in copied.copies.modules


@pytest.mark.usefixtures("allocated")
def test_a_list_of_tensors_like_the_parameters_is_a_copy() -> None:
    copied = Copied()
    average = [torch.zeros(3, 4), torch.zeros(3)]
    others = [[torch.zeros(3, 4), torch.zeros(4)], [torch.zeros(3, 4), "text"], [Proxy(), Proxy()], []]
    name = "copy of the parameters (average)"
    assert copied.found() == [(ALIKE, name, 48), (ALIKE, name, 12)]
    assert len(average) + len(others) == 6


def test_a_copy_is_looked_for_once_a_step_and_only_if_memory_is_not_known(allocated: Any) -> None:
    copied = Copied()
    target = nn.Linear(4, 3)
    allocated["allocated_bytes"]["all"]["current"] = 60  # the model's own bytes
    assert copied.found() == []
    allocated["allocated_bytes"]["all"]["current"] = 120
    copied.copies.mark_once(1, 100)
    assert len(copied.marks.take().category) == 2
    for step, op, found in ((1, 101, 0), (2, 100, 0), (3, 102, 2)):
        copied.copies.mark_once(step, op)
        assert len(copied.marks.take().category) == found
    assert target is not None


@pytest.mark.usefixtures("allocated")
def test_a_list_of_released_parameters_is_no_copy() -> None:
    copied = Copied()
    for parameter in copied.model.parameters():
        parameter.data = torch.empty(0)
    released = [torch.empty(0), torch.empty(0)]
    assert copied.found() == []
    assert released


class Thing:
    pass


class Holder:
    def __init__(self, held: object) -> None:
        self.target_network = held


def test_a_variable_of_a_function_or_of_its_closure_gives_its_name() -> None:
    ema, best = Thing(), Thing()
    assert variable_name(ema) == "ema"
    assert (lambda: variable_name(best))() == "best"
    assert [variable_name(best) for _ in range(1)] == ["best"]


def test_an_attribute_gives_its_name_and_a_wrappers_that_of_the_wrapper() -> None:
    kept = [Holder(Thing())]
    assert variable_name(kept[0].target_network) == "target_network"
    averaged = ModelEMA(Thing())
    assert variable_name(averaged.module) == "averaged"


def test_what_no_variable_holds_has_no_name() -> None:
    kept = [Thing()]
    assert variable_name(kept[0]) == ""


def test_looking_for_a_name_keeps_nothing_alive() -> None:
    ema, other = Thing(), Thing()
    gone = weakref.ref(other)
    assert variable_name(ema) == "ema"
    del other
    gc.collect()
    assert gone() is None
