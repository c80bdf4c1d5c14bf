"""fakedist from a bare clone, where it is not installed: ``python path/to/cli.py profile ...``."""

from __future__ import annotations

import sys

from fakedist.cli import main

if __name__ == "__main__":
    sys.exit(main())
