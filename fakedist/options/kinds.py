"""Kinds of values that options take: how each is read, and how it is written on a command line."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeGuard

from fakedist.errors import JobError
from fakedist.options.expert_loads import RouterLoadError, parse_router_load
from fakedist.units import GIB, UNLIMITED_BYTES, format_bytes, format_rank_list, parse_bytes, parse_rank_list
from fakedist.visible import visible


class RefusedError(Exception):
    """A value is not of its kind.

    ``predicate`` ends a sentence that begins with the option's name: "must be 1 or more, not 0".
    """

    def __init__(self, predicate: str) -> None:
        super().__init__(predicate)
        self.predicate = predicate


def _last(texts: Sequence[str]) -> object:
    return texts[-1]


def _as_text(value: object) -> list[str]:
    return [str(value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueKind:
    """One kind of value.

    TOML and Python give a *plain* value: a text, a number, true or false, a list, a table. A job *stores* a value,
    which may differ: a size is stored as bytes, a list as a tuple.

    Attributes:
        words: What a plain value is, for the documentation.
        metavar: How ``--help`` writes it. Empty for a switch.
        read: Makes the stored value from a plain one. Returns a stored one as it is. Raises :class:`RefusedError`.
        from_texts: Makes the plain value from the texts given on a command line, of which there is at least one.
        texts: Makes texts from a stored value, each for one appearance of the option.
        is_switch: Whether the option is on or off, and takes no text.
        is_repeatable: Whether the option may appear several times. Otherwise the last one counts.
    """

    words: str
    metavar: str = ""
    read: Callable[[object], object]
    from_texts: Callable[[Sequence[str]], object] = _last
    texts: Callable[[object], list[str]] = _as_text
    is_switch: bool = False
    is_repeatable: bool = False


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(texts: Sequence[str]) -> object:
    try:
        return int(texts[-1])
    except ValueError:
        return texts[-1]


def whole_number(least: int | None = None, most: int | None = None) -> ValueKind:
    """A whole number, with bounds or without."""

    def read(value: object) -> int:
        if not _is_number(value):
            raise RefusedError(f"is a whole number, not {value!r}")
        if least is not None and value < least:
            raise RefusedError(f"must be {least} or more, not {value}")
        if most is not None and value > most:
            raise RefusedError(f"is at most {most}, not {visible(str(value), 40)}")
        return value

    return ValueKind(words="whole number", metavar="N", read=read, from_texts=_integer)


#: What the letters after a count stand for, as papers write tokens: 300B, 2T.
_THOUSANDS = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
_COUNT = re.compile(r"(\d{1,30})(?:\.(\d{1,30}))?\s*([KMBT]?)", re.IGNORECASE)


def large_count() -> ValueKind:
    """A whole number above 0, on a command line also with a letter: 300B, 1.5T."""

    def from_texts(texts: Sequence[str]) -> object:
        match = _COUNT.fullmatch(texts[-1].strip().replace("_", "").replace(",", ""))
        if match is None:
            return texts[-1]
        whole, part, power = match[1], match[2] or "", _THOUSANDS[match[3].upper()]
        return int(whole + part[:power].ljust(power, "0")) if not part[power:].strip("0") else texts[-1]

    def read(value: object) -> int:
        if not _is_number(value) or value < 1:
            raise RefusedError(f"is a number like 300B or 2T, not {visible(repr(value), 40)}")
        return value

    return ValueKind(words="whole number", metavar="N", read=read, from_texts=from_texts)


def rank_list() -> ValueKind:
    """One rank or several. A job stores one of them."""

    def read(value: object) -> tuple[int, ...]:
        if isinstance(value, str):
            try:
                return parse_rank_list(value)
            except JobError as error:
                raise RefusedError(f"cannot be read: {error.message}") from None
        ranks = [value] if _is_number(value) else value
        if not isinstance(ranks, list | tuple) or not ranks or not all(_is_number(rank) for rank in ranks):
            raise RefusedError(f"is a rank or a list of ranks, not {value!r}")
        if len(set(ranks)) < len(ranks):
            raise RefusedError(f"names a rank twice: {value!r}")
        return tuple(ranks)

    def texts(value: object) -> list[str]:
        return [format_rank_list(read(value))]

    return ValueKind(
        words="rank, or list of ranks", metavar="RANKS", read=read, from_texts=",".join, texts=texts, is_repeatable=True
    )


def number(*, least: float, most: float, metavar: str, unit: str = "", suffix: str = "") -> ValueKind:
    """A number with bounds, stored as a float.

    ``unit`` is in words: "watts". ``suffix`` is its symbol, which may follow the number on a command line: 500W.
    """
    called = f"a number of {unit}" if unit else "a number"

    def from_texts(texts: Sequence[str]) -> object:
        try:
            return float(texts[-1].strip().removesuffix(suffix))
        except ValueError:
            return texts[-1]

    def read(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise RefusedError(f"is {called}, not {value!r}")
        if not least <= value <= most:  # nan too
            raise RefusedError(f"must be {least} to {most:,}{unit and ' '}{unit}, not {value:g}")
        return float(value)

    def texts(value: object) -> list[str]:
        return [f"{value:g}"]

    return ValueKind(words=unit or "number", metavar=metavar, read=read, from_texts=from_texts, texts=texts)


def seconds() -> ValueKind:
    """A duration in seconds."""
    kind = number(least=math.ulp(0.0), most=sys.float_info.max, metavar="SECONDS", unit="seconds")

    def read(value: object) -> object:
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
            raise RefusedError(f"must be more than 0 seconds, not {value}")
        return kind.read(value)

    return dataclasses.replace(kind, read=read)


def one_of(choices: tuple[str, ...]) -> ValueKind:
    """One of a few words."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise RefusedError(f"is one of {', '.join(choices)}, not {value!r}")
        return value

    return ValueKind(words=", ".join(choices), metavar="|".join(choices), read=read)


