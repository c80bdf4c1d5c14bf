"""Places running compiled graphs: which layer each line of generated code works for."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

import torch

from fakedist.frames import local_value
from fakedist.patch import present
from fakedist.record.compiled_graphs import Compilations, Generated, Modules, parse_generated
from fakedist.record.marker import device_pieces
from fakedist.record.module_names import OUTSIDE, LayerTable
from fakedist.record.position import GraphPart
from fakedist.rundir.encoding import Record
from fakedist.rundir.memory_records import GeneratedRecord, GraphsRecord, HeldRecord, PlacingsRecord
from fakedist.rundir.rows import GraphRow, HeldRow, LineRow, PlacingRow

#: Most frames between an operation and the generated code that called it.
_MOST_FRAMES = 16


@dataclass(frozen=True)
class PlacedGraph:
    """A compiled graph that a layer calls, with the numbers of its code and of its list of layers.

    Attributes:
        layers: The layer of each module that the code numbers. The last one, index -1, is the calling layer.
        may_reuse_inputs: Whether its code runs whenever the graph does, so that it reuses memory of its inputs.
    """

    code: int
    placing: int
    filename: str
    generated: Generated
    layers: tuple[int, ...]
    may_reuse_inputs: bool

    def part_here(self) -> GraphPart | None:
        """The part whose line of generated code runs in this thread. None outside that code."""
        frame = self._frame(sys._getframe(1))
        module = None if frame is None else self.generated.lines.get(frame.f_lineno)
        if frame is None or module is None:
            return None
        return GraphPart(self.layers[module], frame.f_lineno in self.generated.recomputed)

    def buffers_here(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, str]]:
        """The buffers of integers that tensors are parts of, with their nodes, in the code that this thread runs."""
        integers = self.generated.integers
        frame = None if integers is None else self._frame(sys._getframe(1))
        if integers is None or frame is None:
            return
        buffers = {
            value.untyped_storage().data_ptr(): (value, node)
            for name, node in integers.buffers.items()
            if isinstance(value := local_value(frame, name), torch.Tensor)
        }
        for tensor in tensors:
            if (buffer := buffers.get(tensor.untyped_storage().data_ptr())) is not None:
                yield buffer

    def results_here(self) -> dict[str, torch.Tensor]:
        """The results, by their nodes, of operations of integers that the generated code has called by now."""
        integers = self.generated.integers
        frame = None if integers is None or not integers.results else self._frame(sys._getframe(1))
        if integers is None or frame is None:
            return {}
        values = {node: local_value(frame, name) for node, name in integers.results.items()}
        return {node: value for node, value in values.items() if isinstance(value, torch.Tensor)}

    def _frame(self, frame: FrameType | None) -> FrameType | None:
        for _ in range(_MOST_FRAMES):
            if frame is None or frame.f_code.co_filename == self.filename:
                return frame
            frame = frame.f_back
        return None


class Placing:
    """Places compiled graphs, and records where."""

    def __init__(self, layers: LayerTable, compilations: Compilations) -> None:
        self._layers = layers
        self._compilations = compilations
        self._codes: dict[str, tuple[int, Generated | None]] = {}
        self._placings: dict[tuple[int, ...], int] = {}
        self._placed: dict[tuple[int, int], tuple[Modules, PlacedGraph]] = {}
        self._new_codes: list[Record] = []
        self._new_placings: list[PlacingRow] = []
        self._new_graphs: list[GraphRow] = []
        self._new_held: list[HeldRow] = []

    def take(self) -> list[Record]:
        """The records for the journal since the last call."""
        taken, self._new_codes = self._new_codes, []
        if self._new_placings:
            taken.append(PlacingsRecord(self._new_placings))
        if self._new_graphs:
            taken.append(GraphsRecord(self._new_graphs))
        if self._new_held:
            taken.append(HeldRecord(self._new_held))
        self._new_placings, self._new_graphs, self._new_held = [], [], []
        return taken

    def begins(self, compiled: object, inputs: Sequence[object], op: int, calling: int) -> PlacedGraph | None:
        """Begin the run of Inductor's compiled graph, called as operation ``op`` by the layer ``calling``."""
        placed = self._placed_of(compiled, calling)
        if placed is None:
            return None
        self._new_graphs.append(GraphRow(op, placed.code, placed.placing))
        if placed.may_reuse_inputs:
            for root, line, module in placed.generated.holders:
                if root < 0 and -1 - root < len(inputs):
                    for piece in device_pieces(inputs[-1 - root]):
                        self._new_held.append(HeldRow(op, piece.address, line, placed.layers[module]))
        return placed

    def _placed_of(self, compiled: object, calling: int) -> PlacedGraph | None:
        key = (id(compiled), calling)
        modules = self._compilations.modules(compiled)
        if modules is None:
            return None
        known = self._placed.get(key)
        if known is not None and known[0] is modules:
            return known[1]
        filename = _filename(compiled)
        code, generated = self._code(filename, compiled)
        if generated is None:
            return None
        layers = (*(self._moved(layer, modules.calling, calling) for layer in modules.layers), calling)
        placing = self._placings.get(layers)
        if placing is None:
            placing = self._placings[layers] = len(self._placings)
            self._new_placings.append(PlacingRow(placing, layers))
        runs_always = getattr(compiled, "cudagraph_info", None) is None
        placed = PlacedGraph(code, placing, filename, generated, layers, runs_always)
        self._placed[key] = (modules, placed)
        return placed

    def _code(self, filename: str, compiled: object) -> tuple[int, Generated | None]:
        known = self._codes.get(filename)
        if known is None:
            generated = parse_generated(getattr(compiled, "source_code", ""))
            number = len(self._codes)
            known = self._codes[filename] = (number, generated)
            if generated is not None:
                lines = [LineRow(line, module) for line, module in generated.lines.items()]
                again = sorted(generated.recomputed)
                self._new_codes.append(GeneratedRecord(number, filename, lines, generated.holders, again))
        return known

    def _moved(self, layer: int, compiled_in: int, calling: int) -> int:
        if layer < 0:
            return calling
        return layer if compiled_in in (calling, OUTSIDE) else self._layers.moved(layer, compiled_in, calling)


def find_layers(modules: Modules, layers: LayerTable) -> None:
    """Set the layer of each module that a graph numbers: that of the innermost known module in its stack, or -1."""
    modules.layers = []
    for stack in modules.stacks:
        known = (layers.layer_by_id(key, modules.calling) for key, _ in reversed(stack))
        modules.layers.append(next((layer for layer in known if layer is not None), -1))


def _filename(compiled: object) -> str:
    return str(present(sys.modules["torch._inductor.codecache"], "get_path")(present(compiled, "cache_key"), "py")[2])


def is_dynamos(module: torch.nn.Module) -> bool:
    """Return whether Dynamo made a module. The pieces into which it cuts a graph (DDP's buckets) run as modules."""
    name = type(module).__module__
    if name == "torch._dynamo.eval_frame":  # an OptimizedModule: the script's own model, or such a graph
        inner = module._modules.get("_orig_mod")
        return isinstance(inner, torch.fx.GraphModule) and is_dynamos(inner)
    if name.startswith("torch._dynamo."):
        return True
    if not isinstance(module, torch.fx.GraphModule):
        return False
    return hasattr(module, "compile_subgraph_reason") or any(map(is_dynamos, module.children()))
