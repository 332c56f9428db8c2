"""Messages in wire format whose payload is not copied.

Why
    Protobuf copies a payload when it is set in a message, and again when the message is serialised.
    Each copy into fresh memory takes the event loop about as long as a token.
How
    The payload is not copied, and `head` has all bytes before it. That is a valid message,
    because fields may have any order: the payload is the last field of the last nested message.
"""

from typing import NamedTuple, TypeAlias

Payload: TypeAlias = bytes | memoryview
"""Bytes that do not change. A memoryview has elements of one byte."""

_LENGTH_DELIMITED = 2
"""The wire type of nested messages and bytes."""


class MessageParts(NamedTuple):
    """A message in wire format."""

    head: bytes
    """All bytes before the payload."""
    payload: Payload
    """The other bytes."""

    @property
    def size(self) -> int:
        """Bytes of the message."""
        return len(self.head) + len(self.payload)

    def joined(self) -> bytes:
        """The message in one piece, which is a copy."""
        return b"".join(self)

    def as_field(self, number: int) -> "MessageParts":
        """A message whose only field, or whose last one, is this message.

        Args:
            number: the field's number.
        """
        return MessageParts(field_head(number, self.size) + self.head, self.payload)


def field_head(number: int, size: int) -> bytes:
    """The tag and the size that precede the content of a message or bytes field.

    Args:
        number: the field's number.
        size: bytes of the content.
    """
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(size)


def _varint(value: int) -> bytes:
    """A number in groups of seven bits, the lowest first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
