"""Texts of the ranges and marks that the rank's process gives a tracer, and that are looked for in its trace."""

from __future__ import annotations

#: What each of them begins with.
OWN = "fakedist."
STEP = f"{OWN}step:"
PHASE = f"{OWN}phase:"
LAYER = f"{OWN}layer:"
CALL = f"{OWN}call:"
#: The range that nsys captures.
CAPTURE = f"{OWN}timed"
