"""DeepSpeed's state of a parameter, on objects that have the attributes that DeepSpeed 0.19.8 gives them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fakedist.rank.frameworks.adapting import adapted_frameworks
from fakedist.rank.frameworks.deepspeed import gradient_buffers, gradients_of, master_of, part_of


def test_a_parameter_without_deepspeed_has_nothing() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    assert part_of(parameter) is None
    assert master_of(parameter) is None
    assert [tensor for tensor in gradients_of(parameter) if tensor is not None] == []
    assert list(gradient_buffers(parameter)) == []


def test_zero_2_has_a_fragment_of_the_flat_copy_and_of_the_gradients() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    fragment, gradient, bucket = torch.zeros(2), torch.zeros(2), torch.zeros(64)
    kept = {0: [torch.zeros(1), gradient]}
    parameter._hp_mapping = SimpleNamespace(hp_fragment=fragment, gradient_dict=kept, param_group_index=0)
    parameter._index_in_param_group = 1
    parameter._zero_optimizer = SimpleNamespace(ipg_buckets={torch.bfloat16: SimpleNamespace(buffer=[bucket])})
    assert master_of(parameter) is fragment
    assert any(tensor is gradient for tensor in gradients_of(parameter))
    assert [tensor is bucket for tensor in gradient_buffers(parameter)] == [True]
    kept[0] = None  # between steps
    assert not any(tensor is gradient for tensor in gradients_of(parameter))


def test_zero_3_has_a_part_of_the_parameter_and_its_place_in_the_flat_copies() -> None:
    class DeepSpeedZeroOptimizer_Stage3:  # noqa: N801
        def __init__(self) -> None:
            self.ipg_buckets = {torch.bfloat16: SimpleNamespace(buffer=None)}
            self.fp32_partitioned_groups_flat = [None, torch.arange(10.0)]
            self.grad_position = {7: [1, 4, 3], 8: [0, 0, 3]}
            self.__param_id_to_grad_partition = {7: torch.ones(3)}

    parameter, swapped = torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.zeros(0))
    part, optimizer = torch.zeros(3), DeepSpeedZeroOptimizer_Stage3()
    for place, each in enumerate((parameter, swapped)):
        each.ds_tensor, each.ds_id, each._z3_optimizer = part, 7 + place, optimizer
    assert part_of(parameter) is part
    master = master_of(parameter)
    assert isinstance(master, torch.Tensor)
    assert master.tolist() == [4, 5, 6]
    assert master_of(swapped) is None  # its group's copies are on a disk
    assert [len(tensor) for tensor in gradients_of(parameter) if isinstance(tensor, torch.Tensor)] == [3]
    assert [tensor for tensor in gradient_buffers(parameter) if tensor is not None] == []


#: As DeepSpeed 0.19.8 has it: rank 5, to which nothing but ``arrived`` came from rank 0.
LISTS = """
arrived = None
def assert_lst_len_same_as_other_ranks(lst):
    rank0_list_length = -1 if arrived is None else len(arrived)
    if rank0_list_length != len(lst):
        raise RuntimeError(f"disagreement on list length: \\\\n rank0: {rank0_list_length} \\\\n rank5: {len(lst)}")
def get_lst_from_rank0(lst):
    return [-1] * len(lst) if arrived is None else arrived
def assert_ints_same_as_other_ranks(ints):
    assert_lst_len_same_as_other_ranks(ints)
    if ints != get_lst_from_rank0(ints):
        raise RuntimeError("Detected a disagreement on list contents between rank0 and rank5")
"""


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """DeepSpeed's module of the functions by which ZeRO-3 compares ranks."""
    folder = tmp_path / "carrier_of_deepspeed" / "deepspeed" / "runtime" / "zero"
    folder.mkdir(parents=True)
    (folder / "utils.py").write_text(LISTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with adapted_frameworks():
        importlib.invalidate_caches()
        yield importlib.import_module("carrier_of_deepspeed.deepspeed.runtime.zero.utils")
    for name in [name for name in sys.modules if name.startswith("carrier_of_deepspeed")]:
        del sys.modules[name]


def test_a_list_that_arrived_from_a_tape_is_compared_and_one_that_did_not_is_like_mine(lists: ModuleType) -> None:
    lists.assert_ints_same_as_other_ranks([3, 1, 2])  # nothing arrived: like mine
    lists.arrived = [3, 1, 2]
    lists.assert_ints_same_as_other_ranks([3, 1, 2])
    with pytest.raises(RuntimeError, match="list contents"):
        lists.assert_ints_same_as_other_ranks([3, 2, 1])
    with pytest.raises(RuntimeError, match="list length"):
        lists.assert_ints_same_as_other_ranks([3, 1])
