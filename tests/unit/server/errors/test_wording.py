"""Refusals read as sentences by themselves: they name what is wrong, its value, and what to do."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from rheostat_server import errors
from rheostat_server.prompts.prompts import Prompts
from rheostat_wire.v1 import generation_pb2, selector_pb2, types_pb2

from ..admissions import admission_context, admitted
from ..characters import CharTokenizer
from ..fakes import INFO, SITES, VOCABULARY
from ..messages import add, capture, request, selector, site_set


def message_of(refused, at=None) -> str:
    with pytest.raises(errors.RheostatError) as caught:
        admitted(refused, at)
    return caught.value.message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", 5, "temperature must be 0, which is greedy, or 0.01 to 2, not 5"),
        ("temperature", 0.001, "temperature must be 0, which is greedy, or 0.01 to 2, not 0.001"),
        ("top_p", 2, "top_p must be above 0 and at most 1, not 2"),
        ("top_p", 0, "top_p must be above 0 and at most 1, not 0"),
        ("min_p", -0.5, "min_p must be 0 to 1, not -0.5"),
        ("presence_penalty", 3, "presence_penalty must be -2 to 2, not 3"),
        ("repetition_penalty", 0, "repetition_penalty must be above 0, not 0"),
        ("n", 65, "n must be 1 to 64, not 65"),
        ("min_tokens", 9, "min_tokens must be at most max_tokens, which is 2, not 9"),
        ("seed", 2**63, f"seed must be below 2^63, not {2**63}"),
        ("logprobs", 9, "logprobs must be at most 5, not 9"),
    ],
)
def test_a_number_outside_its_limits_is_named_with_them(field, value, message) -> None:
    sampling = generation_pb2.Sampling(max_tokens=2, **{field: value})
    assert message_of(request(sampling=sampling)) == message


def test_max_tokens_of_zero_is_named() -> None:
    sampling = generation_pb2.Sampling(max_tokens=0)
    assert message_of(request(sampling=sampling)) == "max_tokens must be at least 1, not 0"


@pytest.mark.parametrize(
    ("text", "occurrence", "message"),
    [
        ("cow", None, 'the prompt does not hold the text "cow"'),
        ("a", None, 'the prompt holds the text "a" 3 times; choose an occurrence, 0 to 2'),
        ("a", 3, 'the prompt holds the text "a" 3 times; occurrences are 0 to 2, not 3'),
        ("x" * 99, None, f'the prompt does not hold the text "{"x" * 40}..."'),
    ],
)
def test_a_span_is_named_by_its_text(text, occurrence, message) -> None:
    one = selector_pb2.Range(text=selector_pb2.Span(text=text, occurrence=occurrence))
    assert message_of(request(text="a banal", steer=[add(where=selector(one))])) == message


def test_sites_that_are_not_served_are_named_in_ranges() -> None:
    sites = replace(SITES, num_layers=36)
    everywhere = capture(site_set(types_pb2.POINT_ROUTER_LOGITS))
    message = message_of(request(captures=[everywhere]), admission_context(sites))
    assert message.startswith("ToyForCausalLM does not serve router_logits 0-35: ")


class DeafTokenizer(CharTokenizer):
    """A template that ignores roles that it does not know, as most templates of models do."""

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> str:
        return super().render(
            [one for one in messages if one["role"] in ("system", "user", "assistant")],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )


def chat(*roles: str):
    messages = [types_pb2.ChatMessage(role=role, content="hi") for role in roles]
    return request(chat=types_pb2.Chat(messages=messages))


def test_a_message_that_the_chat_template_leaves_out_is_refused() -> None:
    prompts = Prompts(DeafTokenizer(), vocabulary=VOCABULARY, model_tokens=INFO.model_tokens)
    at = replace(admission_context(), prompts=prompts)
    for roles in (("usr",), ("user", "usr"), ("system", "usr", "assistant")):
        with pytest.raises(errors.InvalidValue) as caught:
            admitted(chat(*roles), at)
        assert caught.value.message == (
            'the model\'s chat template omits messages of the role "usr"; it is for roles '
            'such as "system", "user" and "assistant"'
        )
        assert caught.value.field == f"chat.messages[{roles.index('usr')}].role"
    assert admitted(chat("system", "user", "assistant"), at).prompt.text.startswith("system: hi")


def test_what_a_chat_template_says_is_passed_on() -> None:
    assert message_of(chat("nobody")) == (
        "the model's chat template refuses these messages: nobody speaks"
    )
