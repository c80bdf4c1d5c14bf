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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.bounded import UnreadableError, read_json
from fakedist.cost_model.hosts import HostCosts
from fakedist.cost_model.kernels.measurements import Floats
from fakedist.cost_model.step import Prices
from fakedist.cost_model.timeline import Array
from fakedist.errors import SetupError
from fakedist.rundir import time_notes
from fakedist.rundir.launch_records import LAUNCH_KINDS, WorkRow
from fakedist.rundir.notes import Note
from fakedist.rundir.plain import PlainValueError, from_plain, to_plain
from fakedist.rundir.schema import FAMILIES
from fakedist.rundir.step_time import Calibration

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


Bools = npt.NDArray[np.bool_]

#: Work counts as similar if no size differs by more than this factor.
_MOST_DIFFERENT = 2.0
#: Work that differs in something other than a size counts as different as this factor in each.
_OTHER_KIND = 2.0
_NEIGHBOURS = 4
#: Squared distance (of logarithms) within which neighbours count alike.
_SAME = 1e-2
#: Fewer kernels than this do not show their spread: the interval is at least this wide on either side.
_FEW, _LEAST_SPREAD = 5, 0.05

#: Sizes that matter, by what the work is.
_SIZES = {
    "product": ("m", "n", "k", "batch", "groups"),
    "attention": ("batch", "heads", "kv_heads", "queries", "keys", "width", "value_width"),
    "bytes": ("moved_bytes",),
}
#: What must be the same, and what may differ at a distance.
_SAME_WORK = ("sizes", "family", "dtype", "scaling", "attention", "over_host_link", "pinned")
_LIKE_WORK = ("layout", "accumulates", "library", "causal", "window", "is_dense", "short_name")


@dataclass(frozen=True)
class WorkTimes:
    """Times of works, with their 90 % intervals, in microseconds (NaN if unknown); arrays of one length."""

    time_us: Floats
    low_us: Floats
    high_us: Floats


@dataclass(frozen=True)
class CalibratedTimes:
    """Times of works after a calibration table was applied: the table's, or scaled by those of similar work."""

    times: WorkTimes
    is_measured: Bools
    is_scaled: Bools


@dataclass(frozen=True)
class TimeFractions:
    """Fractions of the time of a step's kernels that are measured on the user's GPU, or scaled by similar kernels."""

    measured: float
    scaled: float


class CalibratedPrices:
    """Kernel times by a model and a calibration table. It implements ``fakedist.cost_model.step.Prices``.

    ``fractions`` are those of the last priced time that are from the table.
    """

    def __init__(self, prices: Prices, table: CalibrationTable) -> None:
        origin = table.origin
        self._prices, self._table = prices, table
        self.product: str = prices.product
        self.host: HostCosts = prices.host
        self.calibrated_on: Calibration | None = Calibration(origin.gpu, origin.torch, origin.date, origin.driver)
        self.fractions = TimeFractions(0.0, 0.0)

    def price(self, work: pd.DataFrame, counts: Array) -> pd.DataFrame:
        """How long each row of work takes, see ``Prices.price``."""
        of_table = self._prices.price(self._table.work(), self._table.times()[:, 3].astype(np.int64))
        priced = self._prices.price(work, counts)
        own = apply_calibration(work, _times(priced), self._table, _times(of_table))
        basis = priced["basis"].astype(str)
        basis = basis.where(~own.is_scaled, basis + ", scaled by the calibration table")
        basis = basis.where(~own.is_measured, "calibration table")
        columns = {"time_us": own.times.time_us, "low_us": own.times.low_us, "high_us": own.times.high_us}
        if "least_us" in priced:  # a factor of similar work does not bring an estimate below its roofline
            least_us = np.where(own.is_measured, 0.0, priced["least_us"].to_numpy("f8"))
            columns = {name: np.maximum(column, least_us) for name, column in columns.items()}
        calibrated = priced.assign(**columns, basis=basis)
        if "accuracy" in calibrated:
            calibrated["accuracy"] = calibrated["accuracy"].where(~own.is_measured, "")
        took = np.nan_to_num(own.times.time_us) * counts
        whole = max(float(took.sum()), 1e-9)
        self.fractions = TimeFractions(
            float(took[own.is_measured].sum()) / whole, float(took[own.is_scaled].sum()) / whole
        )
        return calibrated

    def step_interval(self, priced: pd.DataFrame, counts: Array) -> tuple[float, float]:
        """The interval of the sum over all launches, as the model makes it."""
        return self._prices.step_interval(priced, counts)

    def notes(self) -> list[Note]:
        """Where the times come from."""
        origin = self._table.origin
        note = time_notes.times_calibrated(origin.gpu, origin.date, self.fractions.measured, self.fractions.scaled)
        return [note, *self._prices.notes()]


