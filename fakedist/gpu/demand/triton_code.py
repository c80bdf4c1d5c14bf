"""Reads Triton's kernels: their source for loads and stores, their compiled form for the FLOPs of ``tl.dot``.

Source (:func:`read_source`) shows how often a kernel loads and stores its arguments. In Triton's intermediate
representation (:class:`TritonIr`), products have tile sizes and precision, and loops and conditions have integer
bounds: arguments, the program's index, and values loaded from known tensors. They are evaluated for all programs of the
grid at once, so helper functions count, and so do loops that end earlier in some programs, as in causal attention.
"""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fakedist.gpu.demand.work_shapes import Known

_LOADS, _STORES = ("load",), ("store",)
#: Modules of Triton in a kernel's source. A ``load`` of anything else is a block pointer's or descriptor's method.
_MODULES = ("tl", "triton_helpers", "libdevice", "tl_math", "language", "triton")
_BUILTINS = ("range", "min", "max", "len", "int", "float", "print", "isinstance", "getattr")
_NUMEL = re.compile(r"^\s*([xyz]|r\d_)numel(?::\s*tl\.constexpr)? = (\d+)\s*$", re.MULTILINE)


#: Products in Triton's language, and in Gluon's.
_MULTIPLIES = re.compile(r"\bdot(_scaled)?\(|\b(warpgroup_mma|tcgen05_mma|mma_v2)\w*\(")


class Access(NamedTuple):
    """A kernel's use of an argument.

    Attributes:
        passes: Loops of its own that load from it; 1 if it loads once or outside loops, 0 if it does not.
        loads: Most statements in one loop that load from it.
        stores: Statements that store to it.
        adds: Atomic additions to it, which read and write.
        gathers: Whether its addresses depend on values that it has loaded.
        reads_back: Whether it loads what it stored before.
    """

    passes: int = 0
    loads: int = 0
    stores: int = 0
    adds: int = 0
    gathers: bool = False
    reads_back: bool = False


class TritonSource(NamedTuple):
    """The uses of a kernel's arguments (empty if unreadable), and whether it multiplies matrices.

    ``numels``: elements along each dimension that Inductor's kernels iterate over, where the source has them.
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
    accesses = _SourceReader(kernel).accesses() if kernel is not None else {}
    return TritonSource(accesses, numels, _MULTIPLIES.search(source) is not None)


class _SourceReader(ast.NodeVisitor):
    def __init__(self, function: ast.FunctionDef) -> None:
        arguments = function.args
        self._names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
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

    def visit_For(self, node: ast.For | ast.While) -> None:
        self._loops.append(id(node))
        self.generic_visit(node)
        self._loops.pop()

    visit_While = visit_For  # noqa: N815 (ast.NodeVisitor looks it up by this name)

    def visit_If(self, node: ast.If) -> None:
        self._conditions += 1
        self.generic_visit(node)
        self._conditions -= 1

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
        for name in (node.id for node in ast.walk(target) if isinstance(node, ast.Name)):
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
        function = _called(node)
        gathers = self._is_loaded(address) or (_is_method(node) and any(map(self._is_loaded, node.args[:1])))
        for name in self._pointers_in(address):
            if function in _LOADS or not self._conditions:  # another branch may not store
                self._first.setdefault(name, function)
            if function in _LOADS:
                self._loads[name][self._loops[-1] if self._loops else 0].add(id(node))
            elif function in _STORES:
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
        return {name for variable in _without_loads(expression) for name in self._pointers.get(variable, ())}

    def _is_loaded(self, expression: ast.AST) -> bool:
        return any(
            (isinstance(node, ast.Name) and node.id in self._loaded)
            or (isinstance(node, ast.Call) and _called(node) in _LOADS)
            for node in ast.walk(expression)
        )


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_method(node: ast.Call) -> bool:
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    return owner is not None and not (isinstance(owner, ast.Name) and owner.id in _MODULES)


def _address(node: ast.Call) -> ast.expr | None:
    function = _called(node)
    if function not in (*_LOADS, *_STORES) and not function.startswith("atomic_"):
        return None
    if _is_method(node) and isinstance(node.func, ast.Attribute):
        return node.func.value
    named = (keyword.value for keyword in node.keywords if keyword.arg in ("pointer", "desc"))
    return node.args[0] if node.args else next(named, None)


def _without_loads(expression: ast.AST) -> Iterator[str]:
    if isinstance(expression, ast.Call) and _address(expression) is not None:
        return
    if isinstance(expression, ast.Name):
        yield expression.id
    for child in ast.iter_child_nodes(expression):
        yield from _without_loads(child)


#: A whole number in each program; None if it is not known.
Numbers = npt.NDArray[np.int64] | None
#: FLOPs in each program, by the type of the operands; None if they are not known.
Counts = dict[str, npt.NDArray[np.float64]] | None

#: Of larger grids, so many programs stand for all.
_MOST_PROGRAMS = 1 << 14
#: A loop whose inside depends on how often it ran is followed up to here.
_MOST_ROUNDS = 1 << 12

_LOCATION = re.compile(r"\s*loc\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\)")
_ASSIGNED = re.compile(r"^(?:%([\w$.-]+)(?::\d+)? = )?(.*)$")
_NAME = r"%([\w$.#-]+)"
_FOR = re.compile(rf"^scf\.for (?:unsigned )?{_NAME} = {_NAME} to {_NAME} step {_NAME}(?: iter_args\((.*?)\) ->)?")
_CARRIED = re.compile(rf"{_NAME} = {_NAME}")
_CONSTANT = re.compile(r"^arith\.constant (-?\d+|true|false)(?: : \w+)?$")
_DOT = re.compile(r"^tt\.dot(_scaled)? ")
_TENSOR = re.compile(r"tensor<((?:\d+x)+)([\w]+)>")
_PARAMETER = re.compile(rf"{_NAME}: ")
_PREDICATES: dict[str, Callable[..., npt.NDArray[np.bool_]]] = {
    "eq": np.equal, "ne": np.not_equal, "slt": np.less, "ult": np.less, "sle": np.less_equal, "ule": np.less_equal,
    "sgt": np.greater, "ugt": np.greater, "sge": np.greater_equal, "uge": np.greater_equal,
}  # fmt: skip


def _quotient(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Division that rounds towards zero; by zero, 0."""
    safe = np.where(b == 0, 1, b)
    return np.where(b == 0, 0, np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe)))


