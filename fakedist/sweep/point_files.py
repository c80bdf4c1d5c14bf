"""Files that are written for a point: a TOML, YAML or JSON file with some of its values replaced."""

from __future__ import annotations

import copy
import datetime
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from fakedist.bounded import UnreadableError, read_bytes
from fakedist.errors import SweepError
from fakedist.section import Section
from fakedist.sweep.placeholders import Filling

_ENDINGS = (".toml", ".yaml", ".yml", ".json")
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class PointFile:
    """A file that is written for each point.

    Attributes:
        name: The placeholder that stands for its path.
        file_name: How it is called.
        content: What it is made from.
        changes: Plain values to set, by their place: the keys from the outside inwards.
    """

    name: str
    file_name: str
    content: Mapping[str, object]
    changes: tuple[tuple[tuple[str, ...], object], ...]

    def text(self, filling: Filling) -> str:
        """The file at one point.

        Raises:
            SweepError: A place to set is inside something that is no table, or the format has no such value.
        """
        found = copy.deepcopy(dict(self.content))
        for keys, pattern in self.changes:
            _set(found, keys, filling.plain(pattern), f"{self.name}: {'.'.join(keys)}")
        if self.file_name.endswith(".toml"):
            return toml_text(found)
        try:
            if self.file_name.endswith(".json"):
                return json.dumps(found, indent=2, allow_nan=False) + "\n"
            return str(yaml.safe_dump(found, sort_keys=False))
        except (TypeError, ValueError, yaml.YAMLError) as error:
            raise SweepError(
                f"the file {self.name} cannot be written: {error}", "leave out the value, or use TOML"
            ) from None


def read_point_file(name: str, section: Section, directory: Path) -> PointFile:
    """A file's description in a sweep file.

    Args:
        name: The placeholder for its path.
        section: Its table: ``from``, ``set`` and, without ``from``, ``name``.
        directory: Where paths are relative to.

    Raises:
        SweepError: The description is not valid, or the file that it is made from cannot be read.
    """
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
    """What a TOML, YAML or JSON file contains: plain values only.

    Raises:
        SweepError: It cannot be read, or is no table.
    """
    try:
        text = read_bytes(path, _MOST_BYTES).decode()
        if path.suffix == ".toml":
            found: object = tomllib.loads(text)
        else:
            found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise SweepError(f"{path} cannot be read: {error.strerror}", "paths are relative to the sweep file") from None
    except UnreadableError as error:
        raise SweepError(f"{path} cannot be read: {error}", "give a configuration file") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        told = (str(error).splitlines() or [type(error).__name__])[0]
        raise SweepError(f"{path} is not {path.suffix[1:].upper()}: {told}", "correct the file") from None
    if not isinstance(found, dict):
        raise SweepError(f"{path} is no table of keys and values", "give a configuration file")
    return found


def _set(content: dict[str, object], keys: tuple[str, ...], value: object, where: str) -> None:
    place: object = content
    for at, key in enumerate(keys):
        is_last = at == len(keys) - 1
        if isinstance(place, list):
            if not key.isdecimal() or int(key) >= len(place):
                raise SweepError(f"{where}: {'.'.join(keys[:at])} is a list of {len(place)}", f'"{keys[0]}.0" = ...')
            if is_last:
                place[int(key)] = value
            else:
                place = place[int(key)]
        elif isinstance(place, dict):
            if is_last:
                place[key] = value
            else:
                place = place.setdefault(key, {})
        else:
            raise SweepError(f"{where}: {'.'.join(keys[:at])} is {place!r}, not a table", "correct the key under set")


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
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": "inf", "-inf": "-inf"}.get(str(value), "nan")
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(_value(each, path) for each in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(str(key))} = {_value(each, path)}' for key, each in value.items())} }}"
    raise SweepError(f"{'.'.join(path)} = {value!r} has no form in TOML", "leave it out")
