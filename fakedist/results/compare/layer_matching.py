"""Matches the layers of two runs by name, through renames and moves, and names repeated layers once.

Two runs on one axis: the same phase of the same step is at the same position, however many events each run has.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeAlias

import numpy as np
import pandas as pd

from fakedist.analysis.memory_tables import with_children
from fakedist.analysis.recording import Array


@dataclass(frozen=True)
class Stretch:
    """A piece of the common axis.

    Attributes:
        phase: Empty if the two runs have different phases in this step.
        events: For each run, the first event and the first after the piece; equal without events.
        at: Begin and end on the axis, from 0 to 1.
    """

    step: int
    phase: str
    events: tuple[tuple[int, int], tuple[int, int]]
    at: tuple[float, float] = (0.0, 0.0)


def common_axis(spans: tuple[pd.DataFrame, pd.DataFrame], num_events: tuple[int, int]) -> list[Stretch]:
    """The pieces of an axis that two runs share, in order, each as wide as the run with more events in it."""
    steps = [_by_step(table, total) for table, total in zip(spans, num_events, strict=True)]
    pieces: list[Stretch] = []
    for step in sorted(set(steps[0]) | set(steps[1])):
        sides = [spans_of.get(step, []) for spans_of in steps]
        phases = [[phase for phase, _, _ in side] for side in sides]
        if phases[0] == phases[1]:
            for (phase, *one), (_, *other) in zip(*sides, strict=True):
                pieces.append(Stretch(step, phase, ((one[0], one[1]), (other[0], other[1]))))
            continue
        whole = [(side[0][1], side[-1][2]) if side else (0, 0) for side in sides]
        pieces.append(Stretch(step, "", (whole[0], whole[1])))
    widths = np.array([max(end - first for first, end in piece.events) for piece in pieces], "f8")
    ends = np.cumsum(widths) / max(widths.sum(), 1)
    starts = ends - widths / max(widths.sum(), 1)
    return [
        Stretch(piece.step, piece.phase, piece.events, (float(start), float(end)))
        for piece, start, end in zip(pieces, starts, ends, strict=True)
    ]


def _by_step(spans: pd.DataFrame, num_events: int) -> dict[int, list[tuple[str, int, int]]]:
    if not len(spans):
        return {0: [("", 0, num_events)]} if num_events else {}
    first = [int(event) for event in spans["first_event"]]
    ends = [*first[1:], num_events]
    by_step: dict[int, list[tuple[str, int, int]]] = {}
    for step, phase, start, end in zip(spans["step"].tolist(), spans["phase"].astype(str), first, ends, strict=True):
        by_step.setdefault(int(step), []).append((phase, start, end))
    return by_step


def on_axis(curve: Array, pieces: list[Stretch], side: int, num_columns: int) -> tuple[Array, Array]:
    """The minimum and maximum in each column of the common axis of a curve over events of run ``side``, 0 or 1.

    A column without events keeps the last value of the column before.
    """
    column = np.zeros(len(curve), "i8")
    for piece in pieces:
        first, end = piece.events[side]
        positions = piece.at[0] + (np.arange(end - first) + 0.5) / max(end - first, 1) * (piece.at[1] - piece.at[0])
        column[first:end] = np.minimum((positions * num_columns).astype("i8"), num_columns - 1)
    least, most = np.full(num_columns, np.iinfo("i8").max), np.full(num_columns, -1)
    last = np.full(num_columns, -1)
    np.minimum.at(least, column, curve)
    np.maximum.at(most, column, curve)
    last[column] = curve  # of several events in a column, the last one counts
    known = np.maximum.accumulate(np.where(last >= 0, np.arange(num_columns), -1))
    before = np.where(known >= 0, last[np.maximum(known, 0)], 0)
    empty = most < 0
    return np.where(empty, before, least), np.where(empty, before, most)


OUTSIDE = "(outside of modules)"
#: How alike two layers with different names must be, from 0 to 1, to count as one renamed layer.
RENAMED_FROM = 0.5

Pair = tuple[int, int]
#: A layer's class, and the names and shapes below it.
Shape: TypeAlias = "tuple[str, tuple[tuple[str, Shape], ...]]"
#: A shape and the bytes of its parameters.
Signature = tuple[Shape, int]


def layer_patterns(table: pd.DataFrame) -> list[str]:
    """Names of layers with ``*`` for the numbers of repeated ones: layers.3.mlp becomes layers.*.mlp.

    Repeated means that all numbered siblings, or at least three, have its class: the second linear layer of a
    feed-forward written as a sequence keeps its number. Rows have name, class_name and parent, parents before children.
    """
    names = [str(name) for name in table["name"]]
    parents, classes = table["parent"].tolist(), table["class_name"].tolist()
    siblings: dict[tuple[int, str, bool], list[str]] = defaultdict(list)
    for name, parent, of_class in zip(names, parents, classes, strict=True):
        above, _, last = name.rpartition(".")
        siblings[parent, above, last.isdecimal()].append(of_class)
    patterns: list[str] = []
    for name, parent, of_class in zip(names, parents, classes, strict=True):
        above, _, last = name.rpartition(".")
        numbered = siblings[parent, above, True]
        if last.isdecimal() and numbered.count(of_class) >= min(3, len(numbered)):
            last = "*"
        is_below = parent > 0 and f"{above}.".startswith(f"{names[parent]}.")  # a trace's "Block.0" of "GPT", too
        prefix = patterns[parent] + above[len(names[parent]) :] if is_below else above
        patterns.append(f"{prefix}.{last}" if above else last)
    return patterns


def match_layers(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Pair the layers of two tables ``layers``: every layer of both runs once.

    Columns ``a`` and ``b`` (rows; -1 without a counterpart), ``how``: same, renumbered, renamed, moved, gone, appeared.
    """
    trees = _Tree(a), _Tree(b)
    matcher = _Matcher(*trees)
    matcher.match(0, 0, "same")
    matcher.match_moved()
    rows: list[tuple[int, int, str]] = [(at, to, how) for (at, to), how in matcher.pairs.items()]
    rows += [(at, -1, "gone") for at in range(len(a)) if at not in matcher.of_a]
    rows += [(-1, to, "appeared") for to in range(len(b)) if to not in matcher.of_b]
    return pd.DataFrame(rows, columns=["a", "b", "how"])