_BINARY: dict[str, Callable[..., npt.NDArray[np.int64]]] = {
    "addi": np.add, "subi": np.subtract, "muli": np.multiply, "minsi": np.minimum, "minui": np.minimum,
    "maxsi": np.maximum, "maxui": np.maximum, "andi": np.bitwise_and, "ori": np.bitwise_or, "xori": np.bitwise_xor,
    "shli": np.left_shift, "shrsi": np.right_shift, "shrui": np.right_shift, "divsi": _quotient, "divui": _quotient,
    "remsi": lambda a, b: a - _quotient(a, b) * b, "remui": lambda a, b: a - _quotient(a, b) * b,
    "floordivsi": np.floor_divide, "ceildivsi": lambda a, b: -np.floor_divide(-a, b),
    "ceildivui": lambda a, b: -np.floor_divide(-a, b),
}  # fmt: skip
_CASTS = ("extsi", "extui", "trunci", "index_cast", "index_castui")
#: Operands of a product -> the type it computes in, as ``WorkRow.dtype``.
_TYPES = {"f64": "fp64", "f16": "bf16", "bf16": "bf16", "i8": "int8"}


@dataclass
class _Statement:
    """A line, the name that it assigns (or ""), and the regions that it opens; ``dots`` if it multiplies."""

    target: str
    text: str
    regions: list[list[_Statement]] = field(default_factory=list)
    dots: bool = False


class _Pointer(NamedTuple):
    argument: str
    offset: npt.NDArray[np.int64]


_Value = npt.NDArray[np.int64] | _Pointer | None


