"""Sizes of Transformer Engine's fused attention, which cuDNN computes."""

from __future__ import annotations

import itertools

import torch

from fakedist.gpu.attention_demand import Known
from fakedist.gpu.demand import NAN, Demand
from fakedist.gpu.quantized_tensors import matrix_of
from fakedist.gpu.values.arguments import Arguments
from fakedist.gpu.work_shapes import AttentionShape, Lengths, Mask

#: Positions of the arguments of ``fused_attn_fwd`` and ``fused_attn_bwd`` in version 2.20.
_FORWARD = {"layout": 6, "mask": 10, "window": 12, "bottom_right": 13, "cu_seqlens": 14, "query": 16}
_BACKWARD = {"layout": 5, "mask": 12, "window": 14, "bottom_right": 15, "cu_seqlens": 17, "query": 19}


def fused_attention(name: str, args: Arguments, demand: Demand, known: Known) -> Demand:
    """The demand of a fused attention, with its sizes if the arguments are those of the version that is known.

    Args:
        name: ``fused_attn_fwd`` or ``fused_attn_bwd``.
        args: The call's arguments.
        demand: Its bytes and type.
        known: Returns a tensor's values: where packed sequences begin.
    """
    at = _FORWARD if name.endswith("fwd") else _BACKWARD
    unknown = demand._replace(flops=NAN)
    if len(args) <= at["query"] + 2:
        return unknown
    query, key, value = args[at["query"] : at["query"] + 3]
    layouts = _text(args[at["layout"]]).removeprefix("NVTE_").removeprefix("PAGED_KV_").split("_")
    mask = _mask(args, at)
    shapes = [_shape(tensor) for tensor in (query, key, value)]
    if not all(len(shape) >= 3 for shape in shapes):
        return unknown
    longest = args[0], args[1]
    sizes = _sizes(layouts, shapes, longest, args[at["cu_seqlens"] : at["cu_seqlens"] + 2], known)
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
    )
    if isinstance(sizes, Lengths):
        flops = shape._replace(batch=1, queries=1).flops(sizes.met_pairs(mask))
    else:
        flops = shape.flops(mask.met_keys(queries, keys))
    return demand._replace(flops=flops, attention=shape)


def _text(value: object) -> str:
    """The name of a member of one of the extension's enumerations."""
    return str(getattr(value, "name", value)).upper()


def _mask(args: Arguments, at: dict[str, int]) -> Mask:
    kind, window = _text(args[at["mask"]]), args[at["window"]]
    left, right = window if isinstance(window, (list, tuple)) and len(window) == 2 else (-1, -1)
    from_end = bool(args[at["bottom_right"]]) or "BOTTOM_RIGHT" in kind
    return Mask("CAUSAL" in kind, int(left), int(right), from_end)


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
