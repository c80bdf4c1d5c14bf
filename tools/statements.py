"""Print the statements of each ring, and fail above its ceiling in statements.toml: part of ``make check``.

A statement is one of Python's, docstrings apart; ``a, b = x, y`` counts as two. The core is the package without its
extras.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
CEILINGS = Path(__file__).with_suffix(".toml")


def num_statements(source: str) -> int:
    """Statements of a module."""
    return sum(_weight(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))


def _weight(node: ast.stmt) -> int:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return 0
    is_packed = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
    return len(node.value.elts) if is_packed and isinstance(node.value, ast.Tuple) else 1


def figures(root: Path = ROOT) -> dict[str, int]:
    """Statements of the package, of its core, of each extra and of the tests; modules of the package."""
    package = root / "fakedist"
    extras = {path.parent.name: path.parent for path in sorted(package.glob("extras/*/__init__.py"))}
    rings = {f"extras/{name}": _in(folder.rglob("*.py")) for name, folder in extras.items()}
    whole = _in(package.rglob("*.py"))
    modules = sum(path.name != "__init__.py" for path in package.rglob("*.py"))
    core = whole - sum(rings.values())
    tests = _in((root / "tests").rglob("*.py"))
    return {"package": whole, "core": core, **rings, "tests": tests, "modules": modules}


def _in(paths: Iterable[Path]) -> int:
    return sum(num_statements(path.read_text()) for path in paths)


def main() -> int:
    """Print the figures. Returns 1 if one is above its ceiling, or has none."""
    ceilings = tomllib.loads(CEILINGS.read_text())
    code = 0
    for name, number in figures().items():
        ceiling = ceilings.get(name, 0)
        is_over = number > ceiling
        code |= is_over
        sys.stdout.write(f"{name:20} {number:7,} of {ceiling:7,}{'  TOO MANY' if is_over else ''}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
