"""Formulas of single operators: FLOPs that torch's counter lacks or gets wrong, and bytes of single kernels.

Torch's counter (torch.utils.flop_counter) multiplies the weight gradient of a grouped convolution by its groups
(``conv_backward_flop``, torch 2.10 to 2.15). Some operations have only a lower bound: FLOPs and dependent steps, but
not how close their kernels come to the GPU's limits.

An operation's kernels may divide its bytes unevenly: each pass reads a row too long for the caches again, and a kernel
that prepares indices moves no data. From torch 2.15's aten/src/ATen/native/cuda, named at each function.

bitsandbytes' kernels stream what they read and write, and convert on the way. They are unmeasured, so they too have a
lower bound. Sizes follow its ``_ops.py`` and ``backends/cuda/ops.py`` (release 0.50).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.sparse import is_sparse, parts
from fakedist.gpu.values.tensors import Arguments, Keywords, storage_of, tensors


class Arithmetic(NamedTuple):
    """The computation of an operation; ``steps`` are dependent ones, each of which waits for the one before.

    ``is_bounded``: only the least is known that its kernels take. ``is_scalar``: fp32 without tensor cores.
    """

    flops: float
    steps: int = 0
    is_bounded: bool = False
    is_scalar: bool = False


class Call(NamedTuple):
    """A call that has returned."""

    operator: Operator
    args: Arguments
    kwargs: Keywords
    result: object

    def value(self, name: str) -> object:
        """An argument; None if the operator has no such argument."""
        return self.operator.argument(name, self.args, self.kwargs)

    def tensor(self, *names: str) -> torch.Tensor:
        """The first of these arguments that is a tensor. TypeError if none is."""
        tensor = next((value for name in names if isinstance(value := self.value(name), torch.Tensor)), None)
        if tensor is None:
            raise TypeError(f"{self.operator.full_name} without {names[0]}")
        return tensor

    def returned(self) -> torch.Tensor:
        """The first tensor of the result. TypeError if it has none."""
        tensor = next(tensors((self.result,)), None)
        if tensor is None:
            raise TypeError(f"{self.operator.full_name} returned no tensor")
        return tensor


#: Returns the arithmetic of a call. Raises TypeError, ValueError or IndexError for arguments that it does not know.
Counter = Callable[[Call], Arithmetic]


def arithmetic_function(operator: Operator) -> Counter | None:
    """The function for an operator; None if it has none here."""
    if operator.is_kernel:
        return _COUNTERS.get(operator.name)
    return _BITSANDBYTES_COUNTERS.get(operator.name) if operator.qualified_name.startswith(_BITSANDBYTES) else None


def fp32_type(operation: str) -> str:
    """The type in which cuDNN computes convolutions ("conv") or recurrent networks ("rnn") of fp32 operands."""
    precision = torch._C._get_fp32_precision_getter
    # torch.backends.cudnn.allow_tf32 raises an error if the two differ.
    return "tf32" if precision("cuda", operation) == "tf32" else "fp32"


# ---- convolutions


def _convolution(call: Call) -> Arithmetic:
    is_transposed = bool(call.value("transposed")) or "transpose" in call.operator.name
    data = call.tensor("input", "self")
    return _of_convolution(call, data, data if is_transposed else call.returned())


def _convolution_backward(call: Call) -> Arithmetic:
    """The gradients of the input and of the weights take as much as the forward each."""
    data, mask = call.tensor("input"), call.value("output_mask")
    forward = _of_convolution(call, data, data if call.value("transposed") else call.tensor("grad_output"))
    wanted = mask[:2] if isinstance(mask, (list, tuple)) else (True, True)
    return forward._replace(flops=forward.flops * sum(map(bool, wanted)))


def _of_convolution(call: Call, data: torch.Tensor, met: torch.Tensor) -> Arithmetic:
    """Each position of ``met`` (the result; the input of a transposed convolution) meets every weight."""
    weight = call.tensor("weight")
    channels_at = 1 - weight.dim()
    positions = met.numel() // max(int(met.shape[channels_at]), 1)
    # With one channel a group, kernels multiply without tensor cores. No measurement here covers them.
    is_depthwise = "depthwise" in call.operator.name or call.value("groups") == data.shape[channels_at] != 1
    return Arithmetic(2.0 * positions * weight.numel(), is_bounded=is_depthwise, is_scalar=is_depthwise)


# ---- recurrent networks


def _recurrent(call: Call) -> Arithmetic:
    """Each token meets every matrix once; each step of a layer waits for the one before."""
    data, weights = call.tensor("input"), tensors((call.value("weight"),))
    packed, layers = call.value("batch_sizes"), call.value("num_layers")
    time = 1 if call.value("batch_first") else 0
    steps = len(packed) if isinstance(packed, (list, tuple)) and packed else int(data.shape[time])
    tokens = data.numel() // max(int(data.shape[-1]), 1)
    parameters = sum(weight.numel() for weight in weights if weight.dim() == 2)
    return Arithmetic(2.0 * tokens * parameters, steps * (layers if isinstance(layers, int) else 1))


def _recurrent_backward(call: Call) -> Arithmetic:
    forward = _recurrent(call)
    return forward._replace(flops=2 * forward.flops)


def _ctc(call: Call) -> Arithmetic:
    """The probabilities at each time follow from those at the time before."""
    return Arithmetic(0.0, steps=int(call.tensor("log_probs").shape[0]), is_bounded=True)


# ---- distances


def _distance(call: Call) -> Arithmetic:
    """A difference, an absolute value or a power, and a sum for each pair and dimension."""
    is_forward = "forward" in call.operator.name
    pairs = call.returned() if is_forward else call.tensor("grad_output", "grad")
    per_pair = 3.0 if call.value("p") in (0.0, 1.0, 2.0, float("inf")) else 10.0  # a power: logarithm, exponential
    width = int(call.tensor("x1", "self").shape[-1])
    return Arithmetic(
        (per_pair if is_forward else per_pair + 1) * pairs.numel() * width, is_bounded=True, is_scalar=True
    )


# ---- products with packed or sparse weights


def _packed_product(call: Call) -> Arithmetic:
    """Weights of four or eight bits become the first operand's type on the way to the tensor cores."""
    return Arithmetic(2.0 * call.returned().numel() * int(call.tensor("self").shape[-1]), is_bounded=True)


