"""Names of the ranges and marks that the rank's process emits and that fakedist looks for in a tracer's trace."""

from __future__ import annotations

#: The prefix of every name.
OWN = "fakedist."
STEP = f"{OWN}step:"
PHASE = f"{OWN}phase:"
LAYER = f"{OWN}layer:"
CALL = f"{OWN}call:"
#: The range that nsys captures.
CAPTURE = f"{OWN}timed"
