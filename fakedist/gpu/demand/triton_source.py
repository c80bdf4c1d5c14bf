"""Reads from the source of a Triton kernel how it uses its arguments: what it loads and stores, and how often."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_LOADS, _STORES = ("load",), ("store",)
#: Modules of Triton in a kernel's source. A ``load`` of anything else is a block pointer's or descriptor's method.
_MODULES = ("tl", "triton_helpers", "libdevice", "tl_math", "language", "triton")
_BUILTINS = ("range", "min", "max", "len", "int", "float", "print", "isinstance", "getattr")
_NUMEL = re.compile(r"^\s*([xyz]|r\d_)numel(?::\s*tl\.constexpr)? = (\d+)\s*$", re.MULTILINE)


#: Products in Triton's language, and in Gluon's.
_MULTIPLIES = re.compile(r"\bdot(_scaled)?\(|\b(warpgroup_mma|tcgen05_mma|mma_v2)\w*\(")


class Access(NamedTuple):
    """How a kernel uses an argument.

    Attributes:
        passes: In how many loops of its own it loads from it; 1 if it loads once or outside loops, 0 if it does not.
        loads: Most places in one loop that load from it.
        stores: Places that store to it.
        adds: Places that add to it (atomic operations), which reads and writes.
        gathers: Whether where it loads, stores or adds depends on values that it has loaded.
        reads_back: Whether it stores to it first, and loads what it stored later.
    """

    passes: int = 0
    loads: int = 0
    stores: int = 0
    adds: int = 0
    gathers: bool = False
    reads_back: bool = False


class TritonSource(NamedTuple):
    """What a kernel's source says.

    Attributes:
        accesses: How it uses its arguments; empty if the source cannot be read.
        numels: Elements along each dimension that Inductor's kernels iterate over, where the source has them.
        multiplies: Whether it multiplies matrices.
    """

    accesses: dict[str, Access]
    numels: dict[str, int]
    multiplies: bool


def read_source(name: str, source: str) -> TritonSource:
    """Read the source of the kernel of this name, with its helper functions, if any."""
    numels = {f"{name}numel": int(number) for name, number in _NUMEL.findall(source)}
    try:
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError):
        functions = []
    kernel = next((function for function in functions if function.name == name), functions[-1] if functions else None)
    accesses = _Reader(kernel).accesses() if kernel is not None else {}
    return TritonSource(accesses, numels, _MULTIPLIES.search(source) is not None)


class _Reader(ast.NodeVisitor):
    """Follows pointers through a function's assignments."""

    def __init__(self, function: ast.FunctionDef) -> None:
        arguments = function.args
        self._names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        self._pointers: dict[str, set[str]] = {name: {name} for name in self._names}
        self._loaded: set[str] = set()
        self._loops: list[int] = []
        self._conditions = 0
        self._loads: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._stores: dict[str, set[int]] = defaultdict(set)
        self._adds: dict[str, set[int]] = defaultdict(set)
        self._gathers: set[str] = set()
        self._first: dict[str, str] = {}  # what it does first with an argument
        for _ in range(2):  # a loop uses names that its end assigns
            for statement in function.body:
                self.visit(statement)

    def accesses(self) -> dict[str, Access]:
        return {name: self._access(name) for name in self._names}

    def _access(self, name: str) -> Access:
        by_loop = self._loads.get(name, {})
        in_loops = [sites for loop, sites in by_loop.items() if loop]
        loads = max(map(len, by_loop.values()), default=0)
        passes = max(len(in_loops), 1) if by_loop else 0
        reads_back = passes > 0 and self._first.get(name) in _STORES
        adds = len(self._adds[name])
        return Access(passes, loads, len(self._stores[name]), adds, name in self._gathers, reads_back)

    # ---- statements

    def visit_For(self, node: ast.For) -> None:
        self._loops.append(id(node))
        self.generic_visit(node)
        self._loops.pop()

    def visit_If(self, node: ast.If) -> None:
        self._conditions += 1
        self.generic_visit(node)
        self._conditions -= 1

    def visit_While(self, node: ast.While) -> None:
        self._loops.append(id(node))
        self.generic_visit(node)
        self._loops.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self._assign(node.target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self._assign(node.target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        pointers, is_loaded = self._pointers_in(value), self._is_loaded(value)
        for name in (each.id for each in ast.walk(target) if isinstance(each, ast.Name)):
            self._pointers.setdefault(name, set()).update(pointers)
            if is_loaded:
                self._loaded.add(name)

    # ---- expressions

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        address = _address(node)
        if address is None:
            self._helper(node)
            return
        what = _called(node)
        gathers = self._is_loaded(address) or (_is_method(node) and any(map(self._is_loaded, node.args[:1])))
        for name in self._pointers_in(address):
            if what in _LOADS or not self._conditions:  # another branch may not store
                self._first.setdefault(name, what)
            if what in _LOADS:
                self._loads[name][self._loops[-1] if self._loops else 0].add(id(node))
            elif what in _STORES:
                self._stores[name].add(id(node))
            else:
                self._adds[name].add(id(node))
            if gathers:
                self._gathers.add(name)

    def _helper(self, node: ast.Call) -> None:
        """Take what a helper function gets as loaded, once."""
        if isinstance(node.func, ast.Name) and node.func.id not in _BUILTINS:
            for name in set().union(*map(self._pointers_in, node.args)):
                self._first.setdefault(name, "load")
                self._loads[name][0].add(id(node))

    def _pointers_in(self, expression: ast.AST) -> set[str]:
        """The arguments that an expression's value may point into. A loaded value points nowhere."""
        return {name for each in _without_loads(expression) for name in self._pointers.get(each, ())}

    def _is_loaded(self, expression: ast.AST) -> bool:
        """Whether an expression depends on a value that was loaded."""
        return any(
            (isinstance(each, ast.Name) and each.id in self._loaded)
            or (isinstance(each, ast.Call) and _called(each) in _LOADS)
            for each in ast.walk(expression)
        )


def _called(node: ast.Call) -> str:
    """The name of a called function or method."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_method(node: ast.Call) -> bool:
    """Whether a load or store is a method of a block pointer or descriptor."""
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    return owner is not None and not (isinstance(owner, ast.Name) and owner.id in _MODULES)


def _address(node: ast.Call) -> ast.expr | None:
    """Where a call loads, stores or adds; None for other calls."""
    what = _called(node)
    if what not in (*_LOADS, *_STORES) and not what.startswith("atomic_"):
        return None
    if _is_method(node) and isinstance(node.func, ast.Attribute):
        return node.func.value
    named = (keyword.value for keyword in node.keywords if keyword.arg in ("pointer", "desc"))
    return node.args[0] if node.args else next(named, None)


def _without_loads(expression: ast.AST) -> Iterator[str]:
    """The names in an expression, except those that only decide where it loads."""
    if isinstance(expression, ast.Call) and _address(expression) is not None:
        return
    if isinstance(expression, ast.Name):
        yield expression.id
    for child in ast.iter_child_nodes(expression):
        yield from _without_loads(child)
