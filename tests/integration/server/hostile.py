"""Hostile calls of the steering surface, made by chance from a seed.

Most begin as something sound and lose it in a few places, so that they get far: a field set to an
extreme, a part dropped, doubled or replaced by another, bytes flipped. What would run stays short.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

import rheostat
from rheostat import generated, positions, span, token_ids, window
from rheostat._client.requests import generate_request
from rheostat._steering.steering import steering_to_wire
from rheostat_server.limits import BASELINES, NOISES, SWEEP_PAIRS
from rheostat_wire.v1 import (
    gain_pb2,
    generation_service_pb2,
    selector_pb2,
    steering_service_pb2,
    sweep_pb2,
    sweep_service_pb2,
)

from .naive import OPS

GENERATE = "GenerationService/Generate"
EXPLAIN = "GenerationService/Explain"
SESSION = "GenerationService/Session"
SET_GLOBAL = "SteeringService/SetGlobal"
PUT = "SteeringService/PutVector"
GET = "SteeringService/GetVector"
LIST = "SteeringService/ListVectors"
DERIVE = "SteeringService/DeriveVectors"
DELETE = "SteeringService/DeleteName"

SHARES = {
    GENERATE: 40,
    EXPLAIN: 22,
    SET_GLOBAL: 10,
    PUT: 10,
    SESSION: 8,
    DELETE: 3,
    DERIVE: 3,
    GET: 2,
    LIST: 2,
}
"""How often each rpc is called, in percent."""

NAMES = [f"fuzz/{number}" for number in range(8)]
"""Names that calls put on vectors."""

_NUMBERS = [0, 1, 2, 3, 5, 6, 7, 100, 511, 512, 513, 65536, 2**31 - 1, 2**32 - 1]
_SIGNED = [*_NUMBERS[:-1], -1, -2, -100, -(2**31)]
_LONG = [2**32, 2**53 + 1, 2**63 - 1]
_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e30, -3e38, float("nan"), float("inf"), 1e-45]
_TEXTS = [
    "",
    "joy",
    "day",
    *NAMES[:4],
    "My day was",
    "\x00",
    "\u202e\u200b\ufeff",
    "👩‍👩‍👧‍👦" * 9,
    "e\u0301" * 30,
    "\U0010ffff\ufffd",
    "%s{0}${x}\r\n\r\n",
    "../../etc/passwd",
    "a" * 3000,
]
_ROW = np.linspace(-1, 1, 128, dtype=np.float32)[None]


class Attempt(NamedTuple):
    """One call."""

    method: str
    messages: list[bytes]
    """One, except where the client streams."""
    vanishes: bool
    """Whether the client goes away after the first answer."""
    pause: float = 0.0
    """Seconds between two messages, and after the last."""


def attempts(seed: int, count: int) -> Iterator[Attempt]:
    """Calls; equal seeds give equal ones."""
    rng = random.Random(seed)
    sound = _Sound()
    methods = rng.choices(list(SHARES), weights=list(SHARES.values()), k=count)
    for number, method in enumerate(methods):
        parts = sound.messages(rng, method, number)
        bad = rng.randrange(len(parts))
        messages = [spoilt(rng, p) if i == bad else serialized(p) for i, p in enumerate(parts)]
        if len(messages) > 1 and rng.random() < 0.1:
            rng.shuffle(messages)
        yield Attempt(method, messages, rng.random() < 0.02)


class _Sound:
    """Calls that are in order."""

    def __init__(self) -> None:
        selectors = [
            None,
            "prompt",
            "generated",
            positions(0, -1),
            window(1, 3),
            generated(0, 2) | span("day"),
            "all" - token_ids(5, 282, 300),
            token_ids(*range(200, 400)) - window(-1),
        ]
        handles = [
            rheostat.named(NAMES[0]),
            rheostat.named(NAMES[1]),
            rheostat.inline(_ROW),
            rheostat.inline(_ROW, dtype="bfloat16"),
        ]
        self._forms: list[dict[str, Any]] = [
            {},
            {"encoding": "full8"},
            {"encoding": "topk8", "kept": 3},
            {"encoding": "rp8", "kept": 100, "seed": 2**64 - 1},
            {"dtype": "float16", "encoding": "lz4_planes"},
            {"projection": handles},
            {"projection": handles[2:] * 70, "encoding": "full8"},
            {"projection": handles[2], "encoding": "rp8", "kept": 1},
        ]
        ops = [op.does for op in OPS.values()]
        ops += [op for one in handles for op in (one * 2.0, rheostat.norm_add(one, 0.1))]
        ops += [rheostat.ablate(handles[0], handles[2]), rheostat.scale(handles[1], 0.0)]
        self._steps = [
            op.at(points=points, layers=layers, where=where)
            for op in ops
            for where in selectors
            for points, layers in (("resid_post", 2), (["resid_pre", "resid_mid"], [0, 5]))
        ]

        self._probes = [
            rheostat.probe(one, points="resid_post", layers=layers, where=where, name=f"p{n}")
            for n, (one, layers, where) in enumerate(
                [
                    (handles[2], 1, None),
                    (handles[2], [0, 4], "prompt"),
                    (handles[3], 3, "generated"),
                ]
            )
        ]
        conditions = [self._probes[n].above(bound) for n in range(3) for bound in (-1e6, 0, 1e6)]
        conditions += [self._probes[0].below(0, pool="mean", for_tokens=2)]
        actions = [rheostat.Observe(), rheostat.Stop("why"), rheostat.Stop(drop_sampled=False)]
        actions += [rheostat.Stop(all_samples=True)]
        self._rules = [
            rheostat.Rule(f"r{n}", condition, action)
            for n, (condition, action) in enumerate(
                (condition, action) for condition in conditions for action in actions
            )
        ]

    def messages(self, rng: random.Random, method: str, number: int) -> list[Message]:
        """The messages of a call."""
        service = steering_service_pb2
        makers: dict[str, Callable[[], list[Message]]] = {
            GENERATE: lambda: [self._request(rng, number)],
            EXPLAIN: lambda: [explained(self._request(rng, number))],
            SESSION: lambda: self._session(rng, number),
            SET_GLOBAL: lambda: [
                service.SetGlobalRequest(
                    policy=service.Policy(steering=steering_to_wire(self._steering(rng))),
                    expected_version=rng.choice([None, None, None, 0, 7]),
                )
            ],
            PUT: lambda: self._upload(rng),
            DERIVE: lambda: [self._contrast(rng)],
            DELETE: lambda: [service.DeleteNameRequest(name=rng.choice(NAMES))],
            GET: lambda: [service.GetVectorRequest(name=rng.choice(NAMES))],
            LIST: lambda: [service.ListVectorsRequest(page_size=rng.choice(_NUMBERS))],
        }
        return makers[method]()

    def _steering(self, rng: random.Random) -> list[rheostat.Intervention]:
        return rng.choices(self._steps, k=rng.choice([0, 1, 1, 2, 3, 6]))

    def _request(self, rng: random.Random, number: int) -> generation_service_pb2.GenerateRequest:
        capture = rheostat.Capture(
            rng.choice(["resid_post", ["resid_pre", "resid_post"]]),
            layers=rng.choice([[1], [0, 1, 5]]),
            where="prompt",
            **rng.choice(self._forms),
        )
        return generate_request(
            rng.choice(["My day was", "day after day", [0, 790, 593, 282], [5] * 300]),
            steering=self._steering(rng),
            capture=capture if rng.random() < 0.3 else None,
            probes=rng.sample(self._probes, rng.choice([0, 0, 1, 3])),
            rules=rng.sample(self._rules, rng.choice([0, 0, 0, 1, 4])),
            hold_back=rng.choice([None, None, 0, 1, 5]),
            max_tokens=rng.randint(1, 2),
            n=rng.choice([1, 1, 1, 2]),
            request_id=rng.choice([None, f"fuzz-{number}", f"fuzz-{number % 50}"]),
            with_baseline=rng.random() < 0.05,
            when_full=rng.choice([None, "wait", "refuse"]),
        )

    def _session(self, rng: random.Random, number: int) -> list[Message]:
        kind = generation_service_pb2.SessionRequest
        messages = [kind(start=self._request(rng, number))]
        for update_id in range(1, rng.randint(1, 5)):
            if rng.random() < 0.3:
                gain = gain_pb2.Gain(factor=rng.choice([0.0, 1.0, 2.5]))
                gain.interventions.extend(rng.choice([[], [0], [0, 1]]))
                messages.append(kind(update_id=update_id, gain=gain))
                continue
            steering = steering_to_wire(self._steering(rng))
            messages.append(kind(update_id=update_id, steering=steering))
        if rng.random() < 0.2:
            messages.append(kind(update_id=9, stop=generation_service_pb2.SessionStop()))
        return messages

    def _upload(self, rng: random.Random) -> list[Message]:
        rows = (_ROW * rng.choice([1.0, 2.0, -1.0])).repeat(rng.choice([1, 1, 6]), axis=0)
        kind = steering_service_pb2.PutVectorRequest
        first = kind()
        first.header.dtype = 1  # type: ignore[assignment]  # DTYPE_FLOAT32
        first.header.shape.extend(rows.shape)
        first.header.total_bytes = rows.nbytes
        first.header.name = rng.choice(["", *NAMES])
        data = rows.tobytes()
        cut = rng.randrange(len(data))
        return [first, kind(chunk=data[:cut]), kind(chunk=data[cut:])]

    def _contrast(self, rng: random.Random) -> steering_service_pb2.DeriveVectorsRequest:
        request = steering_service_pb2.DeriveVectorsRequest()
        for side in (request.positive, request.negative):
            for _ in range(2):
                side.add().text = rng.choice(["glad", "so sad", "My day was", "day by day"])
        request.sites.points.append(3)  # type: ignore[arg-type]  # POINT_RESID_POST
        request.sites.list.layers.extend([1, 4])
        request.name = rng.choice(["", NAMES[2]])
        return request


def explained(request: generation_service_pb2.GenerateRequest) -> Message:
    """The request to explain it."""
    return generation_service_pb2.ExplainRequest(request=request)


def spoilt(rng: random.Random, message: Message, tokens: int = 2) -> bytes:
    """A message's bytes, usually no longer as they should be; `tokens` as in `serialized`."""
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 4])):
        _mutate(rng, rng.choice(list(_parts(message))))
    data = serialized(message, tokens)
    if rng.random() > 0.15:
        return data
    data = _scrambled(rng, data)
    try:
        message.ParseFromString(data)
    except DecodeError:
        return data
    return serialized(message, tokens)


