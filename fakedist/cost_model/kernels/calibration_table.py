"""The file of times that were measured on a user's own GPU: a row for each work that kernels had to do.

JSON, to be read, compared and committed::

    {"fakedist_times": 1,
     "origin": {"gpu": "NVIDIA H100 80GB HBM3", "tool": "torch.profiler", ...},
     "rows": [{"work": {"name": "cublasGemmEx", "kind": "product", "m": 4096, ...},
               "time_us": 187.2, "low_us": 185.9, "high_us": 191.4, "num_kernels": 96}, ...]}

``work`` has the columns of the table ``work`` that differ from their defaults; null is an unknown number. The times are
the median and the 5 % and 95 % quantiles of ``num_kernels`` measured kernels.
"""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from fakedist.bounded import UnreadableError, read_json
from fakedist.errors import SetupError
from fakedist.rundir.launch_records import LAUNCH_KINDS, WorkRow
from fakedist.rundir.plain import PlainValueError, from_plain, to_plain
from fakedist.rundir.schema import FAMILIES

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
_KEY = "fakedist_times"
_MAX_BYTES = 256 << 20
_LONGEST_US = 1e9
_WRITE_AGAIN = "fakedist calibrate RUN --from-trace TRACE -o FILE writes one"
_COLUMNS: Mapping[str, type] = typing.get_type_hints(WorkRow)
_DEFAULTS: Mapping[str, object] = WorkRow._field_defaults
#: What kernels have to do is the same without these: what asked for it, and the function of the library.
_IGNORED_FIELDS = {
    "product": ("name", "operation", "threads", "pinned"),
    "copy": ("operation", "threads"),
    "fill": ("operation", "threads"),
}


class CalibrationRow(NamedTuple):
    """Measured work."""

    work: WorkRow
    time_us: float
    low_us: float
    high_us: float
    num_kernels: int


@dataclass(frozen=True)
class CalibrationOrigin:
    """Source of a table's times; empty texts are unknown.

    Attributes:
        gpu: As CUDA reports it.
        tool: torch.profiler, nsys or make calibrate.
        date: As 2026-01-31.
        driver: Version of the driver or of CUDA.
        rehearsal: Nothing was measured.
    """

    gpu: str
    tool: str
    date: str
    torch: str = ""
    driver: str = ""
    file: str = ""
    rehearsal: bool = False


@dataclass(frozen=True)
class CalibrationTable:
    """Times measured on one GPU."""

    origin: CalibrationOrigin
    rows: Sequence[CalibrationRow]

    def work(self) -> pd.DataFrame:
        """The measured work, with the columns of the table ``work``."""
        import pandas as pd  # the parent of a run checks tables, and does without pandas

        return pd.DataFrame([row.work for row in self.rows], columns=list(WorkRow._fields))

    def times(self) -> npt.NDArray[np.float64]:
        """``time_us``, ``low_us``, ``high_us`` and ``num_kernels`` of each row, as columns."""
        return np.array([row[1:] for row in self.rows], np.float64).reshape(-1, 4)


def work_key(work: WorkRow) -> tuple[object, ...]:
    """Equal for works that kernels do in the same way."""
    kind = "copy" if work.kind == "host_reads" and work.name.startswith("Memcpy") else work.kind
    ignored = ("kind", *_IGNORED_FIELDS.get(kind, ()))
    values = (None if name in ignored else value for name, value in zip(WorkRow._fields, work, strict=True))
    known = (None if isinstance(value, float) and math.isnan(value) else value for value in values)
    return (kind, *known)


def made_table(origin: CalibrationOrigin, samples: Mapping[WorkRow, Sequence[float]]) -> CalibrationTable:
    """A table of measured microseconds of each work. Works with one key are one row."""
    joined: dict[tuple[object, ...], tuple[WorkRow, list[float]]] = {}
    for work, times in samples.items():
        joined.setdefault(work_key(work), (work, []))[1].extend(times)
    rows = []
    for work, times in joined.values():
        low, middle, high = (round(float(quantile), 4) for quantile in np.quantile(times, (0.05, 0.5, 0.95)))
        rows.append(CalibrationRow(work, middle, low, high, len(times)))
    return CalibrationTable(origin, rows)


def calibration_table_text(table: CalibrationTable) -> str:
    """The content of a table's file."""
    plain = [row._asdict() | {"work": _plain_work(row.work)} for row in table.rows]
    head = json.dumps({_KEY: FORMAT, "origin": to_plain(table.origin)}, indent=1)[:-2]
    rows = ",\n".join("  " + json.dumps(row) for row in plain)
    return f'{head},\n "rows": [\n{rows}\n ]\n}}\n'


