"""The pages in docs/run-directory, made from the schema of the tables and from the docstrings of the records.

``python -m tools.schema_page docs/run-directory`` writes them; a test keeps them true.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from fakedist.docstrings import docstring_of
from fakedist.options.kinds import options_of
from fakedist.rundir.directory import Manifest
from fakedist.rundir.finding import Finding
from fakedist.rundir.schema import SCHEMA_VERSION, attributes
from fakedist.rundir.summary import Summary
from fakedist.rundir.table_rows import TABLES

_RECORDS = f"""# Records of a run directory

Every key of `run.json` and of the object of `--json`. [The run directory](../run-directory.md) has the files. All sizes
are in bytes and all times in microseconds. Schema version {SCHEMA_VERSION}.
"""
_TABLES = f"""# Tables of a run directory

A table is the file `tables/NAME.parquet`. `run.table("NAME")` and `fakedist report RUN --format csv --table NAME` read
it. [The run directory](../run-directory.md#tables) says which table answers which question. All sizes are in bytes and
all times in microseconds. Schema version {SCHEMA_VERSION}.
"""


def pages() -> dict[str, str]:
    """The text of each page, by the name of its file."""
    return {"records.md": _records_page(), "tables.md": _tables_page()}


def _records_page() -> str:
    lines = [_RECORDS, "## run.json\n"]
    kinds = records(Manifest, without=Summary)
    for kind in kinds:
        lines += _section(kind, is_titled=kind is not Manifest)
    lines += [
        "## The object of `--json`\n",
        "The summary; `run_directory`, the absolute path of the run directory; and `findings`, a list of Finding.\n",
    ]
    for kind in (*records(Summary), Finding):
        if kind not in kinds:
            lines += _section(kind, is_titled=kind is not Summary)
    return "\n".join(lines).rstrip() + "\n"


def _tables_page() -> str:
    lines = [_TABLES]
    for name, table in TABLES.items():
        lines += [f"## {name}\n", f"{table.row}\n", "| column | type | meaning |", "|---|---|---|"]
        lines += [*(f"| `{c.name}` | {c.type} | {c.meaning} |" for c in table.columns), ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(kind: type, *, is_titled: bool) -> list[str]:
    title = [f"### {kind.__name__}\n", f"{_sentence(kind)}\n"] if is_titled else []
    return [*title, "| key | type | meaning |", "|---|---|---|", *_rows(kind), ""]


def records(kind: type, without: type | None = None) -> list[type]:
    """A record and all those in its fields, in the order in which they are first met, ``without`` one of them."""
    kinds = [kind]
    for known in kinds:
        for hint in typing.get_type_hints(known).values():
            kinds += [inner for inner in _dataclasses_in(hint) if inner not in kinds and inner is not without]
    return kinds


def _dataclasses_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for inner in typing.get_args(hint):
        yield from _dataclasses_in(inner)


def _rows(kind: type) -> Iterator[str]:
    meanings = meanings_of(kind)
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        yield f"| `{field.name}` | {_type_text(hints[field.name])} | {_as_json(meanings[field.name])} |"


def _type_text(hint: object) -> str:
    """A type as JSON has it: "integer or null", "list of LayerMemory"."""
    arguments = typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(str(member.value) for member in hint)
    match typing.get_origin(hint):
        case typing.Literal:
            return ", ".join(map(str, arguments))
        case origin if origin in (types.UnionType, typing.Union):
            return " or ".join(map(_type_text, arguments))
        case origin if origin is list or arguments[1:] == (Ellipsis,):
            return f"list of {_type_text(arguments[0])}".replace("pair of", "pairs of")
        case origin if origin is tuple:
            return f"pair of {_type_text(arguments[0])}s"
        case origin if origin is dict:
            return f"{_type_text(arguments[1])} by name"
    names = {int: "integer", float: "number", str: "text", bool: "boolean", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))  # type: ignore[call-overload, no-any-return]


def _as_json(text: str) -> str:
    for word, in_json in (("``", "`"), ("None", "null"), ("False", "false"), ("True", "true")):
        text = text.replace(word, in_json)
    return text


def _sentence(kind: type) -> str:
    return " ".join(docstring_of(kind).split("\n\n")[0].split())


def meanings_of(kind: type) -> dict[str, str]:
    """The meaning of each attribute of a record, from its docstring or the help of an option of a job."""
    meanings = {option.field: option.help for option in options_of(kind)}
    for each in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        meanings |= attributes(each)
    return meanings


if __name__ == "__main__":
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text)
