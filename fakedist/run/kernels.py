"""The journal's record of a timed step's kernels. Whatever timed the step writes it; it becomes table ``kernels``."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from fakedist.run.schema import BOUNDS, FAMILIES, PHASES

#: Columns of the record and of the table, as ``array`` type codes. Texts are indices into the record's ``texts``.
#: Family, phase and bound are indices into the schema's tuples.
KERNEL_CODES = {"name": "I", "family": "B", "stream": "Q", "start_us": "d", "duration_us": "d", "launch_us": "d"} | {
    "grid": "I", "block": "I", "operation": "I", "op": "q", "step": "i", "phase": "B", "recompute": "B", "layer": "i",
    "call": "q", "flops": "d", "moved_bytes": "d", "bound": "B",
}  # fmt: skip
#: The same columns as numpy types.
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
#: Values for columns that a row leaves out.
_UNKNOWN: dict[str, Any] = {"launch_us": _NAN, "grid": "", "block": "", "operation": "", "op": -1} | {
    "recompute": False, "layer": 0, "call": -1, "flops": _NAN, "moved_bytes": _NAN, "bound": "",
}  # fmt: skip


class KernelRows:
    """Rows of the table ``kernels`` on their way into the journal.

    Args:
        source: Where the rows come from: ``source``, ``tool``, ``step``, ``gpu`` and the rest of
            ``summary["kernels"]``.
    """

    def __init__(self, source: Mapping[str, Any]) -> None:
        self._source = dict(source)
        self._columns = {name: array(code) for name, code in KERNEL_CODES.items()}
        self._texts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._columns["name"])

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row: the table's values by column. Columns that may be unknown may be left out.

        Raises:
            KeyError: A column is missing, or its text is not in the schema.
        """
        for name, column in self._columns.items():
            value = row[name] if name in row else _UNKNOWN[name]
            if name in _TEXTS:
                value = self._texts.setdefault(value, len(self._texts))
            elif name in _PLACES:
                value = _PLACES[name][value]
            column.append(value)

    def record(self) -> dict[str, Any]:
        """The journal's record of all rows. A run has one."""
        columns = {name: column.tobytes() for name, column in self._columns.items()}
        return {"kind": "kernels", "source": self._source, "texts": list(self._texts), **columns}
