"""vLLM decodes generated tokens after the last tokens of their prompt, to the same text."""

import random
from collections.abc import Iterator, Sequence

import pytest
import tokenizers
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, TokenizersBackend
from vllm import SamplingParams
from vllm.v1.engine import detokenizer as vllm_detokenizer
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer

from rheostat_engine.adapters.detokenizer import decode_last_tokens
from rheostat_server.engine.vllm_engine import DEMO_MODEL

from .test_logprobs import asked

RELIES = "rheostat_engine.adapters.detokenizer relies on it"


@pytest.fixture(autouse=True)
def _prepared() -> Iterator[None]:
    stock = vllm_detokenizer.FastIncrementalDetokenizer
    assert stock is FastIncrementalDetokenizer, RELIES
    decode_last_tokens()
    yield
    vllm_detokenizer.FastIncrementalDetokenizer = stock


def bundled() -> TokenizersBackend:
    """Tokens are bytes, so that some hold a part of a character."""
    found = AutoTokenizer.from_pretrained(DEMO_MODEL)
    assert isinstance(found, TokenizersBackend), RELIES
    return found


def spaced() -> TokenizersBackend:
    """Tokens begin with a space, which is left out at the beginning of a text."""
    words = ["<unk>", "<s>", *(f"\u2581w{number}" for number in range(200))]
    made = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, "<unk>"))
    made.decoder = decoders.Metaspace()
    return TokenizersBackend(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


def fallback() -> TokenizersBackend:
    """Characters that the vocabulary lacks are bytes, and only whole runs of these are decoded."""
    words = ["<unk>", "<s>", "\u2581w", *(f"<0x{byte:02X}>" for byte in range(256))]
    ids = {word: id for id, word in enumerate(words)}
    made = Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return TokenizersBackend(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


def text(detokenizer: IncrementalDetokenizer, generated: Sequence[int]) -> str:
    for token in generated:
        detokenizer.update([token], False)
    return detokenizer.get_next_output_text(finished=True, delta=True)


@pytest.mark.parametrize("make", [bundled, spaced])
def test_generated_text_is_that_of_stock_vllm(make) -> None:
    tokenizer, rng = make(), random.Random(0)
    vocabulary = len(tokenizer)
    for length in (1, 3, 63, 64, 65, 300, 2000):
        for skip in (True, False):
            params = SamplingParams(max_tokens=50, skip_special_tokens=skip)
            prompt = [rng.randrange(vocabulary) for _ in range(length)]
            generated = [rng.randrange(vocabulary) for _ in range(50)]
            ours = IncrementalDetokenizer.from_new_request(tokenizer, asked(prompt, params))
            assert type(ours) is not FastIncrementalDetokenizer, RELIES
            stock = FastIncrementalDetokenizer(tokenizer, asked(prompt, params))
            assert text(ours, generated) == text(stock, generated)


@pytest.mark.parametrize("character", ["\u00e9", "\u1000", "\U0001f600"])
@pytest.mark.parametrize("count", [16, 22, 33, 43, 400])
def test_a_prompt_that_ends_with_a_run_of_bytes_is_the_same_prompt(character, count) -> None:
    """The last tokens of the prompt may begin within a character, which spoils the whole run."""
    tokenizer = fallback()
    word = 2
    some = [word + 1 + byte for byte in character.encode()]
    prompt, generated = [word, *some * count], [*some * 2, word]
    params = SamplingParams(max_tokens=50)
    ours = IncrementalDetokenizer.from_new_request(tokenizer, asked(prompt, params))
    assert text(ours, generated) == character * 2 + " w"


def test_a_prompt_that_ends_without_text_is_the_same_prompt() -> None:
    tokenizer = spaced()
    prompt = [7, *[tokenizer.bos_token_id] * 1000]
    request = asked(prompt, SamplingParams(max_tokens=2))
    ours = IncrementalDetokenizer.from_new_request(tokenizer, request)
    assert text(ours, [8, 9]) == " w6 w7"
    assert request.prompt_token_ids == prompt


def test_the_stream_gets_few_tokens_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    stock = tokenizers.decoders.DecodeStream

    def counting(ids: Sequence[int] = (), **options: object) -> object:
        given.append(len(ids))
        return stock(ids=ids, **options)

    monkeypatch.setattr(tokenizers.decoders, "DecodeStream", counting)
    params = SamplingParams(max_tokens=2)
    IncrementalDetokenizer.from_new_request(bundled(), asked([5, 6] * 8000, params))
    assert len(given) == 1, RELIES
    assert given[0] <= 64
