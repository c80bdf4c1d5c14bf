"""How well recorded and traced launches fit each other, as a whole number; at most 0 means not at all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fakedist.analysis.calibration.signatures import Signature, kernel_words, plain_name

Scores = npt.NDArray[np.int32]
T = TypeVar("T", bound=Hashable)

_NAME, _LIKE_NAME, _FAMILY, _GRID, _OTHER_GRID = 40, 20, 5, 20, -10
_OPERATION, _OTHER_OPERATION = 30, -30
_PRODUCT, _SIZES, _OTHER_SIZES, _AUXILIARY = 30, 30, -100, -25
_COPY, _BYTES, _OTHER_BYTES = 20, 30, -20
_NEVER = -1000
#: The share of common words from which two names count as alike.
_ALIKE = 0.5
#: Which of the two families an elementwise kernel belongs to depends on its phase, which a trace may not tell.
_SAME_FAMILY = {"optimizer": "elementwise"}
#: A pair is strong from this score on: a name and a grid, or an operation and sizes, and nothing against it.
STRONG = 50


def score(recorded: list[Signature], traced: list[Signature]) -> Scores:
    """Scores of all pairs: a row for each recorded signature, a column for each traced one."""
    if not recorded or not traced:
        return np.zeros((len(recorded), len(traced)), np.int32)
    found = _by_kind(recorded, traced)
    found = np.where(found > _NEVER // 2, found + _by_operation(recorded, traced), _NEVER)
    found += np.maximum(_equal(recorded, traced, "grid", "", (_GRID, _OTHER_GRID)), _tuned(recorded) * _OTHER_GRID)
    found += _equal(recorded, traced, "num_bytes", -1, (_BYTES, _OTHER_BYTES))
    found += _equal(recorded, traced, "sizes", (), (_SIZES, _OTHER_SIZES))
    return found.astype(np.int32)


def conflicts(recorded: list[Signature], traced: list[Signature]) -> npt.NDArray[np.bool_]:
    """Whether two kernels have known and different grids, or two copies different bytes: their work differs.

    Triton chooses blocks by tuning, so its grids differ for the same work.
    """
    grid = _equal(recorded, traced, "grid", "", (0, 1))
    bytes_ = _equal(recorded, traced, "num_bytes", -1, (0, 1))
    return np.asarray(((grid > 0) & (_tuned(recorded) > 0)) | (bytes_ > 0))


def _by_kind(recorded: list[Signature], traced: list[Signature]) -> Scores:
    """Scores by what the launches are and what they are called."""
    rows, row = _distinct((each.kind, plain_name(each.name), _family(each.family), False) for each in recorded)
    columns, column = _distinct(
        (each.kind, plain_name(each.name), _family(each.family), each.is_auxiliary) for each in traced
    )
    scores = np.array([[_pair(one, other) for other in columns] for one in rows], np.int32)
    mine, others = (np.array([name if kind == "kernel" else "" for kind, name, *_ in side]) for side in (rows, columns))
    # A kernel that the other side has by this name is no kernel of another name.
    in_both = np.intersect1d(mine, others)
    has_own = np.isin(mine, in_both)[:, None] | np.isin(others, in_both)[None, :]
    are_kernels = (mine != "")[:, None] & (others != "")[None, :]
    scores[are_kernels & has_own & (mine[:, None] != others[None, :])] = _NEVER
    return scores[row][:, column]


def _pair(recorded: tuple[str, str, str, bool], traced: tuple[str, str, str, bool]) -> int:
    kind, name, family, _ = recorded
    of_kind, of_name, of_family, is_auxiliary = traced
    if kind in ("copy", "fill") or of_kind in ("copy", "fill"):
        return _COPY if (kind, name) == (of_kind, of_name) else _NEVER
    if kind in ("product", "library"):
        is_like = family == of_family or "other" in (family, of_family)
        score = _PRODUCT if family == of_family else 0
        return score + (_AUXILIARY if is_auxiliary else 0) if is_like else _NEVER
    if name == of_name:
        return _NAME
    words, others = kernel_words(name), kernel_words(of_name)
    if len(words & others) >= _ALIKE * max(len(words | others), 1):
        return _LIKE_NAME
    return _FAMILY if family == of_family else _OTHER_GRID


def _by_operation(recorded: list[Signature], traced: list[Signature]) -> Scores:
    """Scores by operation. One that the other side never names, as those of compiled graphs, tells nothing."""
    rows, row = _distinct(each.operations for each in recorded)
    columns, column = _distinct(each.operations for each in traced)
    named = {name for names in columns for name in names}
    scores = np.zeros((len(rows), len(columns)), np.int32)
    for place, names in enumerate(rows):
        if known := named & set(names):
            for other, around in enumerate(columns):
                if around:
                    scores[place, other] = _OPERATION if known & set(around) else _OTHER_OPERATION
    return scores[row][:, column]


def _equal(
    recorded: list[Signature], traced: list[Signature], name: str, unknown: object, points: tuple[int, int]
) -> Scores:
    """Points for an equal and for a different value of a field, where both sides know it."""
    numbers: dict[object, int] = {unknown: 0}
    row, column = (
        np.array([numbers.setdefault(getattr(each, name), len(numbers)) for each in side])
        for side in (recorded, traced)
    )
    known = (row > 0)[:, None] & (column > 0)[None, :]
    equal, different = points
    return np.where(known, np.where(row[:, None] == column[None, :], equal, different), 0).astype(np.int32)


def _tuned(recorded: list[Signature]) -> Scores:
    """A column: 0 for Triton's kernels, whose blocks are tuned, 1 for others."""
    return np.array([[not each.is_tuned] for each in recorded], np.int32)


def _family(family: str) -> str:
    return _SAME_FAMILY.get(family, family)


def _distinct(values: Iterable[T]) -> tuple[list[T], npt.NDArray[np.int64]]:
    places: dict[T, int] = {}
    rows = [places.setdefault(each, len(places)) for each in values]
    return list(places), np.array(rows, np.int64)
