"""Tracks which module each part of a graph belongs to, from Dynamo's graph to the code that Inductor generates.

Dynamo notes the modules in which the nodes of its graph ran (``nn_module_stack``). AOTAutograd and Inductor copy this,
to the nodes of the backward as ``fwd_nn_module_stack``. Generated code names modules by number, in the order in which
Dynamo's graph first mentions them. Caches keep the code, and the same code serves identical graphs of other modules.
Dynamo itself runs in every process, so its graph gives the meaning of the numbers. How a graph's nodes are divided
among modules is part of the caches' keys.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Protocol

from torch import fx

from fakedist.patch import patched, present
from fakedist.record.generated import COMPILED, with_modules
from fakedist.record.integers import VERSION, integers_of

_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
#: The modules of a node, outermost first: (id of the module or 0, its name in the compiled function).
Stack = tuple[tuple[int, str], ...]


class _Lowering(Protocol):
    """Inductor's ``GraphLowering``."""

    graph: fx.Graph
    name_to_buffer: Mapping[str, object]


class _Code(Protocol):
    """Inductor's ``ValueWithLineMap``: generated code, as far as it is a text."""

    value: object


class Modules:
    """The numbered modules of the nodes of a Dynamo graph.

    Args:
        graph: Dynamo's graph.
        calling: The layer that calls the graph when it is compiled.

    Attributes:
        stacks: The modules of each number.
        layers: The layer of each number, -1 if it is not known. The recorder fills this in.
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

    def of_buffers(self, lowering: _Lowering) -> dict[str, int]:
        """The number of each buffer's module, for a graph that Inductor has lowered."""
        order = {node: place for place, node in enumerate(lowering.graph.nodes)}
        found = {}
        for name, buffer in lowering.name_to_buffer.items():
            origins = [*(getattr(buffer, "origins", None) or ()), getattr(buffer, "origin_node", None)]
            nodes = [node for node in origins if isinstance(node, fx.Node) and node.op == "call_function"]
            # The last of the nodes fused into a buffer is the one whose value it holds.
            last = max(nodes, key=lambda node: order.get(node, -1), default=None)
            found[str(name)] = COMPILED if last is None else self.number(last)
        return found


def _nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph and of the graphs inside it (checkpointed parts)."""
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _stack(node: fx.Node) -> Stack:
    found = next((stack for name in _STACKS if (stack := node.meta.get(name))), None) or {}
    keys = ((str(key).partition("@")[0], value[0]) for key, value in found.items())
    return tuple((int(key) if key.isdecimal() else 0, str(path)) for key, path in keys)


class Watched:
    """Follows compilations, and knows which modules the numbers in a compiled graph's code mean.

    Args:
        begun: Called with the modules of a graph that is about to be compiled.
        calling: Returns the layer that runs now.
    """

    def __init__(self, begun: Callable[[Modules], None], calling: Callable[[], int]) -> None:
        self._begun, self._calling = begun, calling
        self._now = threading.local()
        self._of_graph: dict[int, tuple[weakref.ref[object], Modules]] = {}

    def modules(self, compiled: object) -> Modules | None:
        """The modules of a compiled graph (Inductor's ``CompiledFxGraph``). None if they are not known."""
        known = self._of_graph.get(id(compiled))
        return known[1] if known is not None and known[0]() is compiled else None

    @contextmanager
    def compilations(self) -> Iterator[None]:
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

    def _codegen(self, original: Callable[..., tuple[_Code, object]]) -> Callable[..., object]:
        def codegen(lowering: _Lowering, *args: object, **kwargs: object) -> object:
            result = original(lowering, *args, **kwargs)
            code = result[0]
            if self._modules is not None and isinstance(source := getattr(code, "value", None), str):
                integers = integers_of(lowering.graph, lowering.name_to_buffer)
                code.value = with_modules(source, self._modules.of_buffers(lowering), integers)
            return result

        return codegen

    def _post_compile(self, original: Callable[..., None]) -> Callable[..., None]:
        def post_compile(compiled: object, *args: object, **kwargs: object) -> None:
            if self._modules is not None:
                self._of_graph[id(compiled)] = (weakref.ref(compiled), self._modules)
            original(compiled, *args, **kwargs)

        return post_compile
