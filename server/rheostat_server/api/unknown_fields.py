"""Walks the bytes of a request, counts its fields and packed numbers, and finds unknown fields.

Why unknown fields are refused
    Protobuf skips them. A newer client's request would then run without its gate or its rule, and
    succeed. So every message of a request is checked, at every depth.

Why bytes are walked before they are decoded
    Protobuf decodes a message in one call, and every stream waits until it returns. 16 MB of empty
    captures are 8 million messages: 0.6 s to decode, 1.8 s to search for unknown fields. 16 MB of
    packed numbers take 0.3 s. A walk can pause between two fields, and stop if there are too many.

The rules:

* The walk refuses no message that protobuf decodes. It may accept a message that protobuf then
  refuses, for example a text that is not UTF-8.
* A field is one step, however many bytes it has. Packed numbers are one field, and are counted
  without decoding them: 16 MB take 20 ms at most.
* A field is unknown exactly if protobuf's `DiscardUnknownFields` would remove it. If a later field
  of a oneof replaces a message, the walk finds unknown fields in the replaced message too.
"""

from dataclasses import dataclass
from functools import cache
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from rheostat_server.limits import ID_BYTES, MESSAGE_NUMBERS

_DEPTH = 100
"""The deepest nesting of messages and groups that protobuf accepts."""

_TAG_BYTES = 5
_SIZE_BYTES = _VARINT_BYTES = 10
"""The longest encodings of tags, sizes and numbers that protobuf accepts. From version 7 on it
accepts at most 5 bytes for a size."""

_LARGEST_TAG = (1 << 32) - 1
_LARGEST_NUMBER = (1 << 64) - 1

_VARINT, _FIXED64, _LENGTH, _BEGIN, _END, _FIXED32 = range(6)
"""Wire types. `_BEGIN` and `_END` enclose a group, an old form of a message. Our schemas have no
groups, so a group is always an unknown field."""

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
"""The wire type of each field type. Field types that are not listed are varints."""

_NUMBER_SIZES = {_VARINT: 0, _FIXED32: 4, _FIXED64: 8}
"""Bytes of a packed number by its wire type; 0: they vary."""

_NO_NUMBERS = -1

_CONTINUED = bytes(range(0x80, 0x100))
"""The bytes of a varint but its last."""

_COUNTED = 1 << 20
"""Bytes of packed numbers that are counted at a time."""

_NO_GROUP = -1


@dataclass(frozen=True, slots=True, eq=False)
class _Field:
    """A field of the schema."""

    name: str
    repeated: bool
    message: Descriptor | None
    """The message type; None if the field holds no message."""
    number_size: int
    """Bytes of a number if the field holds numbers, 0 if they vary; else `_NO_NUMBERS`."""


class _Level:
    """A message, or an unknown group, that contains the current position of the walk."""

    __slots__ = ("begin", "counts", "depth", "end", "field", "group", "known", "number", "parent")

    def __init__(
        self,
        known: dict[int, _Field],
        begin: int,
        end: int,
        *,
        parent: "_Level | None" = None,
        field: _Field | None = None,
        number: int = 0,
        group: int = _NO_GROUP,
    ) -> None:
        self.known = known
        self.begin = begin
        self.end = end
        self.parent = parent
        self.field = field
        self.number = number
        self.group = group
        self.counts: dict[int, int] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        if self.depth > _DEPTH:
            raise DecodeError("messages are nested too deeply")


