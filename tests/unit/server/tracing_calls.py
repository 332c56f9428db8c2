"""Random calls of what causal tracing serves: runs, sweeps, the lens and attribution.

Most calls are valid and run to their end. Of the others, one field is odd, or the client goes away
in the middle. A call depends on the seed and its number alone.
"""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from rheostat_engine import Act, Kind, Plan
from rheostat_server.engine.backend import Delta, Job
from rheostat_wire.v1 import (
    lens_service_pb2,
    replace_pb2,
    run_service_pb2,
    selector_pb2,
    steering_pb2,
    sweep_pb2,
    sweep_service_pb2,
    tensor_pb2,
    types_pb2,
    vector_pb2,
)

from .fakes import LAYERS, VOCABULARY, WIDTH
from .messages import selector, site_set, window
from .stored_runs import F32, header, rows, span
from .sweeps.patched import PatchedBackend, answer, grade, probe, prompt

POINTS = (types_pb2.POINT_RESID_POST, types_pb2.POINT_ATTN_OUT, types_pb2.POINT_MLP_OUT)
RUN_IDS = tuple(f"run-{number}" for number in range(6))
"""Few, so that calls meet."""
SHARES = {
    "Sweep": 35,
    "CaptureRun": 16,
    "PutRun": 12,
    "GetRun": 6,
    "ReadRun": 10,
    "RenewLease": 3,
    "DeleteRun": 4,
    "Lens": 8,
    "Attribute": 6,
}
"""How often each method is called, in percent."""
ODD, CUT = 0.2, 0.15
"""The parts of the calls with an odd field, and of those whose client goes away."""


@dataclass
class JitteryBackend(PatchedBackend):
    """Takes a moment for each request, so that calls overlap and can be cut in the middle."""

    clock: random.Random = field(default_factory=lambda: random.Random(0))

    def values(self, job: Job) -> list[float]:
        def relevant(acts: Sequence[Act]) -> tuple[Act, ...]:
            return tuple(act for act in acts if act.kind in (Kind.REPLACE, Kind.ADD_LAST))

        acts, window = relevant(job.plan.acts), job.plan.window
        if window is not None:
            before = relevant(job.plan.acts[: window.first_act])
            window = window._replace(first_act=len(before))
        plan = Plan(job.plan.request_id, acts, job.plan.captures, window=window)
        return super().values(Job(plan, job.prompt, job.sampling, job.sample, job.lora))

    def score(self, job: Job) -> float:
        return -abs(super().score(job))  # log-probabilities are never positive

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(self.clock.choice((0.0, 0.0, 0.001, 0.004)))
        async with aclosing(super().generate(job)) as deltas:
            async for delta in deltas:
                yield delta


class Call(NamedTuple):
    """A call."""

    number: int
    method: str
    messages: list[Message]
    """One, but for uploads."""
    odd: str
    """The name of the field that was changed; empty if the call is valid."""
    answers: int | None
    """Answers, or parts of an upload, after which the client goes away. None: it stays."""
    seconds: float | None
    """Time after which the client goes away. None: it stays."""

    @property
    def cut(self) -> bool:
        """Whether the client goes away."""
        return self.answers is not None or self.seconds is not None


def calls(seed: int, count: int, first: int = 0) -> Iterator[Call]:
    """The calls of a seed."""
    for number in range(first, first + count):
        yield _call(random.Random(f"{seed}/{number}"), number)


def _call(rng: random.Random, number: int) -> Call:
    (method,) = rng.choices(list(SHARES), list(SHARES.values()))
    messages = _MAKERS[method](rng)
    odd = ""
    answers, seconds = None, None
    drawn = rng.random()
    if drawn < ODD:
        odd = _make_odd(rng.choice(messages), rng)
    elif drawn < ODD + CUT:
        if rng.random() < 0.5:
            answers = rng.randrange(1 + 2 * len(messages))
        else:
            seconds = rng.random() * 0.03
    return Call(number, method, messages, odd, answers, seconds)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def _site_set(rng: random.Random) -> types_pb2.SiteSet:
    points = rng.sample(POINTS, rng.choice((1, 1, 2)))
    layers = sorted(rng.sample(range(LAYERS), rng.randint(1, LAYERS)))
    return site_set(*points, layers=rng.choice((None, layers)))


def _where(rng: random.Random, count: int) -> selector_pb2.Selector:
    start = rng.randrange(count)
    return selector(window(start, rng.randint(start + 1, count)))


def _steering(rng: random.Random, count: int) -> steering_pb2.Steering | None:
    if rng.random() < 0.7:
        return None
    source = rng.choice(
        (
            {"zeros": replace_pb2.ZeroSource()},
            {"noise": replace_pb2.NoiseSource(seed=rng.randrange(9), std=rng.random())},
            {"vector": _vector(rng)},
        )
    )
    op = replace_pb2.Replace(**source)
    one = steering_pb2.Intervention(
        sites=site_set(POINTS[0], layers=[rng.randrange(LAYERS)]),
        where=_where(rng, count),
        replace=op,
    )
    return steering_pb2.Steering(interventions=[one])