def serialized(message: Message, tokens: int = 2) -> bytes:
    """What is sent: the message, cut down where it would run for more than so many tokens."""
    for part in _parts(message):
        if isinstance(part, generation_service_pb2.GenerateRequest):
            sampling = part.sampling
            if not sampling.HasField("max_tokens") or tokens < sampling.max_tokens <= 512:
                sampling.max_tokens = tokens
            if 2 < sampling.n <= 64:
                sampling.n = 2
        elif isinstance(part, sweep_service_pb2.SweepRequest):
            if len(part.pairs) <= SWEEP_PAIRS:
                del part.pairs[2:]
            if 2 < part.baseline_count <= BASELINES:
                part.baseline_count = 2
        elif isinstance(part, sweep_pb2.NoiseCorruption) and part.noise_count <= NOISES:
            part.noise_count = min(part.noise_count or 2, 2)
    return message.SerializeToString()


def _scrambled(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.1:
        return rng.randbytes(rng.randint(1, 200))
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at:at] = rng.randbytes(rng.randint(1, 4))
            case 2:
                del changed[at : at + rng.randint(1, 8)]
            case _:
                del changed[at:]
    return bytes(changed)


def _parts(message: Message) -> Iterator[Message]:
    """The message and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else [value]:
            yield from _parts(part)


def _mutate(rng: random.Random, message: Message) -> None:
    """Changes one field of a message, one that is set more often than not."""
    fields: Sequence[FieldDescriptor] = [field for field, _ in message.ListFields()]
    if not fields or rng.random() < 0.4:
        fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    if rng.random() < 0.2:
        message.ClearField(field.name)
    elif field.is_repeated:
        _mutate_list(rng, message, field)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if rng.random() < 0.6:
            fill(rng, inner)
    else:
        setattr(message, field.name, scalar(rng, field))


def _mutate_list(rng: random.Random, message: Message, field: FieldDescriptor) -> None:
    values = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        values[rng.choice(_TEXTS)] = rng.choice(_TEXTS)
    elif field.message_type is None:
        values.extend(scalar(rng, field) for _ in range(rng.choice([1, 2, 50, 5000])))
    elif len(values) and rng.random() < 0.6:
        many = 300 if isinstance(values[0], selector_pb2.Range) else 20
        values.extend([values[0]] * rng.choice([1, 2, many]))
    else:
        fill(rng, values.add())


def scalar(rng: random.Random, field: FieldDescriptor) -> object:
    """A value for a field, plausible or not."""
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(_TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice([b"", b"x" * 32, bytes(512), rng.randbytes(512), _ROW.tobytes()])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.choice([one.number for one in field.enum_type.values] + [99, -1])
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice(_FLOATS)
    if field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32):
        return rng.choice(_SIGNED)
    if field.type in (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_INT64):
        return rng.choice(_NUMBERS + _LONG)
    return rng.choice(_NUMBERS)


def fill(rng: random.Random, message: Message) -> None:
    """Sets fields at random, nested ones too."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() > 0.35:
            continue
        if field.is_repeated:
            _mutate_list(rng, message, field)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            fill(rng, getattr(message, field.name))
        else:
            setattr(message, field.name, scalar(rng, field))
