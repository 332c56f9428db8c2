"""Prompts: converts text, token ids or a chat to token ids, and to offsets in the text.

The tokenizer is used on its own threads only; see `tokenizer_threads`. A text that cannot fit into
the context is refused before all of it is tokenised.
"""

import json
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from weakref import WeakKeyDictionary

from rheostat_engine.immutable import immutable
from rheostat_server import validation
from rheostat_server.errors import (
    InvalidValue,
    MissingField,
    NoChatTemplate,
    NoTokenizer,
    NotSupported,
    PromptTooLong,
)
from rheostat_server.limits import (
    CHAT_MESSAGES,
    DECODED_TOKEN_BYTES,
    ID_BYTES,
    PROMPT_TOKEN_BYTES,
    TEMPLATE_VARIABLE_BYTES,
    TEMPLATE_VARIABLES,
)
from rheostat_server.prompts.tokenizer import (
    ChatTemplateError,
    Offsets,
    Tokenizer,
    TooManyTokens,
    decode_with_offsets,
)
from rheostat_server.prompts.tokenizer_threads import TokenizerThreads
from rheostat_server.validation import field_path
from rheostat_wire.v1 import generation_service_pb2, types_pb2

_LOG = logging.getLogger(__name__)

PromptMessage = (
    generation_service_pb2.GenerateRequest
    | generation_service_pb2.TokenizeRequest
    | types_pb2.Prompt
)


@immutable(weakref_slot=True)
class PromptTokens:
    """A prompt for the engine."""

    token_ids: tuple[int, ...]
    source: str
    """The field of the message: "text", "token_ids" or "chat"."""
    text: str | None
    """The given, rendered or decoded text; None if it was not needed."""
    offsets: Offsets | None
    """Code points [start, end) of `text`, one per token; None if unknown."""


class Prompts:
    """Resolves the prompts of a model.

    Without a tokenizer, only token ids are accepted. `vocabulary` is the number of token ids, and
    `model_tokens` the context length.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, vocabulary: int, model_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._model_tokens = model_tokens
        self._decoded: WeakKeyDictionary[PromptTokens, PromptTokens] = WeakKeyDictionary()
        """Prompts of token ids, with their text and offsets, while a request refers to them."""
        self._threads = None if tokenizer is None else TokenizerThreads(tokenizer)

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be tokenised."""
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._tokenizer is not None and self._tokenizer.has_chat_template

    def close(self) -> None:
        """Ends the threads."""
        if self._threads is not None:
            self._threads.close()

    async def resolve(
        self, message: PromptMessage, *, with_text: bool, special: bool = True
    ) -> PromptTokens:
        """The tokens of a prompt.

        Args:
            message: has the prompt.
            with_text: whether token ids are decoded too.
            special: whether a text gets the usual special tokens.

        Raises:
            InvalidArgument: the prompt is malformed or too long.
            NoTokenizer, NoChatTemplate: this server cannot read this kind of prompt.
            NotSupported: `with_text`, and the tokenizer returns no offsets.
            QueueFull: too many texts wait to be tokenised.
        """
        kind = validation.required(message.WhichOneof("prompt"), "", "text, token_ids and chat")
        if kind == "token_ids":
            if len(message.token_ids.ids) > self._model_tokens:
                raise PromptTooLong(
                    f"the prompt has {len(message.token_ids.ids)} tokens; the context holds "
                    f"{self._model_tokens}",
                    field=kind,
                )
            ids = tuple(message.token_ids.ids)
            validation.token_ids(ids, self._vocabulary, "token_ids.ids")
            prompt = PromptTokens(ids, kind, None, None)
            if not with_text:
                return prompt
            self._require_threads(kind)
            return await self.decode(prompt)
        threads = self._require_threads(kind)
        if kind == "text":
            if not message.text:
                raise MissingField("the prompt is empty", field="text")
            text = message.text
        else:
            text = await self._render(threads, message.chat)
        size = self._check_length(text, kind)
        special, most = special and kind == "text", self._model_tokens
        try:
            encoded = await threads.run(
                size, lambda tokenizer: tokenizer.encode(text, special=special, most=most)
            )
        except TooManyTokens as error:
            raise PromptTooLong(
                f"the prompt has more than {most} tokens; the context holds {most}", field=kind
            ) from error
        if not encoded.token_ids:
            raise InvalidValue("the prompt has no tokens", field=kind)
        validation.token_ids(encoded.token_ids, self._vocabulary, kind)
        if with_text and encoded.offsets is None:
            raise NotSupported(
                "this model's tokenizer returns no offsets of tokens in the text; "
                "select positions instead",
                field=kind,
            )
        return PromptTokens(encoded.token_ids, kind, text, encoded.offsets)

    async def decode(self, prompt: PromptTokens) -> PromptTokens:
        """A prompt with its text and offsets, if there is a tokenizer."""
        threads, ids = self._threads, prompt.token_ids
        if prompt.text is not None or threads is None:
            return prompt
        if prompt not in self._decoded:
            text, offsets = await threads.run(
                DECODED_TOKEN_BYTES * len(ids),
                lambda tokenizer: decode_with_offsets(tokenizer, ids),
            )
            self._decoded[prompt] = replace(prompt, text=text, offsets=offsets)
        return self._decoded[prompt]

    def _check_length(self, text: str, field: str) -> int:
        """The number of bytes of a text.

        Raises:
            PromptTooLong: the text cannot fit into the context, however it is tokenised.
        """
        limit = PROMPT_TOKEN_BYTES * self._model_tokens
        size = len(text.encode(errors="surrogatepass"))
        if size > limit:
            raise PromptTooLong(
                f"the text has {size} bytes; a context of {self._model_tokens} tokens takes at "
                f"most {limit}",
                field=field,
            )
        return size

    def _require_threads(self, field: str) -> TokenizerThreads:
        if self._threads is None:
            raise NoTokenizer("this server has no tokenizer; send token_ids", field=field)
        return self._threads

    async def _render(self, threads: TokenizerThreads, chat: types_pb2.Chat) -> str:
        if not self.has_chat_template:
            raise NoChatTemplate(
                "this model has no chat template; send text or token_ids", field="chat"
            )
        messages, variables = _messages(chat), _variables(chat)
        parts = [part for message in chat.messages for part in (message.role, message.content)]
        size = self._check_length("".join(parts), "chat")
        continue_final = chat.continue_final_message
        if continue_final and chat.add_generation_prompt:
            raise InvalidValue(
                "cannot be combined with add_generation_prompt", field="chat.continue_final_message"
            )
        opens = not continue_final
        if chat.HasField("add_generation_prompt"):
            opens = chat.add_generation_prompt

        def render(tokenizer: Tokenizer) -> tuple[str, int | None]:
            return _render_checked(
                lambda messages: tokenizer.render(
                    messages,
                    add_generation_prompt=opens,
                    continue_final_message=continue_final,
                    variables=variables,
                ),
                messages,
            )

        try:
            text, omitted = await threads.run(size, render)
        except ChatTemplateError as error:
            _LOG.info("the chat template refuses a chat: %s", error)
            why = " ".join(str(error).split())[:_TEMPLATE_CHARACTERS]
            raise InvalidValue(
                f"the model's chat template refuses these messages: {why}", field="chat"
            ) from error
        if omitted is not None:
            raise InvalidValue(
                "the model's chat template omits messages of the role "
                f'"{messages[omitted]["role"][:_SHOWN_ROLE]}"; it is for roles such as "system", '
                '"user" and "assistant"',
                field=f"chat.messages[{omitted}].role",
            )
        return text


