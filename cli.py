"""fakedist from a bare clone, where it is not installed: ``python path/to/cli.py profile ...``."""

from __future__ import annotations

import sys

from fakedist.__main__ import program

if __name__ == "__main__":
    sys.exit(program())