def _vector(rng: random.Random) -> vector_pb2.VectorRef:
    values = np.array([[rng.gauss(0, 1) for _ in range(WIDTH)]], np.float32)
    return vector_pb2.VectorRef(
        inline=tensor_pb2.Tensor(
            dtype=F32,
            shape=values.shape,
            encoding=tensor_pb2.ENCODING_RAW,
            inline=values.tobytes(),
        )
    )


def _capture_run(rng: random.Random) -> list[Message]:
    count = rng.randint(1, 8)
    message = run_service_pb2.CaptureRunRequest(
        run_id=rng.choice(RUN_IDS),
        prompt=prompt(*_tokens(rng, count)),
        sites=_site_set(rng),
        steering=_steering(rng, count),
    )
    if rng.random() < 0.5:
        message.where.CopyFrom(_where(rng, count))
    _lease(message.lease, rng)
    return [message]


def _lease(lease: Duration, rng: random.Random) -> None:
    if rng.random() < 0.5:
        lease.FromMilliseconds(rng.choice((1_000, 60_000)))


def _put_run(rng: random.Random) -> list[Message]:
    count = rng.randint(1, 6)
    layers = sorted(rng.sample(range(LAYERS), rng.randint(1, LAYERS)))
    sites = [types_pb2.Site(point=POINTS[0], layer=layer) for layer in layers]
    first = header(
        run_id=rng.choice(RUN_IDS),
        sites=sites,
        positions=[span(0, count)],
        prompt_token_ids=types_pb2.TokenIds(ids=_tokens(rng, count)),
    )
    _lease(first.header.lease, rng)
    parts = [
        rows(np.full((1, count, WIDTH), float(layer)), sites=[site], positions=[span(0, count)])
        for layer, site in zip(layers, sites, strict=True)
    ]
    rng.shuffle(parts)
    return [first, *parts]


def _get_run(rng: random.Random) -> list[Message]:
    return [run_service_pb2.GetRunRequest(run_id=rng.choice(RUN_IDS))]


def _read_run(rng: random.Random) -> list[Message]:
    message = run_service_pb2.ReadRunRequest(run_id=rng.choice(RUN_IDS))
    if rng.random() < 0.3:
        message.encoding = tensor_pb2.ENCODING_LZ4_PLANES
    return [message]


def _renew(rng: random.Random) -> list[Message]:
    message = run_service_pb2.RenewLeaseRequest(run_id=rng.choice(RUN_IDS))
    message.lease.FromMilliseconds(rng.choice((1_000, 60_000)))
    return [message]


def _delete_run(rng: random.Random) -> list[Message]:
    return [run_service_pb2.DeleteRunRequest(run_id=rng.choice(RUN_IDS))]


def _lens(rng: random.Random) -> list[Message]:
    count = rng.randint(1, 8)
    message = lens_service_pb2.LensRequest(
        prompt=prompt(*_tokens(rng, count)),
        sites=site_set(POINTS[0], layers=sorted(rng.sample(range(LAYERS), rng.randint(1, LAYERS)))),
        steering=_steering(rng, count),
        token_ids=rng.sample(range(VOCABULARY), rng.randrange(3)),
    )
    if rng.random() < 0.5:
        message.top_k = rng.randint(1, 5)
    if rng.random() < 0.5:
        message.where.CopyFrom(_where(rng, count))
    return [message]


def _attribute(rng: random.Random) -> list[Message]:
    count = rng.randint(1, 8)
    token, minus = rng.sample(range(VOCABULARY), 2)
    return [
        lens_service_pb2.AttributeRequest(
            prompt=prompt(*_tokens(rng, count)),
            direction=vector_pb2.TokenDirection(
                token_id=token, minus_token_id=rng.choice((None, minus))
            ),
            steering=_steering(rng, count),
        )
    ]


def _sweep(rng: random.Random) -> list[Message]:
    count = rng.randint(2, 7)
    kind = rng.choice(("corrupt", "corrupt", "noise", "zeros", "mean", "run_id"))
    grades = [
        grade(rng.choice(("LOGPROB", "PROBABILITY", "LOGIT_DIFFERENCE", "RANK", "KL")))
        for _ in range(rng.choice((1, 1, 2)))
    ]
    if rng.random() < 0.2:
        grades.append(probe())
    message = sweep_service_pb2.SweepRequest(
        pairs=[_pair(rng, count, kind) for _ in range(rng.choice((1, 1, 2, 3)))],
        sites=site_set(rng.choice(POINTS)),
        grades=grades,
        steering=_steering(rng, count) if kind != "run_id" else None,
    )
    if rng.random() < 0.3:
        message.where.CopyFrom(_where(rng, count))
    if rng.random() < 0.2:
        message.layer_window = rng.randint(1, LAYERS)
    if rng.random() < 0.2:
        message.alpha = rng.random()
    if rng.random() < 0.2:
        message.max_concurrent_cells = rng.randint(1, 16)
    if rng.random() < 0.2:
        message.baseline_count = rng.randint(1, 8)
    if rng.random() < 0.2:
        message.priority = sweep_pb2.SWEEP_PRIORITY_NORMAL
    if rng.random() < 0.2:
        message.direction = rng.choice(
            [sweep_pb2.SWEEP_DIRECTION_NOISE, sweep_pb2.SWEEP_DIRECTION_DENOISE]
            if kind in ("corrupt", "noise")
            else [sweep_pb2.SWEEP_DIRECTION_NOISE]
        )
    if rng.random() < 0.2:
        message.zoom.layer_stride = rng.randint(1, 3)
        message.zoom.column_stride = rng.randint(1, 4)
    if rng.random() < 0.2:
        message.done.add(start=rng.randrange(2), count=1)
        if rng.random() < 0.5:
            message.done_values.append(rng.choice((-12.0, -8.0, math.nan)))
    if rng.random() < 0.2:
        message.keep_runs.FromMilliseconds(rng.choice((1_000, 60_000)))
    message.pair_values = rng.random() < 0.3
    return [message]


