"""Compiled graphs of ``torch.compile``: the module of each part, the integers they compute, and where each runs.

Kernels of compiled graphs do not run. Most of what a graph computes is large floats, which have no values. The counts
of a block mask, offsets of packed sequences and flags are different: kernels do as much as these say. They follow from
a few small operations, which :mod:`fakedist.gpu.values.graph_values` runs on the host.

Dynamo notes the modules in which its nodes ran (``nn_module_stack``). AOTAutograd and Inductor copy this, to backward
nodes as ``fwd_nn_module_stack``. Generated code names modules by number, in the order in which Dynamo's graph first
mentions them. Caches keep the code, which serves identical graphs of other modules, too. Dynamo itself runs in every
process, so its graph gives the numbers' meaning. How a graph's nodes are divided among modules is part of the caches'
keys.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from fakedist.patch import patched, present, when_imported
from fakedist.rundir.rows import HolderRow

#: Of the text, for the keys of caches.
VERSION = 6
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
        nodes: The name of each, its operation, its arguments and keyword arguments. A dict stands for what JSON lacks:
            another node (``n``), a type (``d``), a memory format (``f``), a device (``c``).
        inputs: The index of each input among the graph's.
        buffers: The name of the node whose values each buffer of the generated code holds.
        results: The buffer of each node that an operation of PyTorch's computes while the graph runs: a router's
            choices, counts that ranks exchanged. Its values are read there.
    """

    nodes: list[tuple[str, str, list[object], dict[str, object]]] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> object:
        """The part as JSON."""
        return [self.nodes, self.inputs, list(self.outputs.items()), self.buffers, self.results]

    @classmethod
    def from_json(cls, plain: object) -> IntegerPart:
        """The part from :meth:`as_json`."""
        assert isinstance(plain, list)
        nodes, inputs, outputs, buffers, results = plain
        return cls([tuple(node) for node in nodes], inputs, dict(outputs), buffers, results)


def integers_of(graph: fx.Graph, buffers: Mapping[str, object]) -> IntegerPart | None:
    """The part of a lowered graph that computes integers, by its buffers' names and nodes (``origin_node``)."""
    return _GraphReader(graph, buffers).part()


