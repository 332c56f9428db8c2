"""Hostile calls of the capture surface, made by chance from a seed: see `hostile`."""

import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

import rheostat
from rheostat import generated, positions, token_ids, window
from rheostat._capture.captures import Overload
from rheostat._client.requests import generate_request
from rheostat._selectors import SelectorLike
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, generation_service_pb2

from .hostile import Attempt, serialized, spoilt

SUBSCRIBE = "CaptureService/Subscribe"
ARTIFACTS = "CaptureService/GetArtifacts"
SINKS = "CaptureService/ListSinks"
GENERATE = "GenerationService/Generate"
EXPLAIN = "GenerationService/Explain"

KEPT_REQUESTS = tuple(f"rows-{number}" for number in range(5))
"""Requests whose artifacts are asked for. The test makes them before the hostile calls."""

SHARES = {SUBSCRIBE: 45, GENERATE: 38, EXPLAIN: 10, ARTIFACTS: 5, SINKS: 2}
"""How often each rpc is called, in percent."""

_SELECTORS: list[SelectorLike] = [
    None,
    "prompt",
    "generated",
    positions(0, -1),
    window(1, 3),
    generated(0, 2),
    "all" - token_ids(5, 282, 300),
    token_ids(*range(200, 400)) - window(-1),
]
_ENCODINGS: list[dict[str, Any]] = [
    {},
    {},
    {"encoding": "full8"},
    {"encoding": "lz4_planes"},
    {"encoding": "rp8", "kept": 16, "seed": 7},
    {"encoding": "topk8", "kept": 9},
]
_PROMPTS: list[Any] = ["My day was", "day after day", [0, 790, 593, 282], [5] * 300]
_OVERLOADS: list[Overload | None] = [None, "fail", "drop_oldest", "drop_newest", "spill"]


def attempts(seed: int, count: int) -> Iterator[Attempt]:
    """Calls; equal seeds give equal ones."""
    rng = random.Random(seed)
    methods = rng.choices(list(SHARES), weights=list(SHARES.values()), k=count)
    for number, method in enumerate(methods):
        parts = list(_messages(rng, method, number))
        bad = rng.randrange(len(parts))
        messages = [spoilt(rng, p) if i == bad else serialized(p) for i, p in enumerate(parts)]
        if len(messages) > 1 and rng.random() < 0.1:
            rng.shuffle(messages)
        vanishes = rng.random() < (0.2 if method == SUBSCRIBE else 0.02)
        yield Attempt(method, messages, vanishes)


def _messages(rng: random.Random, method: str, number: int) -> Iterator[Message]:
    if method == SUBSCRIBE:
        yield from _subscription(rng, number)
    elif method == GENERATE:
        yield _request(rng, number)
    elif method == EXPLAIN:
        yield generation_service_pb2.ExplainRequest(request=_request(rng, number))
    elif method == ARTIFACTS:
        sink = rng.choice(["", "disk", "none"])
        name = rng.choice(KEPT_REQUESTS)
        yield capture_service_pb2.GetArtifactsRequest(request_id=name, sink_name=sink)
    else:
        yield capture_service_pb2.ListSinksRequest()


def _capture(rng: random.Random, to: rheostat.Sink | str | None = None) -> rheostat.Capture:
    return rheostat.Capture(
        rng.choice(["resid_post", "resid_pre", ["resid_mid", "attn_out"], "mlp_out"]),
        layers=rng.choice(["all", [1], [0, 5], [2, 3]]),
        where=rng.choice(_SELECTORS),
        to=to,
        overload=None if isinstance(to, str) else rng.choice(_OVERLOADS),
        **rng.choice(_ENCODINGS),
    )


def _request(rng: random.Random, number: int) -> generation_service_pb2.GenerateRequest:
    targets = [None, None, rheostat.Sink("disk", tag=rng.choice(["a", "b"])), "nobody"]
    captures = [_capture(rng, rng.choice(targets)) for _ in range(rng.choice([1, 1, 1, 2]))]
    return generate_request(
        rng.choice(_PROMPTS),
        capture=captures,
        max_tokens=rng.randint(1, 2),
        n=rng.choice([1, 1, 1, 2]),
        request_id=rng.choice([None, f"rows-{number}", f"rows-{number % 50}"]),
        labels={"team": rng.choice(["red", "blue"])},
        with_baseline=rng.random() < 0.05,
        when_full=rng.choice([None, "wait", "refuse"]),
    )


def _subscription(rng: random.Random, number: int) -> Iterator[Message]:
    kind = capture_service_pb2.SubscribeRequest
    first = kind()
    request_message = first.open
    if rng.random() < 0.15:
        request_message.resume.subscription_id = rng.choice(["", "nobody", "0" * 32])
        request_message.resume.after_sequence = rng.choice([0, 1, 2**63])
    else:
        which = rng.randrange(3)
        if which == 0:
            request_message.filter.every.SetInParent()
        elif which == 1:
            request_message.filter.labels.labels["team"] = rng.choice(["red", "green"])
        else:
            names = [f"rows-{number + ahead}" for ahead in range(3)]
            request_message.filter.requests.request_ids.extend(names)
        for _ in range(rng.choice([0, 1, 1, 2])):
            spec = _capture(rng).to_wire()
            spec.ClearField("inline")
            spec.ClearField("overload")
            request_message.captures.append(spec)
        request_message.buffer_bytes = rng.choice([1, 1 << 10, 1 << 16, 1 << 20])
        if rng.random() < 0.7:
            request_message.overload = rng.choice(capture_pb2.Overload.values()[1:])
    request_message.credit_bytes = rng.choice([0, 1, 1 << 10, 1 << 30])
    yield first
    for _ in range(rng.choice([0, 0, 1, 3])):
        if rng.random() < 0.5:
            yield kind(credit=capture_service_pb2.Credit(bytes=rng.choice([1, 1 << 20])))
        else:
            yield kind(ack=capture_service_pb2.Ack(sequence=rng.choice([0, 1, 2])))
