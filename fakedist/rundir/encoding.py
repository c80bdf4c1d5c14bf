"""Turns records into builtins, which the journal's file holds, and back. Every field that is read is checked."""

from __future__ import annotations

import functools
import itertools
import typing
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Annotated, ClassVar, TypeVar

from fakedist.rundir.plain import from_plain, to_plain

#: A column: bytes of an ``array.array`` of this type code, little endian.
U8 = Annotated[bytes, "B"]
U32 = Annotated[bytes, "I"]
U64 = Annotated[bytes, "Q"]
I32 = Annotated[bytes, "i"]
I64 = Annotated[bytes, "q"]
F64 = Annotated[bytes, "d"]

T = TypeVar("T")
_Encode = Callable[[object], object]
_Decode = Callable[[object, str], object]


class Record:
    """A record of a journal: a frozen dataclass, declared by :func:`record_kind`.

    Attributes:
        kind: Names the record in the file.
    """

    __slots__ = ()
    kind: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Field[object]]]


R = TypeVar("R", bound=Record)
#: The records of a file, by kind.
Kinds = dict[str, type[Record]]
#: Those of journal.bin. :mod:`fakedist.rundir.records` and the modules that it imports declare them.
RECORDS: Kinds = {}


@typing.dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record_kind(kind: str, kinds: Kinds = RECORDS) -> Callable[[type[R]], type[R]]:
    """Declare a record: make the class a frozen dataclass, and put it into the table of a file's records."""

    def declare(declared: type[R]) -> type[R]:
        assert kind not in kinds, f"two records of kind {kind}"
        made = dataclass(frozen=True, slots=True)(declared)
        made.kind = kind
        kinds[kind] = made
        return made

    return declare


def columns_of(kind: type) -> dict[str, str]:
    """The columns of a record or a table of it, in order: names, and type codes of ``array.array``."""
    return _codec(kind).columns


class Columns(typing.Generic[T]):
    """Columns that grow by one value each, and become a record or the table of a record."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self.arrays: dict[str, array[float]] = {name: array(code) for name, code in columns_of(kind).items()}

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def add(self, **values: float) -> None:
        """Add one value to each column."""
        for name, column in self.arrays.items():
            column.append(values[name])

    def extend(self, rows: Sequence[Sequence[float]]) -> None:
        """Add rows, each with a value for every column in order. A million rows take half a second."""
        for column, values in zip(self.arrays.values(), zip(*rows, strict=True), strict=bool(rows)):
            column.extend(values)

    def made(self, **others: object) -> T:
        """The record, with its other fields."""
        return self._kind(**others, **{name: column.tobytes() for name, column in self.arrays.items()})


def encode(record: Record) -> dict[str, object]:
    """A record as builtins: its kind and its fields."""
    plain: dict[str, object] = {"kind": record.kind}
    for name, put in _codec(type(record)).encoders:
        value = getattr(record, name)
        plain[name] = value if put is None else put(value)
    return plain


def decode(plain: Mapping[str, object], kinds: Mapping[str, type[Record]]) -> Record:
    """The record that :func:`encode` turned into ``plain``. Fields with a default may be missing.

    Raises:
        ValueError: No such kind exists, a field is missing, or a value has the wrong type.
    """
    kind = kinds.get(str(plain["kind"]))
    if kind is None:
        raise ValueError("there is no such kind of record")
    return _decoded(kind, plain)


def _decoded(kind: type[T], plain: Mapping[str, object]) -> T:
    codec = _codec(kind)
    if missing := [name for name in codec.required if name not in plain]:
        raise ValueError(f"it has no {missing[0]}")
    values = {name: get(plain[name], name) for name, get in codec.decoders if name in plain}
    if len({_num_rows(plain[name], code) for name, code in codec.columns.items() if name in plain}) > 1:
        raise ValueError("its columns differ in length")
    return kind(**values)


def _num_rows(column: object, code: str) -> int:
    return len(column) // array(code).itemsize if isinstance(column, bytes) else -1


@dataclass(frozen=True)
class _Codec:
    """How records of one type are written and read.

    Attributes:
        columns: The columns: names and type codes.
        required: The fields without a default.
        encoders: The fields, each with what makes builtins of its values; None if they are builtins.
        decoders: The fields, each with what checks its values and makes them typed again.
    """

    columns: dict[str, str]
    required: list[str]
    encoders: list[tuple[str, _Encode | None]]
    decoders: list[tuple[str, _Decode]]


_codecs: dict[type, _Codec] = {}


def _codec(kind: type) -> _Codec:
    codec = _codecs.get(kind)
    if codec is None:
        hints = typing.get_type_hints(kind, include_extras=True)
        codec = _codecs[kind] = _Codec(
            {name: hint.__metadata__[0] for name, hint in hints.items() if _is_column(hint)},
            [own.name for own in fields(kind) if own.default is MISSING and own.default_factory is MISSING],
            [(own.name, _encoder(hints[own.name])) for own in fields(kind)],
            [(own.name, _decoder(hints[own.name])) for own in fields(kind)],
        )
    return codec


def _is_column(hint: typing.Any) -> bool:
    return typing.get_origin(hint) is Annotated and hint.__origin__ is bytes


def _encoder(hint: object) -> _Encode | None:
    if hint in (int, bool, float, bytes) or _is_column(hint):
        return None
    if hint is str:
        return str  # an enum's member is a text too, but not a builtin
    if _row_of(hint) is not None:
        return _plain_rows
    if typing.get_origin(hint) is list and typing.get_args(hint)[0] in (str, bytes, tuple[int, ...]):
        return None
    return to_plain


def _plain_rows(rows: object) -> list[tuple[object, ...]]:
    assert isinstance(rows, list)
    return list(map(tuple, rows))


def _decoder(hint: object) -> _Decode:
    if _is_column(hint):
        return functools.partial(_column, array(typing.get_args(hint)[1]).itemsize)
    if (row := _row_of(hint)) is not None:
        return functools.partial(_typed_rows, row, list(map(_value_type, typing.get_type_hints(row).values())))
    if isinstance(hint, type) and is_dataclass(hint) and _codec(hint).columns:
        return lambda value, where: _decoded(hint, _mapping(value, where))
    if hint == list[tuple[int, ...]]:
        return _number_lists
    return lambda value, where: from_plain(typing.cast(type[object], hint), value, where)


def _row_of(hint: object) -> type[tuple[object, ...]] | None:
    """The NamedTuple of a list of rows; None for anything else."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is list and isinstance(arguments[0], type) and hasattr(arguments[0], "_fields"):
        return typing.cast(type[tuple[object, ...]], arguments[0])
    return None


