"""How close estimated kernel times are to measured ones that were left out: ``make accuracy-times``.

Every table is estimated with part of it left out, and the estimate compared with what was left out. Writes
``fakedist/time/data/accuracy.json`` and the tables of docs/accuracy.md between its two marks.

- Products: whole values of n and k are left out, all at once; then wide values, one at a time. Only shapes with every
  side of at least 256 count.
- Attention: whole numbers of tokens are left out. At least 1 GFLOP counts.
- Experts: whole hidden sizes are left out. At least 32 rows an expert count.
- Memory-bound kernels: each measured kernel is left out in turn. At least 8 us count.

The 90 % interval of a family is the 90 % quantile of the error on one half of what was left out; ``inside`` is the
share of the other half that lies within it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.time.attention import AttentionShapes, AttentionTimes
from fakedist.time.experts import GroupedTimes
from fakedist.time.gpus import MEASURED_GPUS, measured_spec, product_roof
from fakedist.time.measurements import DATA, ProductTable, load_measured
from fakedist.time.moving import Moved, MovingTimes, measured_moves
from fakedist.time.products import LEAST_LARGE, ProductTimes

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "accuracy.md"
BEGIN, END = "<!-- make accuracy-times: begin -->", "<!-- make accuracy-times: end -->"

LEFT_OUT = (1536, 2560, 3584, 5120, 7168, 10240)
WIDE = (12288, 16384, 51200, 65536)
LEFT_OUT_TOKENS = (1536, 3072, 6144, 10240)
LEFT_OUT_HIDDEN = (2048, 5120, 7168)
LEAST_ATTENTION_FLOPS = 1e9
LEAST_ROWS = 32
LEAST_US = 8.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Closeness:
    """How close the estimates of one family are on one GPU.

    Attributes:
        family: What was estimated.
        gpu: The measured GPU model.
        kernels: Kernels that were left out.
        median: Median of the relative error's size.
        p95: Its 95 % quantile.
        interval: The 90 % interval, as the size of the logarithm of estimate over measurement.
        inside: The share of other left-out kernels within the interval.
        noise: 5 % and 95 % quantiles of one collector over the median of all, on the same shapes; None if unknown.
    """

    family: str
    gpu: str
    kernels: int
    median: float
    p95: float
    interval: float
    inside: float
    noise: tuple[float, float] | None = None


def main() -> None:
    """Judge every table and write the results."""
    found = [each for name in MEASURED_GPUS for each in judged(name)]
    print(tables(found))
    (DATA / "accuracy.json").write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    page = PAGE.read_text()
    if BEGIN not in page or END not in page:
        sys.exit(f"{PAGE} lacks the marks {BEGIN} and {END}")
    head, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{tables(found)}\n{END}{rest.partition(END)[2]}")


def judged(name: str) -> list[Closeness]:
    """How close the estimates of one GPU's measured kernels are."""
    measured, spec = load_measured(name), measured_spec(name)
    found = []
    for kind, table in measured.products.items():
        found += products(f"products {kind}", name, table, kind)
    found.append(closeness("attention forward", name, attention_errors(name)))
    if len(measured.experts):
        held = measured.experts["hidden"].isin(LEFT_OUT_HIDDEN)
        times = GroupedTimes(measured.experts[~held], product_roof(spec, "bf16"))
        rows = measured.experts[held & (measured.experts["rows"] >= LEAST_ROWS * measured.experts["experts"])]
        sizes = [rows[column].to_numpy() for column in ("rows", "experts", "hidden", "inner")]
        found.append(closeness("experts bf16", name, _error(times.layer_us(*sizes), rows["time_us"])))
    moves = measured_moves(measured, spec.memory_bandwidth).rows
    for family, own in (("elementwise", moves["kind"] == "elementwise"), ("norms", moves["kind"] != "elementwise")):
        parts = [moving_errors(str(kind), rows, spec.memory_bandwidth) for kind, rows in moves[own].groupby("kind")]
        if parts:
            found.append(closeness(family, name, np.concatenate(parts)))
    return found


