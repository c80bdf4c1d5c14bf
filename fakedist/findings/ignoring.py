"""Comments of the script that ignore findings at their lines: ``# fakedist: ignore[FD101]``."""

from __future__ import annotations

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
    """Whether a comment at the finding's line ignores it. A file that cannot be read has none."""
    match = _LINE.fullmatch(finding.line)
    if match is None:
        return False
    try:
        lines = read_bytes(Path(match["file"]), _MOST_BYTES).decode(errors="replace").splitlines()
    except (OSError, UnreadableError):
        return False
    number = int(match["number"])
    comment = _COMMENT.search(lines[number - 1]) if 0 < number <= len(lines) else None
    if comment is None:
        return False
    codes = re.findall(r"[A-Z0-9]+", comment["codes"] or "")
    return not codes or any(finding.code.startswith(code) for code in codes)
