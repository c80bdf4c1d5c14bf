"""How close estimated kernel times are to measured ones that were left out: ``make accuracy-times``.

Every table is estimated with part of it left out, by the code that prices runs, and the estimate compared with what was
left out. Writes ``fakedist/cost_model/data/accuracy.json`` and the tables of docs/accuracy/results.md between
its two marks.

- Products: whole values of n and k are left out, all at once; then wide values, one at a time. Only shapes with every
  side of at least 256 count.
- Attention: whole numbers of tokens are left out. Of inference, at least 1 GFLOP counts.
- Decoding: every second context, then every second batch, are left out, and each combination of heads and width in
  turn. Times are those beyond the L2 cache, as the estimates are.
- Experts: whole hidden sizes are left out. At least 32 rows an expert count.
- Memory-bound kernels: of quantisation, whole row widths are left out, and only sizes beyond the L2 cache count; of
  the others, each measured kernel is left out in turn. At least 8 us count. Liger's elementwise kernels are estimated
  from quantisation alone, as runs are.

The 90 % interval is the 90 % quantile of the errors, by estimated time and distance from measured sizes. ``inside`` is
the share of one half of what was left out that lies within the intervals of the other half. Norms have few rows a GPU:
those of all GPUs make one interval.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.cost_model.accuracy import OCTAVE_EDGES, TIME_EDGES_US, AccuracyRow, bins_of, half_widths_at
from fakedist.cost_model.kernels.attention import AttentionShapes, AttentionTimes
from fakedist.cost_model.kernels.gpus import MEASURED_GPUS, attention_roof, measured_spec, product_roof
from fakedist.cost_model.kernels.measurements import (
    DATA,
    ELEMENTWISE,
    LEAST_LARGE,
    GroupedTimes,
    Moved,
    MovingTimes,
    ProductSizes,
    ProductTable,
    ProductTimes,
    beyond_cache,
    load_measured,
    measured_moves,
)
from fakedist.extras.rl.rollout_time import DecodingShape, DecodingTimes, beyond_l2

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "accuracy" / "results.md"
BEGIN, END = "<!-- make accuracy-times: begin -->", "<!-- make accuracy-times: end -->"

LEFT_OUT = (1536, 2560, 3584, 5120, 7168, 10240)
WIDE = (12288, 16384, 51200, 65536)
LEFT_OUT_TOKENS = (1536, 3072, 6144, 10240)
LEFT_OUT_CONTEXTS = (256, 1024, 4096, 16384, 65536)
LEFT_OUT_BATCHES = (2, 8, 32, 128, 512)
LEFT_OUT_HIDDEN = (2048, 5120, 7168)
LEFT_OUT_WIDTHS = (1024, 2560, 4096, 7168, 10240, 51200)
LEAST_ATTENTION_FLOPS = 1e9
LEAST_ROWS = 32
LEAST_US = 8.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Judged:
    """Kernels that were left out, and their estimates.

    Attributes:
        estimated_us: The estimates.
        measured_us: The measurements.
        octaves: Distance from the nearest measured sizes.
    """

    estimated_us: Floats
    measured_us: Floats
    octaves: Floats

    @classmethod
    def of(cls, estimated_us: Floats, measured_us: pd.Series[float] | Floats) -> Judged:
        """Kernels without a distance."""
        return cls(estimated_us, np.asarray(measured_us, np.float64), np.zeros(len(estimated_us)))

    @property
    def errors(self) -> Floats:
        """Logarithms of estimate over measurement."""
        return np.asarray(np.log(self.estimated_us / self.measured_us))

    def only(self, chosen: npt.NDArray[np.bool_] | slice) -> Judged:
        """Some of them."""
        return Judged(self.estimated_us[chosen], self.measured_us[chosen], self.octaves[chosen])

    def widths(self) -> list[list[float]]:
        """The 90 % intervals that their errors make."""
        return widths_by_bin(self.estimated_us, self.errors, self.octaves)


#: A quantile of fewer errors says little.
_LEAST = 30


def widths_by_bin(estimated_us: Floats, errors: Floats, octaves: Floats) -> list[list[float]]:
    """The 90 % quantiles of logarithmic errors by time and distance; a bin of few errors takes those of all."""
    size = np.abs(errors)
    every = float(np.quantile(size, 0.9))
    longer, further = bins_of(estimated_us, octaves)
    widths = []
    for time in range(len(TIME_EDGES_US) + 1):
        row = []
        for distance in range(len(OCTAVE_EDGES) + 1):
            own = size[(longer == time) & (further == distance)]
            row.append(round(float(np.quantile(own, 0.9)) if len(own) >= _LEAST else every, 4))
        widths.append(row)
    return widths


def together(parts: Sequence[Judged]) -> Judged:
    """All of them."""
    return Judged(*(np.concatenate([getattr(part, name) for part in parts]) for name in Judged.__annotations__))


def main() -> None:
    """Judge every table and write the results."""
    found = [each for name in MEASURED_GPUS for each in judged(name)]
    found += norms()
    print(tables(found))
    (DATA / "accuracy.json").write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    page = PAGE.read_text()
    if BEGIN not in page or END not in page:
        sys.exit(f"{PAGE} lacks the marks {BEGIN} and {END}")
    head, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{tables(found)}\n{END}{rest.partition(END)[2]}")


def judged(name: str) -> list[AccuracyRow]:
    """How close the estimates of one GPU's measured kernels are."""
    measured, spec = load_measured(name), measured_spec(name)
    found = []
    for kind, table in measured.products.items():
        found += products(f"products {kind}", name, table, kind)
    found.append(closeness("attention forward", name, inference_attention(name)))
    found.append(closeness("attention decoding", name, decoding(name)))
    found += [
        closeness(f"attention training {direction}", name, training_attention(name, direction))
        for direction in ("forward", "backward")
        if len(measured.training_attention)
    ]
    if len(measured.experts):
        held = measured.experts["hidden"].isin(LEFT_OUT_HIDDEN)
        times = GroupedTimes(measured.experts[~held], product_roof(spec, "bf16"))
        rows = measured.experts[held & (measured.experts["rows"] >= LEAST_ROWS * measured.experts["experts"])]
        sizes = [rows[column].to_numpy() for column in ("rows", "experts", "hidden", "inner")]
        found.append(closeness("experts bf16", name, Judged.of(times.layer_us(*sizes), rows["time_us"])))
    if len(measured.quantise):
        found.append(closeness("elementwise", name, quantisation(name)))
    moves = measured_moves(measured, spec)
    liger = moves.rows[moves.rows["kind"] == "elementwise.liger"]
    if len(liger):
        estimated = MovingTimes([moves]).time_us(ELEMENTWISE, liger["bytes"].to_numpy(), spec.memory_bandwidth)
        found.append(closeness("elementwise, other kernels", name, Judged.of(estimated, liger["time_us"])))
    return found


