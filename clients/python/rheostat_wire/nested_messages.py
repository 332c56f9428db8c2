"""Messages of one type in a message, at any depth."""

from collections.abc import Iterator
from typing import TypeVar

from google.protobuf.message import Message

Nested = TypeVar("Nested", bound=Message)


def nested_messages(message: Message, kind: type[Nested]) -> Iterator[Nested]:
    """Yields the messages of a type in a message, which may be one itself.

    Values of maps, and messages in the messages that are found, are left out.
    """
    if isinstance(message, kind):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else (value,):
            yield from nested_messages(inner, kind)
