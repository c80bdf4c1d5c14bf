"""What Inductor's Triton templates demand of a GPU: products, convolutions and flex_attention.

The sizes are in the kernel's source, as ``M = 4096`` or ``M = ks0``. Which blocks of keys flex_attention visits is in
its arguments, if the mask's values are known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

from fakedist.gpu.demand.attention_demand import Known
from fakedist.gpu.demand.operation_demand import NAN, Demand, dtype_of
from fakedist.gpu.demand.work_shapes import AttentionShape, ProductShape

_SIZE = re.compile(r"^\s*([A-Z][A-Z0-9_]*)\s*(?::\s*tl\.constexpr\s*)?=\s*(\w+)\s*$", re.MULTILINE)
_SIDES = ("D", "H", "W")
#: Operands and result of a product, as its templates name them, and of a convolution or a fused epilogue.
_OPERANDS = (("arg_A", "arg_X"), ("arg_B", "arg_W"), ("out_ptr0", "in_out_ptr0"))


class Template(NamedTuple):
    """The sizes in a kernel's source: numbers or names of arguments."""

    sizes: dict[str, str]

    def demand(self, arguments: Mapping[str, object], moved_bytes: float, known: Known) -> Demand:
        """The demand of one launch.

        Args:
            arguments: The kernel's arguments, by name.
            moved_bytes: The fewest bytes it must read and write.
            known: Returns the values of a mask.
        """
        sizes = {name: number for name, text in self.sizes.items() if (number := _number(text, arguments)) is not None}
        demand = Demand(NAN, moved_bytes, dtype_of(tuple(arguments.values())))
        if "QK_HEAD_DIM" in sizes and "KV_LEN" in sizes:
            return _attention(sizes, arguments, demand, known)
        shape = _product(sizes)
        if shape is None:
            return demand
        times = 2 if "arg_D" in arguments else 1  # A @ B + C @ D
        operands = (arguments.get(first, arguments.get(other)) for first, other in _OPERANDS)
        shape = shape._replace(k=times * shape.k).of(*operands)
        return demand._replace(flops=shape.flops, product=shape)


def template_of(name: str, source: str) -> Template | None:
    """The template that a kernel came from; None for other kernels."""
    return Template(dict(_SIZE.findall(source))) if name.startswith("triton_tem_") and source else None


def _number(text: str, arguments: Mapping[str, object]) -> int | None:
    value = int(text) if text.isdecimal() else arguments.get(text)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _product(sizes: Mapping[str, int]) -> ProductShape | None:
    """The sizes of a matrix product, or of the product that a convolution is; None if it is neither."""
    if "OUT_C" in sizes and "BATCH" in sizes:
        inputs = sizes.get("GROUP_IN_C", sizes.get("IN_C", 0) // max(sizes.get("GROUPS", 1), 1))
        kernel, out = (math.prod(sizes.get(f"{what}_{side}", 1) for side in _SIDES) for what in ("KERNEL", "OUT"))
        return ProductShape(sizes["BATCH"] * out, sizes["OUT_C"], inputs * kernel)
    if "G" in sizes:  # a grouped product, whose sizes are on the device
        return None
    inner = sizes.get("K", sizes.get("K1"))
    if inner is None or "M" not in sizes or "N" not in sizes:
        return None
    return ProductShape(sizes["M"], sizes["N"], inner, sizes.get("BATCH", 1))


def _attention(sizes: Mapping[str, int], arguments: Mapping[str, object], unknown: Demand, known: Known) -> Demand:
    """Two products in forward, five in backward. One of the five recomputes the scores; the kernel does it twice."""
    try:
        batch = sizes["ZQ"] if "ZQ" in sizes else sizes["Z"]
        heads = sizes["HQ"] if "HQ" in sizes else sizes["HKV"] * sizes.get("GQA_SHARED_HEADS", 1)
        queries, keys, width, value_width = (sizes[name] for name in ("Q_LEN", "KV_LEN", "QK_HEAD_DIM", "V_HEAD_DIM"))
    except KeyError:
        return unknown
    block = sizes.get("SPARSE_KV_BLOCK_SIZE", 0)
    blocks = _met_blocks(arguments, known) if block else None
    shape = AttentionShape(
        direction="backward" if "arg_DO" in arguments else "forward",
        library="flex",
        batch=batch,
        heads=heads,
        kv_heads=sizes.get("HKV", heads // max(sizes.get("GQA_SHARED_HEADS", 1), 1)),
        queries=queries,
        keys=keys,
        width=width,
        value_width=value_width,
    )
    if blocks is None:
        return unknown._replace(flops=shape.flops(keys), attention=shape, is_dense=True)
    causal = (
        len(blocks) > 1 and blocks == [float(row + 1) for row in range(len(blocks))] and len(blocks) * block >= keys
    )
    met = min(sum(blocks) / len(blocks) * block, keys)
    shape = shape._replace(causal=causal, window=0 if causal or met >= keys else max(round(met), 1))
    return unknown._replace(flops=shape.flops(met), attention=shape)


def _met_blocks(arguments: Mapping[str, object], known: Known) -> list[float] | None:
    """Blocks of keys that each block of queries meets, counting those that are not empty, as the mean of batch and
    heads; None if they are unknown.
    """
    rows: list[float] = []
    for name in ("arg_KV_NUM_BLKS", "arg_FULL_KV_NUM_BLKS"):
        counts = arguments.get(name)
        if counts is None:
            continue
        values = known(counts) if isinstance(counts, torch.Tensor) else None
        if values is None or not values.numel():
            return None
        found = values.double().reshape(-1, values.shape[-1]).mean(0).tolist()
        rows = [sum(both) for both in zip(rows, found, strict=True)] if rows else found
    return rows or None