def num_steps_or(choices: tuple[str, ...]) -> ValueKind:
    """A number of steps, or a word for when to stop."""
    words = ", ".join(choices)

    def read(value: object) -> int | str:
        if isinstance(value, str) and value in choices:
            return value
        if not _is_number(value):
            raise RefusedError(f"is a number of steps or {words}, not {value!r}")
        if value < 1:
            raise RefusedError(f"must be 1 or more, not {value}")
        return value

    return ValueKind(
        words=f"number of steps, {words}", metavar="|".join(("N", *choices)), read=read, from_texts=_integer
    )


def memory_size(least_bytes: int) -> ValueKind:
    """A size of memory with a unit, stored as bytes."""

    def read(value: object) -> int:
        try:
            size = value if _is_number(value) else parse_bytes(str(value))
        except JobError as error:
            raise RefusedError(f"cannot be read: {error.message}") from None
        if size < least_bytes:
            raise RefusedError(f"must be {format_bytes(least_bytes)} or more, not {format_bytes(size)}")
        if size > UNLIMITED_BYTES:
            raise RefusedError(f"is at most {format_bytes(UNLIMITED_BYTES)} or unlimited, not {format_bytes(size)}")
        return size

    def texts(value: object) -> list[str]:
        size = read(value)
        if size == UNLIMITED_BYTES:
            return ["unlimited"]
        return [f"{size}B" if size % GIB else f"{size // GIB}GiB"]

    return ValueKind(words="size with a unit", metavar="SIZE", read=read, texts=texts)


def rate() -> ValueKind:
    """A rate with a unit, stored as bytes per second."""

    def read(value: object) -> int:
        if _is_number(value) and value > 0:
            return value
        text = str(value).strip()
        try:
            if not text.endswith("/s"):
                raise JobError(f"{text!r} is not a rate with a unit")
            return parse_bytes(text.removesuffix("/s"))
        except JobError as error:
            raise RefusedError(f"is a rate like 5GB/s: {error.message}") from None

    def texts(value: object) -> list[str]:
        return [f"{read(value)}B/s"]

    return ValueKind(words="rate with a unit", metavar="RATE", read=read, texts=texts)


def switch() -> ValueKind:
    """On or off."""

    def read(value: object) -> bool:
        if not isinstance(value, bool):
            raise RefusedError(f"is true or false, not {value!r}")
        return value

    return ValueKind(words="true or false", read=read, is_switch=True)