class TritonIr:
    """The products of one compiled kernel; ``text`` is its ``asm["ttir"]``."""

    def __init__(self, text: str) -> None:
        lines = [_LOCATION.sub("", line).strip() for line in text.splitlines()]
        functions = [index for index, line in enumerate(lines) if line.startswith("tt.func public")]
        self._parameters: list[str] = []
        self._body: list[_Statement] = []
        #: Whether it has products at all.
        self.multiplies = any(_DOT.match(_ASSIGNED.sub(r"\2", line)) for line in lines)
        if functions and self.multiplies:
            self._parameters = _PARAMETER.findall(lines[functions[0]])
            self._body, _ = _read(lines, functions[0] + 1)
        # Functions that were not inlined are not followed.
        self._counted: dict[tuple[object, ...], tuple[float, str] | None] = {}
        self._is_whole = any(statement.dots for statement in self._body) and not any(
            "tt.call @" in line for line in lines
        )

    def flops(self, arguments: Mapping[str, object], grid: Sequence[int], known: Known) -> tuple[float, str] | None:
        """FLOPs of one launch of ``grid`` programs along each axis, and the type of most of them; None if unknown."""
        if not self.multiplies:
            return 0.0, ""
        if not self._is_whole:
            return None
        sizes = [max(int(size), 1) for size in (*grid, 1, 1, 1)[:3]]
        key = (*sizes, *(value for name in self._parameters if isinstance(value := arguments.get(name), int)))
        if key in self._counted:
            return self._counted[key]
        number = math.prod(sizes)
        programs = np.unique(np.linspace(0, number - 1, min(number, _MOST_PROGRAMS)).astype(np.int64))
        evaluation = _Evaluation(arguments, sizes, programs, known)
        counted = None
        try:
            counts = evaluation.count(self._body, self._values(arguments))
        except (KeyError, IndexError, ValueError, OverflowError):  # a form of another Triton
            counts = None
        if counts is not None:
            totals = {dtype: float(flops.sum()) * number / len(programs) for dtype, flops in counts.items()}
            counted = sum(totals.values()), max(totals, key=lambda dtype: totals[dtype], default="")
        if not evaluation.reads:
            self._counted[key] = counted
        return counted

    def _values(self, arguments: Mapping[str, object]) -> dict[str, _Value]:
        values: dict[str, _Value] = {}
        for name in self._parameters:
            value = arguments.get(name)
            if isinstance(value, torch.Tensor):
                values[name] = _Pointer(name, np.zeros(1, np.int64))
            elif isinstance(value, int):
                values[name] = np.array([int(value)], np.int64)
        return values


def _read(lines: list[str], index: int) -> tuple[list[_Statement], int]:
    statements: list[_Statement] = []
    while index < len(lines):
        line = lines[index]
        if line.startswith("}"):
            return statements, index
        match = _ASSIGNED.match(line)
        assert match is not None
        statement = _Statement(match[1] or "", match[2])
        statement.dots = _DOT.match(statement.text) is not None
        while lines[index].endswith("{"):  # also "} else {"
            region, index = _read(lines, index + 1)
            statement.regions.append(region)
            if index >= len(lines):
                break
        statement.dots |= any(inner.dots for region in statement.regions for inner in region)
        statements.append(statement)
        index += 1
    return statements, index


