"""The command of a point: its placeholders filled, its files, and the GPU and fabric that its step is priced for.

``{{tp}}`` is the text ``{tp}`` itself. Braces around anything but a name, as in JSON, are left as they are.

A file that cannot be read, or a value that is not valid, raises SweepError.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from fakedist.bounded import UnreadableError, read_bytes
from fakedist.errors import FakedistError, SweepError, did_you_mean
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.models.spec import GPU_FILE_ENDING
from fakedist.options import Door, Job, JobProgram, make_jobs, profile_command
from fakedist.options.making import option_named
from fakedist.options.pricing import pricing_option
from fakedist.rundir.plain import from_plain
from fakedist.section import Section
from fakedist.sweep.space import Point, Scalar, Space, text_of

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class Texts:
    """Texts of the command line for one option, one for each time given, read once their placeholders have values."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Filling:
    """Values of the placeholders at one point. ``arguments`` replaces a name by several words, or none."""

    values: Mapping[str, Scalar]
    arguments: Mapping[str, tuple[str, ...]]

    def text(self, pattern: str) -> str:
        """A text with its placeholders filled.

        Raises:
            SweepError: A value of several words stands within a text.
        """
        return _PLACEHOLDER.sub(self._one, pattern)

    def _one(self, match: re.Match[str]) -> str:
        if match[1]:
            return "{" + match[1] + "}"
        words = self.arguments.get(match[2])
        if words is None:
            return text_of(self.values[match[2]])
        if len(words) != 1:
            raise SweepError(
                f"{{{match[2]}}} stands for {len(words)} arguments ({self.values[match[2]]}), and is part of a text",
                f"make {{{match[2]}}} an argument of its own",
            )
        return words[0]

    def plain(self, pattern: object) -> object:
        """A plain value with its placeholders filled. A text that is one placeholder becomes the value itself."""
        match pattern:
            case str():
                whole = _PLACEHOLDER.fullmatch(pattern)
                if whole is not None and whole[2] and whole[2] not in self.arguments:
                    return self.values[whole[2]]
                return self.text(pattern)
            case list() | tuple():
                return [self.plain(value) for value in pattern]
            case dict():
                return {str(key): self.plain(value) for key, value in pattern.items()}
            case Texts():
                return Texts(tuple(self.text(text) for text in pattern.texts))
        return pattern

    def command(self, patterns: Sequence[str]) -> tuple[str, ...]:
        """Arguments with their placeholders filled. One that is a placeholder may become several, or none."""
        words: list[str] = []
        for pattern in patterns:
            whole = _PLACEHOLDER.fullmatch(pattern)
            if whole is not None and whole[2] in self.arguments:
                words += self.arguments[whole[2]]
            else:
                words.append(self.text(pattern))
        return tuple(words)


def placeholders_of(pattern: object) -> Iterator[str]:
    """The names of all placeholders in a plain value, in order."""
    match pattern:
        case str():
            yield from (whole[2] for whole in _PLACEHOLDER.finditer(pattern) if whole[2])
        case list() | tuple():
            yield from (name for part in pattern for name in placeholders_of(part))
        case dict():
            yield from placeholders_of([*pattern.values()])
        case Texts():
            yield from placeholders_of(pattern.texts)


_ENDINGS = (".toml", ".yaml", ".yml", ".json")
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class PointFile:
    """A file that is written for each point. ``changes`` maps keys, from the outside inwards, to plain values."""

    name: str
    file_name: str
    content: Mapping[str, object]
    changes: tuple[tuple[tuple[str, ...], object], ...]

    def text(self, filling: Filling) -> str:
        """The file at one point.

        Raises:
            SweepError: A key to set is inside a value that is not a table, or the format has no such value.
        """
        content = copy.deepcopy(dict(self.content))
        for keys, pattern in self.changes:
            _set(content, keys, filling.plain(pattern), f"{self.name}: {'.'.join(keys)}")
        if self.file_name.endswith(".toml"):
            return toml_text(content)
        try:
            if self.file_name.endswith(".json"):
                return json.dumps(content, indent=2, allow_nan=False) + "\n"
            return str(yaml.safe_dump(content, sort_keys=False))
        except (TypeError, ValueError, yaml.YAMLError) as error:
            raise SweepError(
                f"the file {self.name} cannot be written: {error}", "leave out the value, or use TOML"
            ) from None