def read_calibration_table(path: Path) -> CalibrationTable:
    """Read a table; SetupError if it is missing, not such a table, damaged, or from a rehearsal."""
    try:
        content = read_json(path, _MAX_BYTES)
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}", _WRITE_AGAIN) from error
    except UnreadableError as error:
        raise SetupError(f"{path} is not a table of measured times, or was cut off: {error}", _WRITE_AGAIN) from error
    if not isinstance(content, dict) or _KEY not in content:
        raise SetupError(f"{path} is not a table of measured times: it has no {_KEY!r}", _WRITE_AGAIN)
    if content[_KEY] != FORMAT:
        raise SetupError(f"{path} has format {str(content[_KEY])[:20]}; this fakedist reads {FORMAT}", _WRITE_AGAIN)
    try:
        table = _table(content)
    except PlainValueError as error:
        raise SetupError(f"{path} is damaged: {error}", _WRITE_AGAIN) from error
    if table.origin.rehearsal:
        raise SetupError(f"{path} comes from a rehearsal: nothing was measured", "make calibrate on a GPU")
    return table


def check_calibration_table(path: Path, gpu: str) -> CalibrationTable:
    """Read a table of a certain GPU; SetupError as in :func:`read_calibration_table`, or if it is of another GPU."""
    table = read_calibration_table(path)
    if table.origin.gpu.casefold() != gpu.casefold():
        raise SetupError(
            f"the times of {path} were measured on {table.origin.gpu}, and the step is priced for {gpu}",
            '--gpu MODEL chooses the GPU; a GPU file names any other: product = "..."',
        )
    return table


def _table(content: Mapping[str, object]) -> CalibrationTable:
    origin = from_plain(CalibrationOrigin, content.get("origin"), "origin")
    if not origin.gpu:
        raise PlainValueError("origin.gpu is empty: of which GPU are these times?")
    listed = content.get("rows")
    if not isinstance(listed, list) or not listed:
        raise PlainValueError("rows is not a list of measured work")
    rows = [_row(plain, f"rows[{number}]") for number, plain in enumerate(listed)]
    seen: dict[tuple[object, ...], int] = {}
    for number, row in enumerate(rows):
        before = seen.setdefault(work_key(row.work), number)
        if before != number:
            raise PlainValueError(f"rows[{number}] has the same work as rows[{before}]")
    return CalibrationTable(origin, rows)


def _row(plain: object, where: str) -> CalibrationRow:
    if not isinstance(plain, dict):
        raise PlainValueError(f"{where} is not an object")
    low, middle, high = (_time(plain.get(name), f"{where}.{name}") for name in ("low_us", "time_us", "high_us"))
    if not low <= middle <= high:
        raise PlainValueError(f"{where}: time_us {middle:g} is not between low_us {low:g} and high_us {high:g}")
    count = plain.get("num_kernels")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise PlainValueError(f"{where}.num_kernels is {str(count)[:20]!r}, not a number of kernels")
    return CalibrationRow(_work(plain.get("work"), f"{where}.work"), middle, low, high, count)


def _time(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LONGEST_US:
        raise PlainValueError(f"{where} is {str(value)[:20]!r}, not a time in microseconds")
    return float(value)


def _work(plain: object, where: str) -> WorkRow:
    if not isinstance(plain, dict):
        raise PlainValueError(f"{where} is missing, or not an object")
    if unknown := [name for name in plain if name not in _COLUMNS]:
        raise PlainValueError(f"{where}.{str(unknown[0])[:40]} is not a column of the table work")
    values: dict[str, object] = {}
    for name, kind in _COLUMNS.items():
        if name in plain:
            values[name] = _value(plain[name], kind, f"{where}.{name}")
        elif name not in _DEFAULTS:
            raise PlainValueError(f"{where}.{name} is missing")
    work = WorkRow(**values)  # type: ignore[arg-type]  # each value was checked against its column's type
    if work.kind not in LAUNCH_KINDS or work.family not in FAMILIES:
        unknown_name = work.kind if work.kind not in LAUNCH_KINDS else work.family
        raise PlainValueError(f"{where} has the unknown kind or family {unknown_name[:40]!r}")
    return work


def _value(value: object, kind: type, where: str) -> object:
    if kind is float and value is None:
        return math.nan
    accepted = (int, float) if kind is float else kind
    fits = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    if not fits or (isinstance(value, int | float) and not 0 <= value < 1e30):
        raise PlainValueError(f"{where} is {str(value)[:40]!r}, not a {kind.__name__}")
    return float(value) if isinstance(value, int | float) and kind is float else value


def _plain_work(work: WorkRow) -> dict[str, object]:
    plain: dict[str, object] = {}
    for name, value in work._asdict().items():
        if isinstance(value, float) and math.isnan(value):
            plain[name] = None
        elif name not in _DEFAULTS or value != _DEFAULTS[name]:
            plain[name] = value
    return plain
