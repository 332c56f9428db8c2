"""Prompts and labels: from Python values to messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import TypeAlias, TypedDict

from rheostat._errors import invalid
from rheostat._fields import utf8_text
from rheostat_wire.v1 import generation_service_pb2, types_pb2

_ONE_PROMPT = (
    "this takes one prompt, not a list of them: run several at once with rheostat.aio and "
    "asyncio.gather(*(engine.generate(prompt) for prompt in prompts))"
)


class ChatMessage(TypedDict):
    """One turn of a conversation."""

    role: str
    """A role of the chat template: "system", "user", "assistant"."""
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or chat messages."""


def put_prompt(
    request: (
        generation_service_pb2.GenerateRequest
        | generation_service_pb2.TokenizeRequest
        | types_pb2.Prompt
    ),
    prompt: Prompt,
    path: str = "prompt",
) -> None:
    """Fill the message's oneof ``prompt``; ``path`` names it in errors."""
    if isinstance(prompt, str):
        if not prompt:
            raise invalid(path, "the prompt is empty", "REASON_MISSING_FIELD")
        request.text = utf8_text(prompt, path, "a prompt")
        return
    if isinstance(prompt, Mapping):
        raise invalid(path, 'messages come in a list: [{"role": ..., "content": ...}]')
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Iterable):
        kind = type(prompt).__name__
        raise invalid(path, f"a prompt is text, token ids or messages, not {kind}")
    items = list(prompt)
    if not items:
        raise invalid(path, "the prompt is empty", "REASON_MISSING_FIELD")
    if isinstance(items[0], str | list | tuple):
        kinds = "a prompt is text, token ids or messages, not a list of prompts"
        raise invalid(path, _ONE_PROMPT if path == "prompt" else kinds)
    if isinstance(items[0], Mapping):
        request.chat.messages.extend(
            _message(message, number) for number, message in enumerate(items)
        )
        return
    try:
        request.token_ids.ids.extend(map(index, items))  # type: ignore[arg-type]  # checked
    except (TypeError, ValueError) as error:
        raise invalid(path, f"a prompt is text, token ids or messages: {error}") from None


def _message(message: object, number: int) -> types_pb2.ChatMessage:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise invalid(
            f"chat.messages[{number}]", "a message has a role and a content, and nothing else"
        )
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not isinstance(content, str) or not role:
        media = "; images and other media are not served" if isinstance(content, list) else ""
        raise invalid(f"chat.messages[{number}]", f"role and content are texts{media}")
    for name, text in (("role", role), ("content", content)):
        utf8_text(text, f"chat.messages[{number}].{name}", f"a {name}")
    return types_pb2.ChatMessage(role=role, content=content)


def labels_to_wire(labels: object, path: str) -> dict[str, str]:
    """Returns ``labels`` if it maps texts to texts."""
    if not isinstance(labels, Mapping):
        raise invalid(path, f"labels are a dict of strings, not {type(labels).__name__}")
    return {
        utf8_text(key, path, "a label's key"): utf8_text(value, path, "a label")
        for key, value in labels.items()
    }
