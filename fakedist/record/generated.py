"""The Python code that Inductor generates for a graph: each line's module, which buffer reuses which, its integers."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from fakedist.record.integers import IntegerPart
from fakedist.run.rows import HolderRow

#: Start of the last line of generated code: for each buffer, the number of the module that computes it.
MARK = "# fakedist: modules of buffers "
#: Start of the line before it: the part of the graph that computes integers.
INTEGERS = "# fakedist: integers "
#: A buffer of no known module. It belongs to the module that was compiled.
COMPILED = -1
_FUNCTIONS = ("call", "partition_", "subgraph_")


@dataclass
class Generated:
    """What is known about generated code.

    Attributes:
        lines: Line -> number of the module that it works for.
        holders: Where memory changes hands.
        integers: The part of the graph that computes integers, if it has one.
    """

    lines: dict[int, int] = field(default_factory=dict)
    holders: list[HolderRow] = field(default_factory=list)
    integers: IntegerPart | None = None


def with_modules(source: str, modules: dict[str, int], integers: IntegerPart | None = None) -> str:
    """Append what :func:`parse_generated` needs to generated code, as comments that caches keep."""
    lines = [] if integers is None else [f"{INTEGERS}{json.dumps(integers.as_json(), separators=(',', ':'))}"]
    return "\n".join([source.rstrip(), *lines, f"{MARK}{json.dumps(modules, separators=(',', ':'))}\n"])


def parse_generated(source: str) -> Generated | None:
    """Read generated code. None for code that :func:`with_modules` did not write."""
    before, _, marked = source.rstrip().rpartition("\n")
    if not marked.startswith(MARK):
        return None
    modules = json.loads(marked.removeprefix(MARK))
    found = Generated()
    integers = before.rpartition("\n")[2]
    if integers.startswith(INTEGERS):
        found.integers = IntegerPart.from_json(json.loads(integers.removeprefix(INTEGERS)))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith(_FUNCTIONS):
            _Function(modules, found, is_whole=node.name == "call").read(node)
    return found


class _Function:
    """One generated function, a straight sequence of statements.

    Args:
        modules: Module of each buffer.
        found: Receives the result.
        is_whole: Whether its inputs are the graph's inputs.
    """

    def __init__(self, modules: dict[str, int], found: Generated, *, is_whole: bool) -> None:
        self._modules, self._found, self._is_whole = modules, found, is_whole
        self._roots: dict[str, int] = {}
        self._unwritten: set[str] = set()

    def read(self, function: ast.FunctionDef) -> None:
        """Follow the function's statements."""
        statements = list(_statements(function.body))
        deleted = {(each.lineno, name) for each in statements if isinstance(each, ast.Delete) for name in _names(each)}
        for each in statements:
            if isinstance(each, ast.Assign):
                self._assigned(each, deleted)
            elif isinstance(each, ast.Expr):
                self._called(each)

    def _assigned(self, statement: ast.Assign, deleted: set[tuple[int, str]]) -> None:
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Name) and value.id == "args" and self._is_whole:
            for place, element in enumerate(target.elts):
                if isinstance(element, ast.Name):
                    self._roots[element.id] = -1 - place
            return
        if not isinstance(target, ast.Name):
            return
        name, source = target.id, _viewed(value)
        module = self._modules.get(name, COMPILED)
        if source is None:
            self._roots[name] = statement.lineno
            if isinstance(value, ast.Call) and (name in self._modules):
                self._mark(statement, module)
                if _is_allocation(value):
                    self._unwritten.add(name)
            return
        root = self._roots.get(source)
        if root is None:
            return
        self._roots[name] = root
        if (statement.lineno, source) in deleted and name != source:
            self._found.holders.append(HolderRow(root, statement.lineno, module))
            self._unwritten.add(name)

    def _called(self, statement: ast.Expr) -> None:
        """Take a kernel call. It works for the module of the buffers it writes, those not yet written."""
        named = [name for name in _names(statement) if name in self._modules]
        new = [name for name in named if name in self._unwritten]
        if named:
            self._mark(statement, self._modules[(new or named)[-1]])
            self._unwritten.difference_update(new)

    def _mark(self, statement: ast.stmt, module: int) -> None:
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
            self._found.lines[line] = module


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            yield from _statements(getattr(statement, "body", []))


def _names(node: ast.AST) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]


def _viewed(value: ast.expr) -> str | None:
    """The buffer of which an expression is a view, a part or another name."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Subscript):
        return _viewed(value.value)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "reinterpret_tensor":
        return _viewed(value.args[0])
    return None


def _is_allocation(value: ast.Call) -> bool:
    return isinstance(value.func, ast.Name) and value.func.id.startswith("empty")