def calibrated_prices_of(prices: Prices, path: Path) -> CalibratedPrices:
    """A model with a calibration table; SetupError if the file cannot be read, or is of another GPU."""
    return CalibratedPrices(prices, check_calibration_table(path, prices.product))


def _times(priced: pd.DataFrame) -> WorkTimes:
    time, low, high = (priced[name].to_numpy(np.float64) for name in ("time_us", "low_us", "high_us"))
    return WorkTimes(time, low, high)


def apply_calibration(
    work: pd.DataFrame, estimated: WorkTimes, table: CalibrationTable, estimated_table: WorkTimes
) -> CalibratedTimes:
    """Replace and scale estimates by a table's times; ``estimated_table`` are the same model's for its work."""
    rows = [WorkRow(*values) for values in work[list(WorkRow._fields)].itertuples(index=False, name=None)]
    row_of = {work_key(row.work): number for number, row in enumerate(table.rows)}
    own = np.array([row_of.get(work_key(row), -1) for row in rows], np.int64)
    is_measured = own >= 0
    columns = [np.array(column, np.float64) for column in (estimated.time_us, estimated.low_us, estimated.high_us)]
    measured = table.times()
    for column, measured_values in zip(columns, _spread(measured), strict=True):
        column[is_measured] = measured_values[own[is_measured]]
    is_known = estimated_table.time_us > 0
    ratio = np.log(measured[:, 0] / np.where(is_known, estimated_table.time_us, np.nan))
    factor = np.full(len(work), np.nan)
    factor[~is_measured] = _factors(work[~is_measured], table.work(), ratio)
    is_scaled = np.isfinite(factor) & np.isfinite(columns[0])
    for column in columns:
        column[is_scaled] *= factor[is_scaled]
    return CalibratedTimes(WorkTimes(*columns), is_measured, is_scaled)


def _spread(measured: Floats) -> tuple[Floats, Floats, Floats]:
    time, low, high, count = measured.T
    few = count < _FEW
    return (
        time,
        np.where(few, np.minimum(low, time * (1 - _LEAST_SPREAD)), low),
        np.where(few, np.maximum(high, time * (1 + _LEAST_SPREAD)), high),
    )


def _factors(work: pd.DataFrame, table: pd.DataFrame, ratio: Floats) -> Floats:
    """For each work, what its estimate is multiplied by; NaN if the table has nothing similar."""
    factors = np.full(len(work), np.nan)
    known = np.isfinite(ratio)
    groups, table_groups = (_described(rows) for rows in (work, table[known]))
    ratio = ratio[known]
    by_group = table_groups.groupby(list(_SAME_WORK), sort=False).indices
    for key, mine in groups.groupby(list(_SAME_WORK), sort=False).indices.items():
        if (others := by_group.get(key)) is None:
            continue
        distance = _distances(groups.iloc[mine], table_groups.iloc[others])
        for row, from_others in zip(mine, distance, strict=True):
            nearest = np.argsort(from_others)[:_NEIGHBOURS]
            nearest = nearest[np.isfinite(from_others[nearest])]
            if len(nearest):
                weights = 1 / (np.square(from_others[nearest]) + _SAME)
                factors[row] = math.exp(float(np.average(ratio[others[nearest]], weights=weights)))
    return factors


def _described(work: pd.DataFrame) -> pd.DataFrame:
    """The work with the kernels' names without their arguments, and which sizes matter."""
    short = work["name"].astype(str).str.replace(r"[<(].*", "", regex=True).where(work["kind"] == "kernel", "")
    is_attention = (work["family"] == "attention") & (work["queries"] > 0)
    sizes = np.where(is_attention, "attention", np.where((work["m"] > 0) & (work["k"] > 0), "product", "bytes"))
    return work.assign(short_name=short, sizes=sizes).reset_index(drop=True)


def _distances(work: pd.DataFrame, table: pd.DataFrame) -> Floats:
    """Distances between works and a table's rows; infinite where they are not similar."""
    total = np.zeros((len(work), len(table)))
    far = np.zeros_like(total, bool)
    for name in _SIZES[work["sizes"].iloc[0]]:
        mine, others = (np.log(np.maximum(table_of[name].to_numpy(np.float64), 1.0)) for table_of in (work, table))
        apart = np.abs(mine[:, None] - others[None, :])
        far |= ~(apart <= math.log(_MOST_DIFFERENT) + 1e-9)  # NaN is far from everything
        total += np.square(apart)
    for name in _LIKE_WORK:
        differs = work[name].to_numpy()[:, None] != table[name].to_numpy()[None, :]
        total += differs * math.log(_OTHER_KIND) ** 2
    return np.where(far, np.inf, np.sqrt(total))
