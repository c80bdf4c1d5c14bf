"""What an operation demands of a GPU: floating-point operations and bytes, from its arguments and results.

FLOPs are those of products, convolutions and attention, as torch's own counter counts them
(torch.utils.flop_counter), with two differences: the masked half of causal attention, which kernels skip, does not
count, and keys may have fewer heads than queries. Torch's other operations count as 0. For operations that are not
torch's, the FLOPs are unknown. Bytes are the least that must be read and written: each input and each result once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch._ops import OpOverload

from fakedist.gpu.values.arguments import Arguments, Keywords, tensors
from fakedist.gpu.values.host_reads import READS
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.storage import storage_of

NAN = float("nan")
#: Of these arguments, the operation reads only as much as it returns.
_PICKED_FROM = {"embedding": 0, "index_select": 0, "gather": 0, "index": 0, "_unsafe_index": 0, "take": 0} | {
    "take_along_dim": 0, "nll_loss_forward": 0, "nll_loss2d_forward": 0,
}  # fmt: skip
#: Of these arguments, the operation uses only the shape.
_NOT_READ = {"nll_loss_backward": 1, "nll_loss2d_backward": 1}
#: These change only as much of their first argument as their other arguments provide.
_PUT_INTO = {"index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_"} | {
    "scatter_reduce_", "index_reduce_", "put_",
}  # fmt: skip
#: FSDP2 copies its shards into part of a buffer, which is also an argument, and returns views of it.
_COPIES_FIRST = {"all_gather_copy_in"}
#: These write gradients only when they scale them.
_FUSED_OPTIMIZERS = ("_fused_adam", "_fused_sgd", "_fused_adagrad")
_ONE_VALUE = 8
_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"} | {
    torch.int8: "int8", torch.uint8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip


class Demand(NamedTuple):
    """What one operation demands.

    Attributes:
        flops: Floating-point operations; NaN if unknown.
        moved_bytes: The fewest bytes it must read and write; NaN if unknown.
        dtype: The type it computes in, a key of ``GpuSpec.peak_flops``.
        attention: "forward" or "backward" for an attention, followed by ".cudnn" if cuDNN computes it; else empty.
        keys: Number of keys in the attention's sequence.
        is_dense: Whether an attention counts as if every query met every key, because its mask's values are unknown.
    """

    flops: float = NAN
    moved_bytes: float = NAN
    dtype: str = "bf16"
    attention: str = ""
    keys: float = 0.0
    is_dense: bool = False


UNKNOWN = Demand()


class DemandCounter:
    """Counts what the operations of one operator demand."""

    def __init__(self, func: OpOverload) -> None:
        self._operator = operator = Operator(func)
        name = operator.name
        self._is_attention = "attention" in name and operator.is_kernel and not name.startswith("_fused")
        self._is_grouped = "grouped_mm" in name
        from torch.utils.flop_counter import flop_registry  # imports Triton, which torch itself does not

        self._formula: Callable[..., float] | None = flop_registry.get(func._overloadpacket)
        self._picked_from = _PICKED_FROM.get(name, -1)
        self._not_read = _NOT_READ.get(name, 0 if operator.like else -1)
        self._reads = operator.dynamic or name in READS or name in ("_to_copy", "copy_")
        self._puts_into = name in _PUT_INTO
        self._copies_first = name in _COPIES_FIRST
        self._grads_position = 1 if name.startswith(_FUSED_OPTIMIZERS) else -1

    def demand(self, args: Arguments, kwargs: Keywords, result: object) -> Demand:
        """The demand of one call that has returned.

        Args:
            args: The call's arguments.
            kwargs: The call's keyword arguments.
            result: What the call returned.
        """
        moved = float(self._moved_bytes(args, kwargs, result))
        dtype = dtype_of(args)
        if self._is_attention:
            return self._attention(args, kwargs, moved, dtype)
        if self._is_grouped:
            return Demand(_grouped_flops(args), moved, dtype)
        if not self._operator.is_kernel:
            return Demand(NAN, moved, dtype)
        if self._formula is None:
            return Demand(0.0, moved, dtype)
        try:
            flops = float(self._formula(*args, **kwargs, out_val=result))
        except Exception:  # torch's formula does not know these arguments
            flops = NAN
        if dtype == "fp32" and "conv" in self._operator.name and torch.backends.cudnn.allow_tf32:
            dtype = "tf32"
        return Demand(flops, moved, dtype)

    def read_bytes(self, args: Arguments, result: object) -> int:
        """Bytes that one call read back to the host: one value if only a size came; 0 if it does not wait."""
        if not self._reads or all(tensor.is_cpu for tensor in tensors(args)):
            return 0
        if not self._operator.name.startswith(("copy_", "_to_copy")):
            return _ONE_VALUE
        target = args[0] if self._operator.name == "copy_" else result
        return int(target.nbytes) if isinstance(target, torch.Tensor) and target.is_cpu else 0

    def _moved_bytes(self, args: Arguments, kwargs: Keywords, result: object) -> int:
        operator, written = self._operator, 0
        if self._copies_first:
            return 2 * sum(map(_bytes, tensors((args[0],))))
        fresh = sum(map(_bytes, tensors((result,)))) if not operator.written else 0
        scaled = kwargs.get("grad_scale") is not None
        total = 0
        for position, value in enumerate(args):
            size = sum(map(_bytes, tensors((value,))))
            if position == self._not_read:
                size = 0
            elif position == self._picked_from:
                size = min(size, fresh)
            elif self._puts_into and position == 0:
                others = sum(map(_bytes, tensors(args[1:])))
                size = min(size, others)
            if position in operator.written and (position != self._grads_position or scaled):
                written += size
                if operator.overwrites:
                    continue
            total += size
        for name, value in kwargs.items():
            size = sum(map(_bytes, tensors((value,))))
            written_too = name in operator.written_names
            total += size if not (written_too and operator.overwrites) else 0
            written += size if written_too else 0
        return total + written + fresh

    def _attention(self, args: Arguments, kwargs: Keywords, moved: float, dtype: str) -> Demand:
        """Two products in forward, five in backward. One of the five recomputes the scores."""
        argument, name = self._operator.argument, self._operator.name
        query, key, value = (argument(each, args, kwargs) for each in ("query", "key", "value"))
        if not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)):
            return Demand(NAN, moved, dtype)
        heads, queries, keys = _attention_sizes(name, query, key, lambda each: argument(each, args, kwargs))
        causal = bool(argument("is_causal", args, kwargs)) or bool(argument("custom_mask_type", args, kwargs))
        met = _met_keys(queries, keys) if causal else keys
        width, value_width = query.shape[-1], value.shape[-1]
        backward = "backward" in name
        widths = 3 * width + 2 * value_width if backward else width + value_width
        curve = ("backward" if backward else "forward") + (".cudnn" if "cudnn" in name else "")
        return Demand(2.0 * heads * queries * met * widths, moved, dtype, curve, keys)


def _attention_sizes(
    name: str, query: torch.Tensor, key: torch.Tensor, argument: Callable[[str], object]
) -> tuple[float, float, float]:
    """Query heads of all sequences together, queries per sequence, keys per sequence.

    ``_scaled_dot_product_*`` take (batch, heads, tokens, width). The others take (batch, tokens, heads, width), or
    (tokens, heads, width) for packed sequences, which all count as long as the longest.
    """
    if name.startswith("_scaled_dot_product"):
        batch, heads, queries = query.shape[:3]
        return float(batch * heads), float(queries), float(key.shape[2])
    longest_query, longest_key = argument("max_q"), argument("max_k")
    if query.dim() == 3 and isinstance(longest_query, int) and isinstance(longest_key, int) and longest_query:
        tokens, heads = query.shape[:2]
        return float(heads * tokens / longest_query), float(longest_query), float(longest_key)
    batch, queries, heads = query.shape[:3]
    return float(batch * heads), float(queries), float(key.shape[1])


def _met_keys(queries: float, keys: float) -> float:
    """Average keys per query under a causal mask aligned to the upper left corner."""
    if queries <= keys:
        return (queries + 1) / 2
    return (keys * (keys + 1) / 2 + (queries - keys) * keys) / queries


def _grouped_flops(args: Arguments) -> float:
    """FLOPs of a grouped product: each row belongs to one group, or each matrix is a group."""
    a, b = ([float(size) for size in matrix.shape] for matrix in tensors(args[:2]))
    if len(a) == 3 and len(b) == 3:
        return 2.0 * a[0] * a[1] * a[2] * b[2]
    if len(a) == 3:
        return 2.0 * a[1] * a[2] * b[1]
    return 2.0 * a[0] * a[1] * b[-1]


def tensor_bytes(values: Iterable[object]) -> float:
    """Bytes of the device tensors among a kernel's arguments, each once."""
    return float(sum({tensor.data_ptr(): _bytes(tensor) for tensor in tensors(values)}.values()))


def _bytes(tensor: torch.Tensor) -> int:
    """A device tensor's bytes in memory: for an expanded tensor, no more than its storage has."""
    if tensor.is_cpu:
        return 0
    return min(tensor.nbytes, storage_of(tensor)[1])


def dtype_of(args: Arguments) -> str:
    """The type that an operation on these arguments computes in, a key of ``GpuSpec.peak_flops``."""
    found = next((tensor for tensor in tensors(args) if tensor.dtype in _DTYPES), None)
    return _DTYPES[found.dtype] if found is not None else "fp32"
