"""Storages that hold values; storages of the host are tracked as those of a device are."""

from __future__ import annotations

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


def _missing(defined: Defined, tensor: torch.Tensor) -> torch.Tensor:
    missing = defined.missing(tensor)
    assert missing is not None
    return missing


@pytest.fixture
def defined() -> Defined:
    return Defined(Storages(Watch()))


def test_fresh_memory_holds_nothing_and_an_empty_tensor_all_it_has(defined: Defined) -> None:
    tensor = torch.empty(4)
    assert not defined.holds(tensor)
    assert defined.missing(tensor) is None  # no element has a value
    assert defined.holds(torch.empty(0))


def test_views_and_other_types_over_the_same_bytes_share_what_their_storage_holds(defined: Defined) -> None:
    tensor = torch.empty(4, 4)
    defined.define(tensor)
    assert defined.holds(tensor.t())
    assert defined.holds(tensor[1:, 2])
    integers = torch.empty(4, dtype=torch.int32)
    defined.define(integers[1:2])
    assert defined.holds(integers.view(torch.uint8)[4:8])
    assert not defined.holds(integers.view(torch.uint8)[3:8])
    pair = torch.empty(2)
    defined.define(pair[:1].expand(8))  # what an expanded tensor has
    assert defined.holds(pair[:1])
    assert not defined.holds(pair)


def test_a_part_is_defined_and_spoiled_by_itself(defined: Defined) -> None:
    tensor = torch.empty(3, 4)
    defined.define(tensor[:, 1])
    assert defined.holds(tensor[:, 1])
    assert not defined.holds(tensor[0])
    assert _missing(defined, tensor)[0].tolist() == [True, False, True, True]
    assert defined.missing(tensor[:, 2]) is None
    defined.define(tensor)
    defined.spoil(tensor[2])
    assert defined.holds(tensor[:2])
    assert not defined.holds(tensor)
    defined.spoil(tensor)
    assert not defined.holds(tensor[:2])


def test_a_part_without_elements_changes_nothing_and_parts_add_up_to_the_whole(defined: Defined) -> None:
    tensor = torch.empty(8)
    defined.define(tensor[:4])
    for change in (defined.define, defined.spoil):
        change(tensor[6:6])
        assert _missing(defined, tensor).tolist() == [False] * 4 + [True] * 4
    defined.define(tensor[4:])
    assert defined.holds(tensor)
    defined.spoil(tensor[6:6])
    assert defined.holds(tensor)


def test_memory_that_was_given_back_is_another_storage(defined: Defined) -> None:
    for _ in range(50):
        tensor = torch.empty(1000)
        assert not defined.holds(tensor)
        defined.define(tensor)
        del tensor


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
    taints.mark(tensor, Taint())
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
