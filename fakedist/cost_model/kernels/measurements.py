"""Times of matrix products and of grouped products, interpolated between measured shapes.

The reference is a roofline with whole tiles: tiles of the output fill the SMs in waves, and the operands cross the
memory bus once. Measurement over reference changes slowly with the shape, so it is interpolated in log m, log n and log
k; outside of the table the nearest edge holds.

How far waves show depends on the GPU: Hopper and Blackwell schedule tiles persistently and split the last wave, Ampere
and Ada do not. The fraction is chosen for each table by how well it estimates measured sizes that are left out.

Whole layers of experts were measured (gate, permutation, two grouped products, activation) with balanced routing, bf16.
The quotient of the nearest layers, weighted by distance, is applied to each grouped product's own reference. So gate
and permutation are in it.

Times of kernels that are limited by memory: bytes over the bandwidth that such kernels were measured to reach.

The achieved fraction of the peak bandwidth is interpolated over the bytes (logarithmic); more bytes never take less
time. Each kind of kernel has its curve:

- ``elementwise``: quantisation from bf16 to fp8 by a given scale, which streams two bytes in and one out, measured on
  every GPU but A100 in 1,628 sizes. Sizes that fit the L2 cache count with no more than the fraction of larger ones:
  the collector repeats one kernel on one buffer, a step does not.
- norms, forward and backward, PyTorch's eager and compiled: measured on H200, GB200 and (LayerNorm) H100. Eager norms
  of narrow rows, such as a head's, have curves of their own: they are many times slower. LayerNorm was measured in one
  size on H200 and GB200, 1,024 rows of 12,288, where it takes 31 us on both. Of other sizes it takes as much longer
  than RMSNorm as there: kept at one fraction of the bandwidth, a B200 would be slower than an H100 at 1 GiB.

A GPU without a curve takes that of the most similar GPU. A kernel below the measured sizes takes a fixed start and its
bytes at the best rate; one above keeps the fraction of the largest.

Published measurements of one GPU model, as ``make measured`` packed them into ``fakedist/cost_model/data``.

Sources and licences: bench/measured/README.md.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.errors import SetupError
from fakedist.gpu.models.spec import GpuSpec

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

    def add(self, *assumed: tuple[Flags, Floats | float, str]) -> None:
        """Assume something of some rows: which, half a width (logarithm) that adds to the others, and why."""
        self._found.extend(one for one in assumed if one[0].any())

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


ELEMENTWISE = "elementwise"
_NORM_BACKENDS = {"pytorch": "", "torch_compile": ".compiled"}
#: Eager norms of narrower rows have curves of their own.
WIDE_ROW = 1024
#: Of Liger's table, only kernels that move this much: the host sets the pace of smaller ones.
_LEAST_LIGER_BYTES = 1 << 26
#: Sizes from this many times the L2 cache on say what memory achieves.
_BEYOND_CACHE = 1.5
#: Measured sizes within a quarter of an octave share a point of the curve.
_POINTS_PER_OCTAVE = 4
#: Bytes an element that a kernel of Liger's table reads and writes, by kernel, provider and direction. The table's
#: "backward" of SwiGLU takes as long as its "full", so it is not a backward alone and not here; nor is its RMSNorm of
#: PyTorch, whose backward is of another release than those that were measured on H200 and GB200.
_LIGER_BYTES = {
    ("relu_squared", "liger", "forward"): ("elementwise.liger", 4),
    ("relu_squared", "liger", "backward"): ("elementwise.liger", 6),
    ("megatron_swiglu", "liger", "forward"): ("elementwise.liger", 6),
    ("layer_norm", "huggingface", "forward"): ("layer_norm.forward", 8),
    ("layer_norm", "huggingface", "backward"): ("layer_norm.backward", 12),
}


@dataclass(frozen=True)
class Moved:
    """Measured kernels of one GPU that memory limits (columns kind, bytes, time_us), and its peak bytes per second."""

    rows: pd.DataFrame
    bandwidth: float
    cache_bytes: int
    name: str = ""


@dataclass(frozen=True)
class _BandwidthCurve:
    """Fractions of the peak bandwidth over bytes, both as logarithms; whose they are, and if of another kind."""

    sizes: Floats
    fractions: Floats
    name: str
    is_like_another: bool = False

    def like(self, other: _BandwidthCurve) -> _BandwidthCurve:
        """The other's curve through the only point of this one."""
        shift = self.fractions[0] - np.interp(self.sizes[0], other.sizes, other.fractions)
        return _BandwidthCurve(other.sizes, np.minimum(other.fractions + shift, 0.0), self.name, is_like_another=True)


