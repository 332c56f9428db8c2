"""A tokenizer of one token per character."""

from collections.abc import Mapping, Sequence

from rheostat_server.prompts.tokenizer import ChatTemplateError, Encoded, TooManyTokens

BOS = 1


class CharTokenizer:
    """Each character of 7-bit ASCII is its own token; BOS stands before a text."""

    has_chat_template = True

    def twin(self) -> "CharTokenizer":
        return self

    def encode(self, text: str, *, special: bool, most: int) -> Encoded:
        if len(text) + special > most:
            raise TooManyTokens
        ids = [ord(char) for char in text]
        offsets = [(i, i + 1) for i in range(len(text))]
        if special:
            return Encoded((BOS, *ids), ((0, 0), *offsets))
        return Encoded(tuple(ids), tuple(offsets))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("" if token == BOS else chr(token) for token in token_ids)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> str:
        if any(message["role"] == "nobody" for message in messages):
            raise ChatTemplateError("nobody speaks")
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        lines += [f"{name}={value}" for name, value in variables.items()]
        return "\n".join(lines) + ("\n>" if add_generation_prompt else "")
