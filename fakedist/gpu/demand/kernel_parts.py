"""Bytes of single kernels, where an operation's kernels do not share what it reads and writes once.

A row that is too long to stay in the caches is read again by each pass over it. A kernel that only prepares indices
moves no data. From torch 2.15's sources in aten/src/ATen/native/cuda, named at each function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fakedist.gpu.values.arguments import Arguments, tensors
from fakedist.gpu.values.storage import storage_of

#: Rows up to this size stay in the caches between two passes: each of an H100's 132 SMs works on two of them, and its
#: second-level cache has 50 MB.
CACHED_ROW_BYTES = 128 << 10


class Part(NamedTuple):
    """Kernels of an operation.

    Attributes:
        words: Their names contain one of these.
        moved_bytes: The fewest bytes that they read and write together.
        arithmetic: Their part of the operation's arithmetic, from 0 to 1. Without any, other kernels share it.
    """

    words: tuple[str, ...]
    moved_bytes: float
    arithmetic: float = 0.0


#: Returns an operation's parts, from its arguments and its result.
Parts = Callable[[Arguments, object], tuple[Part, ...]]


def parts_function(name: str) -> Parts | None:
    """The function for an operator, by its name; None if its kernels share its bytes."""
    return _PARTS.get(name)


def _bytes_of(value: object) -> float:
    return float(sum(tensor.nbytes for tensor in tensors((value,)) if tensor.layout is torch.strided))


def _is_long(rows: torch.Tensor, dim: object) -> bool:
    """Whether a row does not stay in the caches. Only rows of the last dimension are read by these kernels."""
    if not isinstance(dim, int) or not rows.dim() or dim not in (-1, rows.dim() - 1):
        return False
    return int(rows.shape[-1]) * rows.element_size() > CACHED_ROW_BYTES


def _softmax(args: Arguments, result: object) -> tuple[Part, ...]:
    """SoftMax.cu, cunn_SoftMaxForward: the maximum, the sum, then the result."""
    rows = next(tensors(args))
    if not _is_long(rows, args[1]):
        return ()
    return (Part(("cunn_SoftMaxForward<",), 3 * _bytes_of(rows) + _bytes_of(result)),)


def _log_softmax_backward(args: Arguments, result: object) -> tuple[Part, ...]:
    """SoftMax.cu, cunn_SoftMaxBackward: the sum of the gradient, then the result."""
    grad, output = tensors(args[:2])
    if not _is_long(grad, args[2]):
        return ()
    return (Part(("cunn_SoftMaxBackward<",), 2 * _bytes_of(grad) + _bytes_of(output) + _bytes_of(result)),)


def _softmax_backward(args: Arguments, result: object) -> tuple[Part, ...]:
    """SoftMax.cu, softmax_backward_cuda_out: multiplies gradient and output first."""
    grad, output = tensors(args[:2])
    multiplied = Part(("elementwise_kernel",), 2 * _bytes_of(grad) + _bytes_of(output))
    return (multiplied, *_log_softmax_backward(args, result))


def _embedding_backward(args: Arguments, result: object) -> tuple[Part, ...]:
    """Embedding.cu and EmbeddingBackwardKernel.cu: sorts the indices, sums runs of rows in fp32, adds the sums."""
    grad, indices = tensors(args[:2])
    sums = float(grad.numel()) * 4
    sorting = ("radix_sort", "::scan::", "unique_by_key", "krn_partial", "compute_num_of_partial", "_with_index")
    return (
        Part(sorting, 4 * _bytes_of(indices)),
        Part(("compute_grad_weight",), _bytes_of(grad) + sums),
        Part(("sum_and_scatter",), sums + _bytes_of(grad)),
    )


def _foreach_norm(args: Arguments, result: object) -> tuple[Part, ...]:
    """ForeachReduceOp.cu: a second kernel adds what each block found."""
    return (Part(("cleanup",), 2 * _bytes_of(result)),)


def _group_norm(args: Arguments, result: object) -> tuple[Part, ...]:
    """group_norm_kernel.cu: the moments of each group, then the result."""
    return (Part(("RowwiseMoments",), _bytes_of(args[0])), Part(("ComputeFusedParams",), _bytes_of(args[1:3])))


def _batch_norm(args: Arguments, result: object) -> tuple[Part, ...]:
    """Normalization.cuh: the statistics of each channel, then the result."""
    return (Part(("collect_statistics",), _bytes_of(args[0])),)


def _convolution_backward(args: Arguments, result: object) -> tuple[Part, ...]:
    """Convolution.cpp, convolution_backward: a sum over the gradient makes that of the bias."""
    if not isinstance(result, (list, tuple)):
        return ()
    bias = result[2] if len(result) > 2 else None
    summed = () if bias is None else (Part(("reduce_kernel",), _bytes_of(args[0]) + _bytes_of(bias)),)
    return (*summed, *_depthwise_backward(args, result))


def _depthwise_backward(args: Arguments, result: Sequence[object]) -> tuple[Part, ...]:
    """DepthwiseConv2d.cu and DepthwiseConv3d.cu: a kernel for each gradient, behind copies of what is not contiguous.
    The one of the weight has few threads, and as much to do.
    """
    (grad, data, weight), groups = tensors(args[:3]), args[9]
    if groups != data.shape[1] or groups == 1:
        return ()
    share = 1.0 / max(sum(isinstance(each, torch.Tensor) for each in result[:2]), 1)
    names = (("depthwise2d_backward", "backward_input"), ("depthwise2d_grad_weight", "backward_weight"))
    others = (weight, data)
    gradients = [
        Part(words, _bytes_of((grad, other, made)), share)
        for words, other, made in zip(names, others, result, strict=False)
        if isinstance(made, torch.Tensor)
    ]
    copied = sum(
        min(each.nbytes, storage_of(each)[1]) + each.nbytes for each in (grad, data) if not each.is_contiguous()
    )
    return (*gradients, Part(("elementwise_kernel",), float(copied))) if copied else tuple(gradients)


def _pad(args: Arguments, result: object) -> tuple[Part, ...]:
    """ConstantPadNd.cpp: fills the result, then copies what is kept of the input into it."""
    kept, filled = _kept_bytes(args), _bytes_of(result)
    return (Part(("FillFunctor",), filled), Part(("copy",), 2 * kept))


def _kept_bytes(args: Arguments) -> float:
    """Bytes of the input that a padding keeps; a negative one cuts."""
    (data, *_), pads = tensors(args[:1]), args[1]
    sizes = list(data.shape)
    assert isinstance(pads, (list, tuple))
    for place, (left, right) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        sizes[-1 - place] += min(int(left), 0) + min(int(right), 0)
    return float(math.prod(max(size, 0) for size in sizes) * data.element_size())


def _mirrored_pad_backward(args: Arguments, result: object) -> tuple[Part, ...]:
    """ReflectionPad.cu and ReplicationPadding.cu: fills the result with zeros, then adds the gradient to it."""
    return (Part(("reflection_pad", "replication_pad"), _bytes_of(args[0]) + _bytes_of(result)),)


def _loss(args: Arguments, result: object) -> tuple[Part, ...]:
    """Loss.cu: the loss of each element is written, and read again where it is reduced."""
    each = max(_bytes_of(args[0]), _bytes_of(args[1]))
    if len(args) > 2 and args[2] == 0:  # at::Reduction::None
        return ()
    return (Part(("elementwise_kernel",), _bytes_of(args[:2]) + each), Part(("reduce_kernel",), each))


_PARTS: dict[str, Parts] = {
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _loss),
    "constant_pad_nd": _pad,
    **{f"{kind}_pad{n}d_backward": _mirrored_pad_backward for kind in ("reflection", "replication") for n in (1, 2, 3)},
    "convolution_backward": _convolution_backward,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "embedding_dense_backward": _embedding_backward,
    "_foreach_norm": _foreach_norm,
    "native_group_norm": _group_norm,
    "native_batch_norm": _batch_norm,
}