class MovingTimes:
    """Estimates kernels that are limited by memory, each kind by the first table that has it."""

    def __init__(self, tables: list[Moved]) -> None:
        self._curves: dict[str, _BandwidthCurve] = {}
        for table in tables:
            for kind, rows in table.rows.groupby("kind"):
                if str(kind) not in self._curves:
                    self._curves[str(kind)] = _curve(str(kind), rows, table)
        for kind, curve in self._curves.items():
            other = self._curves.get(kind.replace("layer_norm", "rms_norm"), curve)
            if len(curve.sizes) == 1 < len(other.sizes) and other.name == curve.name:
                self._curves[kind] = curve.like(other)

    @property
    def kinds(self) -> list[str]:
        """Kinds that were measured."""
        return sorted(self._curves)

    def measured_on(self, kind: str) -> str:
        """The name of the table that a kind's curve is from."""
        return self._curves[kind].name

    def is_like_another(self, kind: str) -> bool:
        """Whether a kind was measured in one size, so that others follow from another kind."""
        return self._curves[kind].is_like_another

    def time_us(self, kind: str, moved_bytes: Floats, bandwidth: float) -> Floats:
        """Microseconds of kernels of one of :attr:`kinds`, by the bytes that each reads and writes."""
        curve = self._curves[kind]
        at = np.clip(np.log(np.maximum(moved_bytes, 1.0)), curve.sizes[0], curve.sizes[-1])
        inside = moved_bytes / (bandwidth * np.exp(np.interp(at, curve.sizes, curve.fractions)))
        # Below the smallest size, what is not the bytes' own time at the best rate is the kernel's start.
        rest = moved_bytes / (bandwidth * np.exp(curve.fractions.max()))
        below = moved_bytes < np.exp(curve.sizes[0])
        return np.asarray(np.where(below, self.start_us(kind, bandwidth) + rest * 1e6, inside * 1e6))

    def start_us(self, kind: str, bandwidth: float) -> float:
        """Microseconds that a kernel of a kind takes with no bytes to speak of."""
        curve = self._curves[kind]
        smallest = np.exp(curve.sizes[0]) / bandwidth
        return float(max(smallest / np.exp(curve.fractions[0]) - smallest / np.exp(curve.fractions.max()), 0.0) * 1e6)


def measured_moves(measured: Measured, spec: GpuSpec) -> Moved:
    """The memory-bound kernels among a GPU's measurements."""
    parts = [
        _quantise_rows(measured.quantise),
        _norm_rows(measured.training_norms),
        _liger_rows(measured.training_other),
    ]
    known = [part for part in parts if len(part)]
    rows = pd.concat(known, ignore_index=True) if known else pd.DataFrame(columns=["kind", "bytes", "time_us"])
    return Moved(rows, spec.memory_bandwidth, spec.l2_bytes, measured.name)


