"""The memory of Transformer Engine's tensors: plain ones, and quantized ones, which hold data and scales apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from fakedist.gpu.values.arguments import PLAIN

#: Attributes of Float8Tensor, MXFP8Tensor, Float8BlockwiseQTensor, NVFP4Tensor and GroupedTensor, and of their storages
#: (transformer_engine/pytorch/tensor/storage): first what is read by rows, then what is read by columns.
_BY_ROWS = ("_data", "_rowwise_data", "rowwise_data")
_BY_COLUMNS = ("_transpose", "_columnwise_data", "columnwise_data")
_SCALES = ("_scale_inv", "_rowwise_scale_inv", "scale_inv", "_columnwise_scale_inv", "columnwise_scale_inv")


def is_quantized(value: object) -> bool:
    """Whether a value is one of Transformer Engine's quantized tensors."""
    return not _is_plain(value) and any(hasattr(value, name) for name in (*_BY_ROWS[:2], "num_tensors"))


def written_tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """All memory of values: of a quantized tensor its data in both forms, and its scales."""
    return _parts(values, (*_BY_ROWS, *_BY_COLUMNS, *_SCALES))


def read_tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """What a kernel reads of values: a quantized tensor in one form, and its scales."""
    for value in _flat(values):
        if _is_plain(value) or not is_quantized(value):
            yield from _parts((value,), ())
            continue
        by_rows = list(_parts((value,), _BY_ROWS))
        yield from by_rows or _parts((value,), _BY_COLUMNS)
        yield from scales((value,))


def scales(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """The scales of the quantized tensors among values."""
    return (tensor for value in _flat(values) if is_quantized(value) for tensor in _parts((value,), _SCALES))


def matrix_of(value: object) -> tuple[int, int]:
    """Rows and columns of a tensor, taken as one matrix of its last dimension's rows; zeros for anything else."""
    shape = getattr(value, "logical_shape", None) or getattr(value, "shape", None)
    if shape is None and is_quantized(value):
        size = getattr(value, "size", None)
        shape = size() if callable(size) else None
    if not shape:
        return 0, 0
    *rows, columns = (int(size) for size in shape)
    count = 1
    for size in rows:
        count *= size
    return count, columns


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and type(value).__torch_dispatch__ is PLAIN


def _flat(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _parts(values: Iterable[object], names: tuple[str, ...]) -> Iterator[torch.Tensor]:
    for value in _flat(values):
        found = (value,) if _is_plain(value) else (getattr(value, name, None) for name in names)
        yield from (each for each in found if isinstance(each, torch.Tensor) and _is_plain(each))