def _render_checked(
    render: Callable[[list[dict[str, str]]], str], messages: list[dict[str, str]]
) -> tuple[str, int | None]:
    """The text of a chat, and the index of the first message that the template omits, or None.

    Most templates write nothing for an unknown role, so its messages would be lost silently. A role
    is omitted if the text stays the same when a character is added to the role's messages.
    """
    text = render(messages)
    rare: dict[str, int] = {}
    for index, message in enumerate(messages):
        if message["role"] not in _COMMON_ROLES:
            rare.setdefault(message["role"], index)
    added = sum(message["role"] in rare for message in messages)
    if not rare or len(render(_extended(messages, rare))) >= len(text) + added:
        return text, None
    for role, index in [*rare.items()][:_TRIED_ROLES]:
        if render(_extended(messages, [role])) == text:
            return text, index
    return text, None


def _extended(messages: list[dict[str, str]], roles: Collection[str]) -> list[dict[str, str]]:
    """The messages, with one character added to the messages of some roles."""
    return [
        {**message, "content": message["content"] + "."} if message["role"] in roles else message
        for message in messages
    ]


def _messages(chat: types_pb2.Chat) -> list[dict[str, str]]:
    path = "chat.messages"
    if not chat.messages:
        raise MissingField("at least one message is required", field=path)
    validation.check_count(len(chat.messages), CHAT_MESSAGES, path, "messages")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise MissingField("a role is required", field=f"{path}[{index}].role")
        validation.text_bytes(message.role, ID_BYTES, f"{path}[{index}].role")
    return [{"role": message.role, "content": message.content} for message in chat.messages]


_COMMON_ROLES = frozenset({"user", "assistant"})
"""Roles that every template has, so they are not tried."""

_TRIED_ROLES = 8
"""Number of roles that are tried one by one. Each try renders the whole chat."""

_SHOWN_ROLE = 64
"""Characters of a role that an error shows."""

_TEMPLATE_CHARACTERS = 200
"""Characters of a template's own message that an error shows."""

_RESERVED_VARIABLES = frozenset(
    {
        "conversation",
        "messages",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "documents",
        "chat_template",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "self",
    }
)
"""Arguments of `apply_chat_template`, which clients must not set."""


def _variables(chat: types_pb2.Chat) -> dict[str, object]:
    path = field_path("chat", "template_variables")
    validation.check_count(len(chat.template_variables), TEMPLATE_VARIABLES, path, "variables")
    size = sum(len(name) + len(value) for name, value in chat.template_variables.items())
    validation.check_count(size, TEMPLATE_VARIABLE_BYTES, path, "characters of names and values")
    variables: dict[str, object] = {}
    for name, value in chat.template_variables.items():
        field = f"{path}[{name[:64]}]"
        if name in _RESERVED_VARIABLES:
            raise InvalidValue("this variable cannot be set", field=field)
        try:
            variables[name] = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidValue("is not a JSON value", field=field) from error
    return variables