class _GraphReader:
    def __init__(self, graph: fx.Graph, buffers: Mapping[str, object]) -> None:
        self._graph = graph
        self._buffers = {name: getattr(buffer, "origin_node", None) for name, buffer in buffers.items()}
        dispatched = {self._buffers[name]: name for name, buffer in buffers.items() if _is_dispatched(buffer)}
        self._results = {node: name for node, name in dispatched.items() if node is not None and _is_whole(node)}
        self._dispatched = set(dispatched)
        self._texts: dict[fx.Node, tuple[str, str, list[object], dict[str, object]]] = {}
        self._inputs: dict[fx.Node, int] = {}
        self._roots: dict[fx.Node, fx.Node] = {}  # whose memory a view shows
        self._writers: dict[fx.Node, list[fx.Node]] = {}
        self._lost: set[fx.Node] = set()
        index = 0
        for node in graph.nodes:
            if node.op == "placeholder":
                if _is_wanted(node):
                    self._inputs[node] = index
                index += 1
            elif node.op == "call_function" and node not in self._results:
                self._call(node)
            elif node.op == "get_attr" and (constant := _constant(node)) is not None:
                self._texts[node] = constant

    def part(self) -> IntegerPart | None:
        part = IntegerPart()
        wanted: list[fx.Node] = []
        for node in self._graph.nodes:
            if node.op == "output":
                for index, value in enumerate(_outputs(node)):
                    if not isinstance(value, fx.Node) or self._roots.get(value, value) in self._dispatched:
                        continue
                    if self._is_target(value):
                        part.outputs[index] = value.name
                        wanted.append(value)
            elif node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
                wanted += [value for value in node.all_input_nodes if self._is_target(value)]
        for name, origin in self._buffers.items():
            if isinstance(origin, fx.Node) and origin not in self._dispatched and self._is_target(origin):
                part.buffers[name] = origin.name
                wanted.append(origin)
        needed = self._needed(wanted)
        if not needed or len(needed) > _MOST_NODES:
            return None
        part.nodes = [self._texts[node] for node in self._graph.nodes if node in needed and node in self._texts]
        part.inputs = {node.name: index for node, index in self._inputs.items() if node in needed}
        part.results = {node.name: name for node, name in self._results.items() if node in needed}
        return part

    def _needed(self, wanted: list[fx.Node]) -> set[fx.Node]:
        needed: set[fx.Node] = set()
        while wanted:
            node = wanted.pop()
            if node in needed:
                continue
            needed.add(node)
            if node in self._results:
                continue
            wanted += node.all_input_nodes
            wanted += self._writers.get(self._roots.get(node, node), [])
        return needed

    def _is_target(self, node: fx.Node) -> bool:
        """Return whether a node is a computed tensor of integers or a mask."""
        return _is_whole(node) and node in self._texts and self._roots.get(node, node) not in self._lost

    def _call(self, node: fx.Node) -> None:
        target = node.target
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        writes = isinstance(target, OpOverload) and target._schema.is_mutable
        text = self._text(node)
        if first is not None and (
            writes or (isinstance(target, OpOverload) and (target.is_view or target._schema.name == "aten::reshape"))
        ):
            self._roots[node] = self._roots.get(first, first)
        self._lost.update(self._roots.get(value, value) for value in _written_by_triton(node))
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
            known = value in self._texts or value in self._inputs or value in self._results
            if not known or self._roots.get(value, value) in self._lost:
                return None
        args = [_as_text(value) for value in node.args]
        kwargs = {key: _as_text(value) for key, value in node.kwargs.items()}
        if any(value is _UNKNOWN for value in (*args, *kwargs.values())):
            return None
        return (node.name, name, args, kwargs)


def _is_whole(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _written_by_triton(node: fx.Node) -> list[fx.Node]:
    """The tensors that a Triton kernel of the script's writes, as torch reads them from Triton's IR."""
    if not isinstance(node.target, HigherOrderOperator) or node.target.name() != "triton_kernel_wrapper_mutation":
        return []
    from torch._higher_order_ops import triton_kernel_wrap

    find: Callable[..., Sequence[str]] = present(triton_kernel_wrap, "get_mutated_tensors")
    call, given = node.kwargs, node.kwargs["kwargs"]
    assert isinstance(given, Mapping)
    like = {name: value.meta.get("val") if isinstance(value, fx.Node) else value for name, value in given.items()}
    written = find(call["kernel_idx"], call["constant_args_idx"], like, call["tma_descriptor_metadata"])
    return [value for name in written if isinstance(value := given[name], fx.Node)]


def _is_dispatched(buffer: object) -> bool:
    """Return whether an operation of PyTorch's computes a buffer, so that it has its values as in eager code."""
    if type(buffer).__name__ == "MultiOutput":  # of several results
        (buffer,) = vars(buffer)["inputs"]
    return isinstance(getattr(buffer, "op_overload", None), OpOverload)


def _constant(node: fx.Node) -> tuple[str, str, list[object], dict[str, object]] | None:
    value = getattr(node.graph.owning_module, str(node.target), None)
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.numel() > _CONSTANTS:
        return None
    if value.is_complex() or value.layout is not torch.strided:
        return None
    text = [value.flatten().tolist(), _as_text(value.dtype), list(value.shape)]
    return (node.name, CONSTANT, text, {})


def _outputs(node: fx.Node) -> tuple[object, ...]:
    outputs = node.args[0]
    return tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)


def _target_name(target: object) -> str | None:
    if isinstance(target, OpOverload):
        if target.namespace not in _NAMESPACES or torch.Tag.nondeterministic_seeded in target.tags:
            return None
        return str(target)
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", None)
    return f"{module}:{name}" if module in _MODULES and name else None


