"""The engine decides which values are known, made up or missing, on a device that computes nothing.

A result is what torch computes from the same inputs: from known ones, and from made-up ones once they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding, one_hot, pad

from fakedist.errors import InventedValueError
from fakedist.gpu.values.tensors import flat
from tests.support.idle_device import IdleDevice

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's, of sparse and quantized tensors
    pytest.mark.usefixtures("kept_kernels"),
]
LARGE = 1 << 21


def changed(tensor: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    tensor = tensor.clone()
    change(tensor)
    return tensor


def mask(x: Tensor) -> Tensor:
    return x > 0


def whole(x: Tensor) -> Tensor:
    return (x * 2).abs().long() % 5


def foreach(x: Tensor, change: Callable[[list[Tensor]], object]) -> list[Tensor]:
    tensors = [x[0].clone(), torch.ones(2), x.clone()]
    change(tensors)
    return tensors


def lengths(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def square(x: Tensor) -> Tensor:
    return x @ x.t() + 3 * torch.eye(2)


def adamw(x: Tensor) -> list[Tensor]:
    """Without amsgrad, an optimizer's list of one state is empty."""
    parameter, first, second, step = (tensor.clone() for tensor in (x, x * 0, x * 0, torch.ones(())))
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-8}
    lists = [parameter], [x + 1], [first], [second], [], [step]
    torch._fused_adamw_(*lists, **options, amsgrad=False, maximize=False)
    return [parameter, first, second]