def _pair(rng: random.Random, count: int, kind: str) -> sweep_pb2.SweepPair:
    ids = _tokens(rng, count)
    one = sweep_pb2.SweepPair(
        prompt=prompt(*ids),
        answer=answer(*{tuple(_tokens(rng, rng.choice((1, 1, 2)))) for _ in range(2)}),
        foil=answer((rng.randrange(VOCABULARY),)),
    )
    if kind == "corrupt":
        other = list(ids)
        other[rng.randrange(count)] = rng.randrange(VOCABULARY)
        if rng.random() < 0.1:
            other.insert(rng.randrange(count), rng.randrange(VOCABULARY))
        one.corrupt.CopyFrom(prompt(*other))
    elif kind == "noise":
        one.noise.noise.std = 1 + rng.random()
        one.noise.noise.seed = rng.randrange(9)
        one.noise.sites.CopyFrom(site_set(types_pb2.POINT_RESID_PRE, layers=[0]))
        one.noise.where.CopyFrom(_where(rng, count))
        if rng.random() < 0.5:
            one.noise.noise_count = rng.randint(1, 3)
    elif kind == "zeros":
        one.zeros.SetInParent()
    elif kind == "mean":
        one.mean.run_id = rng.choice(RUN_IDS)
    else:
        one.run_id = rng.choice(RUN_IDS)
    return one


_MAKERS = {
    "Sweep": _sweep,
    "CaptureRun": _capture_run,
    "PutRun": _put_run,
    "GetRun": _get_run,
    "ReadRun": _read_run,
    "RenewLease": _renew,
    "DeleteRun": _delete_run,
    "Lens": _lens,
    "Attribute": _attribute,
}
assert set(_MAKERS) == set(SHARES)
assert sum(SHARES.values()) == 100
_INTEGERS = (0, 1, 2, 7, 77, 2**31 - 1)
_FLOATS = (0.0, -1.0, 1e-30, 1e30, math.nan, math.inf)
_TEXTS = ("", "a b", "run-0", "\x00", "x" * 300, "nobody")


def _make_odd(message: Message, rng: random.Random) -> str:
    """Changes a field of a message, or of a message in it; returns its name."""
    owner, changed = rng.choice(list(_fields(message)))
    _change(owner, changed, rng)
    return f"{owner.DESCRIPTOR.name}.{changed.name}"


def _fields(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """The fields of a message, and of the messages in it."""
    for one in message.DESCRIPTOR.fields:
        yield message, one
    for one, value in message.ListFields():
        if one.message_type is None or one.message_type.GetOptions().map_entry:
            continue
        for inner in value if one.is_repeated else (value,):
            yield from _fields(inner)


def _change(owner: Message, changed: FieldDescriptor, rng: random.Random) -> None:
    if changed.message_type is not None and changed.message_type.GetOptions().map_entry:
        getattr(owner, changed.name)["\x00"] = "odd"
    elif changed.is_repeated:
        _change_list(getattr(owner, changed.name), changed, rng)
    elif changed.message_type is not None:
        if owner.HasField(changed.name) and rng.random() < 0.5:
            owner.ClearField(changed.name)
        else:
            getattr(owner, changed.name).SetInParent()
    else:
        setattr(owner, changed.name, _odd_value(changed, rng))


def _change_list(values, changed: FieldDescriptor, rng: random.Random) -> None:
    what = rng.choice(("empty", "again", "more", "many"))
    if what == "empty":
        del values[:]
    elif what == "again" and values:
        values.extend([values[rng.randrange(len(values))]])
    elif changed.message_type is not None:
        values.extend([changed.message_type._concrete_class()] * (1 if what == "more" else 300))
    else:
        values.extend([_odd_value(changed, rng)] * (1 if what == "more" else 3000))


def _odd_value(changed: FieldDescriptor, rng: random.Random) -> object:
    kind = changed.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if changed.type == FieldDescriptor.TYPE_BYTES:
            return rng.choice((b"", b"\xff" * 7))
        return rng.choice(_TEXTS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(_FLOATS)
    signed = kind in (
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_ENUM,
    )
    return rng.choice((*_INTEGERS, -1, -(2**31)) if signed else _INTEGERS)
