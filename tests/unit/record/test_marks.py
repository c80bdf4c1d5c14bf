"""Owners, if an optimizer updates something else than the parameters that modules have."""

from __future__ import annotations

import pytest
import torch

from fakedist.record.marker import Piece, device_pieces
from fakedist.record.marks import Marks, _OwnedMemory
from fakedist.record.module_names import KEEP_LAYER, OUTSIDE, LayerTable
from fakedist.record.position import Position
from fakedist.rundir.schema import CATEGORIES
from tests.support.on_device import on_device


def pieces(length: int, *bounds: tuple[int, int, int]) -> tuple[torch.Tensor, _OwnedMemory]:
    """A flat tensor of so many elements, and layers that own (first element, end, layer) of it."""
    flat = on_device(length)
    start = flat.data_ptr()
    return flat, _OwnedMemory((start + 4 * first, start + 4 * end, layer) for first, end, layer in bounds)


@pytest.mark.parametrize(
    ("bounds", "part", "parts"),
    [
        ([(40, 90, 2), (0, 40, 1)], slice(None), [(1, 0, 40), (2, 40, 50)]),
        ([(0, 40, 1), (40, 60, 2), (60, 100, 3)], slice(30, 70), [(1, 0, 10), (2, 10, 20), (3, 30, 10)]),
        ([(0, 40, 1), (40, 60, 2)], slice(0, 40), [(1, 0, 40)]),
        ([(0, 40, 1)], slice(40, None), []),
    ],
    ids=["a flat copy", "a shard that begins and ends inside parameters", "one parameter", "without an owner"],
)
def test_memory_is_divided_among_the_layers_whose_parts_it_holds(
    bounds: list[tuple[int, int, int]], part: slice, parts: list[tuple[int, int, int]]
) -> None:
    flat, known = pieces(100, *bounds)
    assert known.parts(flat[part]) == parts
    assert known.parts(torch.zeros(4)) == []


def test_no_tensor_has_no_pieces() -> None:
    flat = on_device(4)
    assert [*device_pieces(None), *device_pieces("text"), *device_pieces(torch.ones(2)), *device_pieces(flat[:0])] == []
    assert device_pieces(flat[1:3]) == (Piece(flat.data_ptr(), 4, 8),)
    sparse = torch.eye(3).to_sparse()
    assert list(device_pieces(sparse)) == []


def marked(marks: Marks) -> list[tuple[int, int, int]]:
    """(address, start, bytes) of every mark since the last call."""
    taken = marks.take()
    columns = [memoryview(taken.address).cast("Q"), memoryview(taken.start).cast("q"), memoryview(taken.size).cast("q")]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_the_mark_of_a_view_is_at_its_block_and_names_the_bytes_inside() -> None:
    marks, flat = Marks(Position(), LayerTable()), on_device(100)
    marks.mark_tensor(flat[30:70], "parameter", 1)
    marks.workspace(flat.data_ptr(), 7, 64)
    assert marked(marks) == [(flat.data_ptr(), 120, 160), (flat.data_ptr(), 0, 64)]


def test_a_view_of_a_gathered_buffer_marks_what_came_from_this_ranks_part() -> None:
    marks, mine, whole = Marks(Position(), LayerTable()), on_device(100), on_device(400)
    marks.gathered(mine[50:], whole, 2)  # 50 elements of each rank: this one's are 100 to 150
    marks.mark_tensor(whole[90:120], "parameter", 1)
    assert marked(marks) == [(whole.data_ptr(), 360, 120), (mine.data_ptr(), 200, 80)]
    marks.step_ended()
    marks.mark_tensor(whole[90:120], "parameter", 1)
    assert marked(marks) == [(whole.data_ptr(), 360, 120)]


def test_parameters_have_no_hooks_of_ours_once_marks_are_closed() -> None:
    marks, layer = Marks(Position(), LayerTable()), torch.nn.Linear(2, 2)
    marks.module(layer, 1)
    assert all(parameter._post_accumulate_grad_hooks for parameter in layer.parameters())
    marks.close()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in layer.parameters())


def test_a_parameter_belongs_to_the_module_that_had_it_first() -> None:
    marks, first, tied = Marks(Position(), LayerTable()), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    tied.weight = first.weight
    for layer, module in ((3, first), (4, tied)):
        marks.module(module, layer)
    assert [marks.owners.owner(parameter) for parameter in (first.weight, first.bias, tied.bias)] == [3, 3, 4]
    assert [marks.owners.owner(parameter) for parameter in (torch.ones(2), None)] == [KEEP_LAYER, KEEP_LAYER]


