"""The search for copies among all objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fakedist.record.copies import ALIKE, Copies, _counts, _state, _tensors_of
from fakedist.record.module_names import LayerTable


class Proxy:
    """As torch.distributed.reduce_op, and what loads a module late: whatever it is asked, it does something."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"asked for {name}")


def test_an_object_of_the_script_is_asked_for_nothing() -> None:
    assert _tensors_of(Proxy()) == []


def test_a_module_with_a_list_called_buffers_is_looked_at() -> None:
    module = nn.Linear(2, 2)
    module.buffers = module.parameters = []  # type: ignore[assignment]
    assert [sum(counts.values()) for counts in _counts(module)] == [2, 2, 2]
    assert list(_state(module)) == ["weight", "bias"]


def test_a_list_of_released_parameters_is_no_copy() -> None:
    marks: Any = None  # nothing is marked
    Copies(LayerTable(), marks)._mark([], [torch.empty(0), torch.empty(0)], ALIKE, "")
