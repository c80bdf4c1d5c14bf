"""The kernels of the timed step, row by row, on their way into the journal."""

from __future__ import annotations

from typing import NamedTuple

from fakedist.run.encoding import Columns
from fakedist.run.schema import BOUNDS, FAMILIES, PHASES
from fakedist.run.step_time import KernelSource
from fakedist.run.trace_records import KernelsRecord

_NAN = float("nan")
_FAMILIES, _PHASES, _BOUNDS = (
    {text: place for place, text in enumerate(texts)} for texts in (FAMILIES, PHASES, BOUNDS)
)


class KernelRow(NamedTuple):
    """A kernel, copy, fill or collective of the timed step: a row of the table ``kernels``, which describes each field.

    The fields with a default may be unknown.
    """

    name: str
    family: str
    stream: int
    start_us: float
    duration_us: float
    step: int
    phase: str
    launch_us: float = _NAN
    grid: str = ""
    block: str = ""
    operation: str = ""
    op: int = -1
    recompute: bool = False
    layer: int = 0
    call: int = -1
    flops: float = _NAN
    moved_bytes: float = _NAN
    bound: str = ""


class KernelRows:
    """Rows of the table ``kernels`` on their way into the journal.

    Args:
        source: Where the kernels come from.
    """

    def __init__(self, source: KernelSource) -> None:
        self._source = source
        self._columns = Columns(KernelsRecord)
        self._texts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._columns)

    def add(self, row: KernelRow) -> None:
        """Add a row.

        Raises:
            KeyError: Its family, phase or bound is not in the schema.
        """
        coded = {"family": _FAMILIES[row.family], "phase": _PHASES[row.phase], "bound": _BOUNDS[row.bound]}
        texts = {name: self._text(getattr(row, name)) for name in ("name", "grid", "block", "operation")}
        self._columns.add(**row._asdict() | coded | texts)

    def record(self) -> KernelsRecord:
        """The journal's record of all rows. A run has one."""
        return self._columns.made(source=self._source, texts=list(self._texts))

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))