def renamed_layers(a: pd.DataFrame, b: pd.DataFrame, matches: pd.DataFrame) -> list[dict[str, str]]:
    """Topmost layers with another name in the second run, repeats once: ``was``, ``name`` (with ``*``), ``how``."""
    names = [str(name) for name in a["name"]], [str(name) for name in b["name"]]
    patterns = layer_patterns(a), layer_patterns(b)
    other = matches[(matches["a"] >= 0) & (matches["b"] >= 0) & (matches["how"] != "same")]
    counts: dict[tuple[str, str, str], int] = {}
    alone: dict[tuple[str, str, str], tuple[str, str]] = {}
    for at, to, how in zip(other["a"].tolist(), other["b"].tolist(), other["how"], strict=True):
        was, name = names[0][at], names[1][to]
        above = was.rpartition(".")[0], name.rpartition(".")[0]
        if was == name or (was.rpartition(".")[2] == name.rpartition(".")[2] and above[0] != above[1] and all(above)):
            continue  # only the name of a layer above it changed, which is listed
        key = (patterns[0][at], patterns[1][to], str(how))
        counts[key] = counts.get(key, 0) + 1
        alone[key] = (was, name)
    return [
        dict(zip(("was", "name"), alone[key] if count == 1 else key[:2], strict=True), how=key[2])
        for key, count in counts.items()
    ]


class _Tree:
    """The layers of a run: names, classes, children, and what makes two layers alike."""

    def __init__(self, table: pd.DataFrame) -> None:
        self.names = [str(name) for name in table["name"]]
        self.classes = [str(name) for name in table["class_name"]]
        self.parents = [int(parent) for parent in table["parent"]]
        self.children: dict[int, list[int]] = defaultdict(list)
        for layer, parent in enumerate(self.parents):
            if layer:
                self.children[parent].append(layer)
        self.parameter_bytes = with_children(table, table["peak_parameter_bytes"].to_numpy()).tolist()
        self._shapes: dict[int, Shape] = {}

    def last(self, layer: int) -> str:
        """The last part of its name."""
        return self.names[layer].rpartition(".")[2]

    def shape(self, layer: int) -> Shape:
        """Its class, and the names and shapes below it, without its own name. Layers built alike have equal shapes."""
        if layer not in self._shapes:
            below = tuple((self.last(child), self.shape(child)) for child in self.children[layer])
            self._shapes[layer] = (self.classes[layer], below)
        return self._shapes[layer]

    def signature(self, layer: int) -> Signature:
        """Its shape and the bytes of its parameters."""
        return (self.shape(layer), self.parameter_bytes[layer])


