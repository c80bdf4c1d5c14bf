"""Operations that others are made of, each as one to the engine, and lists of tensors of which some are known."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.idle_device import IdleDevice

ATEN = torch.ops.aten
LARGE = 1 << 21
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's, of sparse tensors
    pytest.mark.usefixtures("kept_kernels"),
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> IdleDevice:
    return IdleDevice(monkeypatch)


def sparse(values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), values, (2, *values.shape[1:]), check_invariants=False)


def sequences(x: Tensor) -> tuple[object, ...]:
    lengths = torch.tensor([4]), torch.tensor([2])
    return x.log_softmax(1).repeat(2, 1)[:, None], torch.tensor([[1, 2]]), *lengths


#: As ``torch.inference_mode`` runs them below tensor subclasses.
COMPOSITES: dict[str, tuple[Any, Callable[[Tensor], tuple[object, ...]]]] = {
    "reshaped": (ATEN.reshape.default, lambda x: (x, [3, 2])),
    "reshaped copy": (ATEN.reshape.default, lambda x: (x.t(), [6])),
    "contiguous": (ATEN.contiguous.default, lambda x: (x.t(),)),
    "another type": (ATEN.to.dtype, lambda x: (x, torch.float64)),
    "on the host, as another": (ATEN.to.other, lambda x: (x, torch.ones(1, dtype=torch.float64))),
    "on the host": (ATEN.to.device, lambda x: (x, torch.device("cpu"), torch.float64)),
    "masked scatter": (ATEN.masked_scatter.default, lambda x: (x, x > 0, torch.arange(6.0))),
    "masked scatter in place": (ATEN.masked_scatter_.default, lambda x: (x.clone(), x > 0, torch.arange(6.0))),
    "backward of masked scatter": (ATEN.masked_scatter_backward.default, lambda x: (x, x > 0, [4])),
    "loss of sequences": (ATEN.ctc_loss.Tensor, sequences),
    "coalesced": (ATEN.coalesce.default, lambda x: (sparse(x[0]),)),
    "histogram": (ATEN.histc.default, lambda x: (x, 4)),
    "histogram in a range": (ATEN.histc.default, lambda x: (x, 4, -1, 1)),
    "cross entropy": (ATEN.cross_entropy_loss.default, lambda x: (x, torch.tensor([0, 2]))),
    "quantile": (ATEN.quantile.scalar, lambda x: (x, 0.5)),
    "covariance": (ATEN.cov.default, lambda x: (x,)),
}
#: The engine computes these on the host. Values made up for the results do not follow from those of the sources.
APART = {"loss of sequences", "coalesced"}


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("name", COMPOSITES)
def test_results_of_known_values_are_torchs_own_and_made_up_ones_agree_with_their_sources(
    device: IdleDevice, name: str, is_known: bool
) -> None:
    func, arguments = COMPOSITES[name]
    with device.on():
        x = torch.tensor([[1.0, -2.0, 3.0], [4.0, 0.5, -6.0]]) if is_known else torch.empty(2, 3)
        given = arguments(x)
    with nullcontext() if name in APART else device.on():
        result: Any = device.execute(func, given, {})
    with device.on():
        dense = result.to_dense() if result.is_sparse else result
        known = device.known(dense)
        value = device.read(dense)
        made_up = device.made_up()
        source = device.read(x)
    expected = func(*arguments(source))
    assert (value.dtype, value.shape) == (expected.dtype, dense.shape)
    if is_known:
        assert known is not None
        assert made_up == {}
    elif not name.startswith("on the host"):
        assert known is None
    if is_known or name not in APART:
        assert torch.allclose(value, expected.to_dense())


def test_what_a_host_tensor_becomes_on_the_device_is_known(device: IdleDevice) -> None:
    numbers = device.stay(torch.arange(3.0))
    result: Any = device.execute(ATEN.to.dtype, (numbers, torch.float64), {})
    known = device.known(result)
    assert known is not None
    assert known.tolist() == [0.0, 1.0, 2.0]


def test_the_range_of_a_large_histogram_is_made_up(device: IdleDevice) -> None:
    with device.on():
        device.execute(ATEN.histc.default, (torch.empty(LARGE), 4), {})
    assert device.made_up() == {"aten.histc.default": 2}


@pytest.mark.parametrize(("num_indices", "width", "num_rows"), [(3, LARGE, 2), (LARGE, 1, LARGE)])
def test_small_indices_are_counted_and_many_are_taken_to_be_distinct(
    device: IdleDevice, num_indices: int, width: int, num_rows: int
) -> None:
    with device.on():
        indices = torch.tensor([[1, 1, 0]]) if num_indices == 3 else torch.empty(1, num_indices, dtype=torch.int64)
        tensor = torch.sparse_coo_tensor(
            indices, torch.empty(num_indices, width), (LARGE, width), check_invariants=False
        )
    result: Any = device.execute(ATEN.coalesce.default, (tensor,), {})
    assert result.is_coalesced()
    assert result.values().shape == (num_rows, width)
    assert device.made_up() == {"aten.coalesce.default": 1}


def test_of_a_list_that_changes_each_tensor_is_known_if_all_that_it_is_made_from_is(device: IdleDevice) -> None:
    with device.on():
        first, second, unknown = torch.ones(2), torch.ones(2), torch.empty(2)
        torch._foreach_copy_([first, second], [unknown, torch.zeros(2)])
        assert device.known(first) is None
        known = device.known(second)
        assert known is not None
        assert known.tolist() == [0.0, 0.0]
        torch._foreach_mul_([second], torch.empty(()))  # by one number that is not known
        assert device.known(second) is None
