"""Docstrings that the program itself reads.

With ``PYTHONOPTIMIZE=2`` Python leaves them out. Then they come from the source.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from pathlib import Path
from types import FunctionType


def docstring_of(documented: type | FunctionType) -> str:
    """The docstring of a class or function of this package, without its indentation; empty if it has none."""
    if sys.flags.optimize < 2:
        return inspect.cleandoc(documented.__doc__ or "")
    # A dataclass without a docstring is given one.
    return _docstrings(documented.__module__).get(documented.__qualname__, "")


@functools.cache
def _docstrings(module: str) -> dict[str, str]:
    """The docstrings of a module's classes and functions by their qualified names, from its source."""
    return dict(_in(ast.parse(Path(inspect.getfile(sys.modules[module])).read_text()), ""))


def _in(node: ast.Module | ast.ClassDef, prefix: str) -> list[tuple[str, str]]:
    found = []
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
            found.append((prefix + child.name, ast.get_docstring(child) or ""))
        if isinstance(child, ast.ClassDef):
            found += _in(child, f"{prefix}{child.name}.")
    return found
