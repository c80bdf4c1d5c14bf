"""Kernels as bars of a drawing. A few kernels each get a bar; among many, indistinguishable neighbours share one."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.run.schema import KINDS

_KIND_FROM_DEPTH = 2  # depth 0 is the model, 1 the list of its layers, 2 a layer


def bars(kernels: pd.DataFrame, most: int) -> pd.DataFrame:
    """At most about ``most`` bars, by stream and start.

    If there are more kernels, neighbours on a stream merge if less than a 4,000th of the step lies between them and
    they have the same layer and kind and are both compute or both communication. If there are still too many bars,
    kernels that begin in the same short interval merge, whatever they are.

    Args:
        kernels: The result of :func:`fakedist.analysis.times.kernel_kinds.timed`.
        most: The number of bars to aim for.

    Returns:
        Columns stream, start_us, end_us, first (row in ``kernels`` of the bar's longest kernel), num_kernels, and known
        (whether the duration is known; collectives of unknown duration are never merged).
    """
    start = kernels["start_us"].to_numpy("f8")
    stream = kernels["stream"].to_numpy("u8")
    order = np.lexsort((start, stream))
    stream, start = stream[order], start[order]
    end = start + kernels["known_us"].to_numpy()[order]
    known = kernels["is_known"].to_numpy(bool)[order]
    new_stream = np.concatenate([[True], stream[1:] != stream[:-1]])[: len(order)]
    begins = np.ones(len(order), bool)
    span = float(end.max(initial=0.0)) or 1.0
    if len(order) > most:
        like = [kernels[name].to_numpy()[order] for name in ("layer", "kind", "is_compute")]
        reached = _reached(end, new_stream)
        apart = np.concatenate([[True], start[1:] - reached[:-1] > span / 4_000])
        begins = _different(like) | apart | new_stream | ~known | _after(~known)
    if begins.sum() > most:
        width = span / max(most // max(int(new_stream.sum()), 1), 1)
        begins = _different([(start // width).astype("i8")]) | new_stream | ~known | _after(~known)
    return _merged(order, np.flatnonzero(begins), stream=stream, start=start, end=end, known=known)


def _merged(order: Array, first: Array, *, stream: Array, start: Array, end: Array, known: Array) -> pd.DataFrame:
    bar = np.repeat(np.arange(len(first)), np.diff(first, append=len(order)))
    until = np.maximum.reduceat(end, first) if len(order) else end
    if len(first) > 1:  # kernels on a stream can overlap (one may start early), bars must not
        same = stream[first[1:]] == stream[first[:-1]]
        until[:-1] = np.where(same, np.minimum(until[:-1], start[first[1:]]), until[:-1])
    longest = np.lexsort((-(end - start), bar))[first] if len(order) else order
    return pd.DataFrame(
        {
            "stream": stream[first],
            "start_us": start[first],
            "end_us": until,
            "first": order[longest],
            "num_kernels": np.diff(first, append=len(order)),
            "known": known[first],
        }
    )


def _different(columns: list[Array]) -> Array:
    """Rows that differ from the row before."""
    found = np.ones(len(columns[0]), bool)
    found[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return found


def _after(rows: Array) -> Array:
    """The rows that follow these."""
    return np.concatenate([[False], rows[:-1]])


def _reached(end: Array, new_stream: Array) -> Array:
    """The latest end so far on each row's stream."""
    group = np.cumsum(new_stream) - 1
    found: Array = pd.Series(end).groupby(group).cummax().to_numpy()
    return found


def layer_runs(kernels: pd.DataFrame, parents: Array) -> pd.DataFrame:
    """When each layer ran, on the stream that computes most. One row per interval, nested like the tree of layers.

    Args:
        kernels: The result of :func:`fakedist.analysis.times.kernel_kinds.timed`.
        parents: Column ``parent`` of the table ``layers``.

    Returns:
        Columns layer, kind, depth, start_us, end_us. Parents come before their children, and rows of the same depth do
        not overlap.
    """
    rows = main_stream(kernels)
    columns = ["layer", "kind", "depth", "start_us", "end_us"]
    if not len(rows):
        return pd.DataFrame({name: [] for name in columns})
    chains = _chains(parents)
    start, kind = rows["start_us"].to_numpy("f8"), rows["kind"].to_numpy()
    end = np.maximum.accumulate(start + rows["known_us"].to_numpy())
    path = chains[rows["layer"].to_numpy("i8")]
    # A recomputed forward is an interval of its own within a layer, but does not split the model above it.
    backward = [KINDS.index(name) for name in ("recompute", "backward")]
    part = np.where(np.isin(kind, backward), backward[1], kind)
    changed = _different([part])
    found = []
    for depth in range(path.shape[1]):
        at = path[:, depth]
        if depth == _KIND_FROM_DEPTH:
            changed, part = changed | _different([kind]), kind
        changed = changed | _different([at])
        first = np.flatnonzero(changed)
        last = np.append(first[1:], len(rows)) - 1
        until = np.minimum(end[last], np.append(start[first[1:]], np.inf))
        kept = at[first] > 0
        piece = {"layer": at[first], "kind": part[first], "depth": depth, "start_us": start[first], "end_us": until}
        found.append(pd.DataFrame(piece)[kept])
    runs: pd.DataFrame = pd.concat(found).sort_values(["start_us", "depth"], kind="stable")[columns]
    return runs.reset_index(drop=True)


def longest_runs(runs: pd.DataFrame, most: int) -> pd.DataFrame:
    """The ``most`` longest rows of :func:`layer_runs`, in their order. They still nest."""
    if len(runs) <= most:
        return runs
    kept: pd.DataFrame = runs.loc[(runs["end_us"] - runs["start_us"]).nlargest(most).index.sort_values()]
    return kept


def kind_runs(kernels: pd.DataFrame) -> pd.DataFrame:
    """When forward, backward and so on ran, on the stream that computes most: kind, start_us, end_us."""
    rows = main_stream(kernels)
    kind, start = rows["kind"].to_numpy(), rows["start_us"].to_numpy("f8")
    end = np.maximum.accumulate(start + rows["known_us"].to_numpy()) if len(rows) else start
    first = np.flatnonzero(_different([kind])) if len(rows) else np.zeros(0, "i8")
    last = np.append(first[1:], len(rows))[: len(first)] - 1
    until = np.minimum(end[last], np.append(start[first[1:]], np.inf)[: len(first)])
    return pd.DataFrame({"kind": kind[first], "start_us": start[first], "end_us": until})


def main_stream(kernels: pd.DataFrame) -> pd.DataFrame:
    """The compute kernels of the stream with the most compute time, in order of start."""
    compute = kernels[kernels["is_compute"] & kernels["is_known"]]
    if not len(compute):
        return compute
    most = compute.groupby("stream")["known_us"].sum().idxmax()
    found: pd.DataFrame = compute[compute["stream"] == most].sort_values("start_us", kind="stable")
    return found


def _chains(parents: Array) -> Array:
    """For each layer, the path from the root down to itself, padded with 0 (outside of modules)."""
    chains: list[list[int]] = []
    for layer, parent in enumerate(parents.tolist()):
        chains.append([*(chains[parent] if parent > 0 else []), layer] if layer else [0])
    found = np.zeros((len(chains), max(map(len, chains), default=1)), "i8")
    for layer, chain in enumerate(chains):
        found[layer, : len(chain)] = chain
    return found
