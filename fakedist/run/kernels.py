"""The journal's record of a timed step's kernels: written by whoever timed it, read into the table ``kernels``."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from fakedist.run.schema import BOUNDS, FAMILIES, PHASES

#: Columns of the record, as of the table: ``array``'s type codes. Texts are numbers of the record's ``texts``; family,
#: phase and bound are places in the schema's tuples.
KERNEL_CODES = {"name": "I", "family": "B", "stream": "Q", "start_us": "d", "duration_us": "d", "launch_us": "d"} | {
    "grid": "I", "block": "I", "operation": "I", "op": "q", "step": "i", "phase": "B", "recompute": "B", "layer": "i",
    "call": "q", "flops": "d", "moved_bytes": "d", "bound": "B",
}  # fmt: skip
#: The same for numpy.
KERNEL_TYPES = {
    name: {"I": "<u4", "B": "u1", "Q": "<u8", "d": "<f8", "q": "<i8", "i": "<i4"}[code]
    for name, code in KERNEL_CODES.items()
}
_TEXTS = ("name", "grid", "block", "operation")
_PLACES = {
    column: {text: place for place, text in enumerate(texts)}
    for column, texts in (("family", FAMILIES), ("phase", PHASES), ("bound", BOUNDS))
}
_NAN = float("nan")
#: What a row is where nothing else is said of it.
_UNKNOWN: dict[str, Any] = {"launch_us": _NAN, "grid": "", "block": "", "operation": "", "op": -1} | {
    "recompute": False, "layer": 0, "call": -1, "flops": _NAN, "moved_bytes": _NAN, "bound": "",
}  # fmt: skip


class KernelRows:
    """Rows of the table ``kernels`` on their way into the journal.

    Args:
        source: Where they are from: ``source``, ``tool``, ``step``, ``gpu`` and the rest of ``summary["kernels"]``.
    """

    def __init__(self, source: Mapping[str, Any]) -> None:
        self._source = dict(source)
        self._columns = {name: array(code) for name, code in KERNEL_CODES.items()}
        self._texts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._columns["name"])

    def add(self, row: Mapping[str, Any]) -> None:
        """One row: values by column as the table has them; what may be unknown may be left out.

        Raises:
            KeyError: A column is missing, or its text is none of the schema's.
        """
        for name, column in self._columns.items():
            value = row[name] if name in row else _UNKNOWN[name]
            if name in _TEXTS:
                value = self._texts.setdefault(value, len(self._texts))
            elif name in _PLACES:
                value = _PLACES[name][value]
            column.append(value)

    def record(self) -> dict[str, Any]:
        """The journal's record of all rows; one a run."""
        columns = {name: column.tobytes() for name, column in self._columns.items()}
        return {"kind": "kernels", "source": self._source, "texts": list(self._texts), **columns}
