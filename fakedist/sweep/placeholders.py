"""Placeholders: ``{tp}`` in an argument, a variable or an option stands for the point's value of ``tp``.

``{{tp}}`` is the text ``{tp}`` itself. Braces around anything but a name, as in JSON, are left as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fakedist.errors import SweepError
from fakedist.sweep.axes import Scalar, text_of

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class Texts:
    """What the command line gave for one option, to be read once its placeholders have values.

    Attributes:
        texts: A text for each time that the option was given.
    """

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Filling:
    """What placeholders become at one point.

    Attributes:
        values: The values by name.
        arguments: What stands for a name if that is several words, or none.
    """

    values: Mapping[str, Scalar]
    arguments: Mapping[str, tuple[str, ...]]

    def text(self, pattern: str) -> str:
        """A text with its placeholders filled.

        Raises:
            SweepError: A value of several words stands within a text.
        """
        return _PLACEHOLDER.sub(self._one, pattern)

    def _one(self, found: re.Match[str]) -> str:
        if found[1]:
            return "{" + found[1] + "}"
        words = self.arguments.get(found[2])
        if words is None:
            return text_of(self.values[found[2]])
        if len(words) != 1:
            raise SweepError(
                f"{{{found[2]}}} stands for {len(words)} arguments ({self.values[found[2]]}), and is part of a text",
                f"make {{{found[2]}}} an argument of its own",
            )
        return words[0]

    def plain(self, pattern: object) -> object:
        """A plain value with its placeholders filled. A text that is one placeholder becomes the value itself."""
        if isinstance(pattern, str):
            whole = _PLACEHOLDER.fullmatch(pattern)
            if whole is not None and whole[2] and whole[2] not in self.arguments:
                return self.values[whole[2]]
            return self.text(pattern)
        if isinstance(pattern, list | tuple):
            return [self.plain(each) for each in pattern]
        if isinstance(pattern, dict):
            return {str(key): self.plain(each) for key, each in pattern.items()}
        if isinstance(pattern, Texts):
            return Texts(tuple(self.text(text) for text in pattern.texts))
        return pattern

    def command(self, patterns: Sequence[str]) -> tuple[str, ...]:
        """Arguments with their placeholders filled. One that is a placeholder may become several, or none."""
        found: list[str] = []
        for pattern in patterns:
            whole = _PLACEHOLDER.fullmatch(pattern)
            if whole is not None and whole[2] in self.arguments:
                found += self.arguments[whole[2]]
            else:
                found.append(self.text(pattern))
        return tuple(found)


def placeholders_of(pattern: object) -> Iterator[str]:
    """The names of all placeholders in a plain value, in order."""
    if isinstance(pattern, str):
        yield from (found[2] for found in _PLACEHOLDER.finditer(pattern) if found[2])
    elif isinstance(pattern, list | tuple):
        for each in pattern:
            yield from placeholders_of(each)
    elif isinstance(pattern, dict):
        for each in pattern.values():
            yield from placeholders_of(each)
    elif isinstance(pattern, Texts):
        yield from placeholders_of(pattern.texts)
