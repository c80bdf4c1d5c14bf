"""The messages of MLCommons Chakra's execution traces, made with the protobuf library.

Source: mlcommons/chakra, schema/protobuf/et_def.proto @6dc63e14 (proto3, package ChakraProtoMsg). Only the fields that
a trace needs are declared.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import IO, Protocol

from fakedist.errors import SetupError

#: Values of ``NodeType``.
INVALID, COMPUTE, SEND, RECEIVE, COLLECTIVE = 0, 4, 5, 6, 7
#: Values of ``CollectiveCommType``, by our name of the collective.
COLLECTIVE_TYPES = {
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "barrier": 9,
}
#: Scalar fields of AttributeProto's value, by number.
_VALUES = {"int32": 7, "int64": 9, "uint32": 11, "uint64": 13, "bool": 27, "string": 29}
_PACKAGE = "ChakraProtoMsg"


class Attributes(Protocol):
    """A repeated field of the protobuf library."""

    def add(self, **fields: object) -> object:
        """Append a message with these fields."""


class Message(Protocol):
    """A message of the protobuf library.

    Attributes:
        type: A node's type.
        attr: Its attributes.
    """

    type: int
    attr: Attributes

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes:  # noqa: N802 - protobuf's name
        """Its bytes."""

    def ParseFromString(self, serialized: bytes) -> int:  # noqa: N802 - protobuf's name
        """Read it from bytes."""


@cache
def message_classes() -> dict[str, type]:
    """The classes GlobalMetadata, Node, IOInfo and AttributeProto.

    Raises:
        SetupError: The protobuf library is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise SetupError("Chakra traces need the protobuf library", "pip install 'fakedist[chakra]'") from None
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=_PACKAGE, syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    scalar = {name: getattr(field, f"TYPE_{name.upper()}") for name in _VALUES}

    def add(message: str, *rows: tuple[str, int, str, bool]) -> None:
        made = file.message_type.add(name=message)
        for name, number, kind, repeated in rows:
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if kind in scalar:
                made.field.add(name=name, number=number, type=scalar[kind], label=label)
            elif kind == "NodeType":
                made.field.add(
                    name=name, number=number, type=field.TYPE_ENUM, label=label, type_name=f".{_PACKAGE}.{kind}"
                )
            else:
                made.field.add(
                    name=name, number=number, type=field.TYPE_MESSAGE, label=label, type_name=f".{_PACKAGE}.{kind}"
                )

    names = ("INVALID", "METADATA", "MEM_LOAD", "MEM_STORE", "COMP", "COMM_SEND", "COMM_RECV", "COMM_COLL")
    node_type = file.enum_type.add(name="NodeType")
    for number, name in enumerate(names):
        node_type.value.add(name=f"{name}_NODE", number=number)
    add("AttributeProto", ("name", 1, "string", False), ("doc_string", 2, "string", False))
    attribute = file.message_type[-1]
    attribute.oneof_decl.add(name="value")
    for kind, number in _VALUES.items():
        attribute.field.add(name=f"{kind}_val", number=number, type=scalar[kind], oneof_index=0, label=1)
    add("GlobalMetadata", ("version", 1, "string", False), ("attr", 2, "AttributeProto", True))
    add("IOInfo", ("values", 1, "string", False), ("shapes", 2, "string", False), ("types", 3, "string", False))
    add(
        "Node",
        ("id", 1, "uint64", False),
        ("name", 2, "string", False),
        ("type", 3, "NodeType", False),
        ("ctrl_deps", 4, "uint64", True),
        ("data_deps", 5, "uint64", True),
        ("start_time_micros", 6, "uint64", False),
        ("duration_micros", 7, "uint64", False),
        ("inputs", 8, "IOInfo", False),
        ("outputs", 9, "IOInfo", False),
        ("attr", 10, "AttributeProto", True),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kinds = ("GlobalMetadata", "Node", "IOInfo", "AttributeProto")
    return {kind: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{kind}")) for kind in kinds}


def write_message(file: IO[bytes], message: Message) -> None:
    """Write a message after its length, a varint, as Chakra's readers expect."""
    text = message.SerializeToString(deterministic=True)
    length = len(text)
    while length > 0x7F:
        file.write(bytes([length & 0x7F | 0x80]))
        length >>= 7
    file.write(bytes([length]) + text)


def read_messages(data: bytes) -> Iterator[bytes]:
    """The messages of a trace, each as its bytes.

    Raises:
        ValueError: The data end within a message.
    """
    at = 0
    while at < len(data):
        length, shift = 0, 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError("the trace ends within a message")
            byte = data[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if at + length > len(data):
            raise ValueError("the trace ends within a message")
        yield data[at : at + length]
        at += length
