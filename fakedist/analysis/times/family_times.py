"""Time by family of kernels, and by name, shape and layer: how long, how often, and how close to the GPU's limits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.layer_table import fold_layers
from fakedist.run.schema import BOUNDS, FAMILIES, TABLES

_INTERVAL = ("low_us", "high_us")
_SUMS = ("num_kernels", "num_unknown", "time_us", "flops", "flops_us", "moved_bytes", "moved_us")


def family_table(kernels: pd.DataFrame) -> pd.DataFrame:
    """Every family that ran, most time first.

    Columns: those of ``_SUMS``, as in :func:`name_table`, and ``compute_us``, ``memory_us``, ``launch_us``: the time
    that each bound limits.

    Args:
        kernels: The result of :func:`fakedist.analysis.times.kernel_kinds.timed`.
    """
    rows = _counted(kernels)
    bound = rows["bound"].astype(str).to_numpy()
    for name in filter(None, BOUNDS):
        rows[f"{name}_us"] = np.where(bound == name, rows["time_us"], 0.0)
    columns = [*_SUMS, *(f"{name}_us" for name in BOUNDS if name)]
    found = rows.groupby("family", sort=True)[columns].sum().reset_index()
    found["family"] = [FAMILIES[at] for at in found["family"]]
    return found.sort_values("time_us", ascending=False, kind="stable").reset_index(drop=True)


def name_table(kernels: pd.DataFrame, layers: pd.DataFrame) -> pd.DataFrame:
    """The table ``kernel_names``: a row for each name, shape and folded layer of kernels, most time first.

    Args:
        kernels: The result of :func:`fakedist.analysis.times.kernel_kinds.timed`.
        layers: The table ``layers``.
    """
    rows = _counted(kernels)
    rows["name"] = rows["name"].astype("category")
    rows["shape"] = _shapes(kernels)
    rows["layer_name"] = _folded_names(kernels["layer"].to_numpy("i8"), layers)
    keys = ["name", "family", "shape", "layer_name"]
    groups = rows.groupby(keys, sort=False, observed=True)
    found = groups[list(_SUMS)].sum()
    for name in _INTERVAL:
        found[name] = groups[name].sum(min_count=1)
    duration = groups["duration_us"]
    found["least_us"], found["median_us"], found["largest_us"] = duration.min(), duration.median(), duration.max()
    found["num_layers"] = groups["layer"].nunique()
    found["bound"] = _main_bound(rows, keys).reindex(found.index).fillna("")
    found = found.reset_index().rename(columns={"layer_name": "layer"})
    found = found.astype({"name": str, "shape": str, "layer": str})
    found["family"] = [FAMILIES[at] for at in found["family"]]
    order = found.sort_values(["time_us", "num_kernels"], ascending=False, kind="stable").index
    return found.loc[order, [column.name for column in TABLES["kernel_names"].columns]]


def by_name(names: pd.DataFrame) -> pd.DataFrame:
    """The columns that can be added up of a table ``kernel_names``, by name and family, in the order of the table.

    Args:
        names: The table ``kernel_names``.
    """
    return names.groupby(["name", "family"], sort=False)[list(_SUMS)].sum().reset_index()


def _shapes(kernels: pd.DataFrame) -> pd.Series:
    """The shape of each kernel's work; where it is not known, as in a trace of a GPU, its grid: it follows the size."""
    shape, grid = (kernels[name].astype("category") for name in ("shape", "grid"))
    grid = grid.cat.rename_categories({text: f"grid {text}" for text in grid.cat.categories if text})
    known = sorted({*map(str, shape.cat.categories), *map(str, grid.cat.categories)})
    both = pd.CategoricalDtype(known)
    return shape.astype(both).where(np.asarray(shape.astype(str) != ""), grid.astype(both))


def _folded_names(layer: npt.NDArray[np.int64], layers: pd.DataFrame) -> pd.Categorical[str]:
    """The name of each kernel's layer, the same for repeated layers: layers.0-79.attention."""
    folds = fold_layers(layers)
    of_layer = np.zeros(max(len(layers), 1), "i8")
    for number, fold in enumerate(folds):
        of_layer[list(fold.layers)] = number
    texts = pd.Index([fold.name for fold in folds] or [""])
    numbers = pd.factorize(texts)[0]  # two folds may have one name
    return pd.Categorical.from_codes(numbers[of_layer[layer]], categories=texts.unique())


def _main_bound(rows: pd.DataFrame, keys: list[str]) -> pd.Series:
    """The bound that limits most of each group's time."""
    told = rows[rows["bound"].astype(str) != ""]
    sums = told.astype({"bound": str}).groupby([*keys, "bound"], sort=False, observed=True)["time_us"].sum()
    most = sums.reset_index().sort_values("time_us", ascending=False, kind="stable").drop_duplicates(keys)
    return most.set_index(keys)["bound"]


def _counted(kernels: pd.DataFrame) -> pd.DataFrame:
    """One row per kernel with the columns to sum. NaN counts as 0, and so does the time that goes with it."""
    flops, moved = kernels["flops"].to_numpy("f8"), kernels["moved_bytes"].to_numpy("f8")
    known_us = kernels["known_us"].to_numpy()
    counts = {
        "num_kernels": np.ones(len(kernels), "i8"),
        "num_unknown": (~kernels["is_known"].to_numpy(bool)).astype("i8"),
        "time_us": known_us,
        "flops": np.nan_to_num(flops),
        "flops_us": np.where(np.isfinite(flops), known_us, 0.0),
        "moved_bytes": np.nan_to_num(moved),
        "moved_us": np.where(np.isfinite(moved), known_us, 0.0),
    }
    return kernels[["name", "family", "layer", "bound", "duration_us", *_INTERVAL]].assign(**counts)
