"""Builds request messages from the arguments of a caller.

Omitted arguments stay absent in the message, so that defaults are defined only in the protos.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Literal, SupportsIndex, TypeAlias, TypedDict, Unpack, cast, get_args

from rheostat._capture.captures import CaptureLike, captures_of
from rheostat._errors import invalid
from rheostat._fields import (
    UINT32,
    builds_message,
    did_you_mean,
    flag,
    token_id_list,
    utf8_text,
    whole_number,
    word,
)
from rheostat._prompts import Prompt, labels_to_wire, put_prompt
from rheostat._steering.rules import ProbesLike, RulesLike, probes_to_wire, rules_of
from rheostat._steering.steering import SteeringLike, interventions_of, steering_to_wire
from rheostat_wire.v1 import gain_pb2, generation_pb2, generation_service_pb2

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

WhenFull: TypeAlias = Literal["wait", "refuse"]
"""What happens to a request for whose steering the engine has too little room."""

_WHEN_FULL = {
    name: generation_service_pb2.WhenFull.Value(f"WHEN_FULL_{name.upper()}")
    for name in get_args(WhenFull)
}

OnControllerDisabled: TypeAlias = Literal["fail", "continue"]
"""What happens to a request whose controller is disabled."""

_ON_DISABLED = {
    name: gain_pb2.OnDisabled.Value(f"ON_DISABLED_{name.upper()}")
    for name in get_args(OnControllerDisabled)
}

_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "num_return_sequences": "n",
    "num_samples": "n",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "adapter": "lora",
    "vectors": "steering",
    "interventions": "steering",
}
"""Names of options in other libraries, and their names here."""


class GenerateOptions(TypedDict, total=False):
    """Arguments of generate, stream, session and explain besides the prompt.

    The server chooses values for omitted arguments. The defaults shown here are the server's.
    """

    steering: SteeringLike
    """Interventions, in the order in which they act, after server-wide steering. Default: none."""
    capture: CaptureLike
    """Rows to capture, and their destinations. Default: none."""
    probes: ProbesLike
    """Probes whose readings are sent: `Sample.signals`. Default: none; gates and rules bring their
    own."""
    rules: RulesLike
    """Actions that the server takes when conditions hold. Default: none."""
    controller: str | None
    """Name of a controller of the server (`ModelInfo.controller_names`). It computes the gains of
    the steering from the probes' readings. Default: none."""
    on_controller_disabled: OnControllerDisabled | None
    """If the server disables the controller while the request runs: "fail", which raises
    Refused, or "continue" with the last gains. Default: "fail"."""
    hold_back: int | None
    """Tokens of each running sample that the server holds back, so that a session or a watch that
    stops the sample withholds them. Default: 0."""
    max_tokens: int | None
    """Tokens per sample. Default: as many as the context length allows after the prompt."""
    temperature: float | None
    """0, which is greedy, or 0.01 to 2. Default: 1, the model's own distribution."""
    top_p: float | None
    """Above 0, at most 1. Default: 1."""
    top_k: int | None
    """Number of most likely tokens to sample from; 0: all. Default: 0."""
    min_p: float | None
    """Minimum probability relative to the most likely token, 0 to 1. Default: 0."""
    seed: int | None
    """Makes sampling repeatable. Default: none."""
    n: int | None
    """Number of samples; above 1 needs a temperature above 0. Default: 1."""
    stop: str | Sequence[str]
    """A sample ends before the first of these texts. Default: none."""
    stop_token_ids: Sequence[int]
    """A sample ends after the first of these tokens. Default: none."""
    min_tokens: int | None
    """The end token and stop tokens are not sampled before this many tokens. Default: 0."""
    logprobs: int | None
    """Log-probabilities of each generated token and of this many most likely tokens; 0: of the
    generated token alone. Default: none."""
    prompt_logprobs: int | None
    """As ``logprobs``, for the tokens of the prompt. Default: none."""
    repetition_penalty: float | None
    """Above 0; 1 changes nothing. Default: 1."""
    presence_penalty: float | None
    """-2 to 2. Default: 0."""
    frequency_penalty: float | None
    """-2 to 2. Default: 0."""
    ignore_eos: bool
    """Continue past the model's end token. Default: False."""
    request_id: str | None
    """1 to 128 of [A-Za-z0-9._:-], not that of a running request. Default: the server makes one."""
    with_baseline: bool
    """Whether to also run the request without its steering and rules, with the same sampling, and
    measure the divergence: `Generation.baseline` and `Generation.divergence`. Server-wide steering
    acts on both. Default: False."""
    lora: str | None
    """Name of a loaded adapter. Default: none."""
    labels: Mapping[str, str] | None
    """Up to 16 labels, by which subscriptions can select the request. Default: none."""
    when_full: WhenFull | None
    """If the engine has no room for the request's steering: "wait", no longer than the server's
    limit or the timeout, or "refuse", which raises ResourceExhausted with ``retry_after``. A
    request never runs unsteered. Default: "wait"."""


