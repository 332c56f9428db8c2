"""Scenarios of a hostile client: calls that are expensive, long, many, abandoned or invalid.

Each scenario is one way in which a client could delay others. Its calls depend on a random
generator and a size. Size 1 is the most that any version of the contract allowed; a soak uses
smaller sizes. A server may refuse any of the calls, but no other client may notice them.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from google.protobuf.message import DecodeError

from rheostat_bench import abuse, abuse_captures, abuse_control, abuse_tracing
from rheostat_bench.abuse import Target
from rheostat_bench.calls import Call
from rheostat_wire.v1 import (
    generation_service_pb2,
    lens_service_pb2,
    run_service_pb2,
)

_Make: TypeAlias = Callable[[Target, random.Random, float], Call]


@dataclass(frozen=True)
class Scenario:
    """One kind of hostile behaviour."""

    name: str
    """Its name in the table."""
    make: _Make
    """Makes a call of a given size, above 0 and at most 1."""
    at_once: int = 1
    """The number of concurrent calls."""
    variants: int = 16
    """The number of different calls, which are sent in turn."""
    pause: float = 0.0
    """Seconds between two calls."""


_Prompted: TypeAlias = (
    lens_service_pb2.LensRequest
    | lens_service_pb2.AttributeRequest
    | run_service_pb2.CaptureRunRequest
)

_PROMPTS: Mapping[str, Callable[[bytes], _Prompted]] = {
    abuse_tracing.LENS: lens_service_pb2.LensRequest.FromString,
    abuse_tracing.ATTRIBUTE: lens_service_pb2.AttributeRequest.FromString,
    abuse_tracing.CAPTURE_RUN: run_service_pb2.CaptureRunRequest.FromString,
}
"""Methods that run the prompt of their request once."""


def _prompted(call: Call) -> generation_service_pb2.GenerateRequest:
    """A request that runs the prompt of a call of `_PROMPTS`."""
    ids = _PROMPTS[call.method](call.messages[0]).prompt.token_ids
    return generation_service_pb2.GenerateRequest(token_ids=ids, sampling=abuse.sampling(1))


SCENARIOS: Sequence[Scenario] = (
    Scenario("ordinary requests", abuse.ordinary, at_once=4),
    Scenario("64 plain samples", abuse.plain_samples, pause=0.5, variants=1),
    Scenario("long plain prompts", abuse.plain_long_prompts, variants=4),
    Scenario("fragmented captures", abuse_captures.fragmented, variants=8),
    Scenario("fragmented steering", abuse.fragmented_steering, variants=4),
    Scenario("sessions with updates", abuse.session, at_once=2, variants=4),
    Scenario("long stop texts", abuse.stop_texts, variants=3),
    Scenario("long texts to tokenize", abuse.tokenize, at_once=2, variants=6),
    Scenario("long prompts to generate from", abuse.long_prompt, at_once=2, variants=4),
    Scenario("expensive subscriptions", abuse_captures.expensive_subscription, 2, 2),
    Scenario("fragmented subscriptions", abuse_captures.fragmented_subscription, 2, 4),
    Scenario("observers that join late", abuse_captures.late_observer, at_once=6, variants=16),
    Scenario("a tag for each request", abuse_captures.new_tag, at_once=4, variants=2000),
    Scenario("sink collisions", abuse_captures.sink_collision, at_once=4, variants=64),
    Scenario("log-probabilities unread", abuse.unread_logprobs, variants=2),
    Scenario("inline rows unread", abuse_captures.unread_rows, at_once=4, variants=8),
    Scenario("subscriptions unread", abuse_captures.unread_subscription, at_once=4, variants=8),
    Scenario("GetStats storm", abuse_control.stats, at_once=16, variants=1),
    Scenario("GetModel storm", abuse_control.model, at_once=16, variants=1),
    Scenario("Explain storm", abuse.explain, at_once=8, variants=4),
    Scenario("lists and artifacts storm", abuse_control.lists, at_once=16, variants=16),
    Scenario("new vectors", abuse.new_vectors, at_once=2, variants=8),
    Scenario("contrasts", abuse_control.contrast, at_once=2, variants=2),
    Scenario("server-wide steering", abuse_control.set_global, at_once=2, variants=4),
    Scenario("idle uploads", abuse_control.idle_upload, at_once=16, variants=1),
    Scenario("many names", abuse_control.new_name, at_once=4, variants=4000),
    Scenario("many calls at once", abuse.many_calls, at_once=256, variants=8),
    Scenario("many connections", abuse.new_connection, at_once=16, variants=1),
    Scenario("unknown fields", abuse_control.unknown_fields, at_once=8, variants=8),
    Scenario("tiny fields", abuse_control.tiny_fields, at_once=4, variants=8),
    Scenario("labels", abuse.labels, at_once=8, variants=4),
    Scenario("large and deep messages", abuse_control.large_message, at_once=4, variants=6),
    Scenario("malformed messages", abuse_control.malformed, at_once=8, variants=64),
    Scenario("cancelled at once", abuse.cancelled, at_once=16, variants=8),
    Scenario("runs", abuse_captures.run, at_once=2, variants=256),
    Scenario("baselines", abuse.baseline, at_once=2, variants=4),
    Scenario("sweeps in the background", abuse_tracing.background_sweep, at_once=4, variants=4),
    Scenario("sweeps like other requests", abuse_tracing.hasty_sweep, at_once=4, variants=4),
    Scenario("lenses", abuse_tracing.lens, at_once=16, variants=8),
    Scenario("gates", abuse_tracing.gates, at_once=2, variants=4),
    Scenario("idle uploads of runs", abuse_tracing.idle_run, at_once=16, variants=4),
    Scenario("large uploads of runs", abuse_tracing.large_run, at_once=4, variants=4),
    Scenario("runs that are deleted in use", abuse_tracing.torn_run, at_once=8, variants=64),
)
"""All scenarios."""


def _generation(call: Call) -> generation_service_pb2.GenerateRequest | None:
    """The request of a call that generates; None if the call is no such call, or is invalid."""
    message = call.messages[0]
    try:
        if call.method == abuse.SESSION:
            request = generation_service_pb2.SessionRequest.FromString(message).start
        elif call.method == abuse.GENERATE:
            request = generation_service_pb2.GenerateRequest.FromString(message)
        elif call.method in _PROMPTS:
            return _prompted(call)
        else:
            return None
    except DecodeError:
        return None
    return request if request.sampling.max_tokens else None


def honest(call: Call, target: Target, rng: random.Random) -> Call:
    """Makes the work that a call asks of the engine, and nothing else of the call.

    A generation keeps the length of its prompt, its tokens and samples, and how long its client
    reads. Samples share a prompt through the prefix cache, also where those of the call could not.
    A lens, or a run that is stored, becomes a request for one token. A call that runs no prompt
    becomes a call that only takes time, and so does a sweep, of which nobody knows how far it gets.
    """
    request = _generation(call)
    if request is None:
        return Call(
            "CaptureService/ListSinks", (b"",), reads=0 if call.holds else None, holds=call.holds
        )
    plain = generation_service_pb2.GenerateRequest(
        sampling=abuse.sampling(request.sampling.max_tokens, max(1, request.sampling.n))
    )
    length = len(request.token_ids.ids)
    if length == 0:
        plain.text = request.text
    elif length < target.context:
        plain.token_ids.CopyFrom(abuse.prompt(rng, target, length))
    else:
        plain.token_ids.CopyFrom(request.token_ids)
    if request.with_baseline:
        plain.sampling.n *= 2
    return replace(
        call, method=abuse.GENERATE, messages=(plain.SerializeToString(),), half_closes=True
    )


def prepared(name: str, target: Target, seed: int, size: float = 1.0) -> list[Call]:
    """Makes the calls of a scenario, serialized, the largest first.

    Raises:
        KeyError: there is no scenario with this name.
    """
    one = {scenario.name: scenario for scenario in SCENARIOS}[name]
    rng = random.Random(f"{name} {seed}")
    calls = [one.make(target, rng, size) for _ in range(one.variants)]
    return sorted(calls, key=lambda call: call.nbytes, reverse=True)
