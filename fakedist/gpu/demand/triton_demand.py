"""What Triton's kernels demand of a GPU: Inductor's, and those that libraries and scripts write themselves.

Their source says what they load and store (:mod:`fakedist.gpu.demand.triton_source`). A kernel that Inductor made
moves no more than the elements that it iterates over, which bounds what it picks from an embedding or a slice.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from fakedist.gpu.demand.attention_demand import Known
from fakedist.gpu.demand.kernel_parts import CACHED_ROW_BYTES
from fakedist.gpu.demand.operation_demand import (
    EIGHT_BIT,
    NAN,
    Demand,
    dtype_of,
    matrix_size,
    memory_bytes,
    tensor_bytes,
)
from fakedist.gpu.demand.triton_ir import TritonIr
from fakedist.gpu.demand.triton_source import Access, TritonSource, read_source
from fakedist.gpu.demand.triton_templates import Template, template_of
from fakedist.gpu.demand.work_shapes import ProductShape


class TritonKernel:
    """Counts what the launches of one kernel demand.

    Args:
        name: Its name.
        source: Its source; empty if unknown.
    """

    def __init__(self, name: str, source: str) -> None:
        self._template: Template | None = template_of(name, source)
        self._source: TritonSource = read_source(name, source)
        self._is_inductors = name.startswith("triton_")
        self._irs: dict[str, TritonIr | None] = {}

    def demand(self, arguments: Mapping[str, object], known: Known) -> Demand:
        """The demand of one launch.

        Args:
            arguments: The kernel's arguments, by name.
            known: Returns the values of a mask.
        """
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
        """The demand of a launch with the products of what was compiled.

        Args:
            demand: What its source and its arguments say.
            arguments: The kernel's arguments, by name.
            compiled: What Triton compiled, or torch's static launcher of it; None if that is not known.
            grid: How many programs it had along each axis.
            known: Returns a tensor's values.
        """
        if self._template is not None or (self._is_inductors and not self._source.multiplies):
            return demand
        ir = self._ir(compiled)
        if ir is None or not ir.multiplies:
            return demand
        found = ir.flops(arguments, grid, known)
        if found is None:
            return demand if demand.product is not None else demand._replace(flops=NAN)
        flops, dtype = found
        # The named sizes are of another product, or of one of several.
        product = demand.product if demand.product is not None and 0.5 < flops / demand.flops < 2 else None
        return demand._replace(flops=demand.flops if product else flops, dtype=dtype or demand.dtype, product=product)

    def _ir(self, compiled: object) -> TritonIr | None:
        key = str(getattr(compiled, "hash", ""))
        if key not in self._irs:
            text = _ir_text(compiled)
            self._irs[key] = TritonIr(text) if text else None
        return self._irs[key]

    def _moved_bytes(self, arguments: Mapping[str, object]) -> float:
        accesses = self._source.accesses
        given = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        if not accesses:
            return tensor_bytes(given.values())
        most = self._elements(arguments)
        read: dict[int, float] = {}
        written: dict[int, float] = {}
        for name, tensor in given.items():
            access, address = accesses.get(name, Access(passes=1, loads=1)), tensor.data_ptr()
            passes = access.passes
            if not self._is_long(tensor, arguments):  # what was read or written a moment ago is in the caches
                passes = 0 if access.reads_back else min(passes, 1)
            loads = passes * _least(tensor, most, access.loads) + _least(tensor, most, access.adds)
            stores = _least(tensor, most, access.stores + access.adds)
            read[address] = max(read.get(address, 0.0), loads)
            written[address] = max(written.get(address, 0.0), stores)
        return sum(read.values()) + sum(written.values()) or tensor_bytes(given.values())

    def _elements(self, arguments: Mapping[str, object]) -> float:
        """How many elements one of Inductor's kernels iterates over; infinite if that is not known."""
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
        """Whether a row is too long to stay in the caches until the next pass."""
        width = self._width(arguments) or (int(tensor.shape[-1]) if tensor.dim() else 0)
        return width * tensor.element_size() > CACHED_ROW_BYTES

    def _quantizing(self, demand: Demand, arguments: Mapping[str, object]) -> Demand:
        """The demand, with the matrix that the kernel converts to eight bits, if it does."""
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and value.dtype in EIGHT_BIT:
                access = self._source.accesses.get(name, Access())
                if access.stores and not access.passes:
                    return demand._replace(dtype="fp8", quantized=matrix_size(value))
        return demand


def _ir_text(compiled: object) -> str:
    """The intermediate representation of a compiled kernel; empty if it is not known.

    torch's static launcher keeps only the name under which Triton's cache has it.
    """
    asm, key, name = (getattr(compiled, attribute, None) for attribute in ("asm", "hash", "name"))
    if asm is not None and "ttir" in asm:
        return str(asm["ttir"])
    if not isinstance(key, str) or not isinstance(name, str):
        return ""
    path = importlib.import_module("triton.runtime.cache").get_cache_manager(key).get_file(f"{name}.ttir")
    return Path(path).read_text() if path else ""


def _least(tensor: torch.Tensor, most: float, places: int) -> float:
    """The bytes of a tensor that so many places reach, each at most ``most`` elements."""
    return min(float(memory_bytes(tensor)), most * places * tensor.element_size()) if places else 0.0


def _product(demand: Demand, arguments: Mapping[str, object]) -> Demand:
    """A kernel that multiplies matrices, whose sizes are known by the names that such kernels give them."""
    m, n, k = (arguments.get(name) for name in ("M", "N", "K"))
    if not (isinstance(m, int) and isinstance(n, int) and isinstance(k, int)):
        return demand._replace(flops=NAN)
    shape = ProductShape(m, n, k).of(*(value for value in arguments.values() if isinstance(value, torch.Tensor)))
    return demand._replace(flops=shape.flops, product=shape)
