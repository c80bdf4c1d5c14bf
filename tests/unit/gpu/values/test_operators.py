from __future__ import annotations

import pytest
import torch

from fakedist.gpu.values.operators import Operator

ATEN = torch.ops.aten


def test_in_place_and_out_operations_write() -> None:
    assert Operator(ATEN.add_.Tensor).written == (0,)
    out = Operator(ATEN.add.out)
    assert out.written_names == {"out"}
    assert out.overwrites
    assert Operator(ATEN.add.Tensor).written == ()


@pytest.mark.parametrize(
    ("fact", "true", "false"),
    [
        ("is_view", ("view", "select"), ("lift_fresh", "relu_", "mm")),
        ("dynamic", ("nonzero", "masked_select", "_unique2", "bincount", "_local_scalar_dense", "equal"), ("mm",)),
        ("random", ("native_dropout", "normal_"), ("mm",)),
        ("takes_generator", ("normal_",), ("native_dropout", "mm")),
        ("overwrites", ("copy_",), ("add_", "mm")),
    ],
)
def test_an_operators_facts_follow_from_its_schema(fact: str, true: tuple[str, ...], false: tuple[str, ...]) -> None:
    for names, expected in ((true, True), (false, False)):
        packets = [getattr(ATEN, name) for name in names]
        found = [getattr(Operator(getattr(packet, packet.overloads()[0])), fact) for packet in packets]
        assert found == [expected] * len(names)


def test_only_pytorchs_own_operations_are_kernels() -> None:
    import torch.distributed._functional_collectives

    assert Operator(ATEN.mm.default).is_kernel
    functional = torch.ops._c10d_functional
    assert not Operator(functional.all_reduce.default).is_kernel
    assert [Operator(each.default).is_idle for each in (functional.all_reduce, functional.wait_tensor)] == [False, True]


def test_an_argument_by_place_by_name_and_by_default() -> None:
    operator = Operator(ATEN.topk.default)
    assert operator.argument("dim", (torch.empty(1), 2, 0), {}) == 0
    assert operator.argument("dim", (torch.empty(1), 2), {"dim": 1}) == 1
    assert operator.argument("dim", (torch.empty(1), 2), {}) == -1
    assert operator.argument("nothing", (torch.empty(1), 2), {}) is None
