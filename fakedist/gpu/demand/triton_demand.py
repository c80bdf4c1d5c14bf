"""The demand of Triton's kernels on a GPU: Inductor's, and those that libraries and scripts write themselves.

Sizes are in the source (``M = 4096``, ``M = ks0``), loads and stores too (:mod:`fakedist.gpu.demand.triton_code`);
flex_attention's visited blocks are in its arguments, if the mask's values are known. An Inductor kernel moves at most
the elements that it iterates over, which bounds what it picks from an embedding or a slice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

from fakedist.gpu.demand.formulas import CACHED_ROW_BYTES
from fakedist.gpu.demand.operation_demand import (
    EIGHT_BIT,
    NAN,
    Demand,
    dtype_of,
    matrix_size,
    memory_bytes,
    tensor_bytes,
)
from fakedist.gpu.demand.triton_code import Access, TritonIr, TritonSource, compiled_text, read_source
from fakedist.gpu.demand.work_shapes import AttentionShape, Known, ProductShape

_SIZE = re.compile(r"^\s*([A-Z][A-Z0-9_]*)\s*(?::\s*tl\.constexpr\s*)?=\s*(\w+)\s*$", re.MULTILINE)
_SIDES = ("D", "H", "W")
#: Operands and result of a product, as its templates name them, and of a convolution or a fused epilogue.
_OPERANDS = (("arg_A", "arg_X"), ("arg_B", "arg_W"), ("out_ptr0", "in_out_ptr0"))


class Template(NamedTuple):
    """The sizes in a kernel's source: numbers or names of arguments."""

    sizes: dict[str, str]

    def demand(self, arguments: Mapping[str, object], moved_bytes: float, known: Known) -> Demand:
        """The demand of one launch with these arguments, which moves at least ``moved_bytes``."""
        sizes = {name: number for name, text in self.sizes.items() if (number := _number(text, arguments)) is not None}
        demand = Demand(NAN, moved_bytes, dtype_of(tuple(arguments.values())))
        if "QK_HEAD_DIM" in sizes and "KV_LEN" in sizes:
            return _attention(sizes, arguments, demand, known)
        shape = _template_product(sizes)
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


