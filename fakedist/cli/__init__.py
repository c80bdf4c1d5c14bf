"""The command line: parse, call, print. The only room that prints for fakedist and ends the process.

One module a command; ``entry`` puts them together.
"""

from __future__ import annotations

from fakedist.cli.entry import main

__all__ = ["main"]
