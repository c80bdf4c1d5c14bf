"""Who owns what, where an optimizer updates something else than the parameters that modules have."""

from __future__ import annotations

import torch

from fakedist.record.marks import _Ranges


class OnDevice(torch.Tensor):
    """A tensor on the host that says it is on a device: only addresses and sizes are asked for."""

    is_cuda = True


def pieces(length: int, *bounds: tuple[int, int, int]) -> tuple[torch.Tensor, _Ranges]:
    """A flat tensor of so many elements, and layers that own (first element, end, layer) of it."""
    flat = torch.zeros(length).as_subclass(OnDevice)
    start = flat.data_ptr()
    return flat, _Ranges((start + 4 * first, start + 4 * end, layer) for first, end, layer in bounds)


def test_a_flat_copy_is_divided_among_the_layers_whose_parts_it_holds() -> None:
    flat, known = pieces(100, (40, 90, 2), (0, 40, 1))
    assert known.parts(flat) == [(1, (0, 40)), (2, (40, 50))]


def test_a_shard_that_begins_and_ends_inside_of_parameters_gets_its_parts_of_them() -> None:
    flat, known = pieces(100, (0, 40, 1), (40, 60, 2), (60, 100, 3))
    assert known.parts(flat[30:70]) == [(1, (0, 10)), (2, (10, 20)), (3, (30, 10))]


def test_memory_of_nobody_has_no_parts() -> None:
    flat, known = pieces(100, (0, 40, 1))
    assert known.parts(flat[40:]) == []
    assert known.parts(torch.zeros(4)) == []