def read_point_file(name: str, section: Section, directory: Path) -> PointFile:
    """A file's description in a sweep file: a table of ``from``, ``set`` and, without ``from``, ``name``."""
    source, called = section.take("from", str), section.take("name", str)
    changes = section.take_table("set").items()
    section.end()
    file_name = Path(called or source or "").name
    if not file_name.endswith(_ENDINGS):
        raise SweepError(
            f"{section.where}: a file has an ending of {', '.join(_ENDINGS)}, not {file_name!r}", 'from = "base.toml"'
        )
    content = read_plain(directory / source) if source is not None else {}
    return PointFile(name, file_name, content, tuple((tuple(key.split(".")), value) for key, value in changes))


def read_plain(path: Path) -> Mapping[str, object]:
    """Read the plain values of a TOML, YAML or JSON file."""
    try:
        text = read_bytes(path, _MOST_BYTES).decode()
        if path.suffix == ".toml":
            content: object = tomllib.loads(text)
        else:
            content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise SweepError(
            f"{path} cannot be read: {error.strerror}", "a path in a sweep file is relative to that file"
        ) from None
    except UnreadableError as error:
        raise SweepError(f"{path} cannot be read: {error}", "give a configuration file") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SweepError(f"{path} is not {path.suffix[1:].upper()}: {reason}", "correct the file") from None
    if not isinstance(content, dict):
        raise SweepError(f"{path} is not a table of keys and values", "give a configuration file")
    return content


def _set(content: dict[str, object], keys: tuple[str, ...], value: object, where: str) -> None:
    container: object = content
    for at, key in enumerate(keys):
        is_last = at == len(keys) - 1
        if isinstance(container, list):
            if not key.isdecimal() or int(key) >= len(container):
                raise SweepError(
                    f"{where}: {'.'.join(keys[:at])} is a list of {len(container)}", f'"{keys[0]}.0" = ...'
                )
            if is_last:
                container[int(key)] = value
            else:
                container = container[int(key)]
        elif isinstance(container, dict):
            if is_last:
                container[key] = value
            else:
                container = container.setdefault(key, {})
        else:
            raise SweepError(
                f"{where}: {'.'.join(keys[:at])} is {container!r}, not a table", "correct the key under set"
            )


def toml_text(content: Mapping[str, object]) -> str:
    """Plain values as TOML.

    Raises:
        SweepError: A value has no form in TOML.
    """
    lines: list[str] = []
    _table(content, (), lines)
    return "\n".join(lines) + "\n"


def _table(content: Mapping[str, object], path: tuple[str, ...], lines: list[str]) -> None:
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    if path and (len(tables) < len(content) or not content):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(key)} = {_value(value, (*path, key))}" for key, value in content.items() if key not in tables]
    for key, value in tables.items():
        _table(value, (*path, key), lines)


def _key(key: str) -> str:
    plain = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if plain else json.dumps(key, ensure_ascii=False)


def _value(value: object, path: tuple[str, ...]) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float() if not math.isfinite(value):
            return {"inf": "inf", "-inf": "-inf"}.get(str(value), "nan")
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return f"[{', '.join(_value(item, path) for item in value)}]"
        case dict():
            return f"{{ {', '.join(f'{_key(str(key))} = {_value(item, path)}' for key, item in value.items())} }}"
    raise SweepError(f"{'.'.join(path)} = {value!r} has no form in TOML", "leave it out")


#: Options of a job that only estimated times follow. With a placeholder they are priced, and nothing runs again.
_ONLY_PRICES = {"fabric": "fabric", "host": "host", "gpu_power": "power_watts", "times": "times"}
#: Names that ``price`` can have: options of pricing that are not options of a job, or differ from them.
PRICES = ("gpus_per_node", "router_load")
#: Clocks change times and nothing that the script sees.
_CLOCKS = ("clock_khz", "memory_clock_khz")