def products(family: str, name: str, table: ProductTable, kind: str) -> list[AccuracyRow]:
    """Products of one type: left-out sizes, and wide ones one at a time. Both make the intervals."""
    roof = product_roof(measured_spec(name), kind)
    m, n, k, times = table.rows()
    large = (m >= LEAST_LARGE) & (n >= LEAST_LARGE) & (k >= LEAST_LARGE)
    noise = (float(table.noise[0]), float(table.noise[2])) if table.noise.any() else None

    def without(sizes: tuple[int, ...]) -> Judged:
        held = (np.isin(n, sizes) | np.isin(k, sizes)) & large
        shapes, rest = ProductSizes.of(m[held], n[held], k[held]), ProductTimes(table.without(sizes), roof)
        return Judged(rest.time_us(shapes), times[held], rest.octaves_away(shapes)[0])

    usual, wide = without(LEFT_OUT), together([without((size,)) for size in WIDE])
    every = together([usual, wide])
    return [
        replace(closeness(family, name, usual, noise), half_widths=every.widths()),
        closeness(f"{family}, wide", name, wide, noise),
    ]


def inference_attention(name: str) -> Judged:
    """Attention forwards of inference at numbers of tokens that were left out."""
    rows, roof = load_measured(name).attention, attention_roof(measured_spec(name))
    held = rows["tokens"].isin(LEFT_OUT_TOKENS)
    times = AttentionTimes(rows[~held], pd.DataFrame(), roof)
    rows = rows[held]
    columns = [rows[column].to_numpy() for column in ("batch", "heads", "kv_heads", "tokens", "width")]
    shapes = AttentionShapes.of_itself(*columns, causal=True)
    judged = Judged.of(times.forward_us(shapes, "inference"), rows["time_us"])
    return judged.only(shapes.flops() >= LEAST_ATTENTION_FLOPS)


def decoding(name: str) -> Judged:
    """Attention of one query a sequence: contexts, batches and combinations of heads and width that were left out."""
    spec = measured_spec(name)
    rows = beyond_l2(load_measured(name).decoding, spec)
    every, parts = DecodingTimes(rows, spec), []
    held = [rows["context"].isin(LEFT_OUT_CONTEXTS), rows["batch"].isin(LEFT_OUT_BATCHES), rows["context"] > 0]
    for chosen in held:
        rest = every if chosen.all() else DecodingTimes(rows[~chosen], spec)
        for _, own in rows[chosen].groupby(["heads", "kv_heads", "width"]):
            shape = DecodingShape(*(int(own[column].iloc[0]) for column in ("heads", "kv_heads", "width")))
            batch, context = (own[column].to_numpy(np.float64) for column in ("batch", "context"))
            parts.append(
                Judged.of(rest.time_us(shape, batch, context, without=shape if rest is every else None), own["time_us"])
            )
    return together(parts)


