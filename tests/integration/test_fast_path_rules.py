"""Which operations compiled code may run: those for which the value engine would only run them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tests.support.virtual_worker import on_virtual_gpu

if TYPE_CHECKING:
    from fakedist.gpu.values.engine import ValueEngine


@on_virtual_gpu
def test_rules_follow_the_engine(engine: ValueEngine) -> None:
    import torch

    from fakedist.gpu.fast_path.compiled import Flag, Method, Rule, rule_of
    from fakedist.gpu.values.operators import Operator

    rule = functools.partial(rule_of, composites=engine.composites)
    aten = torch.ops.aten
    assert rule(Operator(aten.mm.default)).method is Method.KERNEL
    assert rule(Operator(aten.add_.Tensor)).flags == Flag.FOLLOWED
    assert Flag.HOST_ONLY in rule(Operator(aten.isnan.default)).flags
    assert Flag.HOST_ONLY in rule(Operator(aten._local_scalar_dense.default)).flags
    assert Flag.HOST_ONLY in rule(Operator(aten.zeros_like.default)).flags
    assert Flag.COUNTS in rule(Operator(aten.sum.dim_IntList)).flags
    assert Flag.CONDENSES in rule(Operator(aten.linalg_vector_norm.default)).flags | Flag.CONDENSES
    assert rule(Operator(aten._foreach_norm.Scalar)).method is Method.PYTHON
    assert Flag.OVERWRITES in rule(Operator(aten._foreach_copy_.default)).flags
    functional = torch.ops._c10d_functional
    assert rule(Operator(functional.all_reduce.default)).method is Method.PYTHON
    for idle in (functional.wait_tensor.default, torch.ops.profiler._record_function_exit._RecordFunction):
        assert rule(Operator(idle)).method is Method.PLAIN
    assert rule(Operator(aten.masked_scatter.default)).method is Method.PYTHON
    assert rule(Operator(aten.reshape.default)) == rule(Operator(aten.to.dtype)) == Rule(Method.KERNEL)
    for other in (aten.to.other, aten.narrow.Tensor, aten.tensor_split.tensor_indices_or_sections):
        assert rule(Operator(other)).method is Method.PYTHON