def _is_wanted(node: fx.Node) -> bool:
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
    match value:
        case fx.Node():
            return {"n": value.name}
        case list() | tuple():
            texts = list(map(_as_text, value))
            return _UNKNOWN if any(text is _UNKNOWN for text in texts) else texts
        case torch.dtype():
            return {"d": str(value).removeprefix("torch.")}
        case torch.memory_format():
            return {"f": str(value).removeprefix("torch.")}
        case torch.device():
            return {"c": 0}
        case torch.layout():
            return None if value is torch.strided else _UNKNOWN
    return value if value is None or type(value) in (bool, int, float, str) else _UNKNOWN


#: Start of the last line of generated code: for each buffer, the number of the module that computes it.
MARK = "# fakedist: modules of buffers "
#: Start of the line before it: the part of the graph that computes integers.
INTEGERS = "# fakedist: integers "
#: Start of the line before these: buffers of a backward that have results of its forward, computed again.
RECOMPUTED = "# fakedist: recomputed "
#: A buffer of no known module. It belongs to the module that was compiled.
COMPILED = -1
_FUNCTIONS = ("call", "partition_", "subgraph_")


@dataclass
class Generated:
    """Facts about generated code: modules by line, changes of what memory holds, and its part on integers.

    Attributes:
        recomputed: Lines of a backward that compute a result of its forward again.
    """

    lines: dict[int, int] = field(default_factory=dict)
    recomputed: set[int] = field(default_factory=set)
    holders: list[HolderRow] = field(default_factory=list)
    integers: IntegerPart | None = None


def with_modules(
    source: str, modules: dict[str, int], integers: IntegerPart | None = None, recomputed: Sequence[str] = ()
) -> str:
    """Append what :func:`parse_generated` needs to generated code, as comments that caches keep."""
    lines = [f"{RECOMPUTED}{json.dumps(recomputed, separators=(',', ':'))}"] if recomputed else []
    if integers is not None:
        lines.append(f"{INTEGERS}{json.dumps(integers.as_json(), separators=(',', ':'))}")
    return "\n".join([source.rstrip(), *lines, f"{MARK}{json.dumps(modules, separators=(',', ':'))}\n"])


def parse_generated(source: str) -> Generated | None:
    """Read generated code. None for code that :func:`with_modules` did not write."""
    before, _, marked = source.rstrip().rpartition("\n")
    if not marked.startswith(MARK):
        return None
    modules = json.loads(marked.removeprefix(MARK))
    generated = Generated()
    before, _, last = before.rpartition("\n")
    if last.startswith(INTEGERS):
        generated.integers = IntegerPart.from_json(json.loads(last.removeprefix(INTEGERS)))
        last = before.rpartition("\n")[2]
    recomputed = json.loads(last.removeprefix(RECOMPUTED)) if last.startswith(RECOMPUTED) else ()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith(_FUNCTIONS):
            _Function(modules, frozenset(recomputed), generated, is_whole=node.name == "call").read(node)
    return generated


