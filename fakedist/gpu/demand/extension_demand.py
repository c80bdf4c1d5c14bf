"""Transformer Engine's extension: the demand of its functions, and its calls, which torch's dispatcher does not see.

Signatures are those of version 2.20 (csrc/extensions.h of ``transformer_engine_torch``). A function not named here
reads its arguments and writes its results once. While a step is timed, the functions are replaced wherever they are
held: in the extension, in Transformer Engine's modules, and in optimizers, which pass them to ``MultiTensorApply``.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from fakedist.gpu.demand.formulas import KernelPart
from fakedist.gpu.demand.operation_demand import EIGHT_BIT, NAN, Demand, dtype_of, memory_bytes, tensor_bytes
from fakedist.gpu.demand.work_shapes import AttentionShape, Known, Lengths, Mask, ProductShape, packed_lengths
from fakedist.gpu.values.tensors import PLAIN, Arguments, Keywords, flat, tensors
from fakedist.patch import patched, present

#: Attributes of Float8Tensor, MXFP8Tensor, Float8BlockwiseQTensor, NVFP4Tensor and GroupedTensor, and of their storages
#: (transformer_engine/pytorch/tensor/storage): first what is read by rows, then what is read by columns.
_BY_ROWS = ("_data", "_rowwise_data", "rowwise_data")
_BY_COLUMNS = ("_transpose", "_columnwise_data", "columnwise_data")
_SCALES = ("_scale_inv", "_rowwise_scale_inv", "scale_inv", "_columnwise_scale_inv", "columnwise_scale_inv")
#: Types of most arguments. They are looked at in every call.
_SIMPLE = frozenset({int, float, bool, str, type(None), list, tuple})


def is_quantized(value: object) -> bool:
    """Return whether a value is one of Transformer Engine's quantized tensors."""
    if type(value) in _SIMPLE or _is_plain(value):
        return False
    return any(hasattr(value, name) for name in (*_BY_ROWS[:2], "num_tensors"))


def written_tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """All memory of values: of a quantized tensor its data in both forms, and its scales."""
    return _parts(values, (*_BY_ROWS, *_BY_COLUMNS, *_SCALES))


