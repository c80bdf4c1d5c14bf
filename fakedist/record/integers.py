"""The part of a compiled graph that computes integers and masks from its inputs, as text that generated code keeps.

Kernels of compiled graphs do not run. Most of what a graph computes is large floats, which have no values. The counts
of a block mask, offsets of packed sequences and flags are different: kernels do as much as these say. They follow from
a few small operations, which :mod:`fakedist.gpu.values.graph_values` runs on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

#: Of the text, for the keys of caches.
VERSION = 2
#: The most operations, and the most elements of a float tensor, that are worth it.
_MOST_NODES, _FLOATS = 4_000, 65_536
#: The operation of a node that stands for a tensor of at most so many elements, which is part of the graph.
CONSTANT, _CONSTANTS = "constant", 4_096
_NAMESPACES = ("aten", "prims")
_MODULES = ("_operator", "math", "torch")
#: Stands for an argument that cannot be text.
_UNKNOWN = object()


@dataclass
class IntegerPart:
    """Operations of a graph, in order.

    Attributes:
        nodes: For each: its name, its operation, its arguments and keyword arguments. A dict stands for what JSON
            lacks: another node (``n``), a type (``d``), a memory format (``f``), a device (``c``).
        inputs: The place of each input among the graph's.
        outputs: The names of results, by place.
        buffers: The name of the node whose values each buffer of the generated code holds.
    """

    nodes: list[tuple[str, str, list[object], dict[str, object]]] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> object:
        """The part as JSON."""
        return [self.nodes, self.inputs, list(self.outputs.items()), self.buffers]

    @classmethod
    def from_json(cls, found: object) -> IntegerPart:
        """The part from :meth:`as_json`."""
        assert isinstance(found, list)
        nodes, inputs, outputs, buffers = found
        return cls([tuple(node) for node in nodes], inputs, dict(outputs), buffers)


def integers_of(graph: fx.Graph, buffers: Mapping[str, object]) -> IntegerPart | None:
    """The part of a lowered graph that computes integers.

    Args:
        graph: The graph.
        buffers: The buffers of its generated code, by name, with the node of each (``origin_node``).
    """
    return _Reader(graph).part(buffers)


class _Reader:
    """Reads a graph's nodes in order.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._texts: dict[fx.Node, tuple[str, str, list[object], dict[str, object]]] = {}
        self._inputs: dict[fx.Node, int] = {}
        self._roots: dict[fx.Node, fx.Node] = {}  # whose memory a view shows
        self._writers: dict[fx.Node, list[fx.Node]] = {}
        self._lost: set[fx.Node] = set()
        place = 0
        for node in graph.nodes:
            if node.op == "placeholder":
                if _is_wanted(node):
                    self._inputs[node] = place
                place += 1
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr" and (constant := _constant(node)) is not None:
                self._texts[node] = constant

    def part(self, buffers: Mapping[str, object]) -> IntegerPart | None:
        found = IntegerPart()
        wanted: list[fx.Node] = []
        for node in self._graph.nodes:
            if node.op == "output":
                for place, value in enumerate(_outputs(node)):
                    if isinstance(value, fx.Node) and self._is_target(value):
                        found.outputs[place] = value.name
                        wanted.append(value)
            elif node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
                wanted += [value for value in node.all_input_nodes if self._is_target(value)]
        for name, buffer in buffers.items():
            origin = getattr(buffer, "origin_node", None)
            if isinstance(origin, fx.Node) and self._is_target(origin):
                found.buffers[name] = origin.name
                wanted.append(origin)
        needed = self._needed(wanted)
        if not needed or len(needed) > _MOST_NODES:
            return None
        found.nodes = [self._texts[node] for node in self._graph.nodes if node in needed and node in self._texts]
        found.inputs = {node.name: place for node, place in self._inputs.items() if node in needed}
        return found

    def _needed(self, wanted: list[fx.Node]) -> set[fx.Node]:
        needed: set[fx.Node] = set()
        while wanted:
            node = wanted.pop()
            if node in needed:
                continue
            needed.add(node)
            wanted += node.all_input_nodes
            wanted += self._writers.get(self._roots.get(node, node), [])
        return needed

    def _is_target(self, node: fx.Node) -> bool:
        """Whether a node is a computed tensor of integers or a mask."""
        value = node.meta.get("val")
        is_whole = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
        return is_whole and node in self._texts and self._roots.get(node, node) not in self._lost

    def _call(self, node: fx.Node) -> None:
        target = node.target
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        writes = isinstance(target, OpOverload) and target._schema.is_mutable
        text = self._text(node)
        if first is not None and (writes or _may_view(target)):
            self._roots[node] = self._roots.get(first, first)
        if writes:
            written = [value for value in node.all_input_nodes if text is None or value is first]
            for value in written:
                root = self._roots.get(value, value)
                self._writers.setdefault(root, []).append(node) if text is not None else self._lost.add(root)
        if text is not None:
            self._texts[node] = text

    def _text(self, node: fx.Node) -> tuple[str, str, list[object], dict[str, object]] | None:
        name = _target_name(node.target)
        if name is None or not _is_wanted(node):
            return None
        for value in node.all_input_nodes:
            known = value in self._texts or value in self._inputs
            if not known or self._roots.get(value, value) in self._lost:
                return None
        args = [_as_text(value) for value in node.args]
        kwargs = {key: _as_text(value) for key, value in node.kwargs.items()}
        if any(value is _UNKNOWN for value in (*args, *kwargs.values())):
            return None
        return (node.name, name, args, kwargs)


