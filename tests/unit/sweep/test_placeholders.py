from __future__ import annotations

import pytest

from fakedist.errors import SweepError
from fakedist.sweep.command import Filling, Texts, placeholders_of

FILLING = Filling(
    {"tp": 4, "lr": 0.5, "on": True, "rec": "full", "one": "one", "none": "none"},
    {"rec": ("--recompute", "full"), "one": ("--x",), "none": ()},
)


def test_a_placeholder_in_a_text_becomes_the_value() -> None:
    assert FILLING.text("--tp={tp},lr={lr},on={on}") == "--tp=4,lr=0.5,on=true"


def test_double_braces_are_the_text_itself() -> None:
    assert FILLING.text("{{tp}}={tp}") == "{tp}=4"


@pytest.mark.parametrize("text", ['{"a": {"b": 1}}', "{}", "{0}", "{ tp }", "${x", "{a-b}"])
def test_other_braces_are_left_as_they_are(text: str) -> None:
    assert FILLING.text(text) == text
    assert list(placeholders_of(text)) == []


def test_a_text_that_is_one_placeholder_keeps_its_type() -> None:
    assert FILLING.plain({"a": "{tp}", "b": ["{on}", "x{tp}"], "c": 3}) == {"a": 4, "b": [True, "x4"], "c": 3}
    assert FILLING.plain(Texts(("{tp}", "a={lr}"))) == Texts(("4", "a=0.5"))


def test_an_argument_may_become_several_or_none() -> None:
    assert FILLING.command(["--tp", "{tp}", "{rec}", "{none}", "{one}", "y{one}"]) == (
        *("--tp", "4", "--recompute", "full", "--x"),
        "y--x",
    )


def test_several_arguments_within_a_text_are_refused() -> None:
    with pytest.raises(SweepError, match="stands for 2 arguments"):
        FILLING.text("x={rec}")


def test_placeholders_are_found_everywhere() -> None:
    template = {"a": ["{tp}", {"b": "x{pp}{{cp}}"}], "c": Texts(("{ep}",)), "d": 1}
    assert list(placeholders_of(template)) == ["tp", "pp", "ep"]