def check_options(
    method: str,
    options: Mapping[str, object],
    options_type: type = GenerateOptions,
    *,
    by_position: Sequence[object] = (),
    also: Sequence[str] = (),
) -> None:
    """Raise TypeError if an option is not in ``options_type``, or was given by position.

    ``also`` are further arguments of the method.
    """
    names = options_type.__annotations__
    if by_position:
        raise TypeError(
            f"{method}() takes its options by name only: write NAME={by_position[0]!r:.60}; the "
            f"names are {', '.join((*also, *names))}"
        )
    for name in options:
        if name not in names:
            hint = did_you_mean(name, names, _OTHER_NAMES)
            listed = hint or f"; rheostat.{options_type.__name__} has {', '.join(names)}"
            raise TypeError(f"{method}() has no option {name!r}{listed}")


_SAMPLING_NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "n", "logprobs",
    "prompt_logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Options that are fields of `Sampling` with the same name."""
_LEAST = {
    "top_k": 0, "max_tokens": 1, "min_tokens": 0, "seed": 0, "n": 1, "logprobs": 0,
    "prompt_logprobs": 0,
}  # fmt: skip
"""The least value of those that are whole numbers."""
_LARGEST_SEED = 2**63 - 1


@builds_message
def generate_request(
    prompt: Prompt, **options: Unpack[GenerateOptions]
) -> generation_service_pb2.GenerateRequest:
    """The message. Raises InvalidRequest for errors that can be found without the model."""
    request_id, lora = options.get("request_id"), options.get("lora")
    if request_id is not None and not (
        isinstance(request_id, str) and _REQUEST_ID.fullmatch(request_id)
    ):
        raise invalid("request_id", "a request id is 1 to 128 of [A-Za-z0-9._:-]")
    if lora == "":
        raise invalid("lora", "the adapter's name is empty")
    interventions = interventions_of(options.get("steering"))
    rules, hold_back = rules_of(options.get("rules")), options.get("hold_back")
    labels, when_full = options.get("labels"), options.get("when_full")
    request = generation_service_pb2.GenerateRequest(
        request_id=request_id or "",
        sampling=_sampling(options),
        steering=steering_to_wire(interventions),
        probes=probes_to_wire(interventions, options.get("probes"), rules),
        rules=[rule.to_wire(f"rules[{number}]") for number, rule in enumerate(rules)],
        captures=[spec.to_wire() for spec in captures_of(options.get("capture"))],
        lora_name="" if lora is None else utf8_text(lora, "lora", "an adapter's name"),
        with_baseline=flag(options.get("with_baseline"), "with_baseline", "with_baseline"),
        labels=None if labels is None else labels_to_wire(labels, "labels"),
        return_prompt_token_ids=True,
        when_full=None if when_full is None else word(when_full, _WHEN_FULL, "when_full"),
    )
    if hold_back is not None:
        request.hold_back = whole_number(hold_back, "hold_back", "a number of tokens", least=0)
    _put_controller(request, options)
    put_prompt(request, prompt)
    return request


def _put_controller(
    request: generation_service_pb2.GenerateRequest, options: GenerateOptions
) -> None:
    name, on_disabled = options.get("controller"), options.get("on_controller_disabled")
    if name is not None:
        request.controlled.controller_name = utf8_text(name, "controller", "a controller's name")
    if on_disabled is None:
        return
    if name is None:
        raise invalid("on_controller_disabled", "it needs a controller")
    request.controlled.on_disabled = word(on_disabled, _ON_DISABLED, "on_controller_disabled")


def _sampling(options: GenerateOptions) -> generation_pb2.Sampling | None:
    """The message; None if every value is a default."""
    stop = options.get("stop", ())
    if not isinstance(stop, Iterable):
        raise invalid("sampling.stop", f"stop is a text or a list of texts, not {stop!r}")
    message = generation_pb2.Sampling(
        stop=[
            utf8_text(text, f"sampling.stop[{number}]", "a stop text")
            for number, text in enumerate([stop] if isinstance(stop, str) else stop)
        ],
        stop_token_ids=token_id_list(
            options.get("stop_token_ids", ()), "sampling.stop_token_ids", "stop_token_ids"
        ),
        ignore_eos=flag(options.get("ignore_eos"), "sampling.ignore_eos", "ignore_eos"),
    )
    for name in _SAMPLING_NUMBERS:
        number = cast("float | None", options.get(name))
        if number is None:
            continue
        try:
            finite = math.isfinite(number)
            if finite:
                setattr(message, name, number)
        except (OverflowError, TypeError, ValueError):
            raise invalid(f"sampling.{name}", _misfit(name, number)) from None
        if not finite:
            raise invalid(f"sampling.{name}", f"{name} is not finite", "REASON_NON_FINITE")
    return message if message.ByteSize() else None


def _misfit(name: str, number: object) -> str:
    """Says which numbers an option takes, if its field cannot hold ``number``."""
    least = _LEAST.get(name)
    if least is None:
        return f"{name} is a number, not {number!r}"
    if isinstance(number, bool) or not isinstance(number, SupportsIndex):
        return f"{name} is a whole number, not {number!r}"
    if (value := index(number)) < least:
        return f"{name} must be at least {least}, not {value}"
    return f"{name} must be at most {_LARGEST_SEED if name == 'seed' else UINT32}, not {value}"
