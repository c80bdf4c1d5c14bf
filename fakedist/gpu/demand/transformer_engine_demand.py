"""What the functions of Transformer Engine's extension demand of a GPU, from their arguments and results.

The signatures are those of version 2.20 (csrc/extensions.h of ``transformer_engine_torch``). A function that is not
named here reads its arguments and writes what it returns, once each.
"""

from __future__ import annotations

from typing import NamedTuple

from fakedist.gpu.demand.attention_demand import Known
from fakedist.gpu.demand.fused_attention_demand import fused_attention
from fakedist.gpu.demand.kernel_parts import Part
from fakedist.gpu.demand.operation_demand import EIGHT_BIT, NAN, Demand, dtype_of, memory_bytes, tensor_bytes
from fakedist.gpu.demand.quantized_tensors import is_quantized, matrix_of, read_tensors, scales, written_tensors
from fakedist.gpu.demand.work_shapes import ProductShape
from fakedist.gpu.values.arguments import Arguments, Keywords, tensors

#: Functions that launch no kernel, or whose kernels are a library's that is seen by itself.
_NO_KERNELS = ("get_", "create_", "init_", "bulk_", "nvshmem_", "cusolvermp_", "newton_schulz")
#: Written, not read: the arguments at these positions.
_ONLY_WRITTEN = {
    "quantize": (2,),
    "group_quantize": (7,),
    "fused_multi_row_padding": (1,),
    "fused_multi_row_unpadding": (1,),
    "fused_topk_with_score_function_bwd": (3,),
    "fused_score_for_moe_aux_loss_bwd": (2,),
    "fp8_block_scaling_compute_partial_amax": (1,),
    "fp8_block_scaling_partial_cast": (1,),
    "mxfp8_scaling_compute_partial_amax": (1, 2),
    "mxfp8_scaling_partial_cast": (1, 2),
    "nvfp4_2d_compute_partial_amax": (1,),
    "nvfp4_2d_partial_cast": (1,),
}
_WRITTEN_NAMES = ("output", "out", "ln_out")
#: Read and written: the arguments at these positions.
_CHANGED = {
    "thd_out_correction": (0,),
    "thd_grad_correction": (0,),
    "thd_second_half_lse_correction": (0,),
    "scaled_softmax_backward": (0,),
    "scaled_masked_softmax_backward": (0,),
    "scaled_upper_triang_masked_softmax_backward": (0,),
    "scaled_aligned_causal_masked_softmax_backward": (0,),
}
#: Memory that kernels work in: the arguments at these positions.
_WORKSPACES = {"moe_permute_fwd": (4,)}
#: Functions of lists of tensors: how many lists at the end are read and written, and how many only written.
_LISTS = {"multi_tensor_scale": (0, 1), "multi_tensor_scale_tensor": (0, 1), "multi_tensor_l2norm": (0, 0)} | {
    "multi_tensor_unscale_l2norm": (0, 0),
    "multi_tensor_compute_scale_and_scale_inv": (0, 2),
}
#: Of an optimizer's lists, all are read and written except the first, the gradients.
_OPTIMIZERS = ("multi_tensor_adam", "multi_tensor_sgd")
_QUANTIZE = {"quantize", "split_quantize", "multi_tensor_quantize", "group_quantize", "bgrad_quantize"} | {
    "bgrad_group_quantize", "nvfp4_quantize_with_amax", "nvfp4_group_quantize_with_amax",
}  # fmt: skip
_ROWS = ("layernorm_", "rmsnorm_", "scaled_")
#: Partial sums of a norm's backward: a row of fp32 for each of about four blocks on each of some 130 SMs.
_PARTIAL_ROWS = 512


class Uses(NamedTuple):
    """How a function uses its arguments.

    Attributes:
        read: Arguments that it reads.
        written: Arguments that it writes.
    """

    read: tuple[object, ...]
    written: tuple[object, ...]


def launches_kernels(name: str) -> bool:
    """Whether a function of the extension may launch kernels of its own."""
    return not name.startswith(_NO_KERNELS)


def extension_demand(name: str, args: Arguments, kwargs: Keywords, result: object, known: Known) -> Demand:
    """The demand of one call that has returned.

    Args:
        name: The function's name in ``transformer_engine_torch``.
        args: The call's arguments.
        kwargs: The call's keyword arguments.
        result: What the call returned.
        known: Returns a tensor's values, or None if no kernel computed them.
    """
    uses = _uses(name, args, kwargs)
    read = {tensor.data_ptr(): memory_bytes(tensor) for tensor in read_tensors(uses.read)}
    written = {tensor.data_ptr(): memory_bytes(tensor) for tensor in written_tensors((*uses.written, result))}
    demand = Demand(0.0, float(sum(read.values()) + sum(written.values())), _dtype(args))
    if name in ("fused_attn_fwd", "fused_attn_bwd"):
        return fused_attention(name, args, demand, known)
    if "swizzle" in name:
        return demand._replace(moved_bytes=2 * tensor_bytes(scales(args)))
    if "gemm" in name:
        return _gemm(name, args, demand)
    if name in _QUANTIZE:
        return _quantize(args, result, demand)
    return _rows(name, args, demand) if name.startswith(_ROWS) else demand