def plain_text() -> ValueKind:
    """A text that is not empty."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not value:
            raise RefusedError(f"is a text, not {value!r}")
        return value

    return ValueKind(words="text", metavar="TEXT", read=read)


def router_load() -> ValueKind:
    """A load of experts, or a file of counts."""

    def read(value: object) -> str:
        try:
            return parse_router_load(str(value))
        except RouterLoadError as error:
            raise RefusedError(error.predicate) from None

    return ValueKind(words="load", metavar="LOAD", read=read)


def variables() -> ValueKind:
    """Environment variables, stored as pairs of name and value in the order of their names."""

    def from_texts(texts: Sequence[str]) -> object:
        pairs = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not name or not equals:
                raise RefusedError(f"is KEY=VALUE, not {text!r}")
            pairs[name] = value
        return pairs

    def read(value: object) -> tuple[tuple[str, str], ...]:
        pairs = tuple(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
            raise RefusedError(f"maps names to texts, unlike {value!r}")
        for name, text in pairs:
            if not isinstance(text, str | int | float) or isinstance(text, bool) or "\0" in str(text):
                raise RefusedError(f"maps names to texts, and {name} is {text!r}")
            if not name or set(str(name)) & {"=", "\0"}:
                raise RefusedError(f"maps names to texts, and {name!r} is not a variable's name")
        return tuple(sorted((str(name), str(text)) for name, text in dict(pairs).items()))

    def texts(value: object) -> list[str]:
        return [f"{name}={text}" for name, text in read(value)]

    return ValueKind(
        words="table of texts", metavar="KEY=VALUE", read=read, from_texts=from_texts, texts=texts, is_repeatable=True
    )


def run_paths() -> ValueKind:
    """Paths of run directories."""

    def from_texts(texts: Sequence[str]) -> object:
        return [path for text in texts for path in text.split(",") if path]

    def read(value: object) -> tuple[str, ...]:
        paths = [value] if isinstance(value, str | os.PathLike) else value
        if not isinstance(paths, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in paths):
            raise RefusedError(f"is a path or a list of paths, not {value!r}")
        return tuple(str(os.fspath(path)) for path in paths)

    def texts(value: object) -> list[str]:
        return list(read(value))

    return ValueKind(
        words="path, or list of paths",
        metavar="RUN[,RUN]",
        read=read,
        from_texts=from_texts,
        texts=texts,
        is_repeatable=True,
    )


def shell_words() -> ValueKind:
    """Words, given in one text as in a shell or as a list."""

    def read(value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            try:
                return tuple(shlex.split(value))
            except ValueError as error:
                raise RefusedError(f"cannot be split into words: {str(error).lower()} in {value!r}") from None
        if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
            raise RefusedError(f"is a list of texts, not {value!r}")
        return tuple(value)

    def texts(value: object) -> list[str]:
        return [shlex.join(read(value))]

    return ValueKind(words="text, or list of texts", metavar="ARGS", read=read, texts=texts)


class OptionGroup(Enum):
    """The subject of an option. Its value is the heading in ``--help``."""

    JOB = "Job"
    DEVICE = "Device"
    RECORDING = "Recording"
    PRICING = "Pricing"
    ROLLOUT = "Rollout"
    BUDGET = "Token budget"


class Door(Enum):
    """A source of options."""

    COMMAND_LINE = "command line"
    TOML = "configuration of check"
    PYTHON = "Python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a job.

    Attributes:
        example: A plain value, as TOML or Python would give it.
        metavar: Its value in ``--help``, if not the kind's own word for it.
        flags: Its names on the command line. The first is the usual one.
        off_flag: What turns a switch off on the command line, if it is on by default.
        default_text: The default in words, if it is not the same at every door.
        field: The job's field. Empty if it sets no field by itself.
        default: The stored default. MISSING if a job must give it.
    """

    kind: ValueKind
    group: OptionGroup
    help: str
    example: object
    metavar: str = ""
    flags: tuple[str, ...] = ()
    off_flag: str = ""
    toml_key: str = ""
    default_text: str = ""
    name: str = ""
    field: str = ""
    default: object = None

    def called(self, door: Door) -> str:
        """Its name at a door."""
        return {Door.COMMAND_LINE: self.flags[0], Door.TOML: self.toml_key, Door.PYTHON: self.name}[door]

    def written(self, door: Door, plain: object) -> str:
        """The text of a plain value at a door: "--steps 3", "steps = 3", "steps=3"."""
        if door is Door.PYTHON:
            return f"{self.name}={_python(plain)}"
        if door is Door.TOML:
            return f"{self.toml_key} = {_toml(plain)}"
        return " ".join(argument.replace("=", " ", 1) for argument in self.arguments(self.kind.read(plain)))

    def arguments(self, stored: object) -> list[str]:
        """Arguments of the command line that give a stored value."""
        if self.kind.is_switch:
            return [self.flags[0] if stored else self.off_flag]
        return [f"{self.flags[0]}={text}" for text in self.kind.texts(stored)]

    def read(self, plain: object, door: Door) -> object:
        """The stored value from a plain one.

        Raises:
            JobError: The value is invalid.
        """
        try:
            return self.kind.read(plain)
        except RefusedError as error:
            raise self.refusal(error, door) from None

    def read_texts(self, texts: tuple[str, ...]) -> object:
        """The plain value from the texts of a command line.

        Raises:
            JobError: A text is invalid.
        """
        try:
            return self.kind.from_texts(texts)
        except RefusedError as error:
            raise self.refusal(error, Door.COMMAND_LINE) from None

    def refusal(self, error: RefusedError, door: Door) -> JobError:
        """The error for a refused value, with an example."""
        return JobError(f"{self.called(door)} {error.predicate}", self.written(door, self.example))


def declared(option: Option) -> Mapping[str, Option]:
    """The metadata of a field that declares an option."""
    return {"option": option}


def options_of(record: type) -> list[Option]:
    """The options that a dataclass declares, in order, with the names that they take from their fields."""
    return [
        named(dataclasses.replace(option, field=field.name, default=field.default))
        for field in dataclasses.fields(record)
        if isinstance(option := field.metadata.get("option"), Option)
    ]


def named(option: Option) -> Option:
    """The option with every name that it does not give itself."""
    name = option.name or option.field
    flags = option.flags or (f"--{name.replace('_', '-')}",)
    return dataclasses.replace(option, name=name, flags=flags, toml_key=option.toml_key or name)


def _python(plain: object) -> str:
    return repr(plain) if isinstance(plain, bool) else json.dumps(plain)


def _toml(plain: object) -> str:
    if isinstance(plain, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml(value)}' for key, value in plain.items())} }}"
    return json.dumps(plain)
