"""Conditions and derived values of a space: expressions over the names of its axes, evaluated by simpleeval.

An expression can compute and compare. It has no attributes, subscripts, comprehensions and imports, and only the
functions listed here, so that a sweep file from elsewhere cannot run anything by it.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

import simpleeval

from fakedist.errors import SweepError
from fakedist.sweep.axes import Scalar

_EXAMPLE = '"tp * pp * cp <= 64"'
_LONGEST = 1_000
_MAX_NODES = 200
_LARGEST = 10**18


def _of_numbers(compute: Callable[..., object]) -> Callable[..., object]:
    """The operation for numbers only: repeated or formatted texts could fill the memory."""

    def checked(*values: object) -> object:
        for value in values:
            if not isinstance(value, int | float):
                raise TypeError(f"{value!r:.40} is no number")
        return compute(*values)

    return checked


def _add(one: object, other: object) -> object:
    return one + other if isinstance(one, str) and isinstance(other, str) else _of_numbers(operator.add)(one, other)


def _power(base: float, exponent: float) -> float:
    if abs(base) > 1e6 or abs(exponent) > 64:
        raise OverflowError("the power is too large")
    return float(base**exponent) if exponent < 0 else base**exponent


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "int": int,
    "round": round,
    "gcd": math.gcd,
    "log2": math.log2,
    "ceil_div": _ceil_div,
}
_OPERATORS: Mapping[type[ast.AST], Callable[..., object]] = {
    ast.Add: _add,
    ast.Sub: _of_numbers(operator.sub),
    ast.Mult: _of_numbers(operator.mul),
    ast.Div: _of_numbers(operator.truediv),
    ast.FloorDiv: _of_numbers(operator.floordiv),
    ast.Mod: _of_numbers(operator.mod),
    ast.Pow: _of_numbers(_power),
    ast.USub: _of_numbers(operator.neg),
    ast.UAdd: _of_numbers(operator.pos),
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, several: one in several,
    ast.NotIn: lambda one, several: one not in several,
}
_NODES = (
    *(ast.Expr, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Name, ast.Constant),
    *(ast.Tuple, ast.List, ast.And, ast.Or, ast.Load, *_OPERATORS),
)
_NAMED_CONSTANTS = {"true": True, "false": False}
_MISTAKES = (simpleeval.InvalidExpression, ArithmeticError, TypeError, ValueError)


class Expression:
    """One expression.

    Args:
        text: What the user wrote.
        where: The place, for messages.

    Attributes:
        text: What the user wrote.
        names: The names that it uses.

    Raises:
        SweepError: It is not an expression, or does more than compute and compare.
    """

    def __init__(self, text: str, where: str) -> None:
        self.text, self._where = text, where
        try:
            tree = ast.parse(text.strip())
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise SweepError(f"{where} {_short(text)!r} is not an expression", _EXAMPLE) from None
        if len(text) > _LONGEST or len(tree.body) != 1 or not isinstance(tree.body[0], ast.Expr):
            raise SweepError(f"{where} {_short(text)!r} is not one expression", _EXAMPLE)
        self._tree = tree.body[0]
        nodes = list(ast.walk(self._tree))
        self._check(nodes)
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        named = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in called}
        self.names = frozenset(named - set(_NAMED_CONSTANTS))

    def value(self, names: Mapping[str, Scalar]) -> Scalar:
        """The value with these names.

        Raises:
            SweepError: It has none, such as after a division by zero.
        """
        evaluator = simpleeval.EvalWithCompoundTypes(
            operators=dict(_OPERATORS), functions=dict(FUNCTIONS), names={**_NAMED_CONSTANTS, **names}
        )
        try:
            found = evaluator.eval(self.text, previously_parsed=self._tree)
        except _MISTAKES as error:
            with_ = " ".join(f"{name}={names[name]}" for name in sorted(self.names) if name in names)
            raise SweepError(
                f"{self._where} {_short(self.text)!r} has no value with {with_}: {error}", "change the expression"
            ) from None
        if not isinstance(found, bool | int | float | str) or (
            isinstance(found, int | float) and not abs(found) < _LARGEST
        ):
            raise SweepError(f"{self._where} {_short(self.text)!r} gives no number, text, true or false", _EXAMPLE)
        return found

    def _check(self, nodes: list[ast.AST]) -> None:
        told = f"{self._where} {_short(self.text)!r}"
        if len(nodes) > _MAX_NODES:
            raise SweepError(f"{told} is too long", "write several conditions")
        for node in nodes:
            if not isinstance(node, _NODES):
                raise SweepError(
                    f"{told}: {type(node).__name__} is not available here: an expression computes and compares",
                    _EXAMPLE,
                )
            if isinstance(node, ast.Call) and not (
                isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
            ):
                raise SweepError(
                    f"{told}: {ast.unparse(node.func)[:40]} is no function", f"the functions are {', '.join(FUNCTIONS)}"
                )
            if isinstance(node, ast.Constant) and not isinstance(node.value, bool | int | float | str):
                raise SweepError(f"{told}: {node.value!r} is no number, text, true or false", _EXAMPLE)


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"