def _template_product(sizes: Mapping[str, int]) -> ProductShape | None:
    if "OUT_C" in sizes and "BATCH" in sizes:
        inputs = sizes.get("GROUP_IN_C", sizes.get("IN_C", 0) // max(sizes.get("GROUPS", 1), 1))
        kernel, out = (math.prod(sizes.get(f"{part}_{side}", 1) for side in _SIDES) for part in ("KERNEL", "OUT"))
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
    """Non-empty blocks of keys per block of queries, as the mean of batch and heads; None if unknown."""
    rows: list[float] = []
    for name in ("arg_KV_NUM_BLKS", "arg_FULL_KV_NUM_BLKS"):
        counts = arguments.get(name)
        if counts is None:
            continue
        values = known(counts) if isinstance(counts, torch.Tensor) else None
        if values is None or not values.numel():
            return None
        means = values.double().reshape(-1, values.shape[-1]).mean(0).tolist()
        rows = [sum(both) for both in zip(rows, means, strict=True)] if rows else means
    return rows or None


class TritonKernel:
    """Counts the demand of the launches of one kernel. ``source`` is empty if unknown."""

    def __init__(self, name: str, source: str) -> None:
        self._template: Template | None = template_of(name, source)
        self._source: TritonSource = read_source(name, source)
        self._is_inductors = name.startswith("triton_")
        self._irs: dict[str, TritonIr | None] = {}

    def demand(self, arguments: Mapping[str, object], known: Known) -> Demand:
        """The demand of one launch by its source and its arguments. ``known`` returns the values of a mask."""
        if self._template is not None:
            return self._template.demand(arguments, tensor_bytes(arguments.values()), known)
        demand = Demand(
            0.0, self._moved_bytes(arguments), dtype_of(tuple(arguments.values())), width=self._width(arguments)
        )
        if self._source.multiplies:
            return _product(demand, arguments)
        return self._quantizing(demand, arguments)

    def launched(
        self, demand: Demand, arguments: Mapping[str, object], compiled: object, grid: tuple[int, ...], known: Known
    ) -> Demand:
        """Add to ``demand`` the products of the compiled form (Triton's or a static launcher of torch)."""
        if self._template is not None or (self._is_inductors and not self._source.multiplies):
            return demand
        ir = self._ir(compiled)
        if ir is None or not ir.multiplies:
            return demand
        counted = ir.flops(arguments, grid, known)
        if counted is None:
            return demand if demand.product is not None else demand._replace(flops=NAN)
        flops, dtype = counted
        # The named sizes are of another product, or of one of several.
        product = demand.product if demand.product is not None and 0.5 < flops / demand.flops < 2 else None
        return demand._replace(flops=demand.flops if product else flops, dtype=dtype or demand.dtype, product=product)

    def _ir(self, compiled: object) -> TritonIr | None:
        key = str(getattr(compiled, "hash", ""))
        if key not in self._irs:
            text = compiled_text(compiled, "ttir")
            self._irs[key] = TritonIr(text) if text else None
        return self._irs[key]

    def _moved_bytes(self, arguments: Mapping[str, object]) -> float:
        accesses = self._source.accesses
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        if not accesses:
            return tensor_bytes(tensors.values())
        most = self._elements(arguments)
        read: dict[int, float] = {}
        written: dict[int, float] = {}
        for name, tensor in tensors.items():
            access, address = accesses.get(name, Access(passes=1, loads=1)), tensor.data_ptr()
            passes = access.passes
            if not self._is_long(tensor, arguments):  # what was read or written a moment ago is in the caches
                passes = 0 if access.reads_back else min(passes, 1)
            loads = passes * _least(tensor, most, access.loads) + _least(tensor, most, access.adds)
            stores = _least(tensor, most, access.stores + access.adds)
            read[address] = max(read.get(address, 0.0), loads)
            written[address] = max(written.get(address, 0.0), stores)
        return sum(read.values()) + sum(written.values()) or tensor_bytes(tensors.values())

    def _elements(self, arguments: Mapping[str, object]) -> float:
        if not self._is_inductors:
            return math.inf
        numels = self._numels(arguments)
        return float(math.prod(numels.values())) if numels else math.inf

    def _numels(self, arguments: Mapping[str, object]) -> dict[str, int]:
        passed = {
            name: value
            for name, value in arguments.items()
            if name.endswith("numel") and isinstance(value, int) and name != "rnumel"
        }
        return self._source.numels | passed

    def _width(self, arguments: Mapping[str, object]) -> int:
        rows = [size for name, size in self._numels(arguments).items() if name.startswith("r")]
        return math.prod(rows) if rows and self._is_inductors else 0

    def _is_long(self, tensor: torch.Tensor, arguments: Mapping[str, object]) -> bool:
        """Return whether a row is too long to stay in the caches until the next pass."""
        width = self._width(arguments) or (int(tensor.shape[-1]) if tensor.dim() else 0)
        return width * tensor.element_size() > CACHED_ROW_BYTES

    def _quantizing(self, demand: Demand, arguments: Mapping[str, object]) -> Demand:
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and value.dtype in EIGHT_BIT:
                access = self._source.accesses.get(name, Access())
                if access.stores and not access.passes:
                    return demand._replace(dtype="fp8", quantized=matrix_size(value))
        return demand


def _least(tensor: torch.Tensor, most: float, accesses: int) -> float:
    return min(float(memory_bytes(tensor)), most * accesses * tensor.element_size()) if accesses else 0.0


def _product(demand: Demand, arguments: Mapping[str, object]) -> Demand:
    m, n, k = (arguments.get(name) for name in ("M", "N", "K"))
    if not (isinstance(m, int) and isinstance(n, int) and isinstance(k, int)):
        return demand._replace(flops=NAN)
    shape = ProductShape(m, n, k).of(*(value for value in arguments.values() if isinstance(value, torch.Tensor)))
    return demand._replace(flops=shape.flops, product=shape)
