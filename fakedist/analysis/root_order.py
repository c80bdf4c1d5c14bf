"""Puts the models that are trained before all others, and parents before their children.

Teachers, references and probes may have run first, and so may a part of a model.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fakedist.analysis.recording import NUMPY_TYPES, Array, Recording
from fakedist.rundir.encoding import columns_of
from fakedist.rundir.launch_records import LaunchesRecord
from fakedist.rundir.rows import LayerRow
from fakedist.rundir.schema import CATEGORIES

#: By what a model is known to be trained: the first of these that any has. SGD keeps no state.
_TRAINED_BY = tuple(CATEGORIES.index(name) for name in ("optimizer_state", "gradient"))


def trained_first(recording: Recording) -> None:
    """Number the layers of trained models first, parents before children. The first model's names lose its own."""
    if len(recording.layers) < 2:
        return
    parents = [row.parent for row in recording.layers]
    roots = _roots(parents)
    trained = _trained(recording.marks, roots)
    short = next((root for root, row in zip(roots, recording.layers, strict=True) if row.name[:1] not in "("), roots[1])

    def rank(layer: int) -> int:
        if not layer or not trained:
            return 0
        return 3 if roots[layer] not in trained else 1 if roots[layer] == short else 2

    order = _parents_first(sorted(range(len(parents)), key=rank), parents)
    if order == sorted(order):
        return
    new = np.empty(len(order), "i4")
    new[order] = np.arange(len(order))
    names = _names([row.name for row in recording.layers], roots, short, order[1] if trained else short)
    if (failed := recording.failed_request) is not None:
        recording.failed_request = dataclasses.replace(failed, layer=names.get(failed.layer, failed.layer))
    recording.layers = [
        LayerRow(number, names[row.name], row.class_name, int(new[row.parent]) if row.parent >= 0 else row.parent)
        for number, row in enumerate(recording.layers[layer] for layer in order)
    ]
    recording.scopes = [row._replace(layer=int(new[row.layer])) for row in recording.scopes]
    recording.regions = [row._replace(layer=int(new[row.layer])) for row in recording.regions]
    recording.held = [row._replace(layer=int(new[row.layer])) for row in recording.held]
    recording.placings = [
        row._replace(layers=tuple(int(new[layer]) for layer in row.layers)) for row in recording.placings
    ]
    for columns in (recording.marks, recording.kernels):
        columns["layer"] = _renumbered(columns["layer"], new)
    if recording.launches is not None:
        layer = np.frombuffer(recording.launches.layer, NUMPY_TYPES[columns_of(LaunchesRecord)["layer"]])
        recording.launches = dataclasses.replace(recording.launches, layer=_renumbered(layer, new).tobytes())


def _roots(parents: list[int]) -> list[int]:
    roots = list(range(len(parents)))
    for layer in roots:
        while parents[roots[layer]] > 0:
            roots[layer] = parents[roots[layer]]
    return roots


def _parents_first(order: list[int], parents: list[int]) -> list[int]:
    ordered: dict[int, None] = {}
    for layer in order:
        above = [layer]
        while parents[above[-1]] >= 0:
            above.append(parents[above[-1]])
        ordered |= dict.fromkeys(reversed(above))
    return list(ordered)


def _names(names: list[str], roots: list[int], short: int, first: int) -> dict[str, str]:
    """Old names to new once ``first`` has the short names, which root ``short`` had (``record/module_names.py``)."""
    new_names = {}
    for name, root in zip(names, roots, strict=True):
        below = name.removeprefix(f"{names[first]}.")
        if root == first and not below.startswith("("):  # what it only calls keeps its name: "(GPT).(Softmax)"
            new_names[name] = below
        elif root == short != first and not name.startswith("("):
            new_names[name] = f"{names[root]}.{name}"
        else:
            new_names[name] = name
    return new_names


def _trained(marks: dict[str, Array], roots: list[int]) -> set[int]:
    """The roots with optimizer state; without any, those with gradients."""
    for category in _TRAINED_BY:
        layers = np.unique(marks["layer"][(marks["category"] == category) & (marks["layer"] > 0)])
        if len(layers):
            return {roots[layer] for layer in layers}
    return set()


def _renumbered(layers: Array, new: Array) -> Array:
    return np.where(layers >= 0, new[layers], layers).astype(layers.dtype)
