"""RMSNorm as it was in December 2024: the values of today's, from the operations of then."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.truth.december_2024.composite_norm import rms_norm


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_values_and_gradients_are_those_of_todays_norm() -> None:
    torch.manual_seed(0)
    norm = nn.RMSNorm(64, eps=1e-5)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 64, requires_grad=True)
    results = []
    for forward in (norm, lambda value: rms_norm(norm, value)):
        y = forward(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, norm.weight))))
    for today, then in zip(*results, strict=True):
        torch.testing.assert_close(then, today, rtol=1e-5, atol=1e-5)


def test_each_operation_reads_and_writes_memory_of_its_own() -> None:
    norm = nn.RMSNorm(64, eps=1e-5, dtype=torch.bfloat16)
    with _Names() as seen:
        y = rms_norm(norm, torch.randn(2, 64, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    expected = ["_to_copy", "pow.Tensor_Scalar", "mean.dim", "add_.Tensor", "rsqrt", "mul.Tensor", "mul.Tensor"]
    names = [name for name in seen.names if name != "detach" and not name.startswith(("randn", "empty"))]
    assert names == [*expected, "_to_copy"]