#: Of floats [2, 3].
PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + x,
    "add a number": lambda x: 2 - x,
    "out": lambda x: torch.add(x, 1, out=torch.empty(2, 3)),
    "out of another shape": lambda x: torch.mul(x[0], 2, out=torch.empty(0)),
    "two outs": lambda x: torch.max(x, 1, out=(torch.empty(2), torch.empty(2, dtype=torch.long))),
    "in place": lambda x: changed(x, lambda t: t.mul_(3)),
    "a part in place": lambda x: changed(x, lambda t: t[:, 1].add_(t[:, 0])),
    "transposed": lambda x: x.t() * 2,
    "transposed in place": lambda x: changed(x, lambda t: t.t().mul_(2)),
    "a part": lambda x: x[1:, ::2].clone(),
    "expanded": lambda x: x[:, :1].expand(2, 5) + 1,
    "expanded mask": lambda x: torch.masked_select(x[:1].expand(4, 3), mask(x[1:])),
    "reshaped": lambda x: x.reshape(3, 2) + 0,
    "reshaped copy": lambda x: x.t().reshape(6),
    "contiguous": lambda x: x.t().contiguous(),
    "another type": lambda x: x.to(torch.float64),
    "integers": lambda x: x.to(torch.int32),
    "zeros like": lambda x: torch.zeros_like(x),
    "ones like": lambda x: torch.ones_like(x[:, 0]),
    "full like": lambda x: torch.full_like(x, 2.5),
    "new zeros": lambda x: x.new_zeros(4),
    "new full": lambda x: x.new_full((2, 2), 1.5),
    "zeroed": lambda x: changed(x, lambda t: t.zero_()),
    "a zeroed row": lambda x: changed(x, lambda t: t[1].zero_()),
    "filled": lambda x: changed(x, lambda t: t[:, 2].fill_(7)),
    "copied": lambda x: torch.empty(2, 3).copy_(x),
    "copied to a row": lambda x: changed(x, lambda t: t[0].copy_(x[1])),
    "copied from one": lambda x: changed(x, lambda t: t.copy_(x[0, 0])),
    "selected": lambda x: x[mask(x)],
    "selected rows": lambda x: x[mask(x[:, 0])],
    "selected by two masks": lambda x: x[mask(x[:, 0]), lengths(0)],
    "put by a mask": lambda x: changed(x, lambda t: t.__setitem__(mask(t), 9.0)),
    "put values": lambda x: changed(x, lambda t: t.__setitem__(t > -99, torch.arange(6.0))),
    "put by position": lambda x: changed(x, lambda t: t.__setitem__(lengths(1), x[0])),
    "masked fill": lambda x: x.masked_fill(mask(x), -1),
    "where": lambda x: torch.where(mask(x), x, x - 1),
    "nonzero": lambda x: mask(x).nonzero(),
    "nonzero of each": lambda x: mask(x).nonzero(as_tuple=True),
    "argwhere": lambda x: torch.argwhere(mask(x)),
    "masked scatter": lambda x: x.masked_scatter(mask(x), torch.arange(6.0)),
    "unique": lambda x: torch.unique(whole(x), return_inverse=True, return_counts=True),
    "bincount": lambda x: torch.bincount(whole(x).flatten(), minlength=7),
    "one hot": lambda x: one_hot(whole(x)),
    "repeated": lambda x: x.repeat_interleave(whole(x[:, 0]), 0),
    "counted": lambda x: mask(x).sum(1),
    "count": lambda x: mask(x).count_nonzero(),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(1),
    "norm": lambda x: x.norm(),
    "largest of each row": lambda x: x.amax(1, keepdim=True),
    "running sum": lambda x: x.cumsum(1),
    "sorted": lambda x: x[0].sort().values,
    "gathered": lambda x: x.gather(1, whole(x) % 3),
    "scattered": lambda x: torch.zeros(2, 5).scatter_add(1, whole(x), x),
    "histogram": lambda x: torch.histc(x, 4),
    "histogram of one number": lambda x: torch.histc(x[:1, :1], bins=3),
    "histogram in a range": lambda x: torch.histc(x, 4, -3, 3),
    "segments": lambda x: torch.segment_reduce(x, "sum", lengths=lengths(2)),
    "covariance": lambda x: x.cov(),
    "split": lambda x: x.tensor_split(lengths(1), 1),
    "line": lambda x: torch.linspace(x[0, 0], x[0, 1], 4),
    "solved": lambda x: torch.linalg.solve(square(x), x),
    "Cholesky": lambda x: torch.linalg.cholesky_ex(square(x)),
    "determinant": lambda x: torch.linalg.slogdet(square(x)),
    "matrix exponential": lambda x: torch.matrix_exp(square(x) / 9),
    "embedding": lambda x: embedding(whole(x) % 2, x),
    "softmax": lambda x: x.softmax(1),
    "layer norm": lambda x: torch.layer_norm(x, (3,)),
    "padded": lambda x: pad(x, (1, 0, 0, 2), value=4.0),
    "stacked": lambda x: torch.stack([x, x + 1], 1),
    "many parts": lambda x: torch.stack([x[i % 2, i % 3] for i in range(6)] + [torch.ones(())] * 6),
    "many parts of a product": lambda x: torch.stack(list((x * 2).flatten().unbind()) * 2),
    "joined": lambda x: torch.cat((x, torch.ones(1, 3))),
    "chunks": lambda x: torch.ops.aten.split_copy.Tensor(x, 1),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x * 2).conj() * 1j),
    "negative view": lambda x: torch.complex(x, x).conj().imag + 1,
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.qint8).dequantize(),
    "quantized by channel": lambda x: torch.quantize_per_channel(
        x, torch.tensor([0.5, 0.25]), lengths(0, 1), 0, torch.qint8
    ).dequantize(),
    "eight bits": lambda x: x.to(torch.float8_e4m3fn).float(),
    "sparse": lambda x: (x.to_sparse() * 2).to_dense(),
    "sparse integers": lambda x: (whole(x).to_sparse() + whole(x).to_sparse()).coalesce().to_dense(),
    "sparse indices": lambda x: x.to_sparse().indices(),
    "sparse rows": lambda x: x.to_sparse_csr() @ torch.ones(3, 2),
    "copied sparse rows": lambda x: x.to_sparse_csr().cpu().to_dense(),
    "sparse sum": lambda x: torch.sparse.sum(x.to_sparse()),
    "added to dense": lambda x: changed(x, lambda t: t.add_(x.to_sparse())),
    "joined sparse": lambda x: torch.cat((x.to_sparse(), x.to_sparse())).to_dense(),
    "coalesced sparse": lambda x: torch.sparse_coo_tensor(lengths(1, 1, 0)[None], x[0], (2,)).coalesce().values(),
    "a list": lambda x: torch._foreach_add([x[0], torch.ones(2), x], 1.0),
    "two lists": lambda x: torch._foreach_mul([x, torch.ones(2)], [x, torch.zeros(2)]),
    "norms of a list": lambda x: torch._foreach_norm([x, torch.ones(2)]),
    "powers of a list": lambda x: torch._foreach_pow(2.0, [x, torch.ones(2)]),
    "a list in place": lambda x: foreach(x, lambda t: torch._foreach_mul_(t, 2.0)),
    "a zeroed list": lambda x: foreach(x, torch._foreach_zero_),
    "a copied list": lambda x: foreach(x, lambda t: torch._foreach_copy_(t, [x[1], torch.zeros(2), x * 2])),
    "a list and numbers": lambda x: foreach(
        x, lambda t: torch._foreach_addcdiv_(t, t, [x[1], torch.ones(2), x], torch.tensor([1.0, 2.0, 3.0]))
    ),
    "an optimizer's lists": adamw,
    "the first of two lists": lambda x: torch._foreach_lerp([x], [x * 2], 0.5),
    "infinite": lambda x: x * math.inf,
    "with infinite ones": lambda x: torch.cat((x[0], torch.full((2,), -math.inf))) * 2,
    "put one value": lambda x: changed(x, lambda t: t.__setitem__(mask(t), x[0, :1].abs())),
    "three operands": lambda x: torch.addcmul(x, x, x, value=0.5),
    "of a host number": lambda x: x * torch.tensor(2.0, dtype=torch.float64),
    "item": lambda x: x[1, 2].item(),
    "an item's type": lambda x: int(whole(x)[0, 0]),
    "a decision": lambda x: bool(x.sum() > 0),
    "equal": lambda x: torch.equal(x, x + 0),
    "close": lambda x: torch.allclose(x, x + 1),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> IdleDevice:
    return IdleDevice(monkeypatch)


