"""Hostile calls that generate: long, expensive, many, abandoned. See `scenarios`.

Every function makes one call of a given size; 1 is as much as the contract ever allowed.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from rheostat_bench.calls import Call
from rheostat_wire.v1 import (
    generation_pb2,
    generation_service_pb2,
    selector_pb2,
    steering_pb2,
    tensor_pb2,
    types_pb2,
    vector_pb2,
)

GENERATE = "GenerationService/Generate"
SESSION = "GenerationService/Session"
EXPLAIN = "GenerationService/Explain"
TOKENIZE = "GenerationService/Tokenize"

POINTS = (
    types_pb2.POINT_RESID_PRE,
    types_pb2.POINT_RESID_MID,
    types_pb2.POINT_RESID_POST,
    types_pb2.POINT_ATTN_OUT,
    types_pb2.POINT_MLP_OUT,
)
MIB = 1 << 20
_ALWAYS_TWO_TOKENS = (5, 6)
"""Two tokens that every vocabulary has."""


class Target(NamedTuple):
    """What hostile calls must fit to get far."""

    layers: int
    width: int
    vocabulary: int
    context: int
    """Tokens of prompt and generation together."""
    sink: str
    """A sink's name."""


def count(size: float, most: int, least: int = 1) -> int:
    """A number that grows with the size."""
    return max(least, round(size * most))


def sites(*points: types_pb2.Point.ValueType, layers: Sequence[int] | None = None) -> Any:
    """Points at some layers; None: at all."""
    if layers is None:
        return types_pb2.SiteSet(points=points, all=types_pb2.AllLayers())
    return types_pb2.SiteSet(points=points, list=types_pb2.LayerList(layers=layers))


def every_other(first: int, windows: int) -> selector_pb2.Selector:
    """Every other generated token, as so many windows of one token, from `first` on."""
    include = [
        selector_pb2.Range(
            generated=selector_pb2.GeneratedWindow(start=first + 2 * i, end=first + 2 * i + 1)
        )
        for i in range(windows)
    ]
    return selector_pb2.Selector(include=include)


def add(
    rng: random.Random, target: Target, where: selector_pb2.Selector | None, rows: int = 1
) -> steering_pb2.Intervention:
    """Adds a vector that nobody has seen, at the middle layer or, with more rows, from layer 0."""
    layers = [target.layers // 2] if rows == 1 else range(rows)
    vector = tensor_pb2.Tensor(
        dtype=tensor_pb2.DTYPE_FLOAT32,
        shape=[rows, target.width],
        encoding=tensor_pb2.ENCODING_RAW,
        # Zero exponents and small mantissas: finite, tiny numbers, so that no text changes.
        inline=b"".join(rng.randbytes(2) + b"\x00\x2f" for _ in range(rows * target.width)),
    )
    act = steering_pb2.Intervention(
        sites=sites(types_pb2.POINT_RESID_POST, layers=list(layers)),
        add=steering_pb2.Add(vector=vector_pb2.VectorRef(inline=vector)),
    )
    if where is not None:
        act.where.CopyFrom(where)
    return act


def sampling(tokens: int, samples: int = 1, **more: Any) -> generation_pb2.Sampling:
    """So many tokens of so many samples, past the model's end token."""
    heat = {"temperature": 1.0} if samples > 1 else {"temperature": 0.0}
    return generation_pb2.Sampling(
        max_tokens=tokens, n=samples, ignore_eos=True, **{**heat, **more}
    )


def prompt(rng: random.Random, target: Target, length: int) -> types_pb2.TokenIds:
    """A prompt that no cache has seen."""
    return types_pb2.TokenIds(ids=[rng.randrange(5, target.vocabulary) for _ in range(length)])


def ordinary(target: Target, rng: random.Random, size: float) -> Call:
    """A steered request whose rows are captured, as anybody makes it."""
    request = generation_service_pb2.GenerateRequest(
        text=rng.choice(["My day was", "The Eiffel Tower is in", "Once there was a boat"]),
        sampling=sampling(rng.randrange(2, 32), logprobs=1, stop=["\n\n"]),
        labels={"team": "red"},
    )
    request.steering.interventions.append(add(rng, target, None))
    capture = request.captures.add()
    capture.sites.CopyFrom(sites(types_pb2.POINT_RESID_POST, layers=[target.layers // 2]))
    capture.inline.SetInParent()
    return Call(GENERATE, (request.SerializeToString(),))


def plain_samples(target: Target, rng: random.Random, size: float) -> Call:
    """An ordinary request of 64 samples: what a full batch costs by itself."""
    request = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, 8), sampling=sampling(100, count(size, 64))
    )
    return Call(GENERATE, (request.SerializeToString(),))


def plain_long_prompts(target: Target, rng: random.Random, size: float) -> Call:
    """64 plain samples of a prompt that fills the context, cancelled after a while."""
    request = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, count(size, target.context - 64, 8)),
        sampling=sampling(32, count(size, 64)),
    )
    return Call(GENERATE, (request.SerializeToString(),), reads=2, holds=0.5)


def fragmented_steering(target: Target, rng: random.Random, size: float) -> Call:
    """64 samples, steered at every other token of a long prompt, cancelled after a while."""
    length = count(size * rng.choice([1.0, 0.25, 0.05]), target.context - 64, 8)
    ids = [_ALWAYS_TWO_TOKENS[i % 2] for i in range(length)]
    only = selector_pb2.Range(token_ids=types_pb2.TokenIds(ids=[_ALWAYS_TWO_TOKENS[0]]))
    request = generation_service_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=ids), sampling=sampling(32, count(size, 64))
    )
    where = selector_pb2.Selector(include=[only])
    request.steering.interventions.append(add(rng, target, where))
    return Call(GENERATE, (request.SerializeToString(),), reads=2, holds=0.5)