class Walk:
    """A walk over the bytes of a message, before the message is decoded."""

    def __init__(
        self, data: bytes, descriptor: Descriptor, most_numbers: int = MESSAGE_NUMBERS
    ) -> None:
        """Nothing is walked yet.

        Args:
            data: the message's bytes.
            descriptor: the message's type.
            most_numbers: packed numbers that the message may have; see `exceeding`.
        """
        self._data = data
        self._level = _Level(_fields(descriptor), 0, len(data))
        self._unknown: tuple[_Level, int] | None = None
        """The first unknown field: the message that contains it, and the field's number."""
        self._most_numbers = most_numbers
        self._exceeding: tuple[_Level, _Field] | None = None
        """The field whose numbers exceed `most_numbers`, and the message that contains it."""
        self.fields = 0
        """The number of walked fields, at all depths."""
        self.numbers = 0
        """The number of walked packed numbers. Counting ends soon after `most_numbers`."""
        self.at = 0
        """The number of walked bytes."""

    def advance(self, fields: int) -> bool:
        """Walks over at most `fields` more fields, at least 1; whether the walk is then complete.

        Raises:
            DecodeError: protobuf cannot decode the message.
        """
        try:
            return self._advance(fields)
        except IndexError as error:
            raise DecodeError("the message ends inside a field") from error

    def _advance(self, fields: int) -> bool:
        data, at, level = self._data, self.at, self._level
        end, known, left = level.end, level.known, fields
        while True:
            if at >= end:
                if at > end or level.group != _NO_GROUP:
                    raise DecodeError("a field is longer than its message")
                if level.parent is None:
                    break
                level = level.parent
                end, known = level.end, level.known
                continue
            if not left:
                break
            left -= 1
            tag = data[at]
            at += 1
            if tag > 0x7F:
                tag, at = _varint(data, at - 1, _TAG_BYTES)
            field = known.get(tag)
            if field is None:
                self._note_unknown(level, tag)
            wire = tag & 7
            if wire == _LENGTH:
                size = data[at]
                at += 1
                if size > 0x7F:
                    size, at = _varint(data, at - 1, _SIZE_BYTES)
                if at + size > end:
                    raise DecodeError("a field is longer than its message")
                if field is None or field.message is None:
                    if field is not None and field.number_size != _NO_NUMBERS:
                        self._count_numbers(level, field, at, size)
                    at += size
                    continue
                number = 0
                if field.repeated:
                    number = level.counts.get(tag, 0)
                    level.counts[tag] = number + 1
                if size:
                    level = _Level(
                        _fields(field.message),
                        at,
                        at + size,
                        parent=level,
                        field=field,
                        number=number,
                    )
                    end, known = level.end, level.known
            elif wire == _VARINT:
                if data[at] > 0x7F:
                    _, at = _varint(data, at, _VARINT_BYTES)
                else:
                    at += 1
            elif wire == _FIXED32:
                at += 4
            elif wire == _FIXED64:
                at += 8
            elif wire == _BEGIN:
                level = _Level({}, at, end, parent=level, group=tag >> 3)
                known = level.known
            elif wire == _END and level.group == tag >> 3 and level.parent is not None:
                level = level.parent
                known = level.known
            else:
                raise DecodeError("a field has no valid wire type")
        self.at, self._level = at, level
        self.fields += fields - left
        return at >= end

    def _count_numbers(self, level: _Level, field: _Field, at: int, size: int) -> None:
        if field.number_size:
            self.numbers += size // field.number_size
        else:
            for start in range(at, at + size, _COUNTED):
                if self.numbers > self._most_numbers:
                    break
                part = self._data[start : min(start + _COUNTED, at + size)]
                self.numbers += len(part.translate(None, _CONTINUED))
        if self.numbers > self._most_numbers and self._exceeding is None:
            self._exceeding = level, field

    def _note_unknown(self, level: _Level, tag: int) -> None:
        if level.group != _NO_GROUP:
            return  # the group itself is the unknown field
        if tag > _LARGEST_TAG:
            raise DecodeError("a field has no valid number")
        if self._unknown is None:
            self._unknown = level, tag >> 3

    def unknown(self) -> str | None:
        """The path of the first unknown field; None if there is none.

        The path ends with the field's number, for example "steering.interventions[0].#77".

        Raises:
            DecodeError: protobuf cannot decode a map entry on the path.
        """
        if self._unknown is None:
            return None
        level, number = self._unknown
        return self._path(level, f"#{number}")

    def exceeding(self) -> str | None:
        """The path of the field with which there are too many packed numbers; None: there is none.

        Raises:
            DecodeError: protobuf cannot decode a map entry on the path.
        """
        if self._exceeding is None:
            return None
        level, field = self._exceeding
        return self._path(level, field.name)

    def _path(self, level: _Level, last: str) -> str:
        """The path of a field in a message."""
        parts = [last]
        while level.field is not None and level.parent is not None:
            parts.append(self._name(level, level.field, parts))
            level = level.parent
        return ".".join(reversed(parts))

    def _name(self, level: _Level, field: _Field, below: list[str]) -> str:
        """The part of a path that names a message."""
        descriptor = field.message
        if descriptor is not None and descriptor.GetOptions().map_entry:
            entry = GetMessageClass(descriptor).FromString(self._data[level.begin : level.end])
            key: object = getattr(entry, descriptor.fields_by_number[1].name)
            if below[-1] == "value":
                below.pop()
            return f"{field.name}[{str(key)[:ID_BYTES]}]"
        return f"{field.name}[{level.number}]" if field.repeated else field.name


def unknown_field(message: Message, data: bytes) -> str | None:
    """The path of the first field that the message's type does not have; None if there is none.

    For small messages only. Protobuf itself searches for unknown fields here. The search takes a
    few times as long as decoding, but less than a walk.

    Args:
        message: the message that was decoded from `data`. Unknown fields are removed from it.
        data: the message's bytes.
    """
    before = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() == before:
        return None
    walk = Walk(data, cast(Descriptor, message.DESCRIPTOR))
    walk.advance(len(data))
    return walk.unknown()


def _varint(data: bytes, at: int, longest: int) -> tuple[int, int]:
    """Decodes a varint of at most `longest` bytes; its value, and the position after it.

    Ten bytes hold 70 bits. Protobuf ignores the highest six of them.
    """
    value = shift = 0
    for _ in range(longest):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _LARGEST_NUMBER, at
        shift += 7
    raise DecodeError("a number has too many bytes")


@cache
def _fields(descriptor: Descriptor) -> dict[int, _Field]:
    """The fields of a message type by tag, which combines a field's number and wire type.

    A repeated field of numbers has two tags, because protobuf accepts packed and unpacked numbers
    whatever the schema says.
    """
    known = {}
    for field in descriptor.fields:
        wire = _WIRE_TYPES.get(field.type, _VARINT)
        size = _NUMBER_SIZES.get(wire, _NO_NUMBERS)
        entry = _Field(field.name, field.is_repeated, field.message_type, size)
        known[field.number << 3 | wire] = entry
        if field.is_repeated and wire != _LENGTH:
            known[field.number << 3 | _LENGTH] = entry
    return known
