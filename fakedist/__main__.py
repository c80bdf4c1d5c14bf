"""``python -m fakedist``."""

from __future__ import annotations

import sys

from fakedist.cli import main

if __name__ == "__main__":
    sys.exit(main())
