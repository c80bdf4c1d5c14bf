"""Storages that hold values; storages of the host are tracked as those of a device are."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch

from fakedist.gpu.values.contents import (
    LIMIT_BYTES,
    MASK_LIMIT_BYTES,
    Defined,
    Storages,
    Taint,
    Taints,
    Watch,
    host_views,
    is_small,
)
from fakedist.gpu.values.means import Means

#: Views of a tensor of 6 x 4 elements: whole, parts, transposed, strided, expanded, another type, empty.
VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x[2],
    lambda x: x[:, 1],
    lambda x: x[1:, ::2],
    lambda x: x[3:4].expand(5, 4),
    lambda x: x.view(-1)[7:21],
    lambda x: x.view(torch.uint8)[4, 3:9],
    lambda x: x[3, 2],
    lambda x: x[:0],
]


@pytest.mark.parametrize("seed", range(6))
def test_each_byte_of_a_storage_is_known_by_itself(seed: int) -> None:
    """Against sets of bytes: those that hold a value, are tainted, and were counted."""
    tensor, random, storages = torch.empty(6, 4, dtype=torch.int32), Random(seed), Storages(Watch())
    defined = Defined(storages)
    numbers = torch.arange(96, dtype=torch.uint8).view(torch.int32).view(6, 4)

    def places(view: Callable[[torch.Tensor], torch.Tensor]) -> list[list[int]]:
        part = view(numbers).contiguous()
        return [element.view(1).view(torch.uint8).tolist() for element in part.flatten()]

    taints, origin, holds, tainted, counted = Taints(storages), Taint(), set[int](), set[int](), set[int]()
    for _ in range(80):
        view = random.choice(VIEWS)
        part = view(tensor)
        elements = places(view)
        covered = {byte for element in elements for byte in element}
        change = random.choice((defined.define, defined.spoil, taints.clear, taints.mark, taints.read))
        if change == taints.mark:
            if part.numel() and 0 not in part.stride():
                taints.mark(part, origin)
                tainted |= covered
                counted -= covered
        elif change == taints.read:
            assert taints.read(part) == sum(element[0] in tainted - counted for element in elements)
            counted |= covered if tainted & covered else set()
        else:
            change(part)
            holds = {defined.define: holds | covered, defined.spoil: holds - covered}.get(change, holds)
            tainted -= covered if change == taints.clear else set()
        for other in VIEWS:
            part = other(tensor)
            elements = places(other)
            lacking = [not holds.issuperset(element) for element in elements]
            assert defined.holds(part) is not any(lacking)
            missing = defined.missing(part)
            if any(lacking) and not all(lacking):
                assert missing is not None
                assert missing.flatten().tolist() == lacking
            else:
                assert missing is None or not missing.any()
            if elements:
                assert (taints.of(part) is None) is not any(tainted.intersection(element) for element in elements)


def test_memory_that_was_given_back_is_another_storage_and_an_empty_tensor_has_all_it_holds() -> None:
    defined = Defined(Storages(Watch()))
    for _ in range(50):
        tensor = torch.empty(1000)
        assert not defined.holds(tensor)
        defined.define(tensor)
        del tensor
    assert defined.holds(torch.empty(0))


def test_facts_of_freed_storages_do_not_pile_up() -> None:
    storages = Storages(Watch())
    for number in range(20_000):
        storages.make(torch.empty(1)).mean = number
    assert len(storages) < 10_000


def test_what_was_written_elsewhere_is_not_known_where_the_storage_was_before() -> None:
    storages = Storages(Watch())
    defined, taints, means = Defined(storages), Taints(storages), Means(lambda tensor: None, storages)
    tensor = torch.empty(4)
    defined.define(tensor)
    taints.mark(tensor, Taint())
    means.know(tensor, 0.5)
    known = storages.get(tensor)
    assert known is not None
    here, known.address = known.address, 1  # as if the storage had moved since
    assert not defined.holds(tensor)
    defined.spoil(tensor[:2])
    taints.clear(tensor[:2])
    means.forget(tensor)
    known.address = here
    assert (defined.holds(tensor), taints.of(tensor), means.of(tensor)) == (False, None, None)
    assert not len(storages)


def test_a_storage_that_moved_is_not_known() -> None:
    storages = Storages(Watch())
    tensor = torch.empty(1)
    storages.make(tensor).mean = 7.0
    assert storages.get(tensor[:0]) is storages.get(tensor)
    tensor.untyped_storage().resize_(1 << 20)
    assert storages.get(tensor) is None
    assert storages.make(tensor).mean is None


def test_a_storage_is_followed_while_anything_is_known() -> None:
    watch, changed = Watch(), []
    watch.changed = lambda storage, more: changed.append(more)
    storages = Storages(watch)
    defined, taints, tensor = Defined(storages), Taints(storages), torch.empty(4)
    defined.define(tensor)
    known = storages.get(tensor)
    assert known is not None
    for part, is_even in ((tensor[:2], False), (tensor, True)):
        taints.mark(part, Taint())
        assert known.is_even is is_even
    assert (changed, len(storages)) == ([1], 1)
    defined.spoil(tensor)
    assert taints.of(tensor) is not None
    taints.clear(tensor)
    assert (changed, len(storages)) == ([1, -1], 0)


def test_a_weak_reference_that_is_passed_on_is_kept_once() -> None:
    storages, tensor = Storages(Watch()), torch.empty(1)
    for _ in range(3):
        key = tensor.untyped_storage()._weak_ref()
        storages.make_at(key, tensor.data_ptr()).is_positive = False
    known = storages.get(tensor)
    assert known is not None
    assert known.is_positive is False


def test_pieces_of_a_buffer_are_seen_where_they_are() -> None:
    buffer, other = torch.arange(24.0), torch.arange(3)
    tensors = [
        buffer[4:8],
        buffer.view(4, 6)[:, 2],
        buffer[:0],
        buffer.view(6, 4).t(),
        buffer.view(torch.int32)[3:5],
        other,
    ]
    for tensor, view in zip(tensors, host_views(tensors), strict=True):
        assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(view, tensor)
        assert not view.numel() or view.data_ptr() == tensor.data_ptr()


def test_masks_and_token_ids_may_be_larger_than_floats() -> None:
    assert is_small(torch.empty(LIMIT_BYTES, dtype=torch.uint8).view(torch.float32))
    assert not is_small(torch.empty(LIMIT_BYTES // 4 + 1))
    assert is_small(torch.empty(MASK_LIMIT_BYTES, dtype=torch.bool))
    assert not is_small(torch.empty(MASK_LIMIT_BYTES + 1, dtype=torch.bool))
