"""What DeepSpeed keeps for a parameter, on objects that have the attributes that DeepSpeed 0.19.8 gives them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fakedist.record.deepspeed import gradient_buffers, gradients_of, master_of, part_of


def test_a_parameter_of_somebody_else_has_nothing() -> None:
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
