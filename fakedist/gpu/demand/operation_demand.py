"""The demand of an operation on a GPU: floating-point operations, bytes and sizes, from its arguments and results.

FLOPs of attention leave out what its mask spares, unlike torch.utils.flop_counter. :mod:`fakedist.gpu.demand.formulas`
has those of operators that torch's counter lacks. Torch's other operations count as 0; those of other libraries have
the formula that their author gave to torch's counter, or are unknown. Bytes are the least: each input and result once,
unless ``formulas`` knows that kernels read more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch._ops import OpOverload

from fakedist.gpu.demand.formulas import (
    BITSANDBYTES_OPTIMIZERS,
    Call,
    KernelPart,
    arithmetic_function,
    fp32_type,
    parts_function,
)
from fakedist.gpu.demand.work_shapes import AttentionOperator, AttentionShape, Known, ProductShape
from fakedist.gpu.values.contents import HOST_LIMIT_BYTES, is_float
from fakedist.gpu.values.host import INDEXING, READS, is_mask
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.sparse import is_sparse, parts
from fakedist.gpu.values.tensors import Arguments, Keywords, storage_of, tensors

#: Returns the length of the rows, from a call's arguments and its result.
Length = Callable[[Arguments, Keywords, object], int]

#: These reduce dimension ``dim`` of their first argument.
_ALONG_DIM = {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "logsumexp"} | {
    "cumsum", "topk", "sort",
}  # fmt: skip
#: These pick a class of each row; the argument at this position has the rows.
_CLASS_AXES = {"nll_loss_forward": 0, "nll_loss_backward": 1, "nll_loss2d_forward": 0, "nll_loss2d_backward": 1}
#: These reduce as many values to one as their argument has for each of their result's.
_REDUCE = {"sum", "mean", "amax", "amin", "max", "min", "prod", "var", "var_mean", "std", "std_mean", "norm"} | {
    "linalg_vector_norm", "argmax", "argmin", "any", "all", "nansum", "count_nonzero",
}  # fmt: skip


def length_function(operator: Operator) -> Length | None:
    """The function for an operator; None if it reduces no rows."""
    name = operator.name
    if name in _ALONG_DIM:
        return lambda args, kwargs, result: _along_dim(args, operator.argument("dim", args, kwargs))
    if name in _CLASS_AXES:
        position = _CLASS_AXES[name]
        return lambda args, kwargs, result: _classes(args[position])
    if name in _REDUCE:
        return lambda args, kwargs, result: _reduced(args, result)
    if name.startswith("native_group_norm"):
        return lambda args, kwargs, result: _group(args, operator.argument("group", args, kwargs))
    if "batch_norm" in name:
        return lambda args, kwargs, result: _batch(args)
    if any(argument.name == "normalized_shape" for argument in operator.func._schema.arguments):
        return lambda args, kwargs, result: _normalized(operator.argument("normalized_shape", args, kwargs))
    return None


def _along_dim(args: Arguments, dim: object) -> int:
    first = next(tensors(args), None)
    if first is None or not first.dim():
        return 0
    return int(first.shape[dim if isinstance(dim, int) else -1])


def _classes(rows: object) -> int:
    if not isinstance(rows, torch.Tensor) or not rows.dim():
        return 0
    return int(rows.shape[1 if rows.dim() > 1 else 0])


def _reduced(args: Arguments, result: object) -> int:
    before = next(tensors(args), None)
    after = next(tensors((result,)), None)
    if before is None or after is None or not after.numel():
        return 0
    return int(before.numel()) // int(after.numel())


def _group(args: Arguments, groups: object) -> int:
    first = next(tensors(args), None)
    if first is None or not isinstance(groups, int) or not first.dim() or not first.shape[0]:
        return 0
    return int(first.numel()) // (int(first.shape[0]) * max(groups, 1))


def _batch(args: Arguments) -> int:
    first = next(tensors(args), None)
    return int(first.numel()) // max(int(first.shape[1]), 1) if first is not None and first.dim() > 1 else 0


def _normalized(shape: object) -> int:
    return math.prod(int(size) for size in shape) if isinstance(shape, (list, tuple)) else 0


NAN = float("nan")
#: Of these arguments, the operation reads only as much as it returns.
_PICKED_FROM = {"embedding": 0, "index_select": 0, "gather": 0, "index": 0, "_unsafe_index": 0, "take": 0} | {
    "take_along_dim": 0, "nll_loss_forward": 0, "nll_loss2d_forward": 0,
}  # fmt: skip
#: Of these arguments, the operation uses only the shape.
_NOT_READ = (
    {"nll_loss_backward": 1, "nll_loss2d_backward": 1, "_adaptive_avg_pool2d_backward": 1}
    | dict.fromkeys(
        (f"{name}{dims}d_backward" for name in ("reflection_pad", "replication_pad", "avg_pool") for dims in (1, 2, 3)),
        1,
    )
    | {"max_pool2d_with_indices_backward": 1, "max_pool3d_with_indices_backward": 1}
)
#: These change only as much of their first argument as their other arguments provide.
_PUT_INTO = {"index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_"} | {
    "scatter_reduce_", "index_reduce_", "put_",
}  # fmt: skip
#: FSDP2 copies its shards into part of a buffer, which is also an argument, and returns views of it.
_COPIES_FIRST = {"all_gather_copy_in"}
#: Torch's operations outside of its main namespaces that compute nothing: FSDP2's copies between shards and buffers.
_MOVING = ("fsdp::",)
#: These write gradients only when they scale them.
_FUSED_OPTIMIZERS = ("_fused_adam", "_fused_sgd", "_fused_adagrad")
#: The position of the gradient in bitsandbytes' optimizers.
_UPDATES_BY = 1
_ONE_VALUE = 8
#: Types of eight-bit floats.
EIGHT_BIT = {torch.float8_e4m3fn, torch.float8_e5m2}
_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"} | {
    torch.int8: "int8", torch.uint8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
    torch.complex128: "fp64", torch.complex64: "fp32", torch.complex32: "bf16",
}  # fmt: skip


class Demand(NamedTuple):
    """The demand of one operation. ``dtype``, ``steps`` and ``is_bounded`` as in ``WorkRow``.

    Attributes:
        flops: Floating-point operations; NaN if unknown.
        moved_bytes: The fewest bytes it must read and write, without those of ``parts``; NaN if unknown.
        width: Length of the rows that it reduces or normalises; 0 if it does neither.
        quantized: Rows and columns of a matrix that it converts to eight bits, or zeros.
        is_dense: Whether an attention counts as unmasked because its mask's values are unknown.
        num_indices: Rows of an embedding that it looks up, or 0.
    """

    flops: float = NAN
    moved_bytes: float = NAN
    dtype: str = "bf16"
    attention: AttentionShape | None = None
    product: ProductShape | None = None
    width: int = 0
    quantized: tuple[int, int] = (0, 0)
    is_dense: bool = False
    parts: tuple[KernelPart, ...] = ()
    num_indices: int = 0
    steps: int = 0
    is_bounded: bool = False

    @property
    def is_divided(self) -> bool:
        """Return whether its kernels differ: one computes something of known sizes, or some have bytes of their own."""
        return self.is_of_one_kernel or self.parts != () or self.steps != 0

    @property
    def is_of_one_kernel(self) -> bool:
        """Return whether one kernel does its main work."""
        return self.attention is not None or self.product is not None or self.quantized != (0, 0)


UNKNOWN = Demand()
#: Of a view, which launches nothing.
NOTHING = Demand(0.0, 0.0)
#: Products of matrices, and the position of their first operand. torch's own formulas take 20 us for the same.
_OPERANDS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_scaled_mm": 0, "_addmm_activation": 1, "_int_mm": 0}


def _fills(args: Arguments) -> bool:
    """Whether an indexing operation writes one number of the host through one mask: masked_fill reads nothing."""
    value = args[2] if len(args) > 2 else None
    return (
        isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_cpu and len(list(tensors(args[1:2]))) == 1
    )


class DemandCounter:
    """Counts the demand of one operator's calls; ``known`` gives the values of packed sequences' offsets.

    ``operation`` is its name. ``is_alike``: the demand follows from the arguments' types and sizes, whatever their
    values.
    """

    def __init__(self, func: OpOverload, known: Known = lambda tensor: None) -> None:
        self._operator = operator = Operator(func)
        self.operation = operator.full_name
        name = operator.name
        self._attention = AttentionOperator(operator, known) if AttentionOperator.reads(operator) else None
        self._is_grouped = "grouped_mm" in name
        from torch.utils.flop_counter import flop_registry  # imports Triton, which torch itself does not

        self._formula: Callable[..., float] | None = flop_registry.get(func._overloadpacket)
        self._operands = _OPERANDS.get(name, -1) if operator.is_kernel else -1
        self._arithmetic = arithmetic_function(operator)
        self._only_moves = operator.is_kernel or operator.qualified_name.startswith(_MOVING)
        self._length = length_function(operator)
        self._parts = parts_function(operator)
        self._is_embedding = name == "embedding"
        self._converts = name in ("_to_copy", "copy_")
        self._picked_from = _PICKED_FROM.get(name, -1)
        self._not_read = _NOT_READ.get(name, 0 if operator.like else -1)
        self._indexes = name in INDEXING
        self._reads = operator.dynamic or name in READS or self._converts or self._indexes
        self._puts_into = name in _PUT_INTO
        self._copies_first = name in _COPIES_FIRST
        is_updating = name in BITSANDBYTES_OPTIMIZERS
        self._grads_position = 1 if name.startswith(_FUSED_OPTIMIZERS) else _UPDATES_BY if is_updating else -1
        has_settings = self._arithmetic is not None
        self.is_alike = self._attention is None and not has_settings and not (operator.is_view and self._reads)

    def demand(self, args: Arguments, kwargs: Keywords, result: object) -> Demand:
        """The demand of one call that has returned."""
        if self._operator.is_view:
            return NOTHING
        moved, dtype = float(self._moved_bytes(args, kwargs, result)), dtype_of(args)
        if self._attention is not None:
            attention = self._attention.demand(args, kwargs)
            if attention is None:
                return Demand(NAN, moved, dtype)
            return Demand(attention.flops, moved, dtype, attention.shape)
        if self._is_grouped:
            product = grouped_shape(args, result)
            return Demand(product.flops, moved, dtype, product=product)
        if self._operands >= 0:
            bounded = any(map(is_sparse, tensors(args)))  # gathers rows: only the least is known
            return Demand(_product_flops(args, self._operands), moved, dtype, is_bounded=bounded)
        if self._arithmetic is not None:
            return self._computing(moved, dtype, Call(self._operator, args, kwargs, result))
        if self._formula is None:
            return self._moving(moved, dtype, args, kwargs, result) if self._only_moves else Demand(NAN, moved, dtype)
        try:
            flops = float(self._formula(*args, **kwargs, out_val=result))
        except Exception:  # the formula does not know these arguments
            flops = NAN
        return Demand(flops, moved, dtype)

    def _computing(self, moved: float, dtype: str, call: Call) -> Demand:
        assert self._arithmetic is not None
        try:
            flops, steps, is_bounded, is_scalar = self._arithmetic(call)
        except (TypeError, ValueError, IndexError):  # arguments that the formula does not know
            return Demand(NAN, moved, dtype)
        if dtype == "fp32" and ("conv" in self._operator.name or "rnn" in self._operator.name):
            dtype = fp32_type("rnn" if "rnn" in self._operator.name else "conv")
        if is_scalar and dtype != "fp64":
            dtype = "fp32"
        parts = () if self._parts is None else self._parts(call.args, call.result)
        return Demand(flops, moved, dtype, parts=parts, steps=steps, is_bounded=is_bounded)

    def _moving(self, moved: float, dtype: str, args: Arguments, kwargs: Keywords, result: object) -> Demand:
        width = 0 if self._length is None else self._length(args, kwargs, result)
        parts = () if self._parts is None else self._parts(args, result)
        if self._converts and isinstance(result, torch.Tensor) and result.dtype in EIGHT_BIT:
            *_, source = tensors(args)
            if source.dtype not in EIGHT_BIT:
                return Demand(0.0, moved, "fp8", quantized=matrix_size(result))
        indices = args[1].numel() if self._is_embedding and isinstance(args[1], torch.Tensor) else 0
        return Demand(0.0, moved, dtype, None, None, width, (0, 0), False, parts, indices)

    def may_read(self, args: Arguments, result: object) -> bool:
        """Whether the host waits for some calls with arguments of these types and sizes."""
        if not self._reads or all(tensor.is_cpu for tensor in tensors(args)):
            return False
        if self._indexes:
            return any(map(is_mask, tensors(args[1:2])))
        return not self._converts or self._target(args, result).is_cpu

    def read_bytes(self, args: Arguments, kwargs: Keywords, result: object) -> int:
        """Bytes that one call read back to the host: one value if only a size came; 0 if it does not wait."""
        if not self.may_read(args, result):
            return 0
        if self._indexes:
            return 0 if _fills(args) else _ONE_VALUE
        if not self._converts:
            return _ONE_VALUE
        target = self._target(args, result)
        is_blocking = not kwargs.get("non_blocking", len(args) > 2 and args[2])
        return int(target.nbytes) if is_blocking or not target.is_pinned() else 0

    def on_host(self, args: Arguments, kwargs: Keywords, result: object) -> tuple[int, int] | None:
        """Elements of the largest tensor, and bytes moved, of a call on large floats of the host's; None for others.

        The value engine does not compute it (:mod:`fakedist.gpu.values.no_data`). A copy from or to the GPU is none.
        """
        operator = self._operator
        if operator.is_view or operator.reshapes or operator.is_idle or (operator.empty and not operator.zeros):
            return None
        read = list(tensors((*args, *kwargs.values())))
        concerned = read + list(tensors((result,)))
        if any(tensor.is_cuda for tensor in concerned) or not any(map(_is_large_on_host, concerned)):
            return None
        named = [value for name, value in kwargs.items() if name in operator.written_names]
        written = list(tensors([*(args[i] for i in operator.written if i < len(args)), *named]))
        ids = {id(tensor) for tensor in written} if operator.overwrites else set()
        moved = [*(tensor for tensor in read if id(tensor) not in ids), *(written or tensors((result,)))]
        moved_bytes = sum(min(tensor.nbytes, storage_of(tensor)[1]) for tensor in moved)
        return max(tensor.numel() for tensor in concerned), moved_bytes

    def _target(self, args: Arguments, result: object) -> torch.Tensor:
        target = args[0] if self._operator.name == "copy_" else result
        assert isinstance(target, torch.Tensor)
        return target

    def _moved_bytes(self, args: Arguments, kwargs: Keywords, result: object) -> int:
        operator, written = self._operator, self._read_again(args, result)
        if self._copies_first:
            return 2 * sum(map(memory_bytes, tensors((args[0],))))
        fresh = _size(result) if not operator.written else 0
        scaled = kwargs.get("grad_scale") is not None
        total = 0
        for position, value in enumerate(args):
            size = _size(value)
            if position == self._not_read:
                size = 0
            elif position == self._picked_from:
                size = min(size, fresh)
            elif self._puts_into and position == 0:
                size = min(size, sum(map(memory_bytes, tensors(args[1:]))))
            if position in operator.written and (position != self._grads_position or scaled):
                written += size
                if operator.overwrites:
                    continue
            total += size
        for name, value in kwargs.items():
            size = _size(value)
            written_too = name in operator.written_names
            total += size if not (written_too and operator.overwrites) else 0
            written += size if written_too else 0
        return total + written + fresh

    def _read_again(self, args: Arguments, result: object) -> int:
        """Bytes read beyond once: each gradient of a convolution reads the result's. The bias kernel has its own."""
        if self._operator.name != "convolution_backward" or not isinstance(result, (list, tuple)):
            return 0
        return _size(args[0]) if all(isinstance(gradient, torch.Tensor) for gradient in result[:2]) else 0


