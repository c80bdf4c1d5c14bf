"""Typed records as plain values: there and back, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

import pytest

from fakedist.rundir.plain import PlainValueError, from_plain, to_plain


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, int]


@dataclass(frozen=True)
class Whole:
    count: int
    share: float | None
    source: Literal["measured", "estimated"]
    parts: list[Part]
    by_name: dict[str, float]
    notes: list[str] = field(default_factory=list)


WHOLE = Whole(3, 0.5, "measured", [Part("a", (1, 2))], {"x": 1.5}, ["read me"])
PLAIN = {
    "count": 3,
    "share": 0.5,
    "source": "measured",
    "parts": [{"name": "a", "sizes": [1, 2]}],
    "by_name": {"x": 1.5},
    "notes": ["read me"],
}


def test_a_record_comes_back_from_json_as_it_was() -> None:
    assert to_plain(WHOLE) == PLAIN
    assert from_plain(Whole, json.loads(json.dumps(PLAIN))) == WHOLE


def test_a_default_may_be_missing_unknown_keys_are_ignored_and_null_is_none() -> None:
    plain = {key: value for key, value in PLAIN.items() if key != "notes"} | {"of_a_later_version": 1}
    assert from_plain(Whole, plain).notes == []
    assert from_plain(Whole, PLAIN | {"share": None}).share is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "3"}, "count is '3', not an integer"),
        ({"count": True}, "count is 'True', not an integer"),
        ({"share": "half"}, "share is 'half', not a number"),
        ({"source": "guessed"}, "source is 'guessed', not one of"),
        ({"parts": [{"name": "a", "sizes": [1, 2]}, {"name": 7, "sizes": [1, 2]}]}, "parts[1].name is '7', not a text"),
        ({"parts": [{"name": "a", "sizes": [1]}]}, "parts[0].sizes is"),
        ({"parts": None}, "parts is 'None', not a list"),
        ({"by_name": {"x": None}}, "by_name.x is"),
        ({"by_name": [1]}, "by_name is '[1]', not an object"),
    ],
)
def test_a_wrong_value_is_refused_by_its_place(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlainValueError) as error:
        from_plain(Whole, PLAIN | change)
    assert message in str(error.value)


def test_a_missing_field_is_named_with_its_place() -> None:
    with pytest.raises(PlainValueError, match=r"^summary\.count is missing$"):
        from_plain(Whole, {key: value for key, value in PLAIN.items() if key != "count"}, "summary")


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(PlainValueError) as error:
        from_plain(Whole, PLAIN | {"count": "9" * 1_000_000})
    assert len(str(error.value)) < 100