class _Function:
    """One generated function, a straight sequence of statements; ``is_whole``: its inputs are the graph's."""

    def __init__(
        self, modules: dict[str, int], recomputed: frozenset[str], generated: Generated, *, is_whole: bool
    ) -> None:
        self._modules = modules
        self._recomputed = recomputed
        self._generated = generated
        self._is_whole = is_whole
        self._roots: dict[str, int] = {}
        self._unwritten: set[str] = set()

    def read(self, function: ast.FunctionDef) -> None:
        statements = list(_statements(function.body))
        deletions = [statement for statement in statements if isinstance(statement, ast.Delete)]
        deleted = {(deletion.lineno, name) for deletion in deletions for name in _names(deletion)}
        for statement in statements:
            if isinstance(statement, ast.Assign):
                self._assigned(statement, deleted)
            elif isinstance(statement, ast.Expr):
                self._called(statement)

    def _assigned(self, statement: ast.Assign, deleted: set[tuple[int, str]]) -> None:
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Name) and value.id == "args" and self._is_whole:
            for index, element in enumerate(target.elts):
                if isinstance(element, ast.Name):
                    self._roots[element.id] = -1 - index
            return
        if not isinstance(target, ast.Name):
            return
        name, source = target.id, _viewed(value)
        if source is None:
            self._roots[name] = statement.lineno
            if isinstance(value, ast.Call) and (name in self._modules):
                self._mark(statement, name)
                if isinstance(value.func, ast.Name) and value.func.id.startswith("empty"):
                    self._unwritten.add(name)
            return
        root = self._roots.get(source)
        if root is None:
            return
        self._roots[name] = root
        if (statement.lineno, source) in deleted and name != source:
            self._generated.holders.append(HolderRow(root, statement.lineno, self._modules.get(name, COMPILED)))
            if name in self._recomputed:
                self._generated.recomputed.add(statement.lineno)
            self._unwritten.add(name)

    def _called(self, statement: ast.Expr) -> None:
        """Take a kernel call. It works for the module of the buffers it writes, those not yet written."""
        named = [name for name in _names(statement) if name in self._modules]
        new = [name for name in named if name in self._unwritten]
        if named:
            self._mark(statement, (new or named)[-1])
            self._unwritten.difference_update(new)

    def _mark(self, statement: ast.stmt, buffer: str) -> None:
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        self._generated.lines.update(dict.fromkeys(lines, self._modules[buffer]))
        if buffer in self._recomputed:
            self._generated.recomputed.update(lines)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            yield from _statements(getattr(statement, "body", []))


def _names(node: ast.AST) -> list[str]:
    return [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]


def _viewed(value: ast.expr) -> str | None:
    """The buffer of which an expression is a view, a part or another name."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Subscript):
        return _viewed(value.value)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "reinterpret_tensor":
        return _viewed(value.args[0])
    return None


_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
#: The modules of a node, outermost first: (id of the module or 0, its name in the compiled function).
Stack = tuple[tuple[int, str], ...]


#: Inductor's ``GraphLowering``, which is untyped.
_Lowering = Any


class Modules:
    """The numbered modules of a Dynamo graph's nodes, each with its layer, -1 if unknown.

    ``calling`` is the layer that calls the graph when it is compiled.
    """

    def __init__(self, graph: fx.GraphModule, calling: int) -> None:
        self.stacks: list[Stack] = []
        self.layers: list[int] = []
        self.calling = calling
        self._numbers: dict[str, int] = {}
        for node in _nodes(graph):
            stack = _stack(node)
            if stack and stack[-1][1] not in self._numbers:
                self._numbers[stack[-1][1]] = len(self.stacks)
                self.stacks.append(stack)

    def number(self, node: fx.Node) -> int:
        """The number of a node's module. Works for nodes derived from Dynamo's too."""
        stack = _stack(node)
        return self._numbers.get(stack[-1][1], COMPILED) if stack else COMPILED

    def division(self, graph: fx.GraphModule) -> tuple[int, ...]:
        """The number of each node's module. Generated code depends on it, so it must be in a cache's key."""
        return tuple(map(self.number, _nodes(graph)))

    def buffer_numbers(self, lowering: _Lowering) -> dict[str, int]:
        """The number of each buffer's module, for a graph that Inductor has lowered."""
        return {
            name: COMPILED if node is None else self.number(node) for name, node in _values_of_buffers(lowering).items()
        }


_TAG = "partitioner_tag"  # AOTAutograd's, of a joint graph's nodes


def recomputed_buffers(lowering: _Lowering) -> list[str]:
    """The buffers of a lowered backward that have the value of a node of its forward."""
    if not lowering.is_backward:  # a forward may have nodes of the backward, which need nothing else
        return []
    values = _values_of_buffers(lowering).items()
    return [name for name, node in values if node is not None and node.meta.get(_TAG) == "is_forward"]