@dataclass
class _Matcher:
    a: _Tree
    b: _Tree
    pairs: dict[Pair, str] = field(default_factory=dict)
    of_a: set[int] = field(default_factory=set)
    of_b: set[int] = field(default_factory=set)

    def match(self, at: int, to: int, how: str) -> None:
        """Pair two layers, and the layers below them as far as they match."""
        self.pairs[at, to] = how
        self.of_a.add(at)
        self.of_b.add(to)
        # Layers below a renamed layer kept their position in it.
        below = "same" if how in ("renamed", "appeared") else how
        left, right = self._free(self.a.children[at], self.of_a), self._free(self.b.children[to], self.of_b)
        for one, other, paired_as in [*self._numbered(left, right), *self._named(left, right)]:
            self.match(one, other, paired_as if paired_as != "same" else below)
        left, right = self._free(left, self.of_a), self._free(right, self.of_b)
        for one, other in self._alike(left, right):
            self.match(one, other, "renamed")

    def match_moved(self) -> None:
        """Pair layers that moved in the tree (below a wrapper, say), if they are the only ones of their shape."""
        layers_of: list[dict[tuple[Shape, str], list[int]]] = [defaultdict(list), defaultdict(list)]
        for tree, taken, by_shape in ((self.a, self.of_a, layers_of[0]), (self.b, self.of_b, layers_of[1])):
            for layer in self._free(range(len(tree.names)), taken):
                by_shape[tree.shape(layer), tree.last(layer)].append(layer)
        for shape, left in layers_of[0].items():  # parents come first
            right = layers_of[1].get(shape, [])
            if len(left) == len(right) == 1 and left[0] not in self.of_a and right[0] not in self.of_b:
                self.match(left[0], right[0], "moved")

    @staticmethod
    def _free(layers: Iterable[int], taken: set[int]) -> list[int]:
        return [layer for layer in layers if layer not in taken]

    def _named(self, left: list[int], right: list[int]) -> list[tuple[int, int, str]]:
        by_name = {self.b.last(layer): layer for layer in right if not self.b.last(layer).isdecimal()}
        return [(layer, by_name[name], "same") for layer in left if (name := self.a.last(layer)) in by_name]

    def _numbered(self, left: list[int], right: list[int]) -> list[tuple[int, int, str]]:
        """Pair the numbered layers in order. A removed or inserted layer shifts those after it."""
        left = [layer for layer in left if self.a.last(layer).isdecimal()]
        right = [layer for layer in right if self.b.last(layer).isdecimal()]
        names = [self.a.last(layer) for layer in left], [self.b.last(layer) for layer in right]
        if names[0] == names[1] or _have_gaps(names[0]) or _have_gaps(names[1]):
            by_name = dict(zip(names[1], right, strict=True))
            return [(one, by_name[name], "same") for one, name in zip(left, names[0], strict=True) if name in by_name]
        pairs = []
        for one, other in _aligned([self.a.signature(at) for at in left], [self.b.signature(to) for to in right]):
            how = "same" if names[0][one] == names[1][other] else "renumbered"
            pairs.append((left[one], right[other], how))
        return pairs

    def _alike(self, left: list[int], right: list[int]) -> list[Pair]:
        scores = [
            (score, -abs(row - spot), -row, one, other)
            for row, one in enumerate(left)
            for spot, other in enumerate(right)
            if not self.a.last(one).isdecimal() and not self.b.last(other).isdecimal()
            if (score := self._likeness(one, other)) >= RENAMED_FROM
        ]
        chosen: list[Pair] = []
        for _, _, _, one, other in sorted(scores, reverse=True):
            if all(one != pair[0] and other != pair[1] for pair in chosen):
                chosen.append((one, other))
        return chosen

    def _likeness(self, one: int, other: int) -> float:
        same_class = self.a.classes[one] == self.b.classes[other]
        bytes_ = self.a.parameter_bytes[one], self.b.parameter_bytes[other]
        sizes = min(bytes_) / max(bytes_) if max(bytes_) else 0.0
        names = difflib.SequenceMatcher(None, self.a.last(one), self.b.last(other)).ratio()
        below = [{tree.last(child) for child in tree.children[at]} for tree, at in ((self.a, one), (self.b, other))]
        parts = [(0.25, float(same_class)), (0.45, sizes), (0.1, names)]
        if any(below):
            parts.append((0.2, len(below[0] & below[1]) / len(below[0] | below[1])))
        return sum(weight * part for weight, part in parts) / sum(weight for weight, _ in parts)


