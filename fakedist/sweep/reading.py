"""Reads a sweep file, or makes the same from a command line."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fakedist.bounded import UnreadableError, read_toml
from fakedist.errors import FakedistError, JobError, SweepError, did_you_mean
from fakedist.options import Door, Program
from fakedist.options.definition import OPTIONS
from fakedist.section import Section
from fakedist.sweep.command import PRICES, PointFile, SweptCommand, Texts, placeholders_of, read_point_file
from fakedist.sweep.plan import SAMPLERS, SweepPlan, read_headroom, read_keep, read_ranks
from fakedist.sweep.space import (
    Axis,
    Expression,
    Scalar,
    Space,
    axis_of_text,
    axis_of_toml,
    check_name,
    read_scalar,
    text_of,
)
from fakedist.units import parse_bytes


@dataclass(frozen=True)
class Given:
    """What the command line gave, in its own words. It goes before the sweep file.

    Attributes:
        axes: ``--axis``.
        monotone: ``--monotone``.
        derived: ``--let``.
        conditions: ``--where``.
        prices: ``--price``.
        options: Options of the job that were given, by name.
        settings: ``ranks``, ``keep``, ``headroom`` and the other keys of a sweep file that are about the sweep.
    """

    axes: Sequence[str] = ()
    monotone: Sequence[str] = ()
    derived: Sequence[str] = ()
    conditions: Sequence[str] = ()
    prices: Sequence[str] = ()
    options: Mapping[str, Texts | bool] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass
class _Parts:
    """The parts of a sweep, from the file or none yet."""

    name: str
    program: Program
    door: Door
    directory: str = ""
    axes: dict[str, Axis] = field(default_factory=dict)
    derived: dict[str, Expression] = field(default_factory=dict)
    conditions: list[Expression] = field(default_factory=list)
    options: dict[str, object] = field(default_factory=dict)
    files: list[PointFile] = field(default_factory=list)
    price: dict[str, object] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)


def sweep_of_file(path: Path, given: Given) -> SweepPlan:
    """The sweep that a file describes, with what the command line changes.

    Raises:
        SweepError: The file is missing, is not TOML, or something in it is not valid.
    """
    try:
        values, _ = read_toml(path)
    except OSError as error:
        raise SweepError(f"{path} cannot be read: {error.strerror}", "fakedist sweep sweep.toml") from None
    except UnreadableError as error:
        raise SweepError(f"{path} is not TOML: {error}", "docs/sweeps.md shows a sweep file") from None
    try:
        return _plan(_parts_of_file(path, values), given)
    except FakedistError as error:
        if path.name in error.message or given != Given():  # then it may be an option that is wrong
            raise
        raise SweepError(f"{path.name}: {error.message}", error.hint) from None


def sweep_of_command(program: Program, given: Given) -> SweepPlan:
    """The sweep that a command line describes without a file.

    Raises:
        SweepError: Something in it is not valid.
    """
    stem = program.target.rpartition(".")[2] if program.is_module else Path(program.target).stem
    return _plan(_Parts(stem, program, Door.COMMAND_LINE), given)


def _parts_of_file(path: Path, values: dict[str, object]) -> _Parts:
    section, directory = Section(path.name, values, SweepError), path.resolve().parent
    parts = _Parts(path.stem, _program(section, directory), Door.TOML, os.fspath(directory))
    parts.axes = {name: axis_of_toml(name, plain, path.name) for name, plain in section.take_table("axes").items()}
    for name, plain in section.take_table("let").items():
        parts.derived[check_name(name, path.name)] = _expression(plain, f"{path.name}, {name}:")
    parts.conditions = [_expression(each, f"{path.name}, where:") for each in _several(section.take_any("where"))]
    files = section.take_table("files")
    for name, plain in files.items():
        if not isinstance(plain, dict):
            raise SweepError(f"{files.where}: {name} is a table, not {plain!r}", f"[files.{name}]")
        parts.files.append(
            read_point_file(
                check_name(name, files.where), Section(f"{files.where}, {name}", plain, SweepError), directory
            )
        )
    price = section.take_table("price")
    parts.price = {name: price.take_any(name) for name in PRICES}
    price.end()
    parts.settings = {name: section.take_any(name) for name in _SETTINGS}
    for option in OPTIONS:
        if option.name != "rank" and (plain := section.take_any(option.toml_key)) is not None:
            parts.options[option.name] = plain
    section.end()
    return parts


#: Keys of a sweep file that are about the sweep.
_SETTINGS = (
    "ranks",
    "keep",
    "headroom",
    "tokens_per_step",
    "micro_batches",
    "context",
    "trials",
    "sampler",
    "sampler_seed",
)


def _program(section: Section, directory: Path) -> Program:
    script, module = section.take("script", str), section.take("module", str)
    if (script is None) is (module is None):
        raise SweepError(f"{section.where} has a script or a module, and not both", 'script = "train.py"')
    arguments = section.take_any("arguments")
    if isinstance(arguments, str):
        try:
            words = shlex.split(arguments)
        except ValueError as error:
            raise SweepError(
                f"{section.where}: arguments: {str(error).lower()}", 'arguments = ["--tp", "{tp}"]'
            ) from None
    else:
        words = list(section.take_texts("arguments"))
    if any("\0" in word for word in words):
        raise SweepError(f"{section.where}: arguments: an argument has a NUL character", "leave it out")
    target = module if script is None else os.path.normpath(directory / script)
    return Program(str(target), tuple(words), is_module=module is not None)


def _several(plain: object) -> list[object]:
    return plain if isinstance(plain, list) else [] if plain is None else [plain]


def _expression(plain: object, where: str) -> Expression:
    if isinstance(plain, bool | int | float):
        plain = str(plain)
    if not isinstance(plain, str):
        raise SweepError(f"{where} an expression is a text, not {plain!r}", 'where = "tp * pp <= 64"')
    return Expression(plain, where)


def _plan(parts: _Parts, given: Given) -> SweepPlan:
    """The sweep of parts, with what the command line gave."""
    for text in given.axes:
        axis = axis_of_text(text, given.monotone)
        parts.axes[axis.name] = _with_arguments(axis, parts.axes.get(axis.name))
    for name in given.monotone:
        if name not in parts.axes:
            raise SweepError(f"--monotone {name}: there is no such axis", "--axis mbs=1,2,4 --monotone mbs")
        if not parts.axes[name].is_monotone:
            old = parts.axes[name]
            parts.axes[name] = Axis(name, old.values, old.arguments, is_monotone=True)
    for text in given.derived:
        name, value = _named(text, "--let", 'dp="64 // tp"')
        parts.derived[check_name(name, "--let")] = Expression(value, f"--let {name}:")
    parts.conditions += [Expression(text, "--where") for text in given.conditions]
    for text in given.prices:
        name, value = _named(text, "--price", "gpus-per-node={n}")
        if name.replace("-", "_") not in PRICES:
            raise SweepError(
                f"--price has no {name}", f"it has {' and '.join(each.replace('_', '-') for each in PRICES)}"
            )
        parts.price[name.replace("-", "_")] = value if any(placeholders_of(value)) else read_scalar(value)
    parts.options |= given.options
    settings = parts.settings | {name: value for name, value in given.settings.items() if value is not None}
    space = Space(
        tuple(parts.axes.values()), tuple(parts.derived.items()), tuple(parts.conditions), _constants(parts.options)
    )
    command = SweptCommand(
        parts.program, parts.options, tuple(parts.files), _without_none(parts.price), parts.door, parts.directory
    )
    return SweepPlan(
        name=parts.name,
        space=space,
        command=command,
        ranks=read_ranks(settings.get("ranks")),
        num_kept=read_keep(settings.get("keep")),
        headroom=read_headroom(settings.get("headroom")),
        tokens=_counted(settings.get("tokens_per_step"), "tokens_per_step", space),
        micro_batches=_counted(settings.get("micro_batches"), "micro_batches", space),
        context_bytes=_context(settings.get("context")),
        num_trials=_number(settings.get("trials"), "trials"),
        sampler=_sampler(settings),
        seed=_number(settings.get("sampler_seed"), "sampler_seed", least=0) or 0,
    )


def _with_arguments(axis: Axis, old: Axis | None) -> Axis:
    """An axis of the command line, whose values stand for what they do in the sweep file."""
    if old is None or not old.arguments:
        return axis
    values = tuple(text_of(value) for value in axis.values)
    for value in values:
        if value not in old.arguments:
            raise SweepError(f"axis {axis.name} has no {value}", did_you_mean(value, old.arguments))
    return Axis(axis.name, values, old.arguments, axis.is_monotone)


def _named(text: str, flag: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise SweepError(f"{flag} {text!r} is no name and value", f"{flag} {example}")
    return name, value


def _without_none(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _constants(options: Mapping[str, object]) -> dict[str, Scalar]:
    """Options that conditions may use by name: the world size, if it is the same at every point."""
    plain = options.get("world_size")
    if isinstance(plain, Texts) and not any(placeholders_of(plain)):
        plain = int(plain.texts[-1]) if plain.texts[-1].isdecimal() else None
    return {"world_size": plain} if isinstance(plain, int) and not isinstance(plain, bool) else {}


def _sampler(settings: Mapping[str, object]) -> str:
    if settings.get("sampler") is not None and settings.get("trials") is None:
        raise SweepError("a sampler chooses a number of points, and none is given", "--sampler tpe --trials 60")
    return str(settings.get("sampler") or SAMPLERS[0])


def _counted(plain: object, name: str, space: Space) -> Expression | None:
    """An expression for a number that a point's values give."""
    if plain is None:
        return None
    expression = _expression(plain, f"{name}:")
    Space(space.axes, space.derived, (expression,), space.constants)  # refuses names that do not exist
    return expression


def _context(plain: object) -> int | None:
    if plain is None:
        return None
    try:
        return parse_bytes(plain if isinstance(plain, str) else "")
    except JobError:
        raise SweepError(f"context is the memory of the CUDA context, not {plain!r}", 'context = "500MiB"') from None


def _number(plain: object, name: str, least: int = 1) -> int | None:
    if plain is None:
        return None
    if not isinstance(plain, int) or isinstance(plain, bool) or plain < least:
        raise SweepError(f"{name} is a whole number of {least} or more, not {plain!r}", f"{name} = 60")
    return plain