def _is_large_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and is_float(tensor) and storage_of(tensor)[1] > HOST_LIMIT_BYTES


def reduced_demand(matrix: torch.Tensor, result: torch.Tensor, num_ranks: int) -> Demand:
    """The demand, without the products, of one that the ranks add up: the sum, a wait, and a copy in another order."""
    parts = (
        KernelPart(("sum_functor", "MeanOps"), float((num_ranks + 1) * memory_bytes(result))),
        KernelPart(("spin_kernel",), 0.0),
        KernelPart(("copy",), float(2 * memory_bytes(matrix))),
    )
    return Demand(0.0, 0.0, dtype_of((result,)), width=num_ranks, parts=parts)


def grouped_shape(args: Arguments, result: object) -> ProductShape:
    """The sizes of a grouped product: each row belongs to one group, or each matrix is a group."""
    first, second = tensors(args[:2])
    a, b = ([int(size) for size in matrix.shape] for matrix in (first, second))
    if len(a) == 3 and len(b) == 3:
        shape = ProductShape(a[0] * a[1], b[2], a[2], groups=a[0])
    elif len(a) == 3:  # the columns of the second are cut into groups
        shape = ProductShape(a[0] * a[1], b[1] // max(a[0], 1), a[2], groups=a[0])
    elif len(b) == 3:
        shape = ProductShape(a[0], b[2], a[1], groups=b[0])
    else:  # what is summed over is cut: the gradient of the weights
        groups = int(result.shape[0]) if isinstance(result, torch.Tensor) and result.dim() == 3 else 1
        shape = ProductShape(groups * a[0], b[1], a[1] // max(groups, 1), groups=groups)
    d_bytes = result.element_size() if isinstance(result, torch.Tensor) else 0
    scaling = _scaling(args) if first.dtype in EIGHT_BIT else ""
    return shape._replace(
        layout="NT"[second.stride(-2) == 1 and b[-1] > 1] + "TN"[first.stride(-1) == 1],
        a_bytes=first.element_size(),
        b_bytes=second.element_size(),
        d_bytes=d_bytes,
        scaling=scaling,
    )


def _product_flops(args: Arguments, first: int) -> float:
    a, b = args[first], args[first + 1]
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return NAN
    elements = (parts(a)[-1] if is_sparse(a) else a).numel()
    return (8.0 if a.is_complex() else 2.0) * elements * b.shape[-1]


def _scaling(args: Arguments) -> str:
    scale = next(tensors(args[2:]), None)
    if scale is None or scale.numel() <= 1:
        return "tensor"
    return "row" if scale.dim() == 1 or scale.shape[-1] == 1 else "block"


def matrix_size(tensor: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a tensor, taken as one matrix of its last dimension's rows."""
    columns = int(tensor.shape[-1]) if tensor.dim() else 1
    return int(tensor.numel()) // max(columns, 1), columns


def tensor_bytes(values: Iterable[object]) -> float:
    """Bytes of the device tensors among a kernel's arguments, each once."""
    return float(sum({tensor.data_ptr(): memory_bytes(tensor) for tensor in tensors(values)}.values()))


def _size(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return memory_bytes(value)
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0


def memory_bytes(tensor: torch.Tensor) -> int:
    """A device tensor's bytes, at most its storage's.

    The states of bitsandbytes' paged optimizers are the host's for torch, and managed memory for CUDA.
    """
    if tensor.is_cpu:
        return int(tensor.nbytes) if getattr(tensor, "is_paged", False) else 0
    if is_sparse(tensor):
        return sum(map(memory_bytes, parts(tensor)))
    if tensor.layout is torch.strided and tensor.is_contiguous():
        return int(tensor.nbytes)
    return min(tensor.nbytes, storage_of(tensor)[1])


def dtype_of(args: Arguments) -> str:
    """The type that an operation on these arguments computes in, a key of ``GpuSpec.peak_flops``."""
    first = next((tensor for tensor in tensors(args) if tensor.dtype in _DTYPES), None)
    return _DTYPES[first.dtype] if first is not None else "fp32"
