"""What is found of an operation from its schema."""

from __future__ import annotations

import torch

from fakedist.gpu.values.kinds import Kind

ATEN = torch.ops.aten


def test_in_place_and_out_operations_write() -> None:
    assert Kind(ATEN.add_.Tensor).written == (0,)
    out = Kind(ATEN.add.out)
    assert out.written_names == {"out"}
    assert out.overwrites
    assert not Kind(ATEN.add_.Tensor).overwrites
    assert Kind(ATEN.copy_.default).overwrites
    assert Kind(ATEN.add.Tensor).written == ()


def test_views_compute_nothing() -> None:
    assert Kind(ATEN.view.default).is_view
    assert Kind(ATEN.select.int).is_view
    assert not Kind(ATEN.lift_fresh.default).is_view
    assert not Kind(ATEN.relu_.default).is_view


def test_operations_whose_size_depends_on_values() -> None:
    names = ("nonzero", "masked_select", "_unique2", "bincount", "_local_scalar_dense", "equal")
    assert all(Kind(getattr(ATEN, name).default).dynamic for name in names)
    assert not Kind(ATEN.mm.default).dynamic


def test_random_operations() -> None:
    assert Kind(ATEN.native_dropout.default).random
    assert not Kind(ATEN.native_dropout.default).takes_generator
    assert Kind(ATEN.normal_.default).takes_generator


def test_only_pytorchs_own_operations_are_kernels() -> None:
    import torch.distributed._functional_collectives

    assert Kind(ATEN.mm.default).is_kernel
    assert not Kind(torch.ops._c10d_functional.all_reduce.default).is_kernel


def test_an_argument_by_place_by_name_and_by_default() -> None:
    kind = Kind(ATEN.topk.default)
    assert kind.argument("dim", (torch.empty(1), 2, 0), {}) == 0
    assert kind.argument("dim", (torch.empty(1), 2), {"dim": 1}) == 1
    assert kind.argument("dim", (torch.empty(1), 2), {}) == -1
    assert kind.argument("nothing", (torch.empty(1), 2), {}) is None