def _half_sparse_product(call: Call) -> Arithmetic:
    """Count a product of which one operand keeps two of four values. Tensor cores skip the others."""
    dense = call.tensor("dense_B", "mat2", "input")
    inner = int(dense.shape[-1 if call.operator.name.endswith("linear") else 0])
    return Arithmetic(1.0 * call.returned().numel() * inner, is_bounded=True)


def _sparse_product(call: Call) -> Arithmetic:
    """Each element of the sparse operand meets a row of the dense one. Dense products state their own sizes."""
    sparse = next((tensor for tensor in tensors(call.args) if is_sparse(tensor)), None)
    if sparse is None:
        return Arithmetic(0.0)
    dense = next(tensor for tensor in reversed(list(tensors(call.args))) if tensor is not sparse)
    is_sampled = call.operator.name == "sparse_sampled_addmm"  # each element is a product of a row and a column
    width = dense.shape[-2] if is_sampled else dense.shape[-1] if dense.dim() > 1 else 1
    return Arithmetic((8.0 if dense.is_complex() else 2.0) * parts(sparse)[-1].numel() * int(width), is_bounded=True)


# ---- factorisations and systems of equations: columns wait for those before
#
# Steps for each column follow from published times, at 8 us a step. On H100: Cholesky of 2048 columns 1.95 ms
# (pytorch/pytorch#173515), QR of 128 x 32 0.19 ms (#173788). Others: symmetric eigenproblems of 100 columns 1.8 ms each
# (#174674), 512 by Jacobi's method 1.7 ms (jax-ml/jax#31368); singular values of 400 columns by Jacobi's method, in
# sweeps over all pairs of columns, 207 ms on A100 (tensor4all/tenferro-rs#1849); least squares of 256 columns by cuBLAS
# 29 ms (#54725). Assumed: LU takes what QR does, LDL one step, eigenvalues of other matrices twice what singular values
# do.

_IN_BLOCKS, _BY_COLUMN = 1 / 8, 1 / 2


def _factorisation(cubes: float, steps_of_column: float) -> Counter:
    """``cubes`` times n^3 for each matrix; of one that is not square, m n^2."""

    def count(call: Call) -> Arithmetic:
        matrix = call.tensor("self", "A", "input")
        least = min(matrix.shape[-2:])
        return Arithmetic(cubes * matrix.numel() * least, math.ceil(steps_of_column * int(least)), is_bounded=True)

    return count


def _pseudo_inverse(call: Call) -> Arithmetic:
    """Count eigenvectors if it is Hermitian, else singular vectors. The products state their own sizes."""
    return (_EIGENVECTORS if call.value("hermitian") else _SINGULAR_VECTORS)(call)


