from __future__ import annotations

import torch

from fakedist.gpu.values.operators import Operator

ATEN = torch.ops.aten


def test_in_place_and_out_operations_write() -> None:
    assert Operator(ATEN.add_.Tensor).written == (0,)
    out = Operator(ATEN.add.out)
    assert out.written_names == {"out"}
    assert out.overwrites
    assert not Operator(ATEN.add_.Tensor).overwrites
    assert Operator(ATEN.copy_.default).overwrites
    assert Operator(ATEN.add.Tensor).written == ()


def test_views_compute_nothing() -> None:
    assert Operator(ATEN.view.default).is_view
    assert Operator(ATEN.select.int).is_view
    assert not Operator(ATEN.lift_fresh.default).is_view
    assert not Operator(ATEN.relu_.default).is_view


def test_operations_whose_size_depends_on_values() -> None:
    names = ("nonzero", "masked_select", "_unique2", "bincount", "_local_scalar_dense", "equal")
    assert all(Operator(getattr(ATEN, name).default).dynamic for name in names)
    assert not Operator(ATEN.mm.default).dynamic


def test_random_operations() -> None:
    assert Operator(ATEN.native_dropout.default).random
    assert not Operator(ATEN.native_dropout.default).takes_generator
    assert Operator(ATEN.normal_.default).takes_generator


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
