"""Reduces a run to the figures that later runs are compared with, by layer and category. Repeated layers are one."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pandas as pd

from fakedist.results.compare.changed_memory import OUTSIDE, layer_patterns
from fakedist.results.compare.changed_times import layer_parts
from fakedist.rundir.schema import CATEGORIES


def pattern_parts(layers: pd.DataFrame) -> pd.DataFrame:
    """Own bytes at the peak: columns path (numbers of repeated layers as ``*``), category, bytes. They add up to it.

    Args:
        layers: The table ``layers``.
    """
    path = pd.Series([pattern or OUTSIDE for pattern in layer_patterns(layers)], name="path")
    frames = [pd.DataFrame({"path": path, "category": c, "bytes": layers[f"peak_{c}_bytes"]}) for c in CATEGORIES]
    sums = pd.concat(frames).groupby(["path", "category"], sort=True)["bytes"].sum().reset_index()
    return sums[sums["bytes"] != 0].reset_index(drop=True)


def pattern_times(layers: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Own time in the timed step: columns path (numbers of repeated layers as ``*``), category (the family), us.

    Args:
        layers: The table ``layers``.
        times: The table ``layer_times``. It has no rows if nothing was timed.
    """
    return layer_parts(times, dict(enumerate(layer_patterns(layers))))


def part_changes(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """Changes between two results of :func:`pattern_parts`: path, name (equal to path), category, change_bytes."""
    keys = ["path", "category"]
    found = before.merge(after, on=keys, how="outer", suffixes=("_before", "_after"))
    change = found["bytes_after"].fillna(0) - found["bytes_before"].fillna(0)
    return found[keys].assign(name=found["path"], change_bytes=change.astype("int64"))


def layers_bytes(layers: pd.DataFrame, pattern: str) -> int | None:
    """Bytes at the peak of all layers that match a pattern, with children; None if no layer matches.

    Args:
        layers: The table ``layers``.
        pattern: A name in which ``*`` matches any part between two dots: ``layers.*.mlp``.
    """
    named = [names_layer(pattern, str(name) or OUTSIDE) for name in layers["name"]]
    return int(layers["peak_own_bytes"][named].sum()) if any(named) else None


def names_layer(pattern: str, name: str) -> bool:
    """Whether a pattern matches a layer or one above it."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) <= len(parts) and all(fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=False))
