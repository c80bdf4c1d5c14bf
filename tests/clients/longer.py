"""Jobs of the catalogue with more steps: the same program, with larger numbers in its loops and settings.

They end after the steps that are recorded, and so say nothing of those in which the host is timed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

STEPS = 12
#: Calls by which a loop is one over training steps.
_OF_A_STEP = {"step", "backward", "train_batch", "train_step", "schedule"}
_SETTING = re.compile(r"((max|num|train|total)_?(train(ing)?_)?)?(steps|iters|batches|iterations)", re.IGNORECASE)


def lengthened(source: str) -> str:
    """A program with :data:`STEPS` steps in place of the few that it names; itself if it names none."""
    lines = source.splitlines(keepends=True)
    found = sorted(set(_numbers(ast.parse(source))), reverse=True)
    for line, begin, end in found:  # from the end, so that the places before stay what they are
        row = lines[line - 1].encode()
        lines[line - 1] = (row[:begin] + str(STEPS).encode() + row[end:]).decode()
    return "".join(lines)


def _numbers(tree: ast.Module) -> Iterator[tuple[int, int, int]]:
    """Where numbers of steps are: the line, and the bytes at which they begin and end."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and _is_training(node) and isinstance(node.iter, ast.Call):
            if isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range":
                yield from _place(node.iter.args[-1])
        elif (isinstance(node, ast.keyword) and _SETTING.fullmatch(node.arg or "")) or (
            isinstance(node, ast.Assign) and _SETTING.fullmatch(getattr(node.targets[0], "id", ""))
        ):
            yield from _place(node.value)
        elif isinstance(node, ast.Call) and node.args and _is_option(node.args[0]):  # parser.add_argument()
            for keyword in node.keywords:
                if keyword.arg == "default":
                    yield from _place(keyword.value)


def _is_training(loop: ast.For) -> bool:
    called = (node.func for statement in loop.body for node in ast.walk(statement) if isinstance(node, ast.Call))
    names = {getattr(function, "attr", getattr(function, "id", "")) for function in called}
    return bool(names & _OF_A_STEP)


def _is_option(word: ast.expr) -> bool:
    text = getattr(word, "value", None)
    return isinstance(text, str) and _SETTING.fullmatch(text.lstrip("-").replace("-", "_")) is not None


def _place(value: ast.expr) -> Iterator[tuple[int, int, int]]:
    if isinstance(value, ast.Constant) and type(value.value) is int and 1 < value.value < STEPS:
        assert value.end_col_offset is not None
        yield value.lineno, value.col_offset, value.end_col_offset