def _have_gaps(names: list[str]) -> bool:
    """True if the numbers are not 0, 1, 2, ...: names chosen by the script, which are never renumbered."""
    return [int(name) for name in names] != list(range(len(names)))


def _aligned(left: list[Signature], right: list[Signature]) -> list[Pair]:
    """Pair two sequences of signatures in order, with the largest total likeness.

    Equal ones at the front are paired first: of layers that are all alike, the last ones are new or gone.
    """
    front = 0
    while front < min(len(left), len(right)) and left[front] == right[front]:
        front += 1
    pairs = [(at, at) for at in range(front)]
    # best[at][to]: the largest likeness of the rest of both sequences.
    best = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for at in range(len(left) - 1, front - 1, -1):
        for to in range(len(right) - 1, front - 1, -1):
            like = _signature_likeness(left[at], right[to])
            best[at][to] = max(best[at + 1][to], best[at][to + 1], best[at + 1][to + 1] + like)
    at = to = front
    while at < len(left) and to < len(right):
        like = _signature_likeness(left[at], right[to])
        if like and best[at][to] == best[at + 1][to + 1] + like:
            pairs.append((at, to))
            at, to = at + 1, to + 1
        elif best[at][to] == best[at + 1][to]:
            at += 1
        else:
            to += 1
    return pairs


def _signature_likeness(one: Signature, other: Signature) -> int:
    (shape, bytes_), (other_shape, other_bytes) = one, other
    if shape == other_shape:
        return 4 if bytes_ == other_bytes else 3
    return 1 if shape[0] == other_shape[0] else 0  # only the class is the same


def layer_paths(a: pd.DataFrame, b: pd.DataFrame, matches: pd.DataFrame) -> tuple[dict[int, str], dict[int, str]]:
    """Each layer's name in the comparison, for both runs: in terms of b, with numbers as ``*``."""
    paths = paths_of_matches(a, b, matches)["path"]
    sides = [
        {layer: path for layer, path in zip(matches[side].tolist(), paths, strict=True) if layer >= 0} for side in "ab"
    ]
    return sides[0], sides[1]


def paths_of_matches(a: pd.DataFrame, b: pd.DataFrame, matches: pd.DataFrame) -> dict[str, list[str]]:
    """Columns name, was, before, path of every match."""
    names_a, names_b = [str(name) for name in a["name"]], [str(name) for name in b["name"]]
    patterns_a, patterns_b = layer_patterns(a), layer_patterns(b)
    parents = a["parent"].tolist()
    to_b = {at: to for at, to in zip(matches["a"].tolist(), matches["b"].tolist(), strict=True) if at >= 0 <= to}

    translated: dict[str, str] = {patterns_a[at]: patterns_b[to] for at, to in to_b.items()}

    def in_terms_of_b(at: int) -> str:
        """A gone layer's pattern: the new name of layers with the same pattern, else its name below its parent's."""
        if patterns_a[at] in translated:
            return translated[patterns_a[at]]
        parent = parents[at]
        if parent <= 0 or names_a[parent].startswith("("):
            return patterns_a[at]
        above = patterns_b[to_b[parent]] if parent in to_b else in_terms_of_b(parent)
        return f"{above}.{patterns_a[at].rpartition('.')[2]}"

    columns: dict[str, list[str]] = {"name": [], "was": [], "before": [], "path": []}
    for at, to in zip(matches["a"].tolist(), matches["b"].tolist(), strict=True):
        columns["name"].append((names_b[to] if to >= 0 else names_a[at]) or OUTSIDE)
        columns["was"].append((names_a[at] if at >= 0 else "") or (OUTSIDE if at == 0 else ""))
        columns["before"].append((patterns_a[at] if at >= 0 else "") or (OUTSIDE if at == 0 else ""))
        columns["path"].append((patterns_b[to] if to >= 0 else in_terms_of_b(at)) or OUTSIDE)
    return columns


def layers_bytes(layers: pd.DataFrame, pattern: str) -> int | None:
    """Bytes at the peak, with children, of the layers that match ``layers.*.mlp``; ``*`` is any part between dots."""
    named = [names_layer(pattern, str(name) or OUTSIDE) for name in layers["name"]]
    return int(layers["peak_own_bytes"][named].sum()) if any(named) else None


def names_layer(pattern: str, name: str) -> bool:
    """True if a pattern matches a layer or one above it."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) <= len(parts) and all(fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=False))
