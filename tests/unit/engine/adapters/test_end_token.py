"""An engine looks up the end token of its tokenizer once."""

from types import SimpleNamespace

from vllm.renderers.base import BaseRenderer

from rheostat_engine.adapters.end_token import keep_end_token

RELIES = "rheostat_engine.adapters.end_token relies on it"


class Tokenizer:
    """Counts look-ups."""

    def __init__(self) -> None:
        self.looks = 0

    @property
    def eos_token_id(self) -> int:
        self.looks += 1
        return 7


class Renderer(BaseRenderer):
    """vLLM's own class, without a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def render_messages(self, *_: object, **__: object) -> None:
        """Not used here."""


def test_the_end_token_is_looked_up_once() -> None:
    tokenizer = Tokenizer()
    llm = SimpleNamespace(renderer=Renderer(tokenizer))
    keep_end_token(llm)
    assert [llm.renderer.get_eos_token_id() for _ in range(3)] == [7, 7, 7], RELIES
    assert tokenizer.looks == 1
