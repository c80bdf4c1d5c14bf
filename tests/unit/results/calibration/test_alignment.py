"""Alignment: repeated steps, lost and extra launches; a band gives what the whole gives."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fakedist.results.calibration import matching
from fakedist.results.calibration.matching import Sequence, Signature, align, score


def sequence(text: str) -> Sequence:
    """A launch for each letter; capitals are products."""
    return Sequence.of(
        [
            Signature(
                "kernel", f"void {each}{each}()", "gemm" if each.isupper() else "elementwise", grid=f"{ord(each)},1,1"
            )
            for each in text
        ]
    )


def positions(recorded: str, traced: str) -> list[int]:
    one, other = sequence(recorded), sequence(traced)
    return align(one, other, score(one.signatures, other.signatures)).tolist()


def test_each_repetition_counts_on() -> None:
    assert positions("abcd", "abcdabcd") == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_trace_may_begin_inside_a_step() -> None:
    assert positions("abcd", "cdabcd") == [2, 3, 4, 5, 6, 7]


def test_what_is_extra_has_no_position() -> None:
    assert positions("abcd", "abxcyyd") == [0, 1, -1, 2, -1, -1, 3]


def test_what_is_missing_is_passed() -> None:
    assert positions("abcdefgh", "abcfgh") == [0, 1, 2, 5, 6, 7]


def test_a_lost_layer_does_not_shift_the_others() -> None:
    layers = "abCd" * 5
    assert positions(f"x{layers}y", f"x{layers[4:]}y")[-1] == 21


def test_order_counts_not_only_what_there_is() -> None:
    """Passing almost a whole step for each launch costs more than leaving launches out."""
    step = "abcdefghijklmnopqrstuvwxyz" * 4
    found = positions(step, step[::-1])
    assert sum(each >= 0 for each in found) < len(step) / 2


def test_nothing_alike_has_no_positions() -> None:
    assert positions("abc", "xyz") == [-1, -1, -1]
    assert positions("abc", "") == []
    assert positions("", "abc") == [-1, -1, -1]


@pytest.mark.parametrize("seed", range(5))
def test_a_band_gives_what_the_whole_gives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = random.Random(seed)
    recorded = "".join(chosen.choices("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLM", k=900))
    traced = "".join(chosen.choice(("", each, each + "z")) if chosen.random() < 0.1 else each for each in recorded * 2)
    whole = positions(recorded, traced)
    assert np.mean(np.array(whole) >= 0) > 0.9
    monkeypatch.setattr(matching, "_MAX_CELLS", 600_000)
    assert np.mean(np.array(positions(recorded, traced)) == np.array(whole)) > 0.99