def _constant(node: fx.Node) -> tuple[str, str, list[object], dict[str, object]] | None:
    """A small tensor of the host that is part of a graph; None if the node is another."""
    value = getattr(node.graph.owning_module, str(node.target), None)
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.numel() > _CONSTANTS:
        return None
    if value.is_complex() or value.layout is not torch.strided:
        return None
    text = [value.flatten().tolist(), _as_text(value.dtype), list(value.shape)]
    return (node.name, CONSTANT, text, {})


def _outputs(node: fx.Node) -> tuple[object, ...]:
    found = node.args[0]
    return tuple(found) if isinstance(found, (list, tuple)) else (found,)


def _may_view(target: object) -> bool:
    """Whether an operation's result may show its first argument's memory."""
    return isinstance(target, OpOverload) and (target.is_view or target._schema.name == "aten::reshape")


def _target_name(target: object) -> str | None:
    """The name of an operation that the host can run; None of others: random ones, and those of other libraries."""
    if isinstance(target, OpOverload):
        if target.namespace not in _NAMESPACES or torch.Tag.nondeterministic_seeded in target.tags:
            return None
        return str(target)
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", None)
    return f"{module}:{name}" if module in _MODULES and name else None


def _is_wanted(node: fx.Node) -> bool:
    """Whether a node's value is a number, integers or a mask, or a few floats."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    if node.op == "call_function" and value is None and isinstance(node.target, OpOverload):
        return len(node.target._schema.returns) > 1  # getitem() picks from it
    return all(map(_is_light, values))


def _is_light(value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return value is None or isinstance(value, (bool, int, float, torch.SymInt, torch.SymBool, torch.SymFloat))
    if not (value.is_floating_point() or value.is_complex()):
        return True
    return math.prod(map(_hint, value.shape)) <= _FLOATS


def _hint(size: object) -> int:
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if hint is not None else _FLOATS + 1


def _as_text(value: object) -> object:
    """An argument as JSON; ``_UNKNOWN`` for one that is not text."""
    if isinstance(value, fx.Node):
        return {"n": value.name}
    if isinstance(value, (list, tuple)):
        found = [_as_text(each) for each in value]
        return _UNKNOWN if any(each is _UNKNOWN for each in found) else found
    if isinstance(value, torch.dtype):
        return {"d": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"f": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"c": 0}
    if isinstance(value, torch.layout):
        return None if value is torch.strided else _UNKNOWN
    return value if value is None or type(value) in (bool, int, float, str) else _UNKNOWN
