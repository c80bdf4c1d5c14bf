"""Runs the script that its arguments name, and prints whether this process forked from a fork server."""

from __future__ import annotations

import os
import sys

print("FORKED" if any("imports.json" in argument for argument in sys.orig_argv) else "COLD", flush=True)
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
with open(sys.argv[0]) as file:
    code = compile(file.read(), sys.argv[0], "exec")
exec(code)