class _Evaluation:
    """Evaluates a kernel's statements for the programs of these numbers; ``sizes`` has the programs along each axis."""

    def __init__(
        self, arguments: Mapping[str, object], sizes: Sequence[int], programs: npt.NDArray[np.int64], known: Known
    ) -> None:
        self._arguments, self._known = arguments, known
        self._num_programs = len(programs)
        x, y, _ = sizes
        self._axes = {"x": programs % x, "y": programs // x % y, "z": programs // (x * y)}
        self._sizes = dict(zip("xyz", sizes, strict=True))
        self._contents: dict[str, npt.NDArray[np.int64] | None] = {}
        #: Whether it depends on what tensors hold.
        self.reads = False

    def count(self, body: list[_Statement], values: dict[str, _Value]) -> Counts:
        """FLOPs of a region in each program. ``values`` has what is known, and takes what the region assigns."""
        total: dict[str, npt.NDArray[np.float64]] = {}
        runs = np.ones(self._num_programs, bool)
        for statement in body:
            if statement.text.startswith("cf."):  # a program that returns early
                ends = _ends(statement.text, body, values)
                if ends is None:
                    return None
                runs = runs & ~ends
                continue
            if statement.text.startswith("scf.for"):
                counts = self._loop(statement, values)
            elif statement.text.startswith("scf.if"):
                counts = self._condition(statement, values)
            elif statement.regions:
                counts = None if statement.dots else {}
            elif statement.dots:
                counts = self._product(statement.text)
            else:
                counts = {}
                if statement.target:
                    values[statement.target] = self._value(statement.text, values)
            if counts is None:
                return None
            total = _sum(total, {dtype: flops * runs for dtype, flops in counts.items()})
        return total

    def _product(self, text: str) -> Counts:
        types = [([int(size) for size in sizes.split("x")[:-1]], dtype) for sizes, dtype in _TENSOR.findall(text)]
        if len(types) < 2:
            return None
        (left, dtype), (result, _) = types[0], types[-1]
        flops = 2.0 * math.prod(result) * left[-1]
        if text.startswith("tt.dot_scaled"):
            packed = "lhs = e2m1" in text
            dtype = "fp4" if packed and "rhs = e2m1" in text else "fp8"
            flops *= 2 if packed else 1
        elif dtype == "f32":
            precision = re.search(r"inputPrecision = (\w+)", text)
            dtype = precision[1] if precision and precision[1] != "ieee" else "fp32"
        else:
            dtype = _TYPES.get(dtype, "fp8" if dtype.startswith("f8") else "fp32")
        return {dtype: np.full(self._num_programs, flops)}

    def _loop(self, statement: _Statement, values: dict[str, _Value]) -> Counts:
        match = _FOR.match(statement.text)
        if match is None:
            return None if statement.dots else {}
        index, low, high, step = match[1], *(values.get(name) for name in match.groups()[1:4])
        carried = _CARRIED.findall(match[5] or "")
        inner = dict(values) | {index: None} | {name: None for name, _ in carried}
        _forget(values, statement.target, len(carried))
        if not statement.dots:
            return {}
        if not (isinstance(low, np.ndarray) and isinstance(high, np.ndarray) and isinstance(step, np.ndarray)):
            return None
        rounds = np.broadcast_to(np.maximum(-((low - high) // np.maximum(step, 1)), 0), (self._num_programs,))
        once = self.count(statement.regions[0], inner)
        if once is not None:
            return {dtype: flops * rounds for dtype, flops in once.items()}
        # What is inside depends on the round.
        if rounds.max(initial=0) > _MOST_ROUNDS:
            return None
        total: dict[str, npt.NDArray[np.float64]] = {}
        state = {name: values.get(first) for name, first in carried}
        for number in range(int(rounds.max(initial=0))):
            inner = dict(values) | {index: low + number * step} | state
            counts = self.count(statement.regions[0], inner)
            if counts is None:
                return None
            total = _sum(total, {dtype: flops * (number < rounds) for dtype, flops in counts.items()})
            state = dict(zip(state, _yielded(statement.regions[0], inner), strict=False))
        return total

    def _condition(self, statement: _Statement, values: dict[str, _Value]) -> Counts:
        match = re.match(rf"^scf\.if {_NAME}", statement.text)
        condition = values.get(match[1]) if match else None
        counts, yielded = [], []
        for region in (*statement.regions, [])[:2]:
            inner = dict(values)
            counts.append(self.count(region, inner))
            yielded.append(_yielded(region, inner))
        for index, (first, second) in enumerate(zip(*yielded, strict=False)):
            chosen = None
            if isinstance(condition, np.ndarray) and isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
                chosen = np.where(condition, first, second)
            values[f"{statement.target}#{index}"] = chosen
            if not index:
                values[statement.target] = chosen
        if not statement.dots:
            return {}
        then, otherwise = counts
        if not isinstance(condition, np.ndarray):
            return None
        is_true = np.broadcast_to(condition.astype(bool), (self._num_programs,))
        if (then is None and is_true.any()) or (otherwise is None and not is_true.all()):
            return None
        chosen_counts = {dtype: flops * is_true for dtype, flops in (then or {}).items()}
        return _sum(chosen_counts, {dtype: flops * ~is_true for dtype, flops in (otherwise or {}).items()})

    def _value(self, text: str, values: dict[str, _Value]) -> _Value:
        if "tensor<" in text:
            return None
        if constant := _CONSTANT.match(text):
            text = constant[1]
            return np.array([int(text == "true") if text in ("true", "false") else int(text)], np.int64)
        operation, _, rest = text.partition(" ")
        namespace, _, name = operation.partition(".")
        operands = [values.get(operand) for operand in re.findall(_NAME, rest)]
        if namespace == "tt":
            return self._of_triton(name, rest, operands)
        numbers = [operand for operand in operands if isinstance(operand, np.ndarray)]
        if namespace != "arith" or len(numbers) != len(operands) or not numbers:
            return None
        if name in _CASTS:
            return numbers[0]
        if name == "cmpi":
            return _PREDICATES[rest.partition(",")[0]](*numbers[:2]).astype(np.int64)
        if name == "select":
            return np.where(numbers[0], numbers[1], numbers[2])
        return _BINARY[name](*numbers[:2]) if name in _BINARY else None

    def _of_triton(self, name: str, rest: str, operands: list[_Value]) -> _Value:
        if name == "get_program_id":
            return self._axes[rest[0]]
        if name == "get_num_programs":
            return np.array([self._sizes[rest[0]]], np.int64)
        first = operands[0] if operands else None
        if not isinstance(first, _Pointer):
            return None
        if name == "addptr" and isinstance(operands[1], np.ndarray):
            return first._replace(offset=first.offset + operands[1])
        if name == "load":
            contents = self._content(first.argument)
            inside = contents is not None and first.offset.min() >= 0 and first.offset.max() < len(contents)
            return contents[first.offset] if contents is not None and inside else None
        return None

    def _content(self, argument: str) -> npt.NDArray[np.int64] | None:
        self.reads = True
        if argument not in self._contents:
            tensor = self._arguments[argument]
            assert isinstance(tensor, torch.Tensor)
            is_whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
            values = self._known(tensor) if is_whole and tensor.is_contiguous() else None
            self._contents[argument] = None if values is None else values.cpu().reshape(-1).to(torch.int64).numpy()
        return self._contents[argument]


def _ends(text: str, body: list[_Statement], values: Mapping[str, _Value]) -> npt.NDArray[np.bool_] | None:
    """Programs that end at a branch with one side that returns without a product; None if unknown."""
    match = re.match(rf"^cf\.cond_br {_NAME}, \^(\w+)(?:\(.*?\))?, \^(\w+)", text)
    condition = values.get(match[1]) if match else None
    if match is None or not isinstance(condition, np.ndarray):
        return np.zeros(1, bool) if text.startswith("cf.br") else None
    returns = [_returns(label, body) for label in match.groups()[1:]]
    if returns == [True, False]:
        return condition.astype(bool)
    return ~condition.astype(bool) if returns == [False, True] else None


def _returns(label: str, body: list[_Statement]) -> bool:
    """Whether a block returns, after stores perhaps, but no products."""
    index = next((index for index, statement in enumerate(body) if statement.text.startswith(f"^{label}")), len(body))
    for statement in body[index + 1 :]:
        if statement.text.startswith("tt.return"):
            return True
        if statement.dots or statement.text.startswith(("cf.", "^")):
            return False
    return False


def _yielded(region: list[_Statement], values: Mapping[str, _Value]) -> list[_Value]:
    if not region or not region[-1].text.startswith("scf.yield"):
        return []
    return [values.get(name) for name in re.findall(_NAME, region[-1].text)]


def _forget(values: dict[str, _Value], target: str, number: int) -> None:
    for index in range(number):
        values[f"{target}#{index}"] = None
    if target:
        values[target] = None


def _sum(
    first: dict[str, npt.NDArray[np.float64]], second: Mapping[str, npt.NDArray[np.float64]]
) -> dict[str, npt.NDArray[np.float64]]:
    return first | {dtype: flops + first[dtype] if dtype in first else flops for dtype, flops in second.items()}


def compiled_text(kernel: object, kind: str) -> str:
    """The text ("ttir", "ptx") of a compiled kernel, or "": torch's static launcher keeps only its name in a cache."""
    asm, key, name = (getattr(kernel, attribute, None) for attribute in ("asm", "hash", "name"))
    if asm is not None and kind in asm:
        return str(asm[kind])
    if not isinstance(key, str) or not isinstance(name, str):
        return ""
    path = importlib.import_module("triton.runtime.cache").get_cache_manager(key).get_file(f"{name}.{kind}")
    return Path(path).read_text() if path else ""