def training_attention(name: str, direction: str) -> Judged:
    """CuDNN's attention, forward or backward, each number of tokens left out in turn; without windows."""
    measured, spec = load_measured(name), measured_spec(name)
    every = measured.training_attention
    every = every[(every["data_type"] == "bfloat16") & every["sliding_window_size"].isna()]
    parts = []
    for tokens in sorted(every["q_seqlen"].unique()):
        rest = every[every["q_seqlen"] != tokens]
        peak = spec.peak_flops["bf16"]
        times = AttentionTimes(measured.attention, rest, attention_roof(spec), training_peak_flops=peak)
        own = every[(every["q_seqlen"] == tokens) & (every["pass"] == {"forward": "fwd", "backward": "bwd"}[direction])]
        own = own.sort_values("deterministic_bwd").drop_duplicates(["config_name", "attn_mask", "batch_size"])
        shapes = _training_shapes(own)
        estimate = times.forward_us if direction == "forward" else times.backward_us
        parts.append(Judged.of(estimate(shapes, "cudnn"), own["time_ms"] * 1e3))
    return together(parts)


def _training_shapes(rows: pd.DataFrame) -> AttentionShapes:
    names = ("batch_size", "num_q_heads", "num_kv_heads", "q_seqlen", "kv_seqlen", "head_dim_qk", "head_dim_vo")
    columns = [rows[name].to_numpy(np.int64) for name in names]
    causal = (rows["attn_mask"] == "top_left").to_numpy()
    return AttentionShapes(
        *columns, causal=causal, window=np.zeros(len(rows), np.int64), in_blocks=np.zeros(len(rows), bool)
    )


def quantisation(name: str) -> Judged:
    """Quantisation of rows of widths that were left out."""
    measured, spec = load_measured(name), measured_spec(name)
    held = measured.quantise["k"].isin(LEFT_OUT_WIDTHS)
    rest = replace(measured, quantise=measured.quantise[~held])
    rows = measured.quantise[held]
    moved = 3.0 * (rows["m"] * rows["k"]).to_numpy()
    estimated = MovingTimes([measured_moves(rest, spec)]).time_us(ELEMENTWISE, moved, spec.memory_bandwidth)
    counts = beyond_cache(moved, spec.l2_bytes) & (rows["time_us"].to_numpy() >= LEAST_US)
    return Judged.of(estimated, rows["time_us"]).only(counts)


def norms() -> list[AccuracyRow]:
    """Norms: each measured kernel estimated from the others of its kind. All GPUs together make the interval."""
    parts: dict[str, Judged] = {}
    for name in MEASURED_GPUS:
        moves = measured_moves(load_measured(name), measured_spec(name))
        own = moves.rows[~moves.rows["kind"].str.startswith(ELEMENTWISE)]
        found = [_each_left_out(str(kind), rows, moves) for kind, rows in own.groupby("kind")]
        if found:
            parts[name] = together(found)
    every = together(list(parts.values()))
    pooled = closeness("norms", "", every)
    return [
        replace(closeness("norms", name, part), half_widths=pooled.half_widths, inside=pooled.inside)
        for name, part in parts.items()
    ]


def _each_left_out(kind: str, rows: pd.DataFrame, moves: Moved) -> Judged:
    estimated, measured = [], []
    for place in rows.index[rows["time_us"] >= LEAST_US]:
        others = rows.drop(index=place)
        if len(others) < 2:
            continue
        times = MovingTimes([replace(moves, rows=others)])
        estimated.append(times.time_us(kind, np.array([rows.loc[place, "bytes"]], np.float64), moves.bandwidth)[0])
        measured.append(rows.loc[place, "time_us"])
    return Judged.of(np.array(estimated), np.array(measured))


def closeness(family: str, gpu: str, judged: Judged, noise: tuple[float, float] | None = None) -> AccuracyRow:
    """Summarise errors."""
    size = np.abs(np.expm1(judged.errors))
    first, second = judged.only(slice(0, None, 2)), judged.only(slice(1, None, 2))
    width = half_widths_at(first.widths(), second.estimated_us, second.octaves)
    return AccuracyRow(
        family,
        gpu,
        kernels=len(size),
        median=float(np.median(size)),
        p95=float(np.quantile(size, 0.95)),
        half_widths=judged.widths(),
        inside=float((np.abs(second.errors) <= width).mean()),
        noise=noise,
    )


def tables(found: list[AccuracyRow]) -> str:
    """The results as Markdown."""
    lines = [
        "| GPU | kernels | left out | median error | 95th percentile | 90 % interval | held by | collectors differ |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in found:
        noise = "" if each.noise is None else f"{np.expm1(each.noise[0]):+.0%} to {np.expm1(each.noise[1]):+.0%}"
        widths = [width for row in each.half_widths for width in row]
        interval = f"±{np.expm1(min(widths)):.0%} to ±{np.expm1(max(widths)):.0%}"
        lines.append(
            f"| {each.gpu} | {each.family} | {each.kernels:,} | {each.median:.1%} | {each.p95:.1%} "
            f"| {interval} | {each.inside:.0%} | {noise} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
