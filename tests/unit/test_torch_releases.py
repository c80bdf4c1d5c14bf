from __future__ import annotations

from pathlib import Path

import pytest

from fakedist import torch_releases
from fakedist.torch_releases import OLDEST, Difference, release_of

DIFFERENCES = [value for value in vars(torch_releases).values() if isinstance(value, Difference)]
PAGE = Path(__file__).parents[2] / "docs/versions.md"


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.15.0+cu132", (2, 15)), ("2.10.0a0+0123abcd", (2, 10)), ("2.9.1", (2, 9)), ("unknown", (0, 0))],
)
def test_a_version_has_a_release(version: str, release: tuple[int, int]) -> None:
    assert release_of(version) == release


def test_a_release_has_what_came_with_it_or_before(monkeypatch: pytest.MonkeyPatch) -> None:
    difference = Difference((2, 10), "x", "y")
    for release, is_missing in [((2, 9), True), ((2, 10), False), ((2, 11), False)]:
        monkeypatch.setattr(torch_releases, "installed", lambda release=release: release)
        assert difference.is_missing() is is_missing


def test_every_difference_is_on_the_page_and_concerns_a_supported_release() -> None:
    text = PAGE.read_text()
    for difference in DIFFERENCES:
        assert difference.since > OLDEST
        row = f"| {'.'.join(map(str, difference.since))} | {difference.what} | {difference.instead} |"
        assert row in text