def results(value: object) -> Iterator[object]:
    """A program's results."""
    return flat((tuple(value),)) if isinstance(value, (list, tuple)) else iter((value,))


def same(value: object, expected: object) -> bool:
    if not isinstance(value, Tensor) or not isinstance(expected, Tensor):
        return value == pytest.approx(expected, nan_ok=True)
    return value.dtype == expected.dtype and torch.allclose(value, expected, equal_nan=True)


X = ((1.0, -2.0, 3.0), (4.0, 0.5, -6.0))


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_of_known_values_are_known(device: IdleDevice, name: str) -> None:
    with device.on():
        found = list(results(PROGRAMS[name](torch.tensor(X))))
        known = [device.known(value) if isinstance(value, Tensor) else value for value in found]
    expected = list(results(PROGRAMS[name](torch.tensor(X))))
    assert all(map(same, known, expected)), (known, expected)
    assert (len(known), device.made_up()) == (len(expected), {})


#: Each tensor of a list is made up by itself, and so are results of sparse tensors.
APART = {name for name in PROGRAMS if "sparse" in name or "list" in name or "dense" in name}
#: Nothing of these depends on a value.
CERTAIN = {"zeros like", "ones like", "full like", "new zeros", "new full", "zeroed", "a zeroed list"}
#: Made-up values of these that count: some remain, and of several results those that are read first.
COUNT = {"a zeroed row": 3, "filled": 4, "two outs": 2, "Cholesky": 4, "determinant": 1, "chunks": 3}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("is_sent", [False, True])
def test_results_of_made_up_values_agree_with_them(device: IdleDevice, name: str, is_sent: bool) -> None:
    seen: list[str] = []
    with device.on():
        x = torch.empty(2, 3) if is_sent else torch.tensor(X)
        if not is_sent:
            device.not_sent(x, lambda: seen.append("read"))
        found = list(results(PROGRAMS[name](x)))
        unknown = [value for value in found if isinstance(value, Tensor) and device.known(value) is None]
        values = [device.read(value) if isinstance(value, Tensor) else value for value in found]
        made_up, was_read, source = device.made_up(), len(seen), device.read(x)
    if name not in APART:
        assert all(map(same, values, results(PROGRAMS[name](source)))), values
    if name not in CERTAIN | APART | {"line"}:
        assert len(unknown) == sum(isinstance(value, Tensor) for value in found)
    assert bool(made_up) is (name not in CERTAIN)
    assert was_read == (name not in CERTAIN and not is_sent)
    if set(made_up) == {"print"} and name not in APART:
        assert made_up["print"] == COUNT.get(name, sum(value.numel() for value in unknown))


def test_a_value_is_made_up_once_and_settled_when_it_was_read(device: IdleDevice) -> None:
    with device.on():
        unknown = torch.ones(1) + torch.empty(1)
        assert device.settled(unknown) is None
        first = unknown.item()
        assert device.made_up() == {"aten._local_scalar_dense.default": 1}
        settled = device.settled(unknown)
        assert (unknown.item(), device.known(unknown)) == (first, None)
        assert settled is not None
        assert settled.tolist() == [first]
        ones = torch.ones(1)
        assert (device.settled(ones) is not None, ones.item()) == (True, 1.0)
    assert device.made_up() == {}


