"""Recognises source files that do not belong to the script. Both halves use it."""

from __future__ import annotations

import re

#: A file that Inductor generated for a compiled graph: "c" and 51 base-32 digits of a SHA-256.
INDUCTORS = re.compile(r"\bc[a-z2-7]{51}\.py\b")
