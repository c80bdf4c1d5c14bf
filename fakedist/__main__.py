"""``python -m fakedist``, and ``fakedist``."""

from __future__ import annotations

import sys

from fakedist.errors import ExitCode


def program() -> int:
    """Run the command line as this process's program; Ctrl-C is one line, also while the command line is imported."""
    try:
        from fakedist.cli.program import program

        return program()
    except KeyboardInterrupt:
        sys.stderr.write(f"fakedist: exit {ExitCode.INTERRUPTED}: interrupted\n")
        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    sys.exit(program())
