"""What Inductor's Triton templates demand of a GPU: products, convolutions and flex_attention.

The sizes are in the kernel's source, as ``M = 4096`` or ``M = ks0``. Which blocks of keys flex_attention visits is in
its arguments, if the mask's values are known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from fakedist.gpu.demand import NAN, Demand, dtype_of

_SIZE = re.compile(r"^\s*([A-Z][A-Z0-9_]*)\s*(?::\s*tl\.constexpr\s*)?=\s*(\w+)\s*$", re.MULTILINE)
_SIDES = ("D", "H", "W")
#: Returns a tensor's values, or None if no kernel computed them.
Known = Callable[[torch.Tensor], "torch.Tensor | None"]


class Template(NamedTuple):
    """The sizes in a kernel's source: numbers or names of arguments."""

    sizes: dict[str, str]

    def demand(self, arguments: Mapping[str, object], moved_bytes: float, known: Known) -> tuple[Demand, bool]:
        """The demand of one launch, and whether a mask is taken as dense because its values are unknown.

        Args:
            arguments: The kernel's arguments, by name.
            moved_bytes: The fewest bytes it must read and write.
            known: Returns the values of a mask.
        """
        sizes = {name: number for name, text in self.sizes.items() if (number := _number(text, arguments)) is not None}
        dtype = dtype_of(tuple(arguments.values()))
        if "QK_HEAD_DIM" in sizes and "KV_LEN" in sizes:
            return _attention(sizes, arguments, Demand(NAN, moved_bytes, dtype), known)
        times = 2.0 if "arg_D" in arguments else 1.0  # A @ B + C @ D
        return Demand(times * _product(sizes), moved_bytes, dtype), False


def template_of(name: str, source: str) -> Template | None:
    """The template that a kernel came from; None for other kernels."""
    return Template(dict(_SIZE.findall(source))) if name.startswith("triton_tem_") and source else None


def _number(text: str, arguments: Mapping[str, object]) -> float | None:
    value = int(text) if text.isdecimal() else arguments.get(text)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _product(sizes: Mapping[str, float]) -> float:
    """FLOPs of a matrix product or a convolution; NaN if the sizes describe neither."""
    if "OUT_C" in sizes and "BATCH" in sizes:
        inputs = sizes.get("GROUP_IN_C", sizes.get("IN_C", NAN) / sizes.get("GROUPS", 1.0))
        kernel, out = (math.prod(sizes.get(f"{what}_{side}", 1.0) for side in _SIDES) for what in ("KERNEL", "OUT"))
        return 2.0 * sizes["BATCH"] * sizes["OUT_C"] * inputs * kernel * out
    if "G" in sizes:  # a grouped product, whose sizes are on the device
        return NAN
    inner = sizes.get("K", sizes.get("K1", NAN))
    return 2.0 * sizes.get("M", NAN) * sizes.get("N", NAN) * inner * sizes.get("BATCH", 1.0)


def _attention(
    sizes: Mapping[str, float], arguments: Mapping[str, object], unknown: Demand, known: Known
) -> tuple[Demand, bool]:
    """Two products in forward, five in backward. One of the five recomputes the scores; the kernel does it twice."""
    try:
        batch = sizes["ZQ"] if "ZQ" in sizes else sizes["Z"]
        heads = sizes["HQ"] if "HQ" in sizes else sizes["HKV"] * sizes.get("GQA_SHARED_HEADS", 1.0)
        queries, keys, width, value_width = (sizes[name] for name in ("Q_LEN", "KV_LEN", "QK_HEAD_DIM", "V_HEAD_DIM"))
    except KeyError:
        return unknown, False
    met = _met_keys(arguments, sizes.get("SPARSE_KV_BLOCK_SIZE", NAN), keys, known)
    backward = "arg_DO" in arguments
    widths = 3 * width + 2 * value_width if backward else width + value_width
    flops = 2.0 * batch * heads * queries * (keys if met is None else met) * widths
    curve = "backward" if backward else "forward"
    return unknown._replace(flops=flops, attention=curve, keys=keys), met is None


def _met_keys(arguments: Mapping[str, object], block: float, keys: float, known: Known) -> float | None:
    """Average keys per query, counting the mask's blocks that are not empty; None if they are unknown."""
    met = 0.0
    for name in ("arg_KV_NUM_BLKS", "arg_FULL_KV_NUM_BLKS"):
        counts = arguments.get(name)
        if counts is None:
            continue
        values = known(counts) if isinstance(counts, torch.Tensor) else None
        if values is None or not values.numel():
            return None
        met += float(values.double().mean()) * block
    return min(met, keys) if met == met else None
