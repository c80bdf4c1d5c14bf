"""Published measurements of one GPU model, as ``make measured`` packed them into ``fakedist/cost_model/data``.

Sources and licences: bench/measured/README.md.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.errors import SetupError

DATA = Path(__file__).parents[1] / "data"
#: Times are stored as log2 of microseconds in these steps; UNKNOWN where nothing was measured.
_STEPS = 1024
_UNKNOWN = -32768

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ProductTable:
    """Measured times of matrix products (m, k) x (k, n) of one type.

    Attributes:
        times_us: Axes m, n, k, ascending; NaN where nothing was measured.
        noise: 5 %, 50 % and 95 % quantiles of the logarithm of one collector's time over the median of all, for the
            same shape; zeros where only one measured.
    """

    m: Integers
    n: Integers
    k: Integers
    times_us: Floats
    noise: Floats

    def without(self, sizes: tuple[int, ...]) -> ProductTable:
        """The table without these values of n and k, to judge how well they are estimated from the others."""
        keep_n, keep_k = ~np.isin(self.n, sizes), ~np.isin(self.k, sizes)
        times = self.times_us[:, keep_n][:, :, keep_k]
        return ProductTable(self.m, self.n[keep_n], self.k[keep_k], times, self.noise)

    def rows(self) -> tuple[Integers, Integers, Integers, Floats]:
        """The measured shapes: m, n, k and microseconds of each."""
        indices = np.nonzero(~np.isnan(self.times_us))
        return self.m[indices[0]], self.n[indices[1]], self.k[indices[2]], self.times_us[indices]


@dataclass(frozen=True)
class Measured:
    """The measurements on one GPU model; a table is empty where the sources have none.

    Attributes:
        name: Such as "h100-sxm".
        products: By type: "bf16", "fp8" (one scale a tensor), "fp8_block" (a scale a block), "nvfp4".
        attention: Causal self-attention forward in bf16: batch, heads, kv_heads, tokens, width, time_us.
        decoding: Attention of one query a sequence in bf16, by vLLM: heads, kv_heads, width, batch, context, time_us.
        experts: Gated bf16 experts of a layer, with gate and permutation: rows (of all experts), experts, hidden,
            inner, time_us.
        quantise: bf16 to fp8 by a given scale: m, k, time_us.
        training_attention: cuDNN's attention forward and backward (columns of ``sdpa_training.csv``).
        training_norms: Norms forward and backward (columns of ``norms_training.csv``).
        training_other: Memory-bound kernels (columns of ``liger_h100_elementwise_ms.csv``).
        origins: By table, the files that it was made from.
    """

    name: str
    products: dict[str, ProductTable]
    attention: pd.DataFrame
    decoding: pd.DataFrame
    experts: pd.DataFrame
    quantise: pd.DataFrame
    training_attention: pd.DataFrame
    training_norms: pd.DataFrame
    training_other: pd.DataFrame
    origins: dict[str, list[str]]


def measured_names() -> list[str]:
    """Names of the GPU models with measurements."""
    return sorted(path.stem for path in DATA.glob("*.npz"))


@cache
def load_measured(name: str, directory: Path = DATA) -> Measured:
    """Read the measurements of a GPU model; SetupError if the table is missing or damaged."""
    path = directory / f"{name}.npz"
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
        return _measured(name, arrays)
    except FileNotFoundError:
        raise SetupError(f"the measured times of {name} are missing: {path}", "make measured writes them") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise SetupError(f"the measured times of {name} are damaged: {path}: {error}", "make measured") from error


def _measured(name: str, arrays: dict[str, npt.NDArray[np.generic]]) -> Measured:
    kinds = [key.removeprefix("products.") for key in arrays if key.count(".") == 1 and key.startswith("products.")]
    return Measured(
        name,
        {kind: _product_table(arrays, f"products.{kind}") for kind in kinds},
        _columns(arrays, "attention.forward", ("batch", "heads", "kv_heads", "tokens", "width")),
        _columns(arrays, "attention.decoding", ("heads", "kv_heads", "width", "batch", "context")),
        _columns(arrays, "grouped", ("rows", "experts", "hidden", "inner")),
        _columns(arrays, "quantise", ("m", "k")),
        _text_table(arrays, "sdpa_training"),
        _text_table(arrays, "norms_training"),
        _text_table(arrays, "liger_h100_elementwise_ms"),
        json.loads(arrays["origins"].tobytes()),
    )


def _product_table(arrays: dict[str, npt.NDArray[np.generic]], key: str) -> ProductTable:
    noise = arrays[f"{key}.noise"] if f"{key}.noise" in arrays else np.zeros(3)
    axes = [arrays[f"{key}.{axis}"].astype(np.int64) for axis in "mnk"]
    return ProductTable(axes[0], axes[1], axes[2], _times(arrays[key]), noise.astype(np.float64))


def _columns(arrays: dict[str, npt.NDArray[np.generic]], key: str, names: tuple[str, ...]) -> pd.DataFrame:
    if f"{key}.time" not in arrays:
        return pd.DataFrame(columns=[*names, "time_us"])
    columns = {name: arrays[f"{key}.{name}"].astype(np.int64) for name in names}
    return pd.DataFrame(columns | {"time_us": _times(arrays[f"{key}.time"])})


def _text_table(arrays: dict[str, npt.NDArray[np.generic]], key: str) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(arrays[key].tobytes())) if key in arrays else pd.DataFrame()


def _times(packed: npt.NDArray[np.generic]) -> Floats:
    steps = packed.astype(np.float64)
    steps[steps == _UNKNOWN] = np.nan
    return np.exp2(steps / _STEPS)


Flags = npt.NDArray[np.bool_]
Texts = npt.NDArray[np.object_]
Codes = npt.NDArray[np.intp]


class WorkArrays:
    """Some or all rows of work, column by column (``rundir.launch_records.WorkRow`` describes each)."""

    def __init__(self, work: pd.DataFrame, indices: Integers | None = None) -> None:
        self._work, self.indices = work, np.arange(len(work)) if indices is None else indices

    def __len__(self) -> int:
        return len(self.indices)

    def only(self, chosen: Flags) -> WorkArrays:
        """The chosen rows."""
        return WorkArrays(self._work, self.indices[chosen])

    def numbers(self, name: str) -> Floats:
        """A column as floating-point numbers."""
        return self._work[name].to_numpy()[self.indices].astype(np.float64)

    def counts(self, name: str) -> Integers:
        """A column of counts."""
        return np.asarray(self._work[name].to_numpy()[self.indices].astype(np.int64))

    def flags(self, name: str) -> Flags:
        """A column of truths."""
        return np.asarray(self._work[name].to_numpy()[self.indices].astype(bool))

    def texts(self, name: str) -> Texts:
        """A column of texts."""
        return np.asarray(self._work[name].to_numpy()[self.indices].astype(object))

    def combinations(self, *names: str) -> tuple[Codes, list[tuple[str, ...]]]:
        """The combination of some texts in each row, as a number, and the combinations."""
        if not len(self):
            return np.zeros(0, np.intp), []
        frame = self._work[list(names)].iloc[self.indices]
        codes = frame.groupby(list(names), sort=False, observed=True).ngroup().to_numpy()
        _, first = np.unique(codes, return_index=True)
        rows = frame.iloc[first]
        return np.asarray(codes), [tuple(map(str, row)) for row in rows.itertuples(index=False)]


@dataclass
class Estimates:
    """A rule's estimates of some rows.

    Attributes:
        time_us: At burst clocks; NaN if unknown.
        spread: Half the width of the 90 % interval, of the logarithm.
        bound: "compute", "memory" or "launch"; empty if unknown.
        accuracy: The family of ``accuracy.json`` whose errors the interval is from; empty without one.
        basis: The measurement or the rule, in a few words.
        spare: How much less (logarithm) it may take: where an unknown mask may spare work, or where the library that
            runs was not measured.
    """

    time_us: Floats
    spread: Floats
    bound: Texts
    accuracy: Texts
    basis: Texts
    spare: Floats | None = None

    @classmethod
    def unknown(cls, number: int) -> Estimates:
        """Nothing is known."""
        texts = [np.full(number, "", object) for _ in range(3)]
        return cls(np.full(number, np.nan), np.full(number, np.nan), *texts)

    def put(self, chosen: Flags, estimates: Estimates) -> None:
        """Fill in what was found for the chosen rows."""
        for name in ("time_us", "spread", "bound", "accuracy", "basis"):
            getattr(self, name)[chosen] = getattr(estimates, name)
        if estimates.spare is not None:
            self.spare = np.zeros(len(self.time_us)) if self.spare is None else self.spare
            self.spare[chosen] = estimates.spare


@dataclass
class Assumptions:
    """A rule's assumptions about rows: each widens the interval and is named in the basis."""

    number: int
    _found: list[tuple[Flags, Floats | float, str]] = field(default_factory=list)

    def add(self, where: Flags, spread: Floats | float, words: str) -> None:
        """Assume something of these rows: half a width (logarithm) that adds to the others, and why."""
        if where.any():
            self._found.append((where, spread, words))

    def spread(self, measured: Floats) -> Floats:
        """The widths with every assumption: independent, so their squares add."""
        total = np.square(measured)
        for where, spread, _ in self._found:
            total = total + np.where(where, spread**2, 0.0)
        return np.asarray(np.sqrt(total))

    def basis(self, begins: Sequence[str] | Texts) -> Texts:
        """The texts with every assumption's words."""
        texts = np.asarray(begins, object).copy()
        for where, _, words in self._found:
            texts[where] += f"; assumed: {words}"
        return texts


def which_limits(compute_us: Floats, memory_us: Floats, start_us: Floats | float) -> Texts:
    """The limit of each row: "launch" where both are less than a kernel's start."""
    longest = np.maximum(compute_us, memory_us)
    bound = np.where(compute_us > memory_us, "compute", "memory")
    return np.where(longest <= start_us, "launch", bound).astype(object)