def _value_type(hint: object) -> type:
    return hint if isinstance(hint, type) and typing.get_origin(hint) is None else tuple


def _column(itemsize: int, value: object, where: str) -> bytes:
    if not isinstance(value, bytes) or len(value) % itemsize:
        raise ValueError(f"{where} is not a column of values of {itemsize} bytes")
    return value


def _typed_rows(row: type[tuple[object, ...]], types: list[type], value: object, where: str) -> list[object]:
    """Rows, checked by column: a run can have millions of calls, and this costs a tenth of checking row by row.

    Those of an earlier version may lack the last values, which have defaults.
    """
    rows = _sequences(value, where)
    if not rows:
        return []
    names: tuple[str, ...] = row._fields  # type: ignore[attr-defined]
    defaults: dict[str, object] = row._field_defaults  # type: ignore[attr-defined]
    lacking = names[len(rows[0]) :]
    if lacking and all(name in defaults for name in lacking):
        rows = [(*each, *(defaults[name] for name in lacking)) for each in rows]
    if set(map(len, rows)) != {len(types)}:
        raise ValueError(f"{where} holds a row that does not have {len(types)} values")
    for column, kind in zip(zip(*rows, strict=True), types, strict=True):
        if not set(map(type, column)) <= {kind}:
            raise ValueError(f"{where} holds a value that is not of type {kind.__name__}")
    return list(map(row._make, rows))  # type: ignore[attr-defined]


def _number_lists(value: object, where: str) -> list[tuple[int, ...]]:
    rows = _sequences(value, where)
    if not set(map(type, itertools.chain.from_iterable(rows))) <= {int}:
        raise ValueError(f"{where} holds a value that is not of type int")
    return typing.cast(list[tuple[int, ...]], rows)


def _sequences(value: object, where: str) -> list[tuple[object, ...]]:
    if not isinstance(value, list) or not set(map(type, value)) <= {tuple}:
        raise ValueError(f"{where} is not a list of rows")
    return value


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a table")
    return value