def products(family: str, name: str, table: ProductTable, kind: str) -> list[Closeness]:
    """Products of one type: left-out sizes, and wide ones one at a time."""
    roof = product_roof(measured_spec(name), kind)
    m, n, k, times = table.rows()
    large = (m >= LEAST_LARGE) & (n >= LEAST_LARGE) & (k >= LEAST_LARGE)
    noise = (float(table.noise[0]), float(table.noise[2])) if table.noise.any() else None

    def errors(sizes: tuple[int, ...]) -> Floats:
        held = (np.isin(n, sizes) | np.isin(k, sizes)) & large
        estimated = ProductTimes(table.without(sizes), roof).time_us(m[held], n[held], k[held])
        return np.asarray(np.log(estimated / times[held]))

    wide = np.concatenate([errors((size,)) for size in WIDE])
    return [closeness(family, name, errors(LEFT_OUT), noise), closeness(f"{family}, wide", name, wide, noise)]


def attention_errors(name: str) -> Floats:
    """Errors of attention forwards at numbers of tokens that were left out."""
    rows, spec = load_measured(name).attention, measured_spec(name)
    held = rows["tokens"].isin(LEFT_OUT_TOKENS)
    times = AttentionTimes(rows[~held], pd.DataFrame(), spec.peak_flops["bf16"], spec.memory_bandwidth)
    rows = rows[held]
    columns = [rows[column].to_numpy() for column in ("batch", "heads", "kv_heads", "tokens", "width")]
    shapes = AttentionShapes(*columns, np.ones(len(rows), bool))
    errors = _error(times.forward_us(shapes, "inference"), rows["time_us"])
    return errors[shapes.flops() >= LEAST_ATTENTION_FLOPS]


def moving_errors(kind: str, rows: pd.DataFrame, bandwidth: float) -> Floats:
    """Errors of memory-bound kernels of one kind, each estimated from the others."""
    errors = []
    for place in rows.index[rows["time_us"] >= LEAST_US]:
        others = rows.drop(index=place)
        if len(others) < 2:
            continue
        moved = np.array([rows.loc[place, "bytes"]])
        estimated = MovingTimes([Moved(others, bandwidth)]).time_us(kind, moved, bandwidth)
        errors.append(np.log(estimated[0] / rows.loc[place, "time_us"]))
    return np.array(errors)


def closeness(family: str, gpu: str, errors: Floats, noise: tuple[float, float] | None = None) -> Closeness:
    """Summarise errors (logarithms of estimate over measurement)."""
    size = np.abs(np.expm1(errors))
    first, second = np.abs(errors[::2]), np.abs(errors[1::2])
    interval = float(np.quantile(first, 0.9))
    inside = float((second <= interval).mean()) if len(second) else float("nan")
    return Closeness(
        family, gpu, len(errors), float(np.median(size)), float(np.quantile(size, 0.95)), interval, inside, noise
    )


def tables(found: list[Closeness]) -> str:
    """The results as Markdown."""
    lines = [
        "| GPU | kernels | left out | median error | 95th percentile | 90 % interval | held by | collectors differ |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in found:
        noise = "" if each.noise is None else f"{np.expm1(each.noise[0]):+.0%} to {np.expm1(each.noise[1]):+.0%}"
        lines.append(
            f"| {each.gpu} | {each.family} | {each.kernels:,} | {each.median:.1%} | {each.p95:.1%} "
            f"| {np.expm1(-each.interval):+.0%} to {np.expm1(each.interval):+.0%} | {each.inside:.0%} | {noise} |"
        )
    return "\n".join(lines)


def _error(estimated: Floats, measured: pd.Series[float]) -> Floats:
    return np.asarray(np.log(estimated / measured.to_numpy()))


if __name__ == "__main__":
    main()
