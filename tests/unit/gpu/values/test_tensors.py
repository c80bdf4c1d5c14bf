"""Facts about all elements of a tensor: the answers of the plain ways."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch

from fakedist.gpu.values import tensors
from fakedist.gpu.values.contents import Defined, Storages, Taint, Taints, Watch
from fakedist.gpu.values.means import Means
from fakedist.gpu.values.tensors import all_true, any_true, distinct, has_no_negative, is_finite, selected
from tests.support.on_device import all_on_device

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, math.nan, math.inf, -math.inf])
def test_one_value_decides(dtype: torch.dtype, value: float) -> None:
    values = torch.ones(4, 8)
    values[2, 3] = value
    values = values.to(dtype)
    assert is_finite(values) is bool(torch.isfinite(values.float()).all())
    assert has_no_negative(values) is bool((values.float() >= 0).all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_that_overflows_is_of_finite_numbers_and_infinities_that_cancel_are_found(dtype: torch.dtype) -> None:
    assert is_finite(torch.full((4,), torch.finfo(dtype).max, dtype=dtype))
    assert not is_finite(torch.tensor([math.inf, -math.inf], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool])
def test_integers_have_a_sign_too(dtype: torch.dtype) -> None:
    values = torch.tensor([1, 0, -1]).to(dtype)
    assert has_no_negative(values) is (not dtype.is_signed)
    assert has_no_negative(values[:2])
    assert not has_no_negative(torch.ones(2, dtype=torch.complex64))  # which has no sign


def test_of_no_elements_everything_holds_and_nothing_is_true() -> None:
    assert is_finite(torch.empty(0))
    assert has_no_negative(torch.empty(0))
    assert all_true(torch.empty(0, dtype=torch.bool))
    assert not any_true(torch.empty(0, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_masks(dtype: torch.dtype) -> None:
    mask = torch.tensor([[True, False], [True, False]]).to(dtype)
    assert [all_true(column) for column in mask.unbind(1)] == [True, False]
    assert [any_true(column) for column in mask.unbind(1)] == [True, False]
    assert any_true(mask)
    assert not all_true(mask)


def test_an_expanded_tensor_is_looked_at_once() -> None:
    values = torch.arange(3.0).expand(5, 3)
    assert distinct(values).shape == (1, 3)
    assert has_no_negative(values)
    assert not has_no_negative(-values)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((4,), (3, 4)), ((3, 4), (4,)), ((), (3, 4)), ((), ())])
def test_a_selection_is_in_the_order_of_torchs_own(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 99, shapes[0], generator=generator).to(dtype)
    mask = torch.randint(0, 2, shapes[1], generator=generator).bool()
    for each in (mask, ~mask):
        found, expected = selected(values, each), torch.masked_select(values, each)
        assert found.shape == expected.shape
        assert torch.equal(found, expected)


class Driver:
    """Keeps each byte's state as the driver does, of one tensor's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor) -> None:
        self.start, self.state, self.num_losses = tensor.data_ptr(), bytearray(tensor.nbytes), ctypes.c_uint64(0)
        self.callback: Any = None
        self.lost_blocks: list[int] = []
        self.answers: list[int] = []
        monkeypatch.setattr(tensors, "of_driver", lambda name, *types: getattr(self, name.removeprefix("fakedist_")))

    def know(self, address: int, num_bytes: int, holding: int) -> None:
        first = address - self.start
        assert 0 <= first <= first + num_bytes <= len(self.state)
        self.state[first : first + num_bytes] = bytes([holding]) * num_bytes

    def know_where(self, address: int, flags: int, num_bytes: int) -> None:
        assert address == self.start
        self.state[:] = ctypes.string_at(flags, num_bytes)

    def taint(self, address: int, num_bytes: int) -> None:
        self.know(address, num_bytes, 7)

    def lost(self, address: int, num_bytes: int) -> int:
        return self.state[address - self.start :][:num_bytes].count(0)

    def next_loss(self) -> int:
        return self.lost_blocks.pop() if self.lost_blocks else 0

    def unknown(self, address: int, num_bytes: int) -> int:
        return self.lost(address, num_bytes)

    def add(self, address: int, number: int) -> None:
        ctypes.c_uint64.from_address(address).value += number

    def zero(self, address: int, num_bytes: int) -> int:
        ctypes.memset(address, 0, num_bytes)
        return 1

    def answers_reads(self, is_on: int) -> None:
        self.answers.append(is_on)

    def tell_reads(self, callback: Any, state: object) -> None:
        self.callback = callback and ctypes.cast(callback, ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64))

    def losses(self) -> int:
        return ctypes.addressof(self.num_losses)


