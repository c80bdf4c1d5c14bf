"""Large floats of the host hold no data: results have the right size, and what is read of them is made up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fakedist.gpu.values.contents import HOST_LIMIT_BYTES
from fakedist.gpu.values.engine import ValueEngine
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.no_data import NoData
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.tensors import flat
from fakedist.record.dispatch import every_operation
from tests.support.idle_device import IdleDevice

N = HOST_LIMIT_BYTES // 4 + 1
ISNAN, ITEM = "aten.isnan.default", "aten._local_scalar_dense.default"


def small() -> Tensor:
    return torch.arange(3.0)


def in_place(x: Tensor) -> list[Tensor]:
    tensors = [small(), x, small()]
    torch._foreach_add_(tensors, [small(), x, small()])
    return tensors


#: Programs of one large tensor: operations that are not computed, and values made up by operation.
PROGRAMS: dict[str, tuple[Callable[[Tensor], Any], int, dict[str, int]]] = {
    "add": (lambda x: x + 1, 1, {}),
    "of results": (lambda x: (x + 1) * 2, 2, {}),
    "half": (lambda x: x.half(), 1, {}),
    "what follows from half": (lambda x: x.half()[:9] + 1, 2, {"aten.add.Tensor": 9}),
    "in place": (lambda x: x.add_(1), 1, {}),
    "a part in place": (lambda x: x[:9].mul_(2), 1, {}),
    "out": (lambda x: torch.add(x, 1, out=torch.empty(0)), 1, {}),
    "out small": (lambda x: torch.sum(x, 0, out=torch.empty(())), 1, {"aten.sum.IntList_out": 1}),
    "two outs": (
        lambda x: torch.max(x.view(-1, 1), 1, out=(torch.empty(0), torch.empty(0, dtype=torch.long))),
        1,
        {"aten.max.dim_max": N},
    ),
    "out of a large one": (lambda x: torch.neg(small(), out=x[:3]), 1, {}),
    "views": (lambda x: x.view(1, N)[:, 2:].t(), 0, {}),
    "mask": (lambda x: x.isnan(), 1, {ISNAN: N}),
    "a sum": (lambda x: x.sum(), 1, {"aten.sum.default": 1}),
    "largest": (lambda x: x.view(1, N).max(1), 1, {"aten.max.dim": 2}),
    "positions": (lambda x: x.nonzero(), 0, {}),
    "an element": (lambda x: torch.tensor(x[3].item() != 99.0), 0, {ITEM: 1}),
    "a list": (lambda x: torch._foreach_add([small(), x], 1.0), 1, {"aten._foreach_add.Scalar": 3}),
    "a list in place": (in_place, 1, {}),
    "made": (lambda x: torch.ones(N) * 1, 2, {}),
    "made by shape": (lambda x: torch.zeros((2, N)), 1, {}),
    "made of integers": (lambda x: torch.zeros(N, dtype=torch.int64) + 1, 0, {}),
    "a double that is large": (lambda x: torch.zeros(N // 2 + 1, dtype=torch.float64), 1, {}),
    "small": (lambda x: small() + 1, 0, {}),
    "a large float that fits": (lambda x: torch.ones(N - 1) + 1, 0, {}),
    "written from large": (lambda x: small().copy_(x[:3]), 1, {"aten.copy_.default": 3}),
    "nothing": (lambda x: x[:0] + 1, 1, {}),
}


COMPUTED = {"small", "a large float that fits", "positions", "made of integers", "an element"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_have_the_right_size_and_are_made_up_where_they_are_small(name: str) -> None:
    (program, operations, made_up), engine, x = PROGRAMS[name], ValueEngine(0), torch.zeros(N)
    with every_operation(engine.execute):
        results = list(flat((program(x),)))
    expected = list(flat((program(torch.zeros(N)),)))
    assert {row.operation: row.num_values for row in engine.invented()} == made_up
    number, line = engine.not_computed_on_host()
    assert (number, line.startswith(__file__)) == (operations, operations > 0)
    for result, like in zip(results, expected, strict=True):
        assert (result.shape, result.dtype, result.stride()) == (like.shape, like.dtype, like.stride())
        if name in COMPUTED or (name == "a list in place" and like.shape == (3,)):
            assert torch.equal(result, like)
        assert (engine.known(result) is None) is engine.host.has_no_data(result)
        if result.is_floating_point() and result.untyped_storage().nbytes() > N:
            assert engine.host.has_no_data(result) is (name not in COMPUTED)


def test_norms_are_made_up_positive_and_an_element_has_a_sign_and_is_the_same_each_time() -> None:
    x = torch.zeros(N)
    with every_operation(ValueEngine(0).execute):
        assert all(torch.linalg.vector_norm(x).item() > 0 for _ in range(9))
        assert x[5].item() == x[5].item() != x[6].item()
        assert min(x[index].item() for index in range(20)) < 0


def test_uploads_leave_nothing_on_the_device_and_downloads_nothing_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = IdleDevice(monkeypatch)
    with device.aside():
        large, few, state = device.stay(torch.zeros(N)), device.stay(torch.arange(3.0)), device.stay(torch.ones(3))
    with device.on():
        target, weights = torch.ones(3), torch.ones(3)
        assert device.known(target.copy_(few)) is not None
        assert device.known(target.copy_(large[:3])) is None
        large[:3].copy_(weights)
        torch._foreach_copy_([weights], [large[:3]])
        assert device.known(weights) is None
        assert device.known(few) is not None
        assert device.known(large) is None
        state.copy_(torch.full((3,), 4.0))
    assert state.tolist() == [4.0] * 3
    assert device.made_up() == {}


COPY, TO_COPY = Operator(torch.ops.aten.copy_.default), Operator(torch.ops.aten._to_copy.default)


def test_what_torch_makes_on_the_host_for_an_upload_is_made_and_not_computed() -> None:
    no_data = NoData(Host(0))
    floats, doubles = torch.zeros(N), torch.zeros(N, dtype=torch.float64)
    rows = torch.zeros(N, 2)

    def staged(operator: Operator, *args: object, **kwargs: object) -> tuple[bool, Tensor]:
        before, position = args, int(operator is COPY)
        after = no_data.upload(operator, args, kwargs)[position]
        assert isinstance(after, Tensor)
        return after is before[position], after

    assert staged(COPY, floats, floats)[0]
    assert staged(COPY, floats, doubles, True)[0]  # the device converts
    assert staged(COPY, rows.t(), rows.t())[0]
    assert staged(TO_COPY, floats)[0]
    assert staged(TO_COPY, rows.t(), dtype=torch.float32)[0]
    assert staged(TO_COPY, floats, dtype=torch.half)[0]  # so little is converted
    for is_same, made in (staged(COPY, floats, doubles), staged(TO_COPY, doubles, dtype=torch.float32)):
        assert (is_same, made.dtype, made.shape) == (False, torch.float32, (N,))
    for is_same, made in (staged(COPY, rows.reshape(2, N), rows.t()), staged(COPY, rows, rows[:1].expand(N, 2))):
        assert (is_same, made.is_contiguous(), made.dtype) == (False, True, torch.float32)


def test_a_download_is_neither_converted_nor_put_in_order_on_the_host() -> None:
    no_data = NoData(Host(0))
    there, halves = torch.ones(N, 2), torch.ones(N, 2, dtype=torch.half)

    values = itertools.count(3)

    def left_alone(operator: Operator, *args: Any, **kwargs: object) -> bool:
        """Whether what comes holds nothing of the source, whose value no memory that was freed before has."""
        value = next(values)
        args[operator is COPY].fill_(value)
        return not no_data.download(operator, args, kwargs).eq(value).any()

    assert left_alone(COPY, torch.zeros(N, 2), halves)
    assert left_alone(COPY, torch.zeros(2, N).t(), there)
    assert left_alone(TO_COPY, halves, dtype=torch.float32, device=torch.device("cpu"))
    assert not left_alone(COPY, torch.zeros(N, 2), there)
    assert not left_alone(COPY, torch.zeros(N, 2), halves, True)  # the device converts
    assert not left_alone(TO_COPY, there)
    assert not left_alone(COPY, torch.zeros(3), torch.ones(3, dtype=torch.half))