def test_reading_a_value_counts_its_origins_as_read_and_each_element_once(device: IdleDevice) -> None:
    seen: list[str] = []
    with device.on():
        first, second, third = torch.ones(2), torch.ones(2), torch.empty(1, 3)
        for name, tensor in (("first", first), ("second", second)):
            device.not_sent(tensor, lambda name=name: seen.append(name))  # type: ignore[misc]
        total, other = first + second, first * 2
        device.read(total)
        assert (sorted(seen), device.made_up()) == (["first", "second"], {"print": 2})
        for tensor in (first, second, other, total, total + 1):
            device.read(tensor)
        assert (len(seen), device.made_up()) == (2, {})
        device.read(third.expand(5, 3))
    assert device.made_up() == {"print": 3}


def test_a_strict_engine_makes_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with IdleDevice(monkeypatch, strict=True).on():
        assert torch.ones(1).item() == 1.0
        with pytest.raises(InventedValueError):
            torch.empty(1).item()


def test_large_tensors_are_not_computed_and_what_another_rank_should_have_sent_is_not_seen(device: IdleDevice) -> None:
    with device.on():
        large = torch.ones(LARGE)
        assert not device.not_sent(large, pytest.fail)
        assert device.is_undefined(large)
        assert not device.is_undefined(torch.ones(1))
        assert not device.is_undefined(device.stay(torch.empty(1)))
        for result in (large * 2, large + torch.ones(1), torch._foreach_add([large], 1.0)[0], large.sum()):
            assert device.known(result) is None
    assert (device.on_host(large), device.made_up()) == (None, {})


@pytest.mark.parametrize("is_topk", [True, False])
def test_indices_that_nothing_chose_are_spread_and_counted(device: IdleDevice, is_topk: bool) -> None:
    with device.on():
        for scores in (torch.empty(64, 1 << 16), torch.empty(64, 8)):
            indices = scores.topk(2)[1] if is_topk else scores.argmax(1)
            num = indices.numel()
            read = device.read(indices).flatten().tolist()
            assert sorted(read) == sorted(index % scores.shape[1] for index in range(num))
            assert device.made_up() == {f"aten.{'topk' if is_topk else 'argmax'}.default": num}


def test_large_tensors_that_come_to_the_host_have_known_values_or_made_up_floats_or_zeros(device: IdleDevice) -> None:
    def copied(source: Tensor) -> Tensor:
        return torch.as_tensor(device.execute(torch.ops.aten._to_copy.default, (source,), {"device": "cpu"}))

    with device.on():
        large, numbers, norms = torch.empty(LARGE), torch.empty(LARGE, dtype=torch.int64), torch.empty(LARGE).abs()
        nowhere = large.isnan()
        everywhere = nowhere.logical_not()
    assert copied(everywhere).all()
    assert not copied(nowhere).any()
    assert device.made_up() == {}
    for source, is_float in ((numbers, False), (large[: LARGE // 4], True), (norms[: LARGE // 4], True)):
        on_host = copied(source)
        assert device.made_up() == {"aten._to_copy.default": source.numel()}
        assert (on_host.unique().numel() > 1) is is_float
        assert on_host.isfinite().all()
        assert bool((on_host >= 0).all()) is (
            source is not large[: LARGE // 4] and source.data_ptr() != large.data_ptr()
        )


def test_random_numbers_are_those_of_the_devices_generator(device: IdleDevice) -> None:
    def drawn(seed: int, offset: int = 0) -> list[Any]:
        device.seed(seed)
        device.offset = offset
        with device.on():
            x = torch.ones(8)
            some = [
                torch.rand_like(x),
                x.bernoulli(0.5),
                torch.empty(8).copy_(x).normal_(),
                torch.dropout(x, 0.5, True),
            ]
            known = [device.known(value) for value in some]
            return [value.tolist() for value in known if value is not None] + x.multinomial(3).tolist()

    first = drawn(1)
    assert device.offset == 4  # multinomial draws on the host alone
    assert len(first) == 7
    assert drawn(1) == first
    assert all(one != other for one, other in zip(first[:4], drawn(2)[:4], strict=True))
    assert drawn(1, 8)[0] != first[0]
    assert device.made_up() == {}


def test_copies_past_the_engine_count_as_values_of_four_bytes_and_fail_if_they_must_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for strict, counted in ((False, {"cudaMemcpy": 3}), (True, {})):
        device = IdleDevice(monkeypatch, strict=strict)
        assert device.read_past(9) is strict
        assert device.made_up() == counted
    assert "cudaMemcpy" in capsys.readouterr().err
