from __future__ import annotations

import pytest

from fakedist.results.compare.reasons import changed_arguments, changed_text


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ("--tp 8", "--tp 8 --loss-parallel", ["--loss-parallel"]),
        ("--tp 8 --lr -1", "--tp 4 --lr -1", ["--tp 8 -> 4"]),
        ("--tp=8", "--tp 8", []),
        ("--checkpoint full --tp 8", "--tp 8", ["no --checkpoint full"]),
        ("small.yaml --tp 8", "large.yaml --tp 8", ["small.yaml -> large.yaml"]),
        ("--set a=1 --set b=2", "--set a=1 --set b=3", ["--set a=1 b=2 -> a=1 b=3"]),
        ("--lr -0.5", "--lr -0.25", ["--lr -0.5 -> -0.25"]),
    ],
)
def test_changed_arguments_are_named(a: str, b: str, told: list[str]) -> None:
    assert changed_arguments(a.split(), b.split()) == told


def test_of_many_changes_the_first_are_named() -> None:
    assert changed_text(["--a", "--b", "--c", "--d", "--e"]) == "--a, --b, --c and 2 more settings"
    assert changed_text(["--a", "--b", "--c", "--d"]) == "--a, --b, --c, --d"
    assert changed_text([]) == ""
