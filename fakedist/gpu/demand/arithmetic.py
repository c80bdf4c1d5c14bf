"""FLOPs of torch's operations that its own counter (torch.utils.flop_counter) lacks or counts wrongly.

Convolutions are among them: the counter multiplies the weight gradient of a grouped convolution by the number of its
groups (``conv_backward_flop``, torch 2.8 to 2.15).

Of some operations only the least is known: their FLOPs and the steps that follow one another, but not how close their
kernels come to the GPU's limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from fakedist.gpu.values.arguments import Arguments, Keywords, tensors
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.sparse import is_sparse, parts


class Arithmetic(NamedTuple):
    """What an operation computes.

    Attributes:
        flops: Floating-point operations.
        steps: How many steps follow one another, each of which waits for the one before; 0 if it has none.
        is_bounded: Whether only the least is known that its kernels take.
        is_scalar: Whether it runs in fp32 without tensor cores, whatever the type of its operands.
    """

    flops: float
    steps: int = 0
    is_bounded: bool = False
    is_scalar: bool = False


class Call(NamedTuple):
    """A call that has returned.

    Attributes:
        operator: What was called.
        args: Its arguments.
        kwargs: Its keyword arguments.
        result: What it returned.
    """

    operator: Operator
    args: Arguments
    kwargs: Keywords
    result: object

    def value(self, name: str) -> object:
        """An argument; None if the operator has no such argument."""
        return self.operator.argument(name, self.args, self.kwargs)

    def tensor(self, *names: str) -> torch.Tensor:
        """The first of these arguments that is a tensor.

        Raises:
            TypeError: None is.
        """
        found = next((value for name in names if isinstance(value := self.value(name), torch.Tensor)), None)
        if found is None:
            raise TypeError(f"{self.operator.full_name} without {names[0]}")
        return found

    def returned(self) -> torch.Tensor:
        """The first tensor of the result.

        Raises:
            TypeError: It has none.
        """
        found = next(tensors((self.result,)), None)
        if found is None:
            raise TypeError(f"{self.operator.full_name} returned no tensor")
        return found


#: Returns the arithmetic of a call. Raises TypeError, ValueError or IndexError for arguments that it does not know.
Counter = Callable[[Call], Arithmetic]


def arithmetic_function(operator: Operator) -> Counter | None:
    """The function for an operator; None if it has none here."""
    return _COUNTERS.get(operator.name) if operator.is_kernel else None


def fp32_type(operation: str) -> str:
    """The type in which cuDNN computes convolutions ("conv") or recurrent networks ("rnn") of fp32 operands."""
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is None:  # torch 2.8
        return "tf32" if torch.backends.cudnn.allow_tf32 else "fp32"
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
    each = 3.0 if call.value("p") in (0.0, 1.0, 2.0, float("inf")) else 10.0  # a power: logarithm, exponential
    width = int(call.tensor("x1", "self").shape[-1])
    return Arithmetic((each if is_forward else each + 1) * pairs.numel() * width, is_bounded=True, is_scalar=True)


# ---- products with packed or sparse weights


def _packed_product(call: Call) -> Arithmetic:
    """Weights of four or eight bits become the first operand's type on the way to the tensor cores."""
    return Arithmetic(2.0 * call.returned().numel() * int(call.tensor("self").shape[-1]), is_bounded=True)


def _half_sparse_product(call: Call) -> Arithmetic:
    """Of one operand, two of four values are kept. Tensor cores skip the others."""
    dense = call.tensor("dense_B", "mat2", "input")
    inner = int(dense.shape[-1 if call.operator.name.endswith("linear") else 0])
    return Arithmetic(1.0 * call.returned().numel() * inner, is_bounded=True)


def _sparse_product(call: Call) -> Arithmetic:
    """Each place of the sparse operand meets a row of the dense one. Dense operands' products state their own sizes."""
    sparse = next((each for each in tensors(call.args) if is_sparse(each)), None)
    if sparse is None:
        return Arithmetic(0.0)
    dense = next(each for each in reversed(list(tensors(call.args))) if each is not sparse)
    is_sampled = call.operator.name == "sparse_sampled_addmm"  # each place is a product of a row and a column
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
    """Of its eigenvectors if it is Hermitian, else of its singular vectors. The products state their own sizes."""
    return (_EIGENVECTORS if call.value("hermitian") else _SINGULAR_VECTORS)(call)


_EIGENVECTORS, _SINGULAR_VECTORS = _factorisation(4 / 3, 2), _factorisation(8 / 3, 32)


def _solution(call: Call) -> Arithmetic:
    matrix = call.tensor("LU", "A", "LD", "self")
    least = int(min(matrix.shape[-2:]))
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