_EIGENVECTORS, _SINGULAR_VECTORS = _factorisation(4 / 3, 2), _factorisation(8 / 3, 32)


def _solution(call: Call) -> Arithmetic:
    least = int(min(call.tensor("LU", "A", "LD", "self").shape[-2:]))
    return Arithmetic(1.0 * call.returned().numel() * least, math.ceil(_IN_BLOCKS * least), is_bounded=True)


_CONVOLUTIONS = (
    "convolution", "_convolution", "convolution_overrideable", "cudnn_convolution", "cudnn_convolution_transpose",
    "cudnn_convolution_relu", "cudnn_convolution_add_relu", "_slow_conv2d_forward", "_conv_depthwise2d",
    "conv_depthwise3d", "slow_conv_dilated2d", "slow_conv_dilated3d", "slow_conv_transpose2d", "slow_conv_transpose3d",
)  # fmt: skip
_LU = ("linalg_lu_factor_ex", "linalg_lu", "_linalg_det", "_linalg_slogdet", "_linalg_solve_ex")
_HALF_SPARSE = (
    "_cslt_sparse_mm", "_sparse_semi_structured_linear", "_sparse_semi_structured_mm", "_sparse_semi_structured_addmm",
)  # fmt: skip
_COUNTERS: dict[str, Counter] = {
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    "convolution_backward": _convolution_backward,
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent_backward,
    **dict.fromkeys(("_ctc_loss", "_ctc_loss_backward", "_cudnn_ctc_loss"), _ctc),
    **dict.fromkeys(("_cdist_forward", "_cdist_backward", "_pdist_forward", "_pdist_backward"), _distance),
    **dict.fromkeys(("_weight_int4pack_mm", "_weight_int8pack_mm"), _packed_product),
    **dict.fromkeys(_HALF_SPARSE, _half_sparse_product),
    **dict.fromkeys(("mv", "addmv", "_sparse_addmm", "_sparse_mm", "sparse_sampled_addmm"), _sparse_product),
    "linalg_cholesky_ex": _factorisation(1 / 3, _IN_BLOCKS),
    "linalg_ldl_factor_ex": _factorisation(1 / 3, 1),
    **dict.fromkeys(_LU, _factorisation(2 / 3, _BY_COLUMN)),
    "cholesky_inverse": _factorisation(2 / 3, _IN_BLOCKS),
    **dict.fromkeys(("linalg_qr", "geqrf", "linalg_householder_product"), _factorisation(4 / 3, _BY_COLUMN)),
    "linalg_inv_ex": _factorisation(4 / 3, _BY_COLUMN),
    "linalg_lstsq": _factorisation(4 / 3, 2),
    "_linalg_eigh": _EIGENVECTORS,
    **dict.fromkeys(("_linalg_svd", "svd"), _SINGULAR_VECTORS),
    "linalg_pinv": _pseudo_inverse,
    **dict.fromkeys(("linalg_eig", "_linalg_eigvals"), _factorisation(8 / 3, 64)),
    **dict.fromkeys(("linalg_solve_triangular", "triangular_solve", "linalg_lu_solve"), _solution),
    **dict.fromkeys(("_cholesky_solve_helper", "linalg_ldl_solve", "ormqr"), _solution),
}


#: Rows up to this size stay in the caches between two passes: each of an H100's 132 SMs works on two of them, and its
#: second-level cache has 50 MB.
CACHED_ROW_BYTES = 128 << 10


class KernelPart(NamedTuple):
    """Kernels whose names contain one of these words, and their least bytes together.

    ``arithmetic`` is their fraction of the operation's; without any, it is that of other kernels.
    """

    words: tuple[str, ...]
    moved_bytes: float
    arithmetic: float = 0.0


#: Returns an operation's parts, from its arguments and its result.
Parts = Callable[[Arguments, object], tuple[KernelPart, ...]]


def parts_function(operator: Operator) -> Parts | None:
    """The function for an operator; None if its kernels divide its bytes evenly."""
    if operator.qualified_name.startswith(_BITSANDBYTES):
        return _BITSANDBYTES_PARTS.get(operator.name)
    return _PARTS.get(operator.name)


def _bytes_of(value: object) -> float:
    return float(sum(tensor.nbytes for tensor in tensors((value,)) if tensor.layout is torch.strided))


