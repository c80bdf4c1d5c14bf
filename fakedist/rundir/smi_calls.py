"""Calls of the virtual GPU's ``nvidia-smi``. The program writes one line per call; the report's notes count them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fakedist.rundir import notes
from fakedist.rundir.notes import Note

#: The first word of a line, before the arguments.
CONSTANT, REFUSED = "constant", "refused"


def write_call(calls: str, kind: str, arguments: Iterable[str]) -> None:
    """Record one call: CONSTANT or REFUSED. If writing fails (full disk, no such directory), the call is lost."""
    line = " ".join(" ".join([kind, *arguments]).split())[:300] + "\n"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(OSError):
        file = os.open(calls, flags, 0o644)
        try:
            os.write(file, line.encode(errors="replace"))  # a single write, so concurrent calls do not mix
        finally:
            os.close(file)


def calls_notes(calls: Path) -> list[Note]:
    """Notes about the calls in the file."""
    constant = 0
    refused = 0
    first = ""
    if not calls.is_file():
        return []
    with suppress(OSError), calls.open(errors="replace") as file:
        for line in file:
            kind, _, arguments = line.strip().partition(" ")
            constant += kind == CONSTANT
            refused += kind == REFUSED
            if kind == REFUSED:
                first = first or f"nvidia-smi {arguments}"
    answered = [notes.smi_constant(constant)] if constant else []
    return [*answered, *([notes.smi_refused(refused, first)] if refused else [])]