def beyond_cache(moved_bytes: Floats, cache_bytes: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Mask of the kernels that move so much that the L2 cache does not matter."""
    return np.asarray(moved_bytes >= _BEYOND_CACHE * cache_bytes)


def _curve(kind: str, rows: pd.DataFrame, table: Moved) -> _BandwidthCurve:
    moved = rows["bytes"].to_numpy(np.float64)
    fraction = np.log(moved / (table.bandwidth * rows["time_us"].to_numpy() * 1e-6))
    point = np.round(np.log2(moved) * _POINTS_PER_OCTAVE)
    points = pd.DataFrame({"size": np.log(moved), "fraction": fraction}).groupby(point).median()
    sizes, fractions = points["size"].to_numpy(np.float64), points["fraction"].to_numpy(np.float64)
    if kind == ELEMENTWISE:
        large = beyond_cache(np.exp(sizes), table.cache_bytes)
        fractions = np.where(large, fractions, np.minimum(fractions, fractions[large][0] if large.any() else 0.0))
    times = np.maximum.accumulate(sizes - fractions)  # logarithms
    return _BandwidthCurve(sizes, sizes - times, table.name)


def _quantise_rows(table: pd.DataFrame) -> pd.DataFrame:
    moved = 3.0 * table["m"] * table["k"]
    return pd.DataFrame({"kind": ELEMENTWISE, "bytes": moved, "time_us": table["time_us"]})


def _norm_rows(norms: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for row in norms.to_dict("records"):
        suffix = _NORM_BACKENDS.get(row["backend"])
        if suffix is None or not np.isfinite(row["fwd_time_ms"]):
            continue
        if row["C"] < WIDE_ROW:
            if suffix:
                continue  # compiled norms of narrow rows are as fast as wide ones, and were measured in few sizes
            suffix = ".narrow"
        for direction, column in (("forward", "fwd"), ("backward", "bwd")):
            time_us = row[f"{column}_time_ms"] * 1e3
            moved = row[f"{column}_gbps"] * 1e9 * time_us * 1e-6
            rows.append({"kind": f"{row['norm_type']}.{direction}{suffix}", "bytes": moved, "time_us": time_us})
    return pd.DataFrame(rows)


def _liger_rows(table: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for row in table.to_dict("records"):
        bytes_of = _LIGER_BYTES.get((row["kernel_name"], row["kernel_provider"], row["mode"]))
        if bytes_of is None:
            continue
        kind, element_bytes = bytes_of
        sizes = dict(setting.split(":") for setting in row["cfg"].split(";"))
        elements = row["x_value"] * int(sizes.get("M", 1)) * int(sizes.get("S", 1)) * int(sizes.get("B", 1))
        if (moved := float(elements * element_bytes)) >= _LEAST_LIGER_BYTES:
            rows.append({"kind": kind, "bytes": moved, "time_us": row["ms"] * 1e3})
    return pd.DataFrame(rows)


#: Tiles of the output as libraries cut it (rows, columns), and the fraction of an SM's peak that each reaches.
_TILES = ((128, 256, 0.87), (128, 128, 0.78), (64, 64, 0.60))
#: What a tile costs besides its sum over k: as much as this many more k.
_EXTRA_K = 150.0
START_US = 4.0
_ACHIEVED_BANDWIDTH = 0.8
_SHARPNESS = 6.0
#: The fractions of smoothed waves that are tried, and the sizes of n and k that are left out to choose one.
_SMOOTH_SHARES = (0.5, 1.0)
_LEFT_OUT = (1024, 3072, 6144)
#: Products from this size on count when that fraction is chosen, as smaller ones are bound by their start.
LEAST_LARGE = 256


@dataclass(frozen=True)
class ProductSizes:
    """Products to estimate, ``batch`` in each launch; arrays of one length.

    ``moved_bytes`` are all that they read and write; None for operands and result once, as they were measured.
    """

    m: Floats
    n: Floats
    k: Floats
    batch: Floats
    moved_bytes: Floats | None = None

    @classmethod
    def of(cls, m: Integers | Floats, n: Integers | Floats, k: Integers | Floats) -> ProductSizes:
        """Single products, as they were measured."""
        m_, n_, k_ = (np.asarray(size, np.float64) for size in (m, n, k))
        return cls(m_, n_, k_, np.ones(len(m)))


@dataclass(frozen=True)
class ProductRoof:
    """Limits for products of one type: dense FLOP/s, bytes per second, bytes of an operand's and a result's element."""

    sms: int
    peak_flops: float
    memory_bandwidth: float
    element_bytes: float = 2.0
    result_bytes: float = 2.0

    def limits_us(self, sizes: ProductSizes, *, smooth: float) -> tuple[Floats, Floats]:
        """Microseconds that products (m, k) x (k, n) need at least: by their tiles, and by the bytes that they move."""
        m, n, k = sizes.m, sizes.n, sizes.k
        compute = np.full(len(m), np.inf)
        for rows, columns, achieved in _TILES:
            waves = sizes.batch * np.ceil(m / rows) * np.ceil(n / columns) / self.sms
            filled = smooth * np.maximum(waves, 0.15) + (1 - smooth) * np.ceil(waves)
            of_an_sm = self.peak_flops / self.sms * achieved
            compute = np.minimum(compute, filled * 2 * rows * columns * (k + _EXTRA_K) / of_an_sm)
        moved = sizes.moved_bytes
        if moved is None:
            moved = sizes.batch * ((m * k + n * k) * self.element_bytes + m * n * self.result_bytes)
        return compute * 1e6, moved / (self.memory_bandwidth * _ACHIEVED_BANDWIDTH) * 1e6

    def reference_us(self, sizes: ProductSizes, *, smooth: float) -> Floats:
        """The reference time of products, in microseconds."""
        compute, memory = self.limits_us(sizes, smooth=smooth)
        return np.asarray(START_US + (compute**_SHARPNESS + memory**_SHARPNESS) ** (1 / _SHARPNESS))


class ProductTimes:
    """Estimates products of one type on one GPU from measurements; ``smooth`` is the fraction of smoothed waves."""

    def __init__(self, table: ProductTable, measured_on: ProductRoof, smooth: float | None = None) -> None:
        self._smooth = _best_share(table, measured_on) if smooth is None else smooth
        self._axes = [np.log(axis.astype(np.float64)) for axis in (table.m, table.n, table.k)]
        m, n, k = np.meshgrid(table.m, table.n, table.k, indexing="ij")
        reference = measured_on.reference_us(ProductSizes.of(m.ravel(), n.ravel(), k.ravel()), smooth=self._smooth)
        self._quotient = fill_gaps(np.log(table.times_us / reference.reshape(m.shape)))
        self._roof = measured_on

    def time_us(self, sizes: ProductSizes, roof: ProductRoof | None = None) -> Floats:
        """Microseconds of products, by the limits of the measured GPU or of another of its architecture."""
        limits = roof or self._roof
        times = self._at(sizes, sizes.m, limits)
        several = sizes.batch > 1
        if several.any():
            # A batch fills the SMs as one product with as many rows does; it takes no less time than one of it.
            times = np.where(several, np.maximum(self._at(sizes, sizes.m * sizes.batch, limits), times), times)
        return times

    def _at(self, sizes: ProductSizes, m: Floats, roof: ProductRoof) -> Floats:
        """Microseconds at the achieved fraction of products with m rows; of one of the batch if that is its own m."""
        quotient = interpolate(self._axes, self._quotient, [np.log(m), np.log(sizes.n), np.log(sizes.k)])
        share = m / (sizes.m * sizes.batch)
        moved = None if sizes.moved_bytes is None else sizes.moved_bytes * share
        own = replace(sizes, batch=sizes.batch * share, moved_bytes=moved)
        return np.asarray(np.exp(quotient) * roof.reference_us(own, smooth=self._smooth))

    def limits_us(self, sizes: ProductSizes, roof: ProductRoof | None = None) -> tuple[Floats, Floats]:
        """Microseconds that products need at least: by their tiles, and by the bytes that they move."""
        return (roof or self._roof).limits_us(sizes, smooth=self._smooth)

    def octaves_away(self, sizes: ProductSizes) -> tuple[Floats, Floats]:
        """Octaves from the nearest measured sizes: the largest of the sides within the table, the sum outside."""
        within, beyond = np.zeros(len(sizes.m)), np.zeros(len(sizes.m))
        for size, axis in zip((sizes.m * sizes.batch, sizes.n, sizes.k), self._axes, strict=True):
            point = np.log(size)
            at = np.clip(point, axis[0], axis[-1])
            above = np.clip(np.searchsorted(axis, at), 1, len(axis) - 1)
            within = np.maximum(within, np.minimum(at - axis[above - 1], axis[above] - at).clip(0))
            beyond += np.abs(point - at)
        return within / np.log(2), beyond / np.log(2)


def interpolate(axes: list[Floats], grid: Floats, points: list[Floats]) -> Floats:
    """Interpolate multilinearly in ``grid`` (without NaN) over ascending axes; beyond an axis its end holds."""
    below, share = [], []
    for axis, point in zip(axes, points, strict=True):
        at = np.clip(point, axis[0], axis[-1])
        index = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, max(len(axis) - 2, 0))
        width = axis[np.minimum(index + 1, len(axis) - 1)] - axis[index]
        below.append(index)
        share.append(np.where(width > 0, (at - axis[index]) / np.where(width > 0, width, 1.0), 0.0))
    total = np.zeros(np.broadcast_shapes(*(point.shape for point in points)))
    for corner in np.ndindex(*(2,) * len(axes)):
        weight = np.ones_like(total)
        indices = []
        for above, index, part, axis in zip(corner, below, share, axes, strict=True):
            weight = weight * (part if above else 1 - part)
            indices.append(np.minimum(index + above, len(axis) - 1))
        total += weight * grid[tuple(indices)]
    return total


def fill_gaps(grid: Floats) -> Floats:
    """The grid with each gap (NaN) filled from a neighbour along the first axis, what is left along the second, ..."""
    grid = grid.copy()
    for axis in range(grid.ndim):
        moved = np.moveaxis(grid, axis, 0)
        for order in (range(1, len(moved)), range(len(moved) - 2, -1, -1)):
            step = 1 if order.step > 0 else -1
            for index in order:
                moved[index] = np.where(np.isnan(moved[index]), moved[index - step], moved[index])
    return grid


def _best_share(table: ProductTable, roof: ProductRoof) -> float:
    m, n, k, times = table.rows()
    large = (m >= LEAST_LARGE) & (n >= LEAST_LARGE) & (k >= LEAST_LARGE)
    held = (np.isin(n, _LEFT_OUT) | np.isin(k, _LEFT_OUT)) & large
    rest = table.without(_LEFT_OUT)

    def error(share: float) -> float:
        estimated = ProductTimes(rest, roof, share).time_us(ProductSizes.of(m[held], n[held], k[held]))
        return float(np.quantile(np.abs(np.log(estimated / times[held])), 0.9))

    return min(_SMOOTH_SHARES, key=error) if held.any() else _SMOOTH_SHARES[-1]


_NEIGHBOURS = 4
#: Points whose distances to every measurement are in memory at once.
_AT_ONCE = 256
_START_US = 4.0
#: Squared distance (of logarithms) within which neighbours count alike.
_SAME = 1e-3


class GroupedTimes:
    """Estimates grouped products on one GPU from measured layers of experts (``Measured.experts``)."""

    def __init__(self, experts: pd.DataFrame, measured_on: ProductRoof) -> None:
        self._roof = measured_on
        sizes = [experts[name].to_numpy(np.float64) for name in ("rows", "experts", "hidden", "inner")]
        self._points = _points(*sizes)
        self._quotient = np.log(experts["time_us"].to_numpy() / self._layer_reference_us(*sizes))

    def estimate(
        self, rows: Floats, groups: Floats, n: Floats, k: Floats, roof: ProductRoof
    ) -> tuple[Floats, Floats, Floats]:
        """Microseconds of grouped products, and the least of their tiles and of their bytes.

        Groups, one for each expert, evenly share ``rows``. ``roof`` is of the measured GPU or its architecture.
        """
        # Whether it is a layer's first product (k hidden, n gate and up) or its second (n hidden) is not known: the
        # one that is closer to what was measured.
        first, first_distance = self._nearest(_points(rows, groups, k, np.maximum(n / 2, 1.0)))
        second, second_distance = self._nearest(_points(rows, groups, n, k))
        quotient = np.where(first_distance <= second_distance, first, second)
        compute, memory = _limits_us(rows, groups, n, k, roof)
        return np.asarray(np.exp(quotient) * (_START_US + np.maximum(compute, memory))), compute, memory

    def layer_us(self, rows: Integers, experts: Integers, hidden: Integers, inner: Integers) -> Floats:
        """Microseconds of a gated layer of experts, as it was measured."""
        sizes = [np.asarray(size, np.float64) for size in (rows, experts, hidden, inner)]
        return np.asarray(np.exp(self._nearest(_points(*sizes))[0]) * self._layer_reference_us(*sizes))

    def _layer_reference_us(self, rows: Floats, experts: Floats, hidden: Floats, inner: Floats) -> Floats:
        first = _reference_us(rows, experts, 2 * inner, hidden, self._roof)
        return first + _reference_us(rows, experts, hidden, inner, self._roof)

    def _nearest(self, points: Floats) -> tuple[Floats, Floats]:
        """The quotient at each point, and how far the nearest measurement is (squared, of logarithms)."""
        points, back = np.unique(points, axis=0, return_inverse=True)
        at_points, distances = np.empty(len(points)), np.empty(len(points))
        lengths = np.square(self._points).sum(axis=1)
        for begin in range(0, len(points), _AT_ONCE):
            some = slice(begin, begin + _AT_ONCE)
            apart = np.square(points[some]).sum(axis=1)[:, None] + lengths - 2 * points[some] @ self._points.T
            number = min(_NEIGHBOURS, apart.shape[1])
            nearest = np.argpartition(apart, number - 1, axis=1)[:, :number]
            distance = np.take_along_axis(apart, nearest, axis=1).clip(0)
            weights = 1 / (distance + _SAME)
            at_points[some] = (self._quotient[nearest] * weights).sum(axis=1) / weights.sum(axis=1)
            distances[some] = distance.min(axis=1)
        return at_points[back.ravel()], distances[back.ravel()]


def _points(rows: Floats, groups: Floats, hidden: Floats, inner: Floats) -> Floats:
    return np.log(np.stack([rows / groups, groups, hidden, inner], axis=1))


def _limits_us(rows: Floats, groups: Floats, n: Floats, k: Floats, roof: ProductRoof) -> tuple[Floats, Floats]:
    """Tiles of 128 rows and columns on all SMs, and operands and results once."""
    tiles = groups * np.ceil(rows / groups / 128) * np.ceil(n / 128)
    compute = tiles * 2 * 128 * 128 * k / roof.peak_flops * 1e6
    moved = (rows * k + groups * n * k) * roof.element_bytes + rows * n * roof.result_bytes
    return np.asarray(compute), np.asarray(moved / roof.memory_bandwidth * 1e6)


def _reference_us(rows: Floats, groups: Floats, n: Floats, k: Floats, roof: ProductRoof) -> Floats:
    return np.asarray(_START_US + np.maximum(*_limits_us(rows, groups, n, k, roof)))