def _is_long(rows: torch.Tensor, dim: object) -> bool:
    """Return whether a row is too long for the caches. These kernels read only rows of the last dimension."""
    if not isinstance(dim, int) or not rows.dim() or dim not in (-1, rows.dim() - 1):
        return False
    return int(rows.shape[-1]) * rows.element_size() > CACHED_ROW_BYTES


def _softmax(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    """SoftMax.cu, cunn_SoftMaxForward: the maximum, the sum, then the result."""
    rows = next(tensors(args))
    if not _is_long(rows, args[1]):
        return ()
    return (KernelPart(("cunn_SoftMaxForward<",), 3 * _bytes_of(rows) + _bytes_of(result)),)


def _log_softmax_backward(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    """SoftMax.cu, cunn_SoftMaxBackward: the sum of the gradient, then the result."""
    grad, output = tensors(args[:2])
    if not _is_long(grad, args[2]):
        return ()
    return (KernelPart(("cunn_SoftMaxBackward<",), 2 * _bytes_of(grad) + _bytes_of(output) + _bytes_of(result)),)


def _softmax_backward(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    """SoftMax.cu, softmax_backward_cuda_out: multiplies gradient and output first."""
    grad, output = tensors(args[:2])
    multiplied = KernelPart(("elementwise_kernel",), 2 * _bytes_of(grad) + _bytes_of(output))
    return (multiplied, *_log_softmax_backward(args, result))


def _embedding_backward(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    """Embedding.cu and EmbeddingBackwardKernel.cu: sorts the indices, sums runs of rows in fp32, adds the sums."""
    grad, indices = tensors(args[:2])
    sums = float(grad.numel()) * 4
    sorting = ("radix_sort", "::scan::", "unique_by_key", "krn_partial", "compute_num_of_partial", "_with_index")
    return (
        KernelPart(sorting, 4 * _bytes_of(indices)),
        KernelPart(("compute_grad_weight",), _bytes_of(grad) + sums),
        KernelPart(("sum_and_scatter",), sums + _bytes_of(grad)),
    )


def _foreach_norm(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    """ForeachReduceOp.cu: a second kernel adds what each block found."""
    return (KernelPart(("cleanup",), 2 * _bytes_of(result)),)


def _group_norm(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    """group_norm_kernel.cu: the moments of each group, then the result."""
    return (
        KernelPart(("RowwiseMoments",), _bytes_of(args[0])),
        KernelPart(("ComputeFusedParams",), _bytes_of(args[1:3])),
    )


def _batch_norm(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    """Normalization.cuh: the statistics of each channel, then the result."""
    return (KernelPart(("collect_statistics",), _bytes_of(args[0])),)


def _convolution_gradients(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    """Convolution.cpp, convolution_backward: a sum over the gradient makes that of the bias."""
    if not isinstance(result, (list, tuple)):
        return ()
    bias = result[2] if len(result) > 2 else None
    summed = () if bias is None else (KernelPart(("reduce_kernel",), _bytes_of(args[0]) + _bytes_of(bias)),)
    return (*summed, *_depthwise_backward(args, result))


def _depthwise_backward(args: Arguments, result: Sequence[object]) -> tuple[KernelPart, ...]:
    """DepthwiseConv2d.cu, DepthwiseConv3d.cu: a kernel per gradient, behind copies; the weight's has few threads."""
    (grad, data, weight), groups = tensors(args[:3]), args[9]
    if groups != data.shape[1] or groups == 1:
        return ()
    fraction = 1.0 / max(sum(isinstance(gradient, torch.Tensor) for gradient in result[:2]), 1)
    names = (("depthwise2d_backward", "backward_input"), ("depthwise2d_grad_weight", "backward_weight"))
    gradients = [
        KernelPart(words, _bytes_of((grad, other, made)), fraction)
        for words, other, made in zip(names, (weight, data), result, strict=False)
        if isinstance(made, torch.Tensor)
    ]
    strided = [tensor for tensor in (grad, data) if not tensor.is_contiguous()]
    copied = sum(min(tensor.nbytes, storage_of(tensor)[1]) + tensor.nbytes for tensor in strided)
    return (*gradients, KernelPart(("elementwise_kernel",), float(copied))) if copied else tuple(gradients)


def _pad(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    """ConstantPadNd.cpp: fills the result, then copies what is kept of the input into it."""
    kept, filled = _kept_bytes(args), _bytes_of(result)
    return (KernelPart(("FillFunctor",), filled), KernelPart(("copy",), 2 * kept))


def _kept_bytes(args: Arguments) -> float:
    (data, *_), pads = tensors(args[:1]), args[1]
    sizes = list(data.shape)
    assert isinstance(pads, (list, tuple))
    for index, (left, right) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        sizes[-1 - index] += min(int(left), 0) + min(int(right), 0)
    return float(math.prod(max(size, 0) for size in sizes) * data.element_size())


def _mirrored_pad_backward(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    """ReflectionPad.cu and ReplicationPadding.cu: fills the result with zeros, then adds the gradient to it."""
    return (KernelPart(("reflection_pad", "replication_pad"), _bytes_of(args[0]) + _bytes_of(result)),)


def _loss(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    """Loss.cu: the loss of each element is written, and read again where it is reduced."""
    loss_bytes = max(_bytes_of(args[0]), _bytes_of(args[1]))
    if len(args) > 2 and args[2] == 0:  # at::Reduction::None
        return ()
    return (
        KernelPart(("elementwise_kernel",), _bytes_of(args[:2]) + loss_bytes),
        KernelPart(("reduce_kernel",), loss_bytes),
    )


_PARTS: dict[str, Parts] = {
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _loss),
    "constant_pad_nd": _pad,
    **{f"{kind}_pad{n}d_backward": _mirrored_pad_backward for kind in ("reflection", "replication") for n in (1, 2, 3)},
    "convolution_backward": _convolution_gradients,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "embedding_dense_backward": _embedding_backward,
    "_foreach_norm": _foreach_norm,
    "native_group_norm": _group_norm,
    "native_batch_norm": _batch_norm,
}


_BITSANDBYTES = "bitsandbytes::"
#: Its optimizers, which change their states in place and only read the gradient, their first tensor.
BITSANDBYTES_OPTIMIZERS = ("optimizer_update_32bit", "optimizer_update_8bit_blockwise")


def _bitsandbytes_moving(call: Call) -> Arithmetic:
    """Only moves and converts. Products inside, which cuBLASLt computes, state their own sizes."""
    return Arithmetic(0.0, is_bounded=True)


def _four_bit_product(call: Call) -> Arithmetic:
    """A product with a matrix of four bits, in one kernel. For many rows, it is decoded first and cuBLAS multiplies."""
    return Arithmetic(2.0 * call.tensor("A").numel() * int(_decoded_shape(call.value("shapeB"))[0]), is_bounded=True)


def _decoded_shape(value: object) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise TypeError(f"a matrix of four bits of shape {value}")
    return int(value[0]), int(value[1])


def _decoding(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    rows, packed, shape, scales, *others = args
    assert isinstance(rows, torch.Tensor)
    decoded = math.prod(_decoded_shape(shape)) * rows.element_size()
    decoding = KernelPart(("kDequantizeBlockwise",), decoded + _bytes_of(packed) + _bytes_of((scales, others)))
    has_bias = len(others) > 2 and others[2] is not None
    if has_bias:
        return (decoding,)
    return decoding, KernelPart(("elementwise_kernel",), 2 * _bytes_of(scales))  # adds the scales' offset


def _encoding(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    rows, encoded = next(tensors(args)), next(tensors((result,)))
    return (KernelPart(("kInt8VectorQuant",), _bytes_of(rows) + _bytes_of(encoded)),)


def _scaling(args: Arguments, result: object) -> tuple[KernelPart, ...]:
    return (KernelPart(("kdequant_mm_int32",), (4.0 + 2.0) * next(tensors((result,))).numel()),)


_BITSANDBYTES_COUNTERS: dict[str, Counter] = {
    **dict.fromkeys(
        ("quantize_4bit", "dequantize_4bit", "quantize_blockwise", "dequantize_blockwise"), _bitsandbytes_moving
    ),
    **dict.fromkeys(("int8_vectorwise_quant", "int8_vectorwise_dequant", "int8_double_quant"), _bitsandbytes_moving),
    **dict.fromkeys(
        ("int8_linear_matmul", "int8_scaled_mm", "int8_mixed_scaled_mm", "int8_mm_dequant"), _bitsandbytes_moving
    ),
    **dict.fromkeys(BITSANDBYTES_OPTIMIZERS, _bitsandbytes_moving),
    **dict.fromkeys(("gemm_4bit", "gemv_4bit"), _four_bit_product),
}
_BITSANDBYTES_PARTS: dict[str, Parts] = {
    "gemm_4bit": _decoding,
    **dict.fromkeys(("int8_vectorwise_quant", "int8_double_quant"), _encoding),
    **dict.fromkeys(("int8_scaled_mm", "int8_mixed_scaled_mm"), _scaling),
}