@dataclass(frozen=True)
class PricedFor:
    """The pricing of a point's step: fields of :class:`fakedist.options.definition.Pricing`, which declares them."""

    gpu: str | None = None
    power_watts: float | None = None
    times: str | None = None
    fabric: str | None = None
    host: str | None = None
    gpus_per_node: int | None = None
    router_load: str | None = None


@dataclass(frozen=True)
class PointRun:
    """The job of rank 0, with placeholders for files, its pricing, and the files' texts by placeholder and name."""

    point: Point
    job: Job
    pricing: PricedFor
    files: tuple[tuple[PointFile, str], ...]

    def placed(self, directory: Path) -> Job:
        """The job with its files in a directory."""
        paths = {_mark(file, text): os.fspath(directory / file.file_name) for file, text in self.files}

        def put(value: str) -> str:
            for mark, path in paths.items():
                value = value.replace(mark, path)
            return value

        arguments = tuple(put(argument) for argument in self.job.arguments)
        environment = tuple((name, put(value)) for name, value in self.job.environment)
        return dataclasses.replace(self.job, arguments=arguments, environment=environment)

    def command(self, directory: Path) -> str:
        """The command that runs rank 0 and prices its step as the point's is, with its files in a directory."""
        job = self.placed(directory)
        priced = self.pricing
        return profile_command(
            dataclasses.replace(
                job,
                gpu=priced.gpu or job.gpu,
                gpu_power_watts=priced.power_watts or job.gpu_power_watts,
                times=priced.times or job.times,
                fabric=priced.fabric or job.fabric,
                host=priced.host or job.host,
            )
        )

    def write_files(self, directory: Path) -> None:
        """Write the point's files into a directory."""
        for file, text in self.files:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / file.file_name).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class SweptCommand:
    """The command of every point, with placeholders. Paths are relative to ``directory``.

    Attributes:
        options: Plain values of the job's options by name, or what the command line gave for them.
        price: Plain values by the names of ``PRICES``.
    """

    program: JobProgram
    options: Mapping[str, object]
    files: tuple[PointFile, ...] = ()
    price: Mapping[str, object] = field(default_factory=dict)
    door: Door = Door.TOML
    directory: str = ""

    def check(self, space: Space) -> None:
        """Check that every placeholder has a value and every axis has a placeholder.

        Raises:
            SweepError: One has not.
        """
        known = [*space.names, *(file.name for file in self.files)]
        used: set[str] = set()
        for where, pattern in self._patterns():
            for name in placeholders_of(pattern):
                used.add(name)
                if name not in known:
                    close = did_you_mean(name, known) if known else ""
                    raise SweepError(
                        f"unknown placeholder {{{name}}} in {where}",
                        f"{close or f'add an axis {name}'}; write {{{{{name}}}}} for the text {{{name}}} itself",
                    )
        behind = space.axes_behind(iter(used))
        for axis in space.axes:
            if axis.name not in behind:
                raise SweepError(
                    f"axis {axis.name} is used nowhere: it has no placeholder in an argument, an option or a file",
                    f"write {{{axis.name}}} where its value belongs, or leave the axis out"
                    + ("; a key of the sweep stands above [axes]" if self.door is Door.TOML else ""),
                )
        for file in self.files:
            if file.name not in used:
                raise SweepError(
                    f"the file {file.name} is used nowhere",
                    f'write {{{file.name}}} for its path: "--config={{{file.name}}}"',
                )

    def at(self, space: Space, point: Point) -> PointRun:
        """The job, pricing and files of a point."""
        words = {
            axis.name: axis.arguments[str(value)]
            for axis, (_, value) in zip(space.axes, point.values, strict=True)
            if axis.arguments
        }
        filling = Filling(space.named_values(point), words)
        files = tuple((file, file.text(filling)) for file in self.files)
        marks: dict[str, Scalar] = {file.name: _mark(file, text) for file, text in files}
        with_files = Filling({**filling.values, **marks}, words)
        try:
            priced, options = self._options(with_files)
            program = dataclasses.replace(self.program, arguments=with_files.command(self.program.arguments))
            (job,) = make_jobs(program, options, self.door, self.directory)
            job, gpu = self._shared_gpu(space, job)
            pricing = from_plain(PricedFor, {**_prices(self.price, with_files), **priced, "gpu": gpu})
        except FakedistError as error:
            where = f"at {point.label}: " if space.axes else ""
            raise SweepError(f"{where}{error.message}", error.hint) from None
        return PointRun(point, job, pricing, files)

    def _options(self, filling: Filling) -> tuple[dict[str, object], dict[str, object]]:
        priced: dict[str, object] = {}
        options: dict[str, object] = {}
        for name, pattern in self.options.items():
            plain = filling.plain(pattern)
            if isinstance(plain, Texts):
                plain = option_named(name).read_texts(plain.texts)
            if name in ("env", "nccl_env") and isinstance(plain, dict):
                plain = {key: text_of(value) if isinstance(value, bool) else value for key, value in plain.items()}
            if name in _ONLY_PRICES and any(placeholders_of(pattern)):
                stored = option_named(name).read(plain, self.door)
                if name != "gpu_power":
                    stored = self._path(str(stored))
                priced[_ONLY_PRICES[name]] = stored
            else:
                options[name] = plain
        return priced, options

    def _shared_gpu(self, space: Space, job: Job) -> tuple[Job, str | None]:
        """The job on the first GPU of its axis that a script cannot tell from its own, and its own if that differs."""
        pattern = self.options.get("gpu")
        (text,) = pattern.texts[-1:] if isinstance(pattern, Texts) else (pattern,)
        names = list(placeholders_of(text))
        axis = next(
            (candidate for candidate in space.axes if names == [candidate.name] and text == f"{{{candidate.name}}}"),
            None,
        )
        if axis is None or axis.arguments:
            return job, None
        same = _seen_by_script(job.gpu, job.gpu_memory_bytes)
        first = next(
            gpu
            for gpu in (self._path(str(value)) for value in axis.values)
            if _seen_by_script(gpu, job.gpu_memory_bytes) == same
        )
        return dataclasses.replace(job, gpu=first), None if first == job.gpu else job.gpu

    def _path(self, value: str) -> str:
        is_path = value.lower().endswith(GPU_FILE_ENDING) or value.endswith(".json")
        return os.path.abspath(os.path.join(self.directory, value)) if is_path else value

    def _patterns(self) -> list[tuple[str, object]]:
        patterns: list[tuple[str, object]] = [("the arguments", list(self.program.arguments))]
        patterns += [
            (f"the option {option_named(name).called(self.door)}", option) for name, option in self.options.items()
        ]
        patterns += [(f"the file {file.name}", [value for _, value in file.changes]) for file in self.files]
        return [*patterns, *((f"price {name}", value) for name, value in self.price.items())]


def _mark(file: PointFile, text: str) -> str:
    """A stand-in for a file's path until it has one: the same for the same content."""
    return f"<{file.file_name}:{hashlib.sha256(text.encode()).hexdigest()[:24]}>"


def _seen_by_script(gpu: str, memory_bytes: int | None) -> tuple[object, ...]:
    """The properties of a GPU that a script can see, other than its clocks."""
    spec = find_gpu(gpu)
    fields = {name: value for name, value in spec.driver_fields().items() if name not in _CLOCKS}
    return (spec.product, memory_bytes or spec.memory_bytes, spec.compute_capability, tuple(fields.items()))


def _prices(price: Mapping[str, object], filling: Filling) -> dict[str, object]:
    values = {name: filling.plain(price.get(name)) for name in PRICES}
    return {name: pricing_option(name).read(value, Door.TOML) for name, value in values.items() if value is not None}