def session(target: Target, rng: random.Random, size: float) -> Call:
    """A session of 32 samples whose steering is replaced over and over."""
    kind = generation_service_pb2.SessionRequest
    start = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, 16), sampling=sampling(200, count(size, 32))
    )
    messages = [kind(start=start)]
    windows = count(size * rng.choice([1.0, 0.1]), 90)
    for update in range(1, count(size, 32) + 1):
        where = every_other(rng.randrange(16), windows)
        steering = steering_pb2.Steering(interventions=[add(rng, target, where)])
        messages.append(kind(update_id=update, steering=steering))
    sent = tuple(message.SerializeToString() for message in messages)
    return Call(SESSION, sent, pause=0.02, reads=count(size, 400), holds=0.1)


def stop_texts(target: Target, rng: random.Random, size: float) -> Call:
    """64 samples, each with stop texts of megabytes, or with as many short ones as there can be."""
    long = rng.random() < 0.7
    texts = ["x" * count(size, 15 * MIB)] if long else [f"{i:03d}" * 80 for i in range(16)]
    request = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, 8), sampling=sampling(64, count(size, 64), stop=texts)
    )
    return Call(GENERATE, (request.SerializeToString(),), reads=8, holds=1.0)


def tokenize(target: Target, rng: random.Random, size: float) -> Call:
    """A text, a conversation or token ids as long as a message can be."""
    request = generation_service_pb2.TokenizeRequest()
    which = rng.randrange(3)
    if which == 0:
        request.text = _text(count(size, 64 * target.context))
    elif which == 1:
        message = request.chat.messages.add()
        message.role, message.content = "user", _text(count(size, 64 * target.context))
    else:
        request.token_ids.ids.extend([5] * count(size, 4 * MIB))
    return Call(TOKENIZE, (request.SerializeToString(),))


def long_prompt(target: Target, rng: random.Random, size: float) -> Call:
    """A prompt that is far too long, as text, token ids or with log-probabilities of all of it."""
    request = generation_service_pb2.GenerateRequest(sampling=sampling(1))
    which = rng.randrange(3)
    if which == 0:
        request.text = _text(count(size, 60 * target.context))
    elif which == 1:
        request.token_ids.ids.extend([5] * count(size, 3 * MIB))
    else:
        request.token_ids.CopyFrom(prompt(rng, target, count(size, 2000)))
        request.sampling.prompt_logprobs = 20
    return Call(GENERATE, (request.SerializeToString(),))


def _text(length: int) -> str:
    """A text with a token for nearly every byte."""
    return ("8a$Q \n" * (length // 6 + 1))[:length]


def unread_logprobs(target: Target, rng: random.Random, size: float) -> Call:
    """64 samples with 20 log-probabilities per token, of which nothing is read."""
    request = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, 8),
        sampling=sampling(count(size, 2000), count(size, 64), logprobs=20),
    )
    return Call(GENERATE, (request.SerializeToString(),), reads=1, holds=6.0 * size)


def explain(target: Target, rng: random.Random, size: float) -> Call:
    """A request with as much steering as there can be, to be explained."""
    request = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, count(size, 2000)), sampling=sampling(4000)
    )
    for _ in range(4):
        where = every_other(rng.randrange(10), count(size, 1000))
        request.steering.interventions.append(add(rng, target, where, rows=target.layers))
    message = generation_service_pb2.ExplainRequest(request=request)
    return Call(EXPLAIN, (message.SerializeToString(),))


def new_vectors(target: Target, rng: random.Random, size: float) -> Call:
    """A request that brings as many vectors as there can be, all of them new."""
    request = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, 4), sampling=sampling(2)
    )
    for _ in range(count(size, 64)):
        request.steering.interventions.append(add(rng, target, None, rows=target.layers))
    return Call(GENERATE, (request.SerializeToString(),))


def many_calls(target: Target, rng: random.Random, size: float) -> Call:
    """A request of 2 MiB that does little, of which hundreds come at once."""
    request = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, 4), sampling=sampling(2)
    )
    request.sampling.stop.append("y" * count(size, 2 * MIB))
    return Call(GENERATE, (request.SerializeToString(),))


def new_connection(target: Target, rng: random.Random, size: float) -> Call:
    """One token over a connection of its own."""
    request = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, 4), sampling=sampling(1)
    )
    return Call(GENERATE, (request.SerializeToString(),), own_connection=True)


def labels(target: Target, rng: random.Random, size: float) -> Call:
    """Labels that are too many or too long."""
    request = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, 4), sampling=sampling(1)
    )
    if rng.random() < 0.5:
        request.labels["team"] = "z" * count(size, 8 * MIB)
    else:
        for number in range(count(size, 100_000)):
            request.labels[f"label-{number}"] = "z" * 40
    return Call(GENERATE, (request.SerializeToString(),))


def cancelled(target: Target, rng: random.Random, size: float) -> Call:
    """A request that is cancelled as soon as it was sent, or after a few answers."""
    request = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, 8), sampling=sampling(64, rng.choice([1, 2]))
    )
    request.steering.interventions.append(add(rng, target, None))
    reads = rng.choice([0, 0, 1, 3])
    return Call(GENERATE, (request.SerializeToString(),), reads=reads, holds=rng.random() * 0.02)


def baseline(target: Target, rng: random.Random, size: float) -> Call:
    """A steered request of many samples with its baseline, and the divergence between them."""
    request = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, 16),
        sampling=sampling(64, count(size, 16), logprobs=20),
        with_baseline=True,
    )
    request.steering.interventions.append(add(rng, target, None))
    return Call(GENERATE, (request.SerializeToString(),))
