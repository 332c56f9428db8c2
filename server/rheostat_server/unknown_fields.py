"""Finds fields of a request that this server does not know.

Why unknown fields are refused
    Protobuf skips them. A request of a newer client would then run without its gate or its rule,
    and succeed. So every message of a request is checked, at every depth.

What the check costs
    It runs on the event loop, for every message. Protobuf itself measures a small message, which
    takes a few times as long as decoding it. A large message is nearly always one tensor, so its
    bytes are walked field by field, and a tensor is one step. The walk is bounded: protobuf also
    measures a large message of very many fields.
"""

from functools import cache
from typing import NamedTuple, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rheostat_server.limits import OFFLOAD_BYTES

_WALKED_FIELDS = 4096
"""Most fields that are walked, which takes a few milliseconds."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5

_WIRE_TYPES = {
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_FIXED64: _FIXED64,
    FieldDescriptor.TYPE_SFIXED64: _FIXED64,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_FIXED32: _FIXED32,
    FieldDescriptor.TYPE_SFIXED32: _FIXED32,
    FieldDescriptor.TYPE_STRING: _LENGTH,
    FieldDescriptor.TYPE_BYTES: _LENGTH,
    FieldDescriptor.TYPE_MESSAGE: _LENGTH,
}
"""Wire types by type of field. All others are varints."""


class _Field(NamedTuple):
    """A known field with one of its wire types."""

    name: str
    repeated: bool
    message: Descriptor | None
    """Type of a message field."""


class _TooManyFields(Exception):
    """The walk is longer than it may be."""


def unknown_field(message: Message, data: bytes) -> str | None:
    """Path of the first field that the message's type does not have, or None.

    The field itself is given by its number: "steering.interventions[0].#77". The path is empty if a
    message has too many fields to look for it.

    Args:
        message: what was decoded from `data`. Unknown fields are removed from it.
        data: the message's bytes.
    """
    small = len(data) <= OFFLOAD_BYTES
    if small and not _has_unknown(message):
        return None
    try:
        return _Walk(data).message(0, len(data), cast(Descriptor, message.DESCRIPTOR))
    except _TooManyFields:
        return "" if small or _has_unknown(message) else None


def _has_unknown(message: Message) -> bool:
    """Whether the message is smaller once protobuf has discarded what it does not know."""
    before = message.ByteSize()
    message.DiscardUnknownFields()
    return message.ByteSize() < before


class _Walk:
    """A walk over bytes that protobuf has decoded, and which are thus well-formed."""

    def __init__(self, data: bytes) -> None:
        """Nothing is walked yet."""
        self._data = data
        self._left = _WALKED_FIELDS

    def message(self, at: int, end: int, descriptor: Descriptor) -> str | None:
        """Path, within the message at [at, end), of its first unknown field.

        Raises:
            _TooManyFields: the walk is too long.
        """
        known, counts = _fields(descriptor), dict[str, int]()
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise _TooManyFields
            tag, at = self._varint(at)
            field = known.get(tag)
            if field is None:
                return f"#{tag >> 3}"
            match tag & 7:
                case 0:
                    _, at = self._varint(at)
                case 1:
                    at += 8
                case 5:
                    at += 4
                case _:
                    size, at = self._varint(at)
                    if field.message is not None:
                        number = counts.get(field.name, 0)
                        counts[field.name] = number + 1
                        inner = self.message(at, at + size, field.message)
                        if inner is not None:
                            return self._path(field, number, at, at + size, inner)
                    at += size
        return None

    def _path(self, field: _Field, number: int, at: int, end: int, inner: str) -> str:
        if field.message is not None and field.message.GetOptions().map_entry:
            entry = GetMessageClass(field.message).FromString(self._data[at:end])
            key: object = getattr(entry, field.message.fields_by_number[1].name)
            return f"{field.name}[{key}].{inner.removeprefix('value.')}"
        return f"{field.name}[{number}].{inner}" if field.repeated else f"{field.name}.{inner}"

    def _varint(self, at: int) -> tuple[int, int]:
        """A number, and where it ends."""
        data = self._data
        byte = data[at]
        if byte < 0x80:
            return byte, at + 1
        value, shift = byte & 0x7F, 7
        while True:
            at += 1
            byte = data[at]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at + 1
            shift += 7


@cache
def _fields(descriptor: Descriptor) -> dict[int, _Field]:
    """A message type's fields by tag, the field's number with the wire type.

    Numbers of a repeated field may come packed or not, whatever the schema says.
    """
    known = {}
    for field in descriptor.fields:
        wire = _WIRE_TYPES.get(field.type, _VARINT)
        entry = _Field(field.name, field.is_repeated, field.message_type)
        known[field.number << 3 | wire] = entry
        if field.is_repeated and wire != _LENGTH:
            known[field.number << 3 | _LENGTH] = entry
    return known
