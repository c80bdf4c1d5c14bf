"""FLOPs and bytes of bitsandbytes' operations: weights of four and eight bits, and optimizers with such states.

Its kernels stream what they read and write, and decode or encode each element on the way. No measurement covers them,
so only the least is known that they take. Sizes follow from ``_ops.py`` and ``backends/cuda/ops.py`` of release 0.50.
"""

from __future__ import annotations

import math

import torch

from fakedist.gpu.demand.arithmetic import Arithmetic, Call, Counter
from fakedist.gpu.demand.kernel_parts import Part, Parts
from fakedist.gpu.values.arguments import Arguments, tensors
from fakedist.gpu.values.operators import Operator

_PREFIX = "bitsandbytes::"
#: Its optimizers, which change their states in place and only read the gradient, their first tensor.
OPTIMIZERS = ("optimizer_update_32bit", "optimizer_update_8bit_blockwise")


def arithmetic_of(operator: Operator) -> Counter | None:
    """The arithmetic of one of its operators; None if it has none here."""
    return _COUNTERS.get(operator.name) if operator.qualified_name.startswith(_PREFIX) else None


def parts_of(operator: Operator) -> Parts | None:
    """The kernels of one of its operators that have bytes of their own; None if they share the operation's."""
    return _PARTS.get(operator.name) if operator.qualified_name.startswith(_PREFIX) else None


def _moving(call: Call) -> Arithmetic:
    """Only moves and converts. Products inside, which cuBLASLt computes, state their own sizes."""
    return Arithmetic(0.0, is_bounded=True)


def _product(call: Call) -> Arithmetic:
    """A product with a matrix of four bits, in one kernel. For many rows, it is decoded first and cuBLAS multiplies."""
    rows = call.tensor("A")
    return Arithmetic(2.0 * rows.numel() * int(_shape(call.value("shapeB"))[0]), is_bounded=True)


def _shape(value: object) -> tuple[int, int]:
    """Rows and columns of the decoded matrix."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise TypeError(f"a matrix of four bits of shape {value}")
    return int(value[0]), int(value[1])


def _bytes_of(value: object) -> float:
    return float(sum(tensor.nbytes for tensor in tensors((value,))))


def _decoding(args: Arguments, result: object) -> tuple[Part, ...]:
    """Reads the packed matrix and its scales, and writes it in the type of the other operand."""
    rows, packed, shape, scales, *others = args
    assert isinstance(rows, torch.Tensor)
    decoded = math.prod(_shape(shape)) * rows.element_size()
    decoding = Part(("kDequantizeBlockwise",), decoded + _bytes_of(packed) + _bytes_of((scales, others)))
    has_bias = len(others) > 2 and others[2] is not None
    if has_bias:
        return (decoding,)
    return decoding, Part(("elementwise_kernel",), 2 * _bytes_of(scales))  # adds the scales' offset


def _encoding(args: Arguments, result: object) -> tuple[Part, ...]:
    """Reads the rows once and writes them in eight bits, with a scale for each."""
    rows, encoded = next(tensors(args)), next(tensors((result,)))
    return (Part(("kInt8VectorQuant",), _bytes_of(rows) + _bytes_of(encoded)),)


def _scaling(args: Arguments, result: object) -> tuple[Part, ...]:
    """Reads the product, of 32-bit integers, and writes it in 16 bits."""
    return (Part(("kdequant_mm_int32",), (4.0 + 2.0) * next(tensors((result,))).numel()),)


_COUNTERS: dict[str, Counter] = {
    **dict.fromkeys(("quantize_4bit", "dequantize_4bit", "quantize_blockwise", "dequantize_blockwise"), _moving),
    **dict.fromkeys(("int8_vectorwise_quant", "int8_vectorwise_dequant", "int8_double_quant"), _moving),
    **dict.fromkeys(("int8_linear_matmul", "int8_scaled_mm", "int8_mixed_scaled_mm", "int8_mm_dequant"), _moving),
    **dict.fromkeys(OPTIMIZERS, _moving),
    **dict.fromkeys(("gemm_4bit", "gemv_4bit"), _product),
}
_PARTS: dict[str, Parts] = {
    "gemm_4bit": _decoding,
    **dict.fromkeys(("int8_vectorwise_quant", "int8_double_quant"), _encoding),
    **dict.fromkeys(("int8_scaled_mm", "int8_mixed_scaled_mm"), _scaling),
}
