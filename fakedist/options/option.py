"""An option of a job: its name at each door, its values and its meaning.

A field of :class:`~fakedist.options.definition.Job` declares its option once. The command line, the configuration of
``check``, ``fakedist.profile`` and docs/options.md are made from these declarations.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from fakedist.errors import JobError
from fakedist.options.kinds import RefusedError, ValueKind


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
