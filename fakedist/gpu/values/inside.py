"""Operations made of others: collectives, FSDP's copies, custom operators. The engine sees the operations inside.

``__torch_dispatch__`` runs an operation with its own mode off, so it does not see the operations inside. PyTorch's own
operations end in a kernel, but ``_c10d_functional.all_reduce`` ends in the process group, which is Python and changes
tensors with operations of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import tensor as new_tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fakedist.gpu.values.arguments import PLAIN, Arguments, Keywords, device_tensors, tensors
from fakedist.gpu.values.operators import Operator

_get_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
_ON_DEVICE = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_QUANTIZED = torch._C.DispatchKeySet(torch._C.DispatchKey.QuantizedCUDA)
_SPARSE = dict.fromkeys(
    (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc),
    torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCsrCUDA),
)
_SPARSE[torch.sparse_coo] = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCUDA)


def _special(tensor: torch.Tensor) -> torch._C.DispatchKeySet | None:
    """The kernels for a device tensor of a special kind."""
    if not tensor.is_cuda:
        return None
    return _QUANTIZED if tensor.is_quantized else _SPARSE.get(tensor.layout)


def _numbers_as_tensors(operator: Operator, args: Arguments) -> Arguments:
    """Arguments with tensors for the numbers that torch's own call would convert: ``sparse * 2``."""
    wanted = [str(argument.type) == "Tensor" for argument in operator.func._schema.arguments]
    return tuple(
        new_tensor(value) if is_tensor and isinstance(value, (bool, int, float, complex)) else value
        for value, is_tensor in zip(args, wanted, strict=False)
    )


class Inside(TorchDispatchMode):
    """Runs an operation and passes those inside it to ``execute``."""

    def __init__(self, execute: Callable[[OpOverload, Arguments, Keywords], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._execute = execute

    def run(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Run an operation's device kernel with this mode on."""
        kernels = next(filter(None, map(_special, tensors(args))), None)
        if kernels is None and not device_tensors((args, tuple(kwargs.values()))):
            return operator.func(*args, **kwargs)
        if kernels is not None:
            args = _numbers_as_tensors(operator, args)
        with self:
            return operator.func.redispatch(kernels or _ON_DEVICE, *args, **kwargs)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions run unchanged."""
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type[torch.Tensor]],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        """Run one of the operations inside."""
        if _get_mode(_FAKE) is not None or not isinstance(func, OpOverload):
            return func(*args, **(kwargs or {}))
        if any(each.__torch_dispatch__ is not PLAIN for each in types):
            return NotImplemented
        return self._execute(func, args, kwargs or {})