def test_a_module_may_claim_a_parameter_that_none_had() -> None:
    marks, parameter = Marks(Position(), LayerTable()), torch.nn.Parameter(torch.ones(2))
    for layer, owner in ((OUTSIDE, OUTSIDE), (5, 5), (6, 5)):
        marks.parameter(parameter, layer)
        assert marks.owners.owner(parameter) == owner


def test_an_optimizers_state_belongs_to_the_layer_of_its_parameter() -> None:
    marks, layer, state = Marks(Position(), LayerTable()), torch.nn.Linear(2, 2), on_device(4)
    marks.module(layer, 3)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    optimizer.state[layer.weight] = {"momentum_buffer": state}
    marks.take()
    for _ in range(2):  # known the second time
        marks.optimizer(optimizer)
    taken = marks.take()
    assert memoryview(taken.layer).cast("i").tolist() == [3]
    assert memoryview(taken.address).cast("Q").tolist() == [state.data_ptr()]
    later = on_device(2)
    optimizer.state[layer.bias] = {"momentum_buffer": later}  # and then its step ran out of memory
    marks.optimizers()
    assert marked(marks) == [(later.data_ptr(), 0, 8)]


class OwnLists(torch.optim.Optimizer):
    """An optimizer that keeps its state in a list, a dictionary by parameter and its groups."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.momenta = [on_device(*parameter.shape) for parameter in parameters]
        self.by_parameter = {parameters[1]: {"exp_avg": on_device(7)}}
        self.param_groups[0]["update_buffer"] = on_device(50)
        self.flat, self.gradient, self.on_host = parameters[0].data[2:], parameters[0].grad, torch.zeros(9)


def test_state_in_an_optimizers_own_lists_is_optimizer_state_of_the_parameters_layers() -> None:
    marks, layers = Marks(Position(), LayerTable()), torch.nn.ParameterList([on_device(10), on_device(20)])
    numbers = [3, 4]
    for parameter, number in zip(layers, numbers, strict=True):
        parameter.grad = on_device(*parameter.shape)
        marks.parameter(parameter, number)
    optimizer = OwnLists(list(layers))
    marked(marks)
    claimed = marks.claimed()
    marks.optimizer(optimizer)
    taken = marks.take()
    purposes = {
        address: (CATEGORIES[category], layer)
        for address, category, layer in zip(
            memoryview(taken.address).cast("Q"),
            memoryview(taken.category).cast("B"),
            memoryview(taken.layer).cast("i"),
            strict=True,
        )
    }
    kept = [
        *optimizer.momenta,
        optimizer.by_parameter[layers[1]]["exp_avg"],
        optimizer.param_groups[0]["update_buffer"],
    ]
    expected = [("optimizer_state", 3), ("optimizer_state", 4), ("optimizer_state", 4), ("optimizer_state", KEEP_LAYER)]
    assert [purposes[tensor.data_ptr()] for tensor in kept] == expected
    assert purposes[layers[0].grad.data_ptr()] == ("gradient", 3)
    assert optimizer.flat.data_ptr() not in purposes
    assert all((tensor.data_ptr(), 0) not in claimed for tensor in kept)
    assert all((tensor.data_ptr(), 0) in marks.claimed() for tensor in kept)


def test_swapped_tensors_have_no_weak_reference_of_ours_and_keep_their_layers() -> None:
    marks = Marks(Position(), LayerTable())
    first, second = (torch.nn.Parameter(torch.ones(size)) for size in (3, 4))
    marks.parameter(first, 7)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(first, second)
    with marks.released(first, second):
        torch.utils.swap_tensors(first, second)
    assert (first.shape, second.shape) == ((4,), (3,))
    assert (marks.owners.owner(first), marks.owners.owner(second)) == (7, KEEP_LAYER)
    first.sum().backward()  # its gradient is marked
    assert marks.owners.owner(first) == 7


def test_lazy_parameters_are_left_until_they_have_a_shape() -> None:
    marks = Marks(Position(), LayerTable())
    net = torch.nn.LazyLinear(3)
    marks.module(net, 5)
    assert marks.owners.owner(net.weight) == KEEP_LAYER
    net(torch.ones(2, 4))
    marks.module(net, 5)
    assert marks.owners.owner(net.weight) == 5


def test_what_a_transform_wraps_is_marked_itself() -> None:
    marks = Marks(Position(), LayerTable())
    net, weights = torch.nn.Linear(4, 4), torch.ones(3, 4, 4)

    def called(weight: torch.Tensor) -> torch.Tensor:
        net._parameters["weight"] = weight  # type: ignore[assignment]
        marks.module(net, 5)
        return weight.sum()

    torch.func.vmap(called)(weights)
    assert marks.owners.owner(weights) == 5
