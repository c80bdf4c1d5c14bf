"""Which storages hold values; storages of the host are tracked as those of a device are."""

from __future__ import annotations

import torch

from fakedist.gpu.values.contents import LIMIT_BYTES, MASK_LIMIT_BYTES, Defined, Storages, Watch, is_small


def _missing(defined: Defined, tensor: torch.Tensor) -> torch.Tensor:
    missing = defined.missing(tensor)
    assert missing is not None
    return missing


def test_fresh_memory_holds_nothing() -> None:
    defined = Defined(Watch())
    tensor = torch.empty(4)
    assert not defined.holds(tensor)
    assert defined.missing(tensor) is None  # no element has a value


def test_an_empty_tensor_holds_all_it_has() -> None:
    assert Defined(Watch()).holds(torch.empty(0))


def test_views_share_what_their_storage_holds() -> None:
    defined = Defined(Watch())
    tensor = torch.empty(4, 4)
    defined.define(tensor)
    assert defined.holds(tensor.t())
    assert defined.holds(tensor[1:, 2])


def test_a_part_is_defined_and_spoiled_by_itself() -> None:
    defined = Defined(Watch())
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


def test_a_part_without_elements_changes_nothing() -> None:
    defined = Defined(Watch())
    tensor = torch.empty(8)
    defined.define(tensor[:4])
    for change in (defined.define, defined.spoil):
        change(tensor[6:6])
        assert _missing(defined, tensor).tolist() == [False] * 4 + [True] * 4
    defined.define(tensor)
    defined.spoil(tensor[6:6])
    assert defined.holds(tensor)


def test_parts_add_up_to_the_whole() -> None:
    defined = Defined(Watch())
    tensor = torch.empty(4)
    defined.define(tensor[:2])
    defined.define(tensor[2:])
    assert defined.holds(tensor)


def test_another_type_over_the_same_bytes_sees_the_same() -> None:
    defined = Defined(Watch())
    tensor = torch.empty(4, dtype=torch.int32)
    defined.define(tensor[1:2])
    assert defined.holds(tensor.view(torch.uint8)[4:8])
    assert not defined.holds(tensor.view(torch.uint8)[3:8])


def test_an_expanded_tensor_defines_only_what_it_has() -> None:
    defined = Defined(Watch())
    tensor = torch.empty(2)
    defined.define(tensor[:1].expand(8))
    assert defined.holds(tensor[:1])
    assert not defined.holds(tensor)


def test_memory_that_was_given_back_is_another_storage() -> None:
    defined = Defined(Watch())
    for _ in range(50):
        tensor = torch.empty(1000)
        assert not defined.holds(tensor)
        defined.define(tensor)
        del tensor


def test_facts_of_freed_storages_do_not_pile_up() -> None:
    facts: Storages[int] = Storages(Watch())
    for number in range(20_000):
        facts.put(torch.empty(1), number)
    assert len(facts) < 10_000


def test_a_storage_that_moved_is_not_known() -> None:
    facts: Storages[int] = Storages(Watch())
    tensor = torch.empty(1)
    facts.put(tensor, 7)
    assert facts.get(tensor) == 7
    tensor.untyped_storage().resize_(1 << 20)
    assert facts.get(tensor) is None


def test_masks_and_token_ids_may_be_larger_than_floats() -> None:
    assert is_small(torch.empty(LIMIT_BYTES, dtype=torch.uint8).view(torch.float32))
    assert not is_small(torch.empty(LIMIT_BYTES // 4 + 1))
    assert is_small(torch.empty(MASK_LIMIT_BYTES, dtype=torch.bool))
    assert not is_small(torch.empty(MASK_LIMIT_BYTES + 1, dtype=torch.bool))