def read_tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors that a kernel reads: of a quantized tensor one form, and its scales."""
    for value in flat(values):
        if _is_plain(value) or not is_quantized(value):
            yield from _parts((value,), ())
            continue
        yield from list(_parts((value,), _BY_ROWS)) or _parts((value,), _BY_COLUMNS)
        yield from scales((value,))


def scales(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """The scales of the quantized tensors among values."""
    return (tensor for value in flat(values) if is_quantized(value) for tensor in _parts((value,), _SCALES))


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


def _parts(values: Iterable[object], names: tuple[str, ...]) -> Iterator[torch.Tensor]:
    for value in flat(values):
        if type(value) in _SIMPLE:
            continue
        parts = (value,) if _is_plain(value) else (getattr(value, name, None) for name in names)
        yield from (part for part in parts if isinstance(part, torch.Tensor) and _is_plain(part))


#: A layout of queries, keys and values among the extension's enumerations.
_LAYOUT = re.compile(r"NVTE_(?:PAGED_KV_)?((?:SB|BS|BH|T)\w*)")


class _AttentionCall(NamedTuple):
    layout: list[str]
    mask: Mask
    offsets: tuple[object, ...]
    operands: tuple[object, ...]
    dropout: bool
    deterministic: bool


def fused_attention(name: str, args: Arguments, demand: Demand, known: Known) -> Demand:
    """Add the sizes of a ``fused_attn_fwd`` or ``fused_attn_bwd`` to its demand, if the arguments are understood."""
    unknown = demand._replace(flops=NAN)
    call = _read(args)
    if call is None:
        return unknown
    layouts, mask = call.layout, call.mask
    query, key, value = call.operands
    shapes = [_shape(tensor) for tensor in (query, key, value)]
    if not all(len(shape) >= 3 for shape in shapes):
        return unknown
    sizes = _sizes(layouts, shapes, (args[0], args[1]), call.offsets, known)
    heads_at = 1 if layouts[0] == "BHSD" else -2
    batch, queries, keys = sizes.equal() if isinstance(sizes, Lengths) else sizes
    shape = AttentionShape(
        direction="forward" if name.endswith("fwd") else "backward",
        library="cudnn",
        batch=batch,
        heads=shapes[0][heads_at],
        kv_heads=shapes[1][heads_at],
        queries=queries,
        keys=keys,
        width=shapes[0][-1],
        value_width=shapes[2][-1],
        causal=mask.causal,
        window=mask.window,
        dropout=call.dropout,
        deterministic=call.deterministic and name.endswith("bwd"),
    )
    return demand._replace(flops=shape.masked_flops(mask, sizes), attention=shape)


def _read(args: Arguments) -> _AttentionCall | None:
    """Find arguments by type, as positions differ between versions: enumerations by name, the window as a pair."""
    texts = [str(getattr(value, "name", "")).upper() for value in args]
    layout = next((match[1] for text in texts if (match := _LAYOUT.fullmatch(text))), "")
    kind = next((text for text in texts if text.endswith("MASK")), "")
    at = next((index for index, value in enumerate(args) if _is_pair(value)), len(args))
    flags = list(itertools.takewhile(lambda value: isinstance(value, bool), args[at + 1 :]))
    first = at + 1 + len(flags)
    if not layout or not kind or len(args) < first + 5:
        return None
    left, right = (int(side) for side in args[at])  # type: ignore[attr-defined]
    mask = Mask("CAUSAL" in kind, left, right, "BOTTOM_RIGHT" in kind)
    # Of the numbers in front, the scale comes first and dropout's probability second. Of the flags after the window,
    # a backward's last one is whether it is deterministic; a forward has none of that kind.
    numbers = [value for value in args[:at] if isinstance(value, float)]
    operands = args[first + 2 : first + 5]
    has_dropout = len(numbers) > 1 and numbers[1] > 0
    return _AttentionCall(
        layout.split("_"), mask, args[first : first + 2], operands, has_dropout, bool(flags and flags[-1])
    )


def _is_pair(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(side, int) for side in value)


def _shape(value: object) -> list[int]:
    if isinstance(value, torch.Tensor):
        return [int(size) for size in value.shape]
    size = getattr(value, "size", None)
    return [int(length) for length in size()] if callable(size) and any(matrix_of(value)) else []


def _sizes(
    layouts: list[str],
    shapes: list[list[int]],
    longest: tuple[object, object],
    offsets: tuple[object, ...],
    known: Known,
) -> tuple[int, int, int] | Lengths:
    query, key = shapes[0], shapes[1]
    if layouts[0].startswith("T"):
        if (lengths := Lengths.between(*(packed_lengths(tensor, known) for tensor in offsets))) is not None:
            return lengths
        queries, keys = (
            size if isinstance(size, int) and size else shape[0]
            for size, shape in zip(longest, (query, key), strict=True)
        )
        return max(round(query[0] / queries), 1), queries, keys
    batch, queries = _batch_and_tokens(layouts[0], query)
    return batch, queries, _batch_and_tokens(layouts[-1] if len(layouts) > 1 else layouts[0], key)[1]


def _batch_and_tokens(layout: str, shape: list[int]) -> tuple[int, int]:
    if layout.startswith("SB"):
        return shape[1], shape[0]
    if layout == "BHSD":
        return shape[0], shape[2]
    return shape[0], shape[1]


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
    """The arguments that a function reads and those that it writes."""

    read: tuple[object, ...]
    written: tuple[object, ...]


def launches_kernels(name: str) -> bool:
    """Return whether a function of the extension may launch kernels of its own."""
    return not name.startswith(_NO_KERNELS)


def extension_demand(name: str, args: Arguments, kwargs: Keywords, result: object, known: Known) -> Demand:
    """The demand of one call that has returned of the function ``name`` in ``transformer_engine_torch``."""
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
    reads = KernelPart(("amax",), float(sum(map(memory_bytes, source))))
    if not converts:
        return demand
    return demand._replace(dtype="fp8", quantized=(rows, matrix_of(source[0])[1]), parts=(reads,))


def _rows(name: str, args: Arguments, demand: Demand) -> Demand:
    width = matrix_of(args[0])[1]
    if "norm_bwd" not in name:
        return demand._replace(width=width)
    return demand._replace(width=width, parts=(KernelPart(("finalize",), 4.0 * _PARTIAL_ROWS * width),))


def _gemm(name: str, args: Arguments, demand: Demand) -> Demand:
    """Products. Those of cuBLAS have their own sizes; here are those that one kernel computes for all groups."""
    swizzle = KernelPart(("swizzle",), 2 * tensor_bytes(scales(args[:4])))
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
    if not isinstance(operand, (list, tuple)):
        return matrix_of(operand)
    sizes = [matrix_of(matrix) for matrix in operand]
    return sum(rows for rows, _ in sizes), max((columns for _, columns in sizes), default=0)


EXTENSION = "transformer_engine_torch"
PACKAGE = "transformer_engine"
_APPLY = ("transformer_engine.pytorch.optimizers.multi_tensor_apply", "MultiTensorApply", "__call__")

_Function = Callable[..., object]


@contextmanager
def watched_calls(
    begins: Callable[[str], int], ended: Callable[[int, Demand | None], None], known: Known
) -> Iterator[None]:
    """Report each call to the extension. RecordingError if this one applies its optimizers in another way.

    ``begins`` gets a function's name and returns a tag. ``ended`` gets that tag, and no demand if the call failed.
    """
    extension = sys.modules.get(EXTENSION)
    if extension is None:
        yield
        return

    def watched(name: str, original: _Function) -> _Function:
        def call(*args: object, **kwargs: object) -> object:
            tag, demand = begins(f"{PACKAGE}.{name}"), None
            try:
                result = original(*args, **kwargs)
                demand = _demand(name, args, kwargs, result, known)
                return result
            finally:
                ended(tag, demand)

        return call

    replaced = {
        id(function): watched(name, function)
        for name, function in vars(extension).items()
        if callable(function) and not isinstance(function, type) and launches_kernels(name)
    }
    with ExitStack() as undo:
        for name, module in list(sys.modules.items()):
            if name == EXTENSION or name.split(".")[0] == PACKAGE:
                for attribute, value in list(vars(module).items()):
                    if id(value) in replaced:
                        undo.enter_context(patched(module, attribute, replaced[id(value)]))
        if _APPLY[0] in sys.modules:
            owner = present(sys.modules[_APPLY[0]], _APPLY[1])
            undo.enter_context(patched(owner, _APPLY[2], _applying(present(owner, _APPLY[2]), replaced)))
        yield


def _demand(name: str, args: Arguments, kwargs: Keywords, result: object, known: Known) -> Demand | None:
    """None if another version's arguments are others: its kernels count as not known."""
    try:
        return extension_demand(name, args, kwargs, result, known)
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def _applying(original: _Function, replaced: dict[int, _Function]) -> _Function:
    def apply(owner: object, function: object, *args: object) -> object:
        return original(owner, replaced.get(id(function), function), *args)

    return apply
