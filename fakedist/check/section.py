"""One table of a TOML file, read key by key: what is wrong is said with its place, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, TypeVar

from fakedist.errors import CheckError

_Value = TypeVar("_Value")
_KINDS: dict[type, str] = {str: "a text", int: "a whole number", dict: "a table", list: "a list", float: "a number"}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What somebody probably wanted to write, as a hint; all there is where nothing comes near."""
    choices = list(known)
    if close := difflib.get_close_matches(word, choices, n=1, cutoff=0.5):
        return f"did you mean {close[0]!r}?"
    return f"there is: {', '.join(choices)}" if choices else ""


class Section:
    """A table of the configuration.

    Args:
        where: What it is called in messages.
        values: The table.
    """

    def __init__(self, where: str, values: dict[str, Any]) -> None:
        self.where = where
        self._values = values
        self._known: list[str] = []

    def take(self, key: str, kind: type[_Value]) -> _Value | None:
        """The value of a key; None where it is not there.

        Raises:
            CheckError: It is of another kind.
        """
        self._known.append(key)
        value = self._values.get(key)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise CheckError(f"{self.where}: {key} is {_KINDS.get(kind, kind.__name__)}, not {value!r}")
        return value

    def take_either(self, key: str, *kinds: type) -> Any:
        """The value of a key that may be of several kinds; None where it is not there."""
        self._known.append(key)
        value = self._values.get(key)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            wanted = " or ".join(_KINDS.get(kind, kind.__name__) for kind in kinds)
            raise CheckError(f"{self.where}: {key} is {wanted}, not {value!r}")
        return value

    def take_texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty where it is not there."""
        found = self.take(key, list) or []
        if not all(isinstance(each, str) for each in found):
            raise CheckError(f"{self.where}: {key} is a list of texts, not {found!r}", 'write numbers as texts: "8"')
        return tuple(found)

    def take_table(self, key: str) -> Section:
        """A table inside; an empty one where it is not there."""
        return Section(f"{self.where}, {key}", self.take(key, dict) or {})

    def items(self) -> list[tuple[str, Any]]:
        """All keys, whatever they are called, with their values."""
        self._known += self._values
        return list(self._values.items())

    def end(self) -> None:
        """No other key may be there.

        Raises:
            CheckError: One is.
        """
        for key in self._values:
            if key not in self._known:
                raise CheckError(f"{self.where}: unknown key {key!r}", did_you_mean(key, self._known))
