"""Converts typed records to plain JSON values and back. Every value read back is checked."""

from __future__ import annotations

import dataclasses
import enum
import functools
import reprlib
import types
import typing
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar, Protocol, TypeVar, overload

T = TypeVar("T")
#: Checks a value and its place, and makes it typed.
_Reader = Callable[[object, str], object]


#: What numbers may be at most: those of 64 bits, and times and operations of any job.
_MOST = {int: (1 << 64) - 1, float: 1e30}
#: Writes values whose whole text may be endless, such as a list that contains itself.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]


#: Metadata of a field that most records lack: it is written only if it holds something.
LEFT_OUT_IF_EMPTY = {"left_out_if_empty": True}


class PlainValueError(ValueError):
    """A value that does not fit the record. The message says where: ``steps[3].step is 'x', not an integer``."""


@overload
def to_plain(value: _Dataclass) -> dict[str, object]: ...
@overload
def to_plain(value: Sequence[_Dataclass]) -> list[dict[str, object]]: ...
@overload
def to_plain(value: object) -> object: ...
def to_plain(value: object) -> object:
    """Dataclasses as dictionaries in field order, tuples as lists, enums as their values, the rest unchanged."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {field.name: to_plain(one) for field, one in held if one or field.metadata != LEFT_OUT_IF_EMPTY}
    if isinstance(value, dict):
        return {str(key): to_plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return list(map(to_plain, value))
    return value.value if isinstance(value, enum.Enum) else value


def from_plain(kind: type[T], value: object, where: str = "") -> T:
    """The record of type ``kind`` that :func:`to_plain` turned into ``value``.

    Unknown keys are ignored. Fields with a default may be missing.

    Raises:
        PlainValueError: A field is missing, or a value has the wrong type.
    """
    return typing.cast(T, _reader(typing.cast(Hashable, kind))(value, where))


@functools.cache
def _reader(kind: object) -> _Reader:
    """The reader for values of a type. Cached, because records come by the thousand."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum_reader(kind)
    if kind is object or kind is typing.Any:
        return lambda value, where: value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _union_reader(arguments)
    if origin is typing.Literal:
        return lambda value, where: value if value in arguments else _refuse(value, where, f"one of {arguments}")
    if origin is list:
        return _list_reader(arguments[0])
    if origin is tuple:
        return _tuple_reader(arguments)
    if origin is dict:
        return _dict_reader(arguments[1])
    assert isinstance(kind, type), f"{kind} is not a type of a record's field"
    return _scalar_reader(kind)


def _dataclass_reader(kind: type) -> _Reader:
    hints = typing.get_type_hints(kind)
    fields = [
        (
            field.name,
            _reader(hints[field.name]),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
    ]

    def read(value: object, where: str) -> object:
        if not isinstance(value, dict):
            _refuse(value, where, "an object")
        known = {}
        for name, reader, is_required in fields:
            path = f"{where}.{name}" if where else name
            if name in value:
                known[name] = reader(value[name], path)
            elif is_required:
                raise PlainValueError(f"{path} is missing")
        return kind(**known)

    return read


def _enum_reader(kind: type[enum.Enum]) -> _Reader:
    members = {member.value: member for member in kind}

    def read(value: object, where: str) -> object:
        if not isinstance(value, str | int) or value not in members:
            _refuse(value, where, f"one of {', '.join(map(str, members))}")
        return members[value]

    return read


def _union_reader(kinds: tuple[object, ...]) -> _Reader:
    some = [kind for kind in kinds if kind is not type(None)]
    readers = [_reader(kind) for kind in some]

    def read(value: object, where: str) -> object:
        if value is None and len(some) < len(kinds):
            return None
        for reader in readers[:-1]:
            try:
                return reader(value, where)
            except PlainValueError:
                continue
        return readers[-1](value, where)

    return read


def _list_reader(kind: object) -> Callable[[object, str], list[object]]:
    reader = _reader(kind)

    def read(value: object, where: str) -> list[object]:
        if not isinstance(value, list | tuple):
            _refuse(value, where, "a list")
        return [reader(item, f"{where}[{at}]") for at, item in enumerate(value)]

    return read


def _tuple_reader(kinds: tuple[object, ...]) -> _Reader:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        of_list = _list_reader(kinds[0])
        return lambda value, where: tuple(of_list(value, where))
    readers = [_reader(kind) for kind in kinds]

    def read(value: object, where: str) -> object:
        if not isinstance(value, list | tuple) or len(value) != len(readers):
            _refuse(value, where, f"a list of {len(readers)}")
        return tuple(
            reader(item, f"{where}[{at}]") for at, (reader, item) in enumerate(zip(readers, value, strict=True))
        )

    return read


def _dict_reader(kind: object) -> _Reader:
    reader = _reader(kind)

    def read(value: object, where: str) -> object:
        if not isinstance(value, dict):
            _refuse(value, where, "an object")
        return {str(name): reader(item, f"{where}.{name}" if where else str(name)) for name, item in value.items()}

    return read


def _scalar_reader(kind: type) -> _Reader:
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    accepted = (int, float) if kind is float else kind
    most = _MOST.get(kind)

    def read(value: object, where: str) -> object:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            _refuse(value, where, names.get(kind, str(kind)))
        if most is not None and not -most <= value <= most:  # type: ignore[operator]
            _refuse(value, where, f"{names[kind]} of at most {most:.3g}")
        return value

    return read


def _refuse(value: object, where: str, expected: str) -> typing.NoReturn:
    if isinstance(value, int) and abs(value) > _MOST[int]:
        shown = f"a number of {value.bit_length():,} bits"
    else:
        shown = repr((str(value) if isinstance(value, str | int | float | None) else _SHORT.repr(value))[:40])
    raise PlainValueError(f"{where or 'the value'} is {shown}, not {expected}")
