"""Comments of the script that ignore findings at their lines: ``# fakedist: ignore[FD101]``."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from fakedist.bounded import UnreadableError, read_bytes
from fakedist.rundir.finding import Finding

_LINE = re.compile(r"(?P<file>.*):(?P<number>\d+) \(.*\)")
_COMMENT = re.compile(r"#\s*fakedist:\s*ignore(?:\[(?P<codes>[A-Z0-9,\s]*)\])?")
_MOST_BYTES = 8 << 20


def path_of(line: str) -> str:
    """The file of a line of the script, ``file:line (function)``; empty if there is none."""
    match = _LINE.fullmatch(line)
    return match["file"] if match else ""


def is_ignored(finding: Finding) -> bool:
    """Whether a comment at the finding's line ignores it, or at the first or last line of its statement.

    A file that cannot be read has no comments.
    """
    match = _LINE.fullmatch(finding.line)
    if match is None:
        return False
    try:
        text = read_bytes(Path(match["file"]), _MOST_BYTES).decode(errors="replace")
    except (OSError, UnreadableError):
        return False
    lines, number = text.splitlines(), int(match["number"])
    return any(
        _names(comment["codes"], finding.code)
        for line in {number, *(_statement(text, number) if _COMMENT.search(text) else ())}
        if 0 < line <= len(lines) and (comment := _COMMENT.search(lines[line - 1]))
    )


def _names(codes: str | None, code: str) -> bool:
    named = re.findall(r"[A-Z0-9]+", codes or "")
    return not named or any(code.startswith(part) for part in named)


def _statement(text: str, number: int) -> tuple[int, ...]:
    """The first and last line of the statement at a line, or of its head if it has a body; empty if there is none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    heads = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = (node.end_lineno or node.lineno) if not body else max(body[0].lineno - 1, node.lineno)
            if node.lineno <= number <= last:
                heads.append((node.lineno, last))
    return max(heads, default=())
