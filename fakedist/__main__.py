"""``python -m fakedist``."""

from __future__ import annotations

import sys

from fakedist.cli.program import program

if __name__ == "__main__":
    sys.exit(program())
