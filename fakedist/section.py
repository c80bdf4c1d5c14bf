"""Reads a table of a TOML file key by key. Errors name the place and suggest what was probably meant."""

from __future__ import annotations

from typing import TypeVar

from fakedist.errors import CheckError, FakedistError, did_you_mean

_Value = TypeVar("_Value")
_KINDS: dict[type, str] = {str: "a text", int: "a whole number", dict: "a table", list: "a list", float: "a number"}


class Section:
    """A table of a TOML file."""

    def __init__(self, where: str, values: dict[str, object], error: type[FakedistError] = CheckError) -> None:
        self.where = where
        self._values = values
        self._error = error
        self._known: list[str] = []

    def take(self, key: str, kind: type[_Value]) -> _Value | None:
        """Take the value of a key. None if the key is missing.

        Raises:
            FakedistError: The value is of another kind.
        """
        self._known.append(key)
        value = self._values.get(key)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            hint = f'write {key} = ["{value}"]' if kind is list and isinstance(value, str) else ""
            raise self._error(f"{self.where}: {key} is {_KINDS.get(kind, kind.__name__)}, not {value!r}", hint)
        return value

    def take_any(self, key: str) -> object:
        """Take the value of a key, whatever it is. None if the key is missing."""
        self._known.append(key)
        return self._values.get(key)

    def take_texts(self, key: str) -> tuple[str, ...]:
        """Take a list of texts. Empty if the key is missing."""
        texts = self.take(key, list) or []
        if not all(isinstance(text, str) for text in texts):
            raise self._error(f"{self.where}: {key} is a list of texts, not {texts!r}", 'write numbers as texts: "8"')
        return tuple(texts)

    def take_table(self, key: str) -> Section:
        """Take a nested table. Empty if the key is missing."""
        return Section(f"{self.where}, {key}", self.take(key, dict) or {}, self._error)

    def items(self) -> list[tuple[str, object]]:
        """Take all keys, whatever their names, with their values."""
        self._known += self._values
        return list(self._values.items())

    def end(self) -> None:
        """Check that no other key is left.

        Raises:
            FakedistError: A key is left.
        """
        for key in self._values:
            if key not in self._known:
                raise self._error(f"{self.where}: unknown key {key!r}", did_you_mean(key, self._known))