def test_the_driver_learns_what_each_byte_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.empty(4, 4, dtype=torch.uint8)
    driver = Driver(monkeypatch, tensor)
    storages = Storages(Watch())
    defined, taints = Defined(storages), Taints(storages)
    for change, part, expected in (
        (defined.define, tensor[1], "0000 1111 0000 0000"),
        (defined.define, tensor[:, 0], "1000 1111 1000 1000"),
        (defined.spoil, tensor[1:3, :2], "1000 0011 0000 1000"),
        (defined.define, tensor.t(), "1111 1111 1111 1111"),
        (defined.spoil, tensor[:, 3], "1110 1110 1110 1110"),
        (defined.spoil, tensor, "0000 0000 0000 0000"),
        (defined.define, tensor, "1111 1111 1111 1111"),
    ):
        change(part)
        assert driver.state.hex()[1::2] == expected.replace(" ", "")
    driver.know(tensor.data_ptr() + 3, 1, 0)  # a launch took a value away
    assert defined.holds(tensor)
    Means(lambda tensor: None, storages).know(tensor, 0.5)
    driver.lost_blocks.append(tensor.data_ptr() + 512)  # another's
    driver.num_losses.value += 1
    assert defined.holds(tensor)
    driver.lost_blocks.append(tensor.data_ptr())
    assert defined.holds(tensor)
    driver.num_losses.value += 1
    assert not defined.holds(tensor)
    assert not len(storages)
    assert not tensors.is_computed(tensor)
    taints.mark(tensor[2], Taint())
    assert driver.state.hex()[1::2] == "1110111177771111"
    assert [tensors.is_computed(each) for each in (tensor[1:], tensor[0], tensor[1:].t())] == [True, False, False]
    taints.mark(tensor[:, 1], Taint())
    assert set(driver.state) == {7}


@pytest.mark.parametrize(("writes", "after"), [(1.0, None), (math.inf, 0.25)])
def test_what_a_kernel_is_about_to_write_holds_until_the_next_one_or_its_replays(
    monkeypatch: pytest.MonkeyPatch, writes: float, after: float | None
) -> None:
    mask = torch.empty(64, dtype=torch.bool)
    driver = Driver(monkeypatch, mask)
    storages = Storages(Watch())
    means = Means(lambda tensor: None, storages)
    means.know(mask, 0.25, writes_to_come=writes)
    for expected in (0.25, after):
        driver.lost_blocks += [mask.data_ptr()] * 2  # one call's launches
        driver.num_losses.value += 2
        assert means.of(mask) == expected


def test_the_driver_zeroes_memory_reports_reads_and_keeps_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(2, 3)
    driver = Driver(monkeypatch, tensor)
    assert not tensors.zero_memory(tensor)
    all_on_device(monkeypatch)
    assert not tensors.zero_memory(tensor.t())
    assert tensors.zero_memory(tensor)
    assert not tensor.any()
    with tensors.answered_reads():
        assert driver.answers == [1]
    assert driver.answers == [1, 0]
    counted: list[int] = []
    with tensors.reported_reads(lambda num_bytes: bool(counted.append(num_bytes)) or num_bytes > 8):
        assert (driver.callback(8), driver.callback(9), counted) == (0, 1, [8, 9])
    assert not driver.callback
    key = tensors.storage_of(tensor)[0]
    assert tensors.storage_of(tensor) == (tensor.untyped_storage()._cdata, tensor.nbytes)
    tensors.hold_weakly(tensor)
    del tensor
    assert torch.UntypedStorage._expired(key)
    torch.UntypedStorage._free_weak_ref(key)
