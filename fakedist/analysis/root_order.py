"""Puts the models that are trained before all others: teachers, references and probes may have run first."""

from __future__ import annotations

import dataclasses

import numpy as np

from fakedist.analysis.recording import NUMPY_TYPES, Array, Recording
from fakedist.run.encoding import columns_of
from fakedist.run.launch_records import LaunchesRecord
from fakedist.run.rows import LayerRow
from fakedist.run.schema import CATEGORIES

#: By what a model is known to be trained: the first of these that any has. SGD keeps no state.
_TRAINED_BY = tuple(CATEGORIES.index(name) for name in ("optimizer_state", "gradient"))


def trained_first(recording: Recording) -> None:
    """Number layers anew: first those of models that an optimizer trains, then those of others, else in their order.

    The layers of the first model are named without it, so names change, too.
    """
    if len(recording.layers) < 2:
        return
    parents = [row.parent for row in recording.layers]
    roots = _roots(parents)
    trained = _trained(recording.marks, roots)
    order = sorted(range(len(parents)), key=lambda layer: (layer > 0 and roots[layer] not in trained, layer))
    if not trained or order == sorted(order):
        return
    new = np.empty(len(order), "i4")
    new[order] = np.arange(len(order))
    names = _names([row.name for row in recording.layers], roots, order[1])
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
    """The root above each layer. Parents come before their children, and layer 0 is above no other."""
    roots = list(range(len(parents)))
    for layer, parent in enumerate(parents):
        if parent > 0:
            roots[layer] = roots[parent]
    return roots


def _names(names: list[str], roots: list[int], first: int) -> dict[str, str]:
    """The new name of each layer by its old one, once another root is the first. See ``record/module_names.py``."""
    found = {}
    for name, root in zip(names, roots, strict=True):
        below = name.removeprefix(f"{names[first]}.")
        if root == first and not below.startswith("("):  # what it only calls keeps its name: "(GPT).(Softmax)"
            found[name] = below
        elif root == roots[1] and not name.startswith("("):
            found[name] = f"{names[root]}.{name}"
        else:
            found[name] = name
    return found


def _trained(marks: dict[str, Array], roots: list[int]) -> set[int]:
    """The roots that an optimizer has state for; if it has none, those with gradients."""
    for category in _TRAINED_BY:
        layers = np.unique(marks["layer"][(marks["category"] == category) & (marks["layer"] > 0)])
        if len(layers):
            return {roots[layer] for layer in layers}
    return set()


def _renumbered(layers: Array, new: Array) -> Array:
    """Layers by their new numbers. -1 stays."""
    return np.where(layers >= 0, new[layers], layers).astype(layers.dtype)
