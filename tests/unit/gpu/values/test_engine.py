"""The engine decides which values are known, made up or missing. All tensors say that they are on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fakedist.errors import InventedValueError
from fakedist.gpu.values.composites import Foreach
from fakedist.gpu.values.contents import Taint
from fakedist.gpu.values.engine import ValueEngine
from fakedist.gpu.values.host import Host
from tests.support.on_device import all_on_device

aten = torch.ops.aten
LARGE = 1 << 22


class Device:
    """Runs operations as the recorder has the engine run them."""

    def __init__(self, *, strict: bool = False) -> None:
        self.engine = ValueEngine(0, strict=strict)

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self.engine.execute(func, args, kwargs)

    def empty(self, *shape: int, **more: Any) -> torch.Tensor:
        return torch.as_tensor(self.run(aten.empty.memory_format, list(shape), **more))

    def ones(self, *shape: int) -> torch.Tensor:
        return torch.as_tensor(self.run(aten.ones.default, list(shape)))

    def item(self, tensor: torch.Tensor) -> float | bool:
        value: float | bool = self.run(aten._local_scalar_dense.default, tensor)
        return value

    def values(self, tensor: torch.Tensor) -> object:
        known = self.engine.known(tensor)
        return None if known is None else known.tolist()

    def made_up(self) -> dict[str, int]:
        """Values made up since the last call, by operation."""
        return {row.operation: row.num_values for row in self.engine.invented()}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    all_on_device(monkeypatch)
    return Device()


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda device: device.empty(2), None),
        (lambda device: device.ones(2), [1.0, 1.0]),
        (lambda device: device.run(aten.zeros_like.default, device.empty(2)), [0.0, 0.0]),
        (lambda device: device.run(aten.add.Tensor, device.ones(2), device.ones(2)), [2.0, 2.0]),
        (lambda device: device.run(aten.fill_.Scalar, device.empty(2), 3.0), [3.0, 3.0]),
        (lambda device: device.run(aten.mul_.Tensor, device.ones(2), device.empty(2)), None),
        (lambda device: device.run(aten.copy_.default, device.empty(2), device.ones(2)), [1.0, 1.0]),
        (lambda device: device.run(aten.add.out, device.ones(2), device.ones(2), out=device.empty(2)), [2.0, 2.0]),
        (lambda device: device.run(aten.reshape.default, device.ones(2), [2, 1]), [[1.0], [1.0]]),
        (lambda device: device.run(aten.lift_fresh.default, torch.ones(2)), [1.0, 1.0]),
        (lambda device: device.run(aten._foreach_add.Scalar, [device.ones(1)], 1.0)[0], [2.0]),
        # Of large tensors only facts are kept: a mean that is the answer, and integers that follow from their making.
        (lambda device: device.ones(LARGE), None),
        (lambda device: device.run(aten.any.default, device.run(aten.isnan.default, device.ones(LARGE))), None),
        (lambda device: device.run(aten.sum.default, device.run(aten.isnan.default, device.empty(LARGE))), 0),
    ],
)
def test_values_are_known_where_their_inputs_are_small_and_known(
    device: Device, make: Callable[[Device], torch.Tensor], values: object
) -> None:
    tensor = make(device)
    if values is not None or tensor.numel() > 1:
        assert device.values(tensor) == values
    assert device.made_up() == {}


def test_a_value_that_no_kernel_computed_is_made_up_once_and_counted_where_it_is_read(device: Device) -> None:
    unknown = device.run(aten.add.Tensor, device.ones(1), device.empty(1))
    first = device.item(unknown)
    assert device.made_up() == {"aten._local_scalar_dense.default": 1}
    assert device.item(unknown) == first
    assert device.values(unknown) is None
    settled = device.engine.settled(unknown)
    assert settled is not None
    assert settled.tolist() == [first]
    assert device.item(device.ones(1)) == 1.0
    assert device.made_up() == {}


def test_a_strict_engine_makes_nothing_up(device: Device) -> None:
    strict = Device(strict=True)
    assert strict.item(strict.ones(1)) == 1.0
    with pytest.raises(InventedValueError):
        strict.item(strict.empty(1))


def test_indices_that_nothing_chose_are_spread_and_counted(device: Device) -> None:
    scores = device.empty(64, 1 << 16)
    indices = device.run(aten.topk.default, scores, 2)[1]
    assert device.values(indices) == [[2 * row, 2 * row + 1] for row in range(64)]
    assert device.made_up() == {"aten.topk.default": 128}


def test_what_another_rank_should_have_sent_is_made_up_and_its_reads_are_seen_unless_it_is_large(
    device: Device,
) -> None:
    read: list[str] = []
    small, large = device.ones(1), device.ones(LARGE)
    assert device.engine.not_sent(small, lambda: read.append("read"))
    assert not device.engine.not_sent(large, lambda: read.append("never"))
    doubled = device.run(aten.add.Tensor, small, small)
    assert (read, device.values(small), device.values(doubled)) == ([], None, None)
    device.item(doubled)
    assert read == ["read"]
    assert device.made_up() == {"aten._local_scalar_dense.default": 1}
    assert device.engine.is_undefined(large)
    assert not device.engine.is_undefined(small)


def test_a_large_mask_that_comes_to_the_host_is_known_and_large_integers_are_zeros_that_count(device: Device) -> None:
    def copied(source: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(device.run(aten._to_copy.default, source, device="cpu"))

    ones = device.run(aten.logical_not.default, device.run(aten.isnan.default, device.empty(LARGE)))
    assert bool(copied(ones).all())
    assert device.made_up() == {}
    assert copied(device.empty(LARGE, dtype=torch.int64)).tolist()[:2] == [0, 0]
    assert device.made_up() == {"aten._to_copy.default": LARGE}


def test_a_tensor_is_printed_with_its_values_if_it_is_small(device: Device) -> None:
    ones, unknown, large = device.ones(2), device.empty(2), device.ones(LARGE)
    shown = device.engine.on_host(ones)
    assert shown is not None
    assert shown.tolist() == [1.0, 1.0]
    assert device.engine.on_host(unknown) is not None
    assert device.engine.on_host(large) is None
    assert device.made_up() == {"print": 2}


def test_a_list_of_states_that_an_optimizer_does_not_have_gets_no_taint() -> None:
    host = Host(0)  # _fused_adamw_ without amsgrad writes an empty list next to its full ones
    Foreach(host)._taint((), {0: Taint(())}, {0})
    assert not host.taints
