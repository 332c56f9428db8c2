"""Hostile calls of causal tracing, runs and gates, made by chance from a seed: see `hostile`."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message

import rheostat
from rheostat._client.requests import generate_request
from rheostat._steering.steering import steering_to_wire
from rheostat_wire.v1 import (
    lens_service_pb2,
    replace_pb2,
    run_service_pb2,
    selector_pb2,
    sweep_pb2,
    sweep_service_pb2,
    tensor_pb2,
    types_pb2,
    vector_pb2,
)

from .hostile import EXPLAIN, GENERATE, Attempt, explained, serialized, spoilt

SWEEP = "SweepService/Sweep"
LENS = "LensService/Lens"
ATTRIBUTE = "LensService/Attribute"
CAPTURE_RUN = "RunService/CaptureRun"
PUT_RUN = "RunService/PutRun"
READ_RUN = "RunService/ReadRun"
GET_RUN = "RunService/GetRun"
RENEW_LEASE = "RunService/RenewLease"
DELETE_RUN = "RunService/DeleteRun"

SHARES = {
    GENERATE: 32,
    EXPLAIN: 8,
    SWEEP: 16,
    LENS: 10,
    ATTRIBUTE: 5,
    CAPTURE_RUN: 10,
    PUT_RUN: 7,
    READ_RUN: 4,
    GET_RUN: 2,
    RENEW_LEASE: 2,
    DELETE_RUN: 4,
}
"""How often each rpc is called, in percent."""

RUNS = [f"fuzz-{number}" for number in range(5)]
"""Ids of runs, few, so that calls use runs that others make and delete."""

_WIDTH, _LAYERS, _VOCABULARY = 128, 6, 1984
_PROMPTS = ([0, 790, 593, 282], [0, 790, 593, 300], [5, 6, 7, 8, 9, 10])
_TAIL = range(100, 228)
"""Tokens that some sweeps add to their prompts, whose cells then copy a part of a cached block."""
_POINTS = (types_pb2.POINT_RESID_POST, types_pb2.POINT_ATTN_OUT)
_ROW = np.linspace(-1, 1, _WIDTH, dtype=np.float32)[None]


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
        vanishes = rng.random() < (0.2 if method in (SWEEP, LENS, READ_RUN) else 0.02)
        yield Attempt(method, messages, vanishes)


def _messages(rng: random.Random, method: str, number: int) -> Iterator[Message]:
    run_id = rng.choice(RUNS)
    if method == GENERATE:
        yield _request(rng, number)
    elif method == EXPLAIN:
        yield explained(_request(rng, number))
    elif method == SWEEP:
        yield _sweep(rng)
    elif method == LENS:
        yield _lens(rng)
    elif method == ATTRIBUTE:
        direction = vector_pb2.TokenDirection(token_id=rng.randrange(_VOCABULARY), minus_token_id=7)
        yield lens_service_pb2.AttributeRequest(prompt=_prompt(rng), direction=direction)
    elif method == CAPTURE_RUN:
        stored = run_service_pb2.CaptureRunRequest(
            run_id=run_id, prompt=_prompt(rng), sites=_sites(rng)
        )
        stored.lease.FromSeconds(rng.choice([1, 60]))
        yield stored
    elif method == PUT_RUN:
        yield from _upload(rng, run_id)
    elif method == READ_RUN:
        yield run_service_pb2.ReadRunRequest(run_id=run_id)
    elif method == GET_RUN:
        yield run_service_pb2.GetRunRequest(run_id=run_id)
    elif method == RENEW_LEASE:
        renewed = run_service_pb2.RenewLeaseRequest(run_id=run_id)
        renewed.lease.FromSeconds(rng.choice([1, 60]))
        yield renewed
    else:
        yield run_service_pb2.DeleteRunRequest(run_id=run_id)


def _prompt(rng: random.Random) -> types_pb2.Prompt:
    return types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=rng.choice(_PROMPTS)))


def _sites(rng: random.Random) -> types_pb2.SiteSet:
    points = [_POINTS[0]] if rng.random() < 0.6 else list(_POINTS)
    if rng.random() < 0.3:
        return types_pb2.SiteSet(points=points, all=types_pb2.AllLayers())
    layers = sorted(rng.sample(range(_LAYERS), 2))
    return types_pb2.SiteSet(points=points, list=types_pb2.LayerList(layers=layers))


def _window(start: int, end: int) -> selector_pb2.Selector:
    one = selector_pb2.Range(positions=selector_pb2.Window(start=start, end=end))
    return selector_pb2.Selector(include=[one])


def _replacements(rng: random.Random) -> list[rheostat.Intervention]:
    run = rng.choice(RUNS)
    sources: Sequence[Any] = (
        rheostat.from_run(run),
        rheostat.from_run(run),
        rheostat.from_run(run, align="affixes"),
        rheostat.run_mean(run),
        rheostat.Noise(std=0.5, seed=rng.randrange(9)),
        rheostat.Zeros(),
        rheostat.inline(_ROW),
    )
    return [
        rheostat.replace(rng.choice(sources), alpha=rng.choice([1.0, 0.5])).at(
            points="resid_post",
            layers=sorted(rng.sample(range(_LAYERS), 2)),
            where=rng.choice([rheostat.window(0, 3), rheostat.positions(0, -1), "prompt"]),
        )
        for _ in range(rng.choice([0, 1, 1, 2]))
    ]


def _gated(rng: random.Random) -> list[rheostat.Intervention]:
    """Interventions behind gates, up to as many gates as there may be."""
    found = []
    for number in range(rng.choice([0, 1, 2, 32])):
        probe = rheostat.probe(
            rheostat.inline(_ROW if number % 2 else -_ROW),
            points="resid_post",
            layers=[number % 3, 3],
            where=rng.choice([None, rheostat.window(0, 3), rheostat.generated(0)]),
            name=f"probe-{number}",
        )
        condition = probe.above(rng.gauss(0, 1), pool=rng.choice(["last", "mean", "max"]))
        gate = rheostat.gate(condition, hold=rng.choice(["token", "rest", "until_read", 3]))
        dose = rheostat.inline(_ROW) * 0.1
        found.append(dose.at(points="resid_post", layers=[4, 5]).when(gate))
    return found


def _request(rng: random.Random, number: int) -> Message:
    return generate_request(
        rng.choice(_PROMPTS),
        steering=[*_replacements(rng), *_gated(rng)],
        max_tokens=rng.randint(2, 3),
        n=rng.choice([1, 1, 2]),
        request_id=rng.choice([None, f"traced-{number}"]),
        when_full=rng.choice([None, "wait", "refuse"]),
    )


def _sweep(rng: random.Random) -> sweep_service_pb2.SweepRequest:
    clean, other, _ = _PROMPTS
    kind = rng.choice(["corrupt", "noise", "zeros", "mean", "run_id"])
    tail = _TAIL if kind != "run_id" and rng.random() < 0.5 else ()
    request = sweep_service_pb2.SweepRequest(
        sites=types_pb2.SiteSet(
            points=[_POINTS[0]], list=types_pb2.LayerList(layers=sorted(rng.sample(range(6), 2)))
        ),
        where=_window(1, 3),
        grades=[sweep_pb2.Grade(token=sweep_pb2.TokenGrade(metric=sweep_pb2.METRIC_LOGPROB))],
        baseline_count=1,
        pair_values=rng.random() < 0.5,
    )
    if rng.random() < 0.5:
        request.priority = sweep_pb2.SWEEP_PRIORITY_NORMAL
    for _ in range(rng.choice([1, 1, 2])):
        pair = request.pairs.add()
        pair.prompt.token_ids.ids.extend([*clean, *tail])
        pair.answer.alternatives.add(ids=[rng.randrange(_VOCABULARY)])
        if kind == "corrupt":
            pair.corrupt.token_ids.ids.extend([*other, *tail])
        elif kind == "noise":
            pair.noise.noise.std = 0.5
            pair.noise.noise_count = 2
            pair.noise.where.CopyFrom(_window(1, 3))
            pair.noise.sites.points.append(types_pb2.POINT_RESID_PRE)
            pair.noise.sites.list.layers.append(0)
        elif kind == "zeros":
            pair.zeros.SetInParent()
        elif kind == "mean":
            pair.mean.CopyFrom(replace_pb2.MeanSource(run_id=rng.choice(RUNS)))
        else:
            pair.run_id = rng.choice(RUNS)
    return request


def _lens(rng: random.Random) -> lens_service_pb2.LensRequest:
    request = lens_service_pb2.LensRequest(
        token_ids=rng.sample(range(_VOCABULARY), rng.choice([0, 2, 64])),
        top_k=rng.choice([0, 5, 100]),
    )
    if rng.random() < 0.3:
        request.run_id = rng.choice(RUNS)
        return request
    request.prompt.CopyFrom(_prompt(rng))
    request.sites.points.append(_POINTS[0])
    request.sites.all.SetInParent()
    request.where.CopyFrom(_window(0, 4))
    steering = steering_to_wire(_replacements(rng))
    if steering is not None:
        request.steering.CopyFrom(steering)
    return request


def _upload(rng: random.Random, run_id: str) -> Iterator[Message]:
    ids = rng.choice(_PROMPTS)
    sites = [types_pb2.Site(point=_POINTS[0], layer=layer) for layer in (1, 4)]
    whole = [types_pb2.PositionRun(start=0, count=len(ids))]
    kind = run_service_pb2.PutRunRequest
    header = run_service_pb2.RunHeader(
        run_id=run_id,
        sites=sites,
        positions=whole,
        prompt_token_ids=types_pb2.TokenIds(ids=ids),
        dtype=tensor_pb2.DTYPE_FLOAT32,
    )
    header.lease.FromSeconds(rng.choice([1, 60]))
    yield kind(header=header)
    for site in sites:
        yield kind(
            rows=run_service_pb2.RunRows(
                sites=[site],
                positions=whole,
                tensor=tensor_pb2.Tensor(
                    dtype=tensor_pb2.DTYPE_FLOAT32,
                    shape=[1, len(ids), _WIDTH],
                    encoding=tensor_pb2.ENCODING_RAW,
                    inline=_ROW.tobytes() * len(ids),
                ),
            )
        )
