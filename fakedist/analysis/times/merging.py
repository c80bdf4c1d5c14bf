"""Kernels as bars of a drawing: each its own where there are few, neighbours as one where nobody tells them apart."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.run.schema import KINDS

_KIND_FROM_DEPTH = 2  # the model, the list of its layers, a layer


def bars(kernels: pd.DataFrame, most: int) -> pd.DataFrame:
    """At most about ``most`` bars, by stream and start.

    Of more kernels than that, neighbours on a stream with less than a 4,000th of the step between them become one where
    they are of one layer, kind and bound to communication or not; if that is not enough, those that begin in the same
    short stretch of time become one, whatever they are.

    Args:
        kernels: What :func:`fakedist.analysis.times.kinds.timed` gave.
        most: How many.

    Returns:
        Columns stream, start_us, end_us, first (row of its longest kernel in ``kernels``), num_kernels; and known
        (whether its duration is: collectives of unknown duration are never merged).
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
    return _merged(order, np.flatnonzero(begins), (stream, start, end, known))


def _merged(order: Array, first: Array, columns: tuple[Array, Array, Array, Array]) -> pd.DataFrame:
    stream, start, end, known = columns
    bar = np.repeat(np.arange(len(first)), np.diff(first, append=len(order)))
    until = np.maximum.reduceat(end, first) if len(order) else end
    if len(first) > 1:  # a kernel may be let begin before the one ahead of it has ended; bars stand one behind another
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
    """Rows that are not as the one before."""
    found = np.ones(len(columns[0]), bool)
    found[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return found


def _after(rows: Array) -> Array:
    """The rows after these."""
    return np.concatenate([[False], rows[:-1]])


def _reached(end: Array, new_stream: Array) -> Array:
    """The latest end so far on each row's stream."""
    group = np.cumsum(new_stream) - 1
    found: Array = pd.Series(end).groupby(group).cummax().to_numpy()
    return found


def layer_runs(kernels: pd.DataFrame, parents: Array) -> pd.DataFrame:
    """When which layer ran: a stretch a row, on the stream that computes most, nested by the layers' tree.

    Args:
        kernels: What :func:`fakedist.analysis.times.kinds.timed` gave.
        parents: Column ``parent`` of the table ``layers``.

    Returns:
        Columns layer, kind, depth, start_us, end_us; parents before their children, nothing overlaps at one depth.
    """
    rows = main_stream(kernels)
    columns = ["layer", "kind", "depth", "start_us", "end_us"]
    if not len(rows):
        return pd.DataFrame({name: [] for name in columns})
    chains = _chains(parents)
    start, kind = rows["start_us"].to_numpy("f8"), rows["kind"].to_numpy()
    end = np.maximum.accumulate(start + rows["known_us"].to_numpy())
    path = chains[rows["layer"].to_numpy("i8")]
    # What backward computes again for a layer stands apart, but does not cut the model to pieces.
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
    """The longest ``most`` of what :func:`layer_runs` gave, in their order; what is left goes on nesting."""
    if len(runs) <= most:
        return runs
    kept: pd.DataFrame = runs.loc[(runs["end_us"] - runs["start_us"]).nlargest(most).index.sort_values()]
    return kept


def kind_runs(kernels: pd.DataFrame) -> pd.DataFrame:
    """When the step went forward, backward and so on, on the stream that computes most: kind, start_us, end_us."""
    rows = main_stream(kernels)
    kind, start = rows["kind"].to_numpy(), rows["start_us"].to_numpy("f8")
    end = np.maximum.accumulate(start + rows["known_us"].to_numpy()) if len(rows) else start
    first = np.flatnonzero(_different([kind])) if len(rows) else np.zeros(0, "i8")
    last = np.append(first[1:], len(rows))[: len(first)] - 1
    until = np.minimum(end[last], np.append(start[first[1:]], np.inf)[: len(first)])
    return pd.DataFrame({"kind": kind[first], "start_us": start[first], "end_us": until})


def main_stream(kernels: pd.DataFrame) -> pd.DataFrame:
    """Compute of the stream that has most of it, in the order of their start."""
    compute = kernels[kernels["is_compute"] & kernels["is_known"]]
    if not len(compute):
        return compute
    most = compute.groupby("stream")["known_us"].sum().idxmax()
    found: pd.DataFrame = compute[compute["stream"] == most].sort_values("start_us", kind="stable")
    return found


def _chains(parents: Array) -> Array:
    """For each layer its ancestors from the root down to itself, padded with 0 (outside of modules)."""
    chains: list[list[int]] = []
    for layer, parent in enumerate(parents.tolist()):
        chains.append([*(chains[parent] if parent > 0 else []), layer] if layer else [0])
    found = np.zeros((len(chains), max(map(len, chains), default=1)), "i8")
    for layer, chain in enumerate(chains):
        found[layer, : len(chain)] = chain
    return found