def _values_of_buffers(lowering: _Lowering) -> dict[str, fx.Node | None]:
    """The last of the nodes fused into each buffer: the one whose value it holds. None if none is known."""
    order = {node: position for position, node in enumerate(lowering.graph.nodes)}
    values = {}
    for name, buffer in lowering.name_to_buffer.items():
        origins = [*(getattr(buffer, "origins", None) or ()), getattr(buffer, "origin_node", None)]
        nodes = [node for node in origins if isinstance(node, fx.Node) and node.op == "call_function"]
        values[str(name)] = max(nodes, key=lambda node: order.get(node, -1), default=None)
    return values


def _nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph and of the graphs inside it (checkpointed parts)."""
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _stack(node: fx.Node) -> Stack:
    modules = next((stack for name in _STACKS if (stack := node.meta.get(name))), None) or {}
    keys = ((str(key).partition("@")[0], value[0]) for key, value in modules.items())
    return tuple((int(key) if key.isdecimal() else 0, str(path)) for key, path in keys)


class Compilations:
    """Follows compilations, and knows the modules behind the numbers in a compiled graph's code.

    ``begun`` gets a graph's modules before it is compiled; ``calling`` returns the running layer.
    """

    def __init__(self, begun: Callable[[Modules], None], calling: Callable[[], int]) -> None:
        self._begun, self._calling = begun, calling
        self._now = threading.local()
        self._by_graph: dict[int, tuple[weakref.ref[object], Modules]] = {}

    def modules(self, compiled: object) -> Modules | None:
        """The modules of a compiled graph (Inductor's ``CompiledFxGraph``). None if they are not known."""
        known = self._by_graph.get(id(compiled))
        return known[1] if known is not None and known[0]() is compiled else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow what Inductor compiles.

        Raises:
            RecordingError: This version's Inductor compiles in another way.
        """
        from torch._inductor import codecache, compile_fx, graph, output_code

        details = present(codecache, "FxGraphHashDetails")
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(patched(compile_fx, "compile_fx", self._compile_fx(present(compile_fx, "compile_fx"))))
            enter(patched(details, "__init__", self._hash_details(present(details, "__init__"))))
            lowering = present(graph, "GraphLowering")
            enter(patched(lowering, "codegen", self._codegen(present(lowering, "codegen"))))
            compiled = present(output_code, "CompiledFxGraph")
            enter(patched(compiled, "post_compile", self._post_compile(present(compiled, "post_compile"))))
            yield

    @property
    def _modules(self) -> Modules | None:
        return getattr(self._now, "modules", None)

    def _within(self, modules: Modules, call: Callable[..., object]) -> Callable[..., object]:
        """Wrap a compiler so that it runs for these modules, even if called much later, for a backward that begins."""

        @functools.wraps(call)
        def within(*args: object, **kwargs: object) -> object:
            before, self._now.modules = self._modules, modules
            try:
                return call(*args, **kwargs)
            finally:
                self._now.modules = before

        return within

    def _compile_fx(self, original: Callable[..., object]) -> Callable[..., object]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def compile_fx(*args: object, **kwargs: object) -> object:
            call = signature.bind(*args, **kwargs)
            graph = next(iter(call.arguments.values()))
            if self._modules is not None or not isinstance(graph, fx.GraphModule):  # compile_fx calls itself
                return original(*args, **kwargs)
            modules = Modules(graph, self._calling())
            self._begun(modules)
            call.apply_defaults()
            call.arguments["inner_compile"] = self._within(modules, call.arguments["inner_compile"])
            return self._within(modules, original)(*call.args, **call.kwargs)

        return compile_fx

    def _hash_details(self, original: Callable[..., None]) -> Callable[..., None]:
        def hash_details(details: object, graph: object, *args: object, **kwargs: object) -> None:
            original(details, graph, *args, **kwargs)
            if self._modules is not None and isinstance(graph, fx.GraphModule):
                vars(details)["fakedist_modules"] = self._modules.division(graph)
                vars(details)["fakedist_integers"] = VERSION

        return hash_details

    def _codegen(self, original: Callable[..., tuple[Any, object]]) -> Callable[..., object]:
        def codegen(lowering: _Lowering, *args: object, **kwargs: object) -> object:
            result = original(lowering, *args, **kwargs)
            code = result[0]
            if self._modules is not None and isinstance(source := getattr(code, "value", None), str):
                integers = integers_of(lowering.graph, lowering.name_to_buffer)
                modules, again = self._modules.buffer_numbers(lowering), recomputed_buffers(lowering)
                code.value = with_modules(source, modules, integers, again)
            return result

        return codegen

    def _post_compile(self, original: Callable[..., None]) -> Callable[..., None]:
        def post_compile(compiled: object, *args: object, **kwargs: object) -> None:
            if self._modules is not None:
                self._by_graph[id(compiled)] = (weakref.ref(compiled), self._modules)
            original(compiled, *args, **kwargs)

        return post_compile


#: Returns the context for a run of a compiled graph with these inputs. It is called with the results.
Around = Callable[[object, Sequence[object]], AbstractContextManager[Callable[[object], None]]]

_CALLBACKS = "torch._dynamo.callback"
_OUTPUT_CODE = "torch._inductor.output_code"
_get_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
_PROXY, _FUNCTIONAL = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL


def is_tracing() -> bool:
    """Return whether torch compiles in this thread, with shapes alone, so that nothing that runs is the job's."""
    return _get_mode(_FAKE) is not None


def is_followed() -> bool:
    """Return whether torch records or rewrites what runs in this thread with real tensors, as ``make_fx`` does."""
    return _get_mode(_PROXY) is not None or _get_mode(_FUNCTIONAL) is not None


@contextmanager
def compilations(report: Callable[[bool], None]) -> Iterator[None]:
    """Call ``report(True)`` where torch begins to compile a graph or its backward, and ``report(False)`` at the end.

    Raises:
        RecordingError: This version's Dynamo compiles in another way.
    """
    depth = 0

    def around(original: Callable[..., AbstractContextManager[None]]) -> Callable[..., AbstractContextManager[None]]:
        @contextmanager
        def install_callbacks(*args: object, **kwargs: object) -> Iterator[None]:
            nonlocal depth
            depth += 1
            if depth == 1:
                report(True)
            try:
                with original(*args, **kwargs):
                    yield
            finally:
                depth -= 1
                if not depth:
                    report(False)

        return install_callbacks

    with ExitStack() as stack:

        def watch(module: ModuleType) -> None:
            owner, name = present(module, "CompilationCallbackHandler"), "install_callbacks"
            stack.enter_context(patched(owner, name, around(present(owner, name))))

        if _CALLBACKS in sys.modules:
            watch(sys.modules[_CALLBACKS])
        stack.enter_context(when_imported(_CALLBACKS.__eq__, watch))
        yield


@contextmanager
def compiled_graphs(graph: Around, made: Compilations) -> Iterator[None]:
    """Run every graph that Inductor compiled inside ``graph(compiled, inputs)``, and follow its compilation.

    That context gives a function, which is called with the results. Inductor, which takes seconds to import, is patched
    when the script first calls ``torch.compile``.

    Raises:
        RecordingError: This version's Inductor runs its graphs in another way.
    """
    original: Callable[..., object] = torch.compile
    with ExitStack() as undo:
        watching = False

        def watch() -> None:
            nonlocal watching
            if not watching:
                watching = True
                undo.enter_context(_inductor_graphs(graph))
                undo.enter_context(made.watching())

        @functools.wraps(original)
        def compile_(*args: object, **kwargs: object) -> object:
            watch()
            return original(*args, **kwargs)

        if _OUTPUT_CODE in sys.modules:
            watch()
        undo.enter_context(patched(torch, "compile", compile_))
        yield


@contextmanager
def _inductor_graphs(graph: Around) -> Iterator[None]:
    from torch._inductor import output_code

    original = present(present(output_code, "CompiledFxGraph"), "__call__")

    def call(self: object, inputs: Sequence[object]) -> object:
        with graph(self, inputs) as returned:
            results = original(self, inputs)
            returned(results)
            return results

    with patched(output_code.CompiledFxGraph, "__call__", call):
        yield
