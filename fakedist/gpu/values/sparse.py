"""Operations on sparse tensors. The device's kernels are not run; CPU kernels compute from the parts on the host.

If indices and values are small and hold values, so does the result, which has its true number of indices.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fakedist.gpu.values.contents import host_view
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.operators import Method, Operator
from fakedist.gpu.values.tensors import Arguments, Keywords, storage_of, tensor_at, tensors

_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_SPARSE = {*_COMPRESSED_ROWS, torch.sparse_coo, torch.sparse_csc, torch.sparse_bsc}


def is_sparse(value: object) -> bool:
    """Return whether a value is a sparse tensor on a device."""
    return isinstance(value, torch.Tensor) and value.is_cuda and value.layout in _SPARSE


class Sparse:
    """Runs operations on sparse tensors; ``inside`` passes the operations inside to the engine."""

    def __init__(self, host: Host, inside: Method) -> None:
        self._host, self._inside = host, inside

    def run(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Run an operation on the device, and on the host if all that it reads holds values."""
        outputs = [index for index in operator.written if index < len(args)]
        near: list[object] = []
        computed = None
        if not operator.is_view and not any(is_sparse(args[index]) for index in outputs) and self._holds(args):
            near = [self._near(value) for value in args]
            for index in outputs:  # the operations inside write to the same memory
                near[index] = tensor_at(tuple(near), index).clone()
            computed = self._computed(operator, near, kwargs)
        try:
            result = self._inside(operator, args, kwargs)
        except RuntimeError:  # cuSPARSE is not simulated, and a kernel that sizes its result by values has none
            if computed is None or outputs:
                raise
            return self._made(computed, _device_of(args))
        for index in outputs:
            written = tensor_at(args, index)
            if not written.is_cuda or is_sparse(written):  # a sparse tensor's values are in its parts
                continue
            if computed is None:
                self._host.spoil(written)
            else:
                self._host.write(written, tensor_at(tuple(near), index))
        if computed is None and not operator.is_view and not outputs:
            self._forget(result, args)
        return result if computed is None or outputs else self._filled(result, computed)

    def _forget(self, result: object, args: Arguments) -> None:
        """A library wrote the values of results, where the operation copied others before."""
        given = {storage_of(part)[0] for value in tensors(args) for part in (parts(value) if is_sparse(value) else ())}
        for tensor in tensors((result,)):
            if tensor.is_cuda and is_sparse(tensor) and storage_of(values := parts(tensor)[-1])[0] not in given:
                self._host.spoil(values)

    def _near(self, value: object) -> object:
        if isinstance(value, (list, tuple)):
            return [self._near(item) for item in value]
        return _on_host(value) if is_sparse(value) else self._host.arguments((value,))[0]

    def _holds(self, values: Iterable[object]) -> bool:
        for value in values:
            if isinstance(value, (list, tuple)):
                if not self._holds(value):
                    return False
            elif isinstance(value, torch.Tensor):
                dense = parts(value) if is_sparse(value) else (value,)
                if not all(not part.is_cuda or self._host.takes_copied(part) for part in dense):
                    return False
                if self._host.taint(dense) is not None:
                    return False
        return True

    def _computed(self, operator: Operator, near: list[object], kwargs: Keywords) -> object:
        try:
            return operator.func(*near, **self._host.keywords(kwargs))
        except Exception:  # no CPU kernel, or none for these types
            return None

    def _filled(self, result: object, computed: object) -> object:
        """The device's result with the computed values, or another if the number of indices differs."""
        if isinstance(result, (tuple, list)) and isinstance(computed, (tuple, list)):
            return type(result)(self._filled(*pair) for pair in zip(result, computed, strict=True))
        if not isinstance(result, torch.Tensor) or not isinstance(computed, torch.Tensor) or not result.is_cuda:
            return result
        if computed.layout is torch.strided:
            if result.layout is torch.strided and result.shape == computed.shape and 0 not in result.stride():
                self._host.write(result, computed)
            return result
        return self._made(computed, result.device)

    def _made(self, computed: object, device: torch.device) -> object:
        if not isinstance(computed, torch.Tensor):
            return computed
        if computed.layout is torch.strided:
            return self._host.to_device(computed, device)
        return _made_of([self._host.to_device(part, device) for part in parts(computed)], computed)


def _device_of(args: Arguments) -> torch.device:
    return next(tensor.device for tensor in tensors(args) if tensor.is_cuda)


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _COMPRESSED_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def _on_host(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return _made_of([host_view(part) for part in parts(value)], value)


def _made_of(dense: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    size = list(like.shape)
    if like.layout is torch.sparse_coo:
        where, values = dense
        whole: bool = like.is_coalesced()
        return torch.sparse_coo_tensor(where, values, size, is_coalesced=whole, check_invariants=False)
    first, second, values = dense
    return torch.sparse_compressed_tensor(first, second, values, size, layout=like.layout, check_invariants=False)