def _uses(name: str, args: Arguments, kwargs: Keywords) -> Uses:
    if name.startswith("multi_tensor_") and len(args) > 2 and isinstance(args[2], (list, tuple)):
        return _list_uses(name, tuple(args[2]))
    only_written, changed = _ONLY_WRITTEN.get(name, ()), _CHANGED.get(name, ())
    left_out = (*only_written, *_WORKSPACES.get(name, ()))
    read = [value for position, value in enumerate(args) if position not in left_out]
    written = [value for position, value in enumerate(args) if position in (*only_written, *changed)]
    for keyword, value in kwargs.items():
        (written if keyword in _WRITTEN_NAMES else read).append(value)
    return Uses(tuple(read), tuple(written))


def _list_uses(name: str, lists: tuple[object, ...]) -> Uses:
    if name.startswith(_OPTIMIZERS):
        return Uses(lists, lists[1:])
    changed, only_written = _LISTS.get(name, (0, 0))
    end = len(lists) - only_written
    return Uses(lists[:end], lists[end - changed :])


def _dtype(args: Arguments) -> str:
    """The type that a function computes in: that of its first tensor."""
    if any(is_quantized(value) for value in args):
        return "fp8"
    return dtype_of(tuple(read_tensors(args)))


def _quantize(args: Arguments, result: object, demand: Demand) -> Demand:
    """A conversion of one matrix, or of several below one another. To find a scale first, a kernel reads it before."""
    source = tuple(tensors((args[0],)))
    if not source:
        return demand
    rows = sum(matrix_of(tensor)[0] for tensor in source)
    converts = any(tensor.dtype in EIGHT_BIT or tensor.element_size() == 1 for tensor in written_tensors((result,)))
    reads = Part(("amax",), float(sum(map(memory_bytes, source))))
    if not converts:
        return demand
    return demand._replace(dtype="fp8", quantized=(rows, matrix_of(source[0])[1]), parts=(reads,))


def _rows(name: str, args: Arguments, demand: Demand) -> Demand:
    """A norm or a softmax."""
    width = matrix_of(args[0])[1]
    if "norm_bwd" not in name:
        return demand._replace(width=width)
    finish = Part(("finalize",), 4.0 * _PARTIAL_ROWS * width)
    return demand._replace(width=width, parts=(finish,))


def _gemm(name: str, args: Arguments, demand: Demand) -> Demand:
    """Products. Those of cuBLAS have their own sizes; here are those that one kernel computes for all groups."""
    swizzle = Part(("swizzle",), 2 * tensor_bytes(scales(args[:4])))
    shape = _groups(args) if "grouped" in name else None
    shape = shape and shape.of(*(next(read_tensors((args[at],)), None) for at in (2, 0, 4)))  # D = B x A
    if shape is None:
        return demand._replace(flops=NAN, parts=(swizzle,))
    return demand._replace(flops=shape.flops, product=shape, parts=(swizzle,))


def _groups(args: Arguments) -> ProductShape | None:
    """The sizes of a grouped product: ``A, transa, B, transb, ...``, each a list or one grouped tensor."""
    first, transposed_a, second, transposed_b = args[:4]
    groups = _count(first) or _count(second)
    (rows_a, columns_a), (rows_b, columns_b) = _matrix(first), _matrix(second)
    if not groups or not rows_a or not rows_b:
        return None
    layout = "NT"[bool(transposed_a)] + "NT"[bool(transposed_b)]
    if layout == "TN":
        return ProductShape(rows_b, rows_a // groups, columns_a, groups=groups, layout=layout)
    if layout == "NN":
        return ProductShape(rows_b, columns_a, rows_a // groups, groups=groups, layout=layout)
    return ProductShape(groups * columns_b, columns_a, rows_b // groups, groups=groups, layout=layout)


def _count(operand: object) -> int:
    return len(operand) if isinstance(operand, (list, tuple)) else int(getattr(operand, "num_tensors", 0))


def _matrix(operand: object) -> tuple[int, int]:
    """Rows of all of an operand's matrices together, and the columns of each."""
    if not isinstance(operand, (list, tuple)):
        return matrix_of(operand)
    sizes = [matrix_of(each) for each in operand]
    return sum(rows for rows, _ in sizes), max((columns for _, columns in sizes), default=0)
