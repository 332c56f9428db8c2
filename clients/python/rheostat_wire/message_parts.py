"""Messages in wire format whose payloads are not copied.

Why
    Protobuf copies a payload when it is set in a message, and again when the message is serialised.
    Each copy into fresh memory takes the event loop about as long as a token.
How
    A message is a tuple of parts, of which payloads are some. Nested messages become fields by
    parts that precede them. Fields may have any order, so the parts of two messages, one after the
    other, are a message with the fields of both.
"""

from functools import lru_cache
from typing import TypeAlias

Payload: TypeAlias = bytes | memoryview
"""Bytes that do not change. A memoryview has elements of one byte."""

_LENGTH_DELIMITED = 2
"""The wire type of nested messages and bytes."""


class MessageParts(tuple[Payload, ...]):
    """The parts of a message in wire format."""

    __slots__ = ()

    def joined(self) -> bytes:
        """The message in one piece, which is a copy."""
        return b"".join(self)

    def as_field(self, number: int) -> "MessageParts":
        """A message whose only field is this message.

        Args:
            number: the field's number.
        """
        return MessageParts((field_head(number, sum(map(len, self))), *self))


@lru_cache(maxsize=1 << 12)  # messages of a stream mostly have the same sizes
def field_head(number: int, size: int) -> bytes:
    """The tag and the size that precede the content of a message or bytes field.

    Args:
        number: the field's number.
        size: bytes of the content.
    """
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(size)


@lru_cache(maxsize=1 << 12)
def number_field(number: int, value: int) -> bytes:
    """A field with a number that is not negative; empty for 0, as its presence means nothing.

    Args:
        number: the field's number.
        value: its value, of an unsigned integer type.
    """
    return _varint(number << 3) + _varint(value) if value else b""


def _varint(value: int) -> bytes:
    """A number in groups of seven bits, the lowest first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
