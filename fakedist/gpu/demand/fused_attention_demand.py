"""Sizes of Transformer Engine's fused attention, which cuDNN computes."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import torch

from fakedist.gpu.demand.attention_demand import Known
from fakedist.gpu.demand.operation_demand import NAN, Demand
from fakedist.gpu.demand.quantized_tensors import matrix_of
from fakedist.gpu.demand.work_shapes import AttentionShape, Lengths, Mask
from fakedist.gpu.values.arguments import Arguments

#: A layout of queries, keys and values among the extension's enumerations.
_LAYOUT = re.compile(r"NVTE_(?:PAGED_KV_)?((?:SB|BS|BH|T)\w*)")


class _Call(NamedTuple):
    """The arguments that matter.

    Attributes:
        layout: Of queries, then of keys and values if it is another.
        mask: Which keys a query meets.
        offsets: Where packed sequences of queries begin, and of keys.
        operands: Queries, keys, values.
        dropout: Whether scores are left out at random.
        deterministic: Whether a backward adds up gradients in a fixed order.
    """

    layout: list[str]
    mask: Mask
    offsets: tuple[object, ...]
    operands: tuple[object, ...]
    dropout: bool
    deterministic: bool


def fused_attention(name: str, args: Arguments, demand: Demand, known: Known) -> Demand:
    """The demand of a fused attention, with its sizes if its arguments are understood.

    Args:
        name: ``fused_attn_fwd`` or ``fused_attn_bwd``.
        args: The call's arguments.
        demand: Its bytes and type.
        known: Returns a tensor's values: where packed sequences begin.
    """
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
    if isinstance(sizes, Lengths):
        flops = shape._replace(batch=1, queries=1).flops(sizes.met_pairs(mask))
    else:
        flops = shape.flops(mask.met_keys(queries, keys))
    return demand._replace(flops=flops, attention=shape)


def _read(args: Arguments) -> _Call | None:
    """Find the arguments by what they are, because their positions differ between versions: enumerations by their
    names, the window as the only pair of numbers, then flags, then the offsets, then the operands.
    """
    texts = [str(getattr(value, "name", "")).upper() for value in args]
    layout = next((found[1] for text in texts if (found := _LAYOUT.fullmatch(text))), "")
    kind = next((text for text in texts if text.endswith("MASK")), "")
    at = next((place for place, value in enumerate(args) if _is_pair(value)), len(args))
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
    return _Call(layout.split("_"), mask, args[first : first + 2], operands, has_dropout, bool(flags and flags[-1]))


def _is_pair(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(side, int) for side in value)


def _shape(value: object) -> list[int]:
    if isinstance(value, torch.Tensor):
        return [int(size) for size in value.shape]
    size = getattr(value, "size", None)
    return [int(each) for each in size()] if callable(size) and any(matrix_of(value)) else []


def _sizes(
    layouts: list[str],
    shapes: list[list[int]],
    longest: tuple[object, object],
    offsets: tuple[object, ...],
    known: Known,
) -> tuple[int, int, int] | Lengths:
    """Batch, queries and keys; or the lengths of packed sequences, if they are known."""
    query, key = shapes[0], shapes[1]
    if layouts[0].startswith("T"):
        lengths = [_lengths(each, known) for each in offsets]
        if lengths[0] is not None and lengths[1] is not None and len(lengths[0]) == len(lengths[1]):
            return Lengths(lengths[0], lengths[1])
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


def _lengths(offsets: object, known: Known) -> list[int] | None:
    values = known(offsets) if isinstance(offsets, torch.Tensor) and offsets.numel() else None
    if values is None:
        return None
    return [max(after - before, 0) for before, after in itertools.pairwise(int(end) for end in values.tolist())]
