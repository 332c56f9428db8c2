"""Hostile gates, rules, gains, watches and policies, made by chance from a seed: see `hostile`.

Watches and policies act on the requests of others. A neighbour runs beside these calls, and must
get what it gets alone. So what would end or steer its requests is limited; see `_sparing`.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message

import rheostat
from rheostat import generated, positions, window
from rheostat._client.requests import generate_request
from rheostat._steering.gates import Condition
from rheostat._steering.rules import probes_to_wire
from rheostat._steering.steering import steering_to_wire
from rheostat_wire.v1 import (
    capture_service_pb2,
    gain_pb2,
    generation_service_pb2,
    monitor_service_pb2,
    steering_pb2,
    steering_service_pb2,
)

from .hostile import (
    EXPLAIN,
    GENERATE,
    SESSION,
    SET_GLOBAL,
    Attempt,
    explained,
    serialized,
    spoilt,
)

WATCH = "MonitorService/Watch"

SHARES = {GENERATE: 42, WATCH: 29, SESSION: 15, EXPLAIN: 9, SET_GLOBAL: 5}
"""How often each rpc is called, in percent."""

LABEL = "fuzz"
"""The label of these requests. A lost watch may refuse requests that have it."""
_TOKENS = 12
"""The most tokens of a request."""
_ROW = np.linspace(-1, 1, 128, dtype=np.float32)[None]
_PROMPTS: Sequence[Any] = ("My day was", [0, 790, 593, 282], [5] * 140)
_POOLS: Sequence[Any] = ("last", "mean", "max")
_LATE_HOLDS: Sequence[Any] = ("next_token", "rest", "until_read", 1, 3)
"""How long a gate that is late may be held."""
_HOLDS = ("token", *_LATE_HOLDS)
_READS = (None, None, "prompt", "generated", positions(0, -1), window(0, 3), generated(0))


def attempts(seed: int, count: int, first: int = 0) -> Iterator[Attempt]:
    """Calls; one depends on the seed and its number alone."""
    for number in range(first, first + count):
        rng = random.Random(f"{seed}/{number}")
        (method,) = rng.choices(list(SHARES), list(SHARES.values()))
        parts = list(_messages(rng, method, number))
        bad = rng.randrange(len(parts)) if rng.random() < 0.5 else None
        messages = [
            _sparing(method, spoilt(rng, one, _TOKENS) if at == bad else serialized(one, _TOKENS))
            for at, one in enumerate(parts)
        ]
        if len(messages) > 1 and rng.random() < 0.05:
            rng.shuffle(messages)
        vanishes = rng.random() < (0.1 if method == WATCH else 0.02)
        yield Attempt(method, messages, vanishes, rng.choice([0, 0.01, 0.1]))


def _sparing(method: str, data: bytes) -> bytes:
    """A message that neither ends nor steers requests without our label."""
    if method == SET_GLOBAL:
        return _harmless(data)
    if method != WATCH:
        return data
    try:
        message = monitor_service_pb2.WatchRequest.FromString(data)
    except DecodeError:
        return data
    if not message.HasField("open"):
        return data
    opened = message.open
    ends = any(rule.HasField("stop") or rule.HasField("steer") for rule in opened.rules) or (
        opened.on_lost != monitor_service_pb2.WATCH_LOST_CONTINUE and opened.HasField("on_lost")
    )
    if ends and opened.filter.WhichOneof("kind") in ("every", "labels"):
        opened.filter.labels.labels[LABEL] = "red"
    return message.SerializeToString()


def _harmless(data: bytes) -> bytes:
    """A policy whose rules that stop and steer never fire, without other steering."""
    message = steering_service_pb2.SetGlobalRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return data
    if not message.HasField("policy"):
        return data
    message.policy.ClearField("steering")
    for rule in message.policy.rules:
        if rule.HasField("stop") or rule.HasField("steer"):
            rule.ClearField("combine")
            rule.ClearField("threshold")
            for condition in rule.conditions:
                condition.ClearField("combine_sites")
                condition.ClearField("below")
                condition.ClearField("stays_below")
                condition.above = 1e6
    return message.SerializeToString()


def _messages(rng: random.Random, method: str, number: int) -> Iterator[Message]:
    if method == GENERATE:
        yield _request(rng, number)
    elif method == EXPLAIN:
        yield explained(_request(rng, number))
    elif method == SESSION:
        yield from _session(rng, number)
    elif method == SET_GLOBAL:
        yield _policy(rng)
    else:
        yield from _watch(rng, number)


def _probe(rng: random.Random, name: str, layers: Sequence[int]) -> rheostat.Probe:
    activation: Any = rng.choice(["identity", "identity", "relu", "jump_relu", "tanh"])
    return rheostat.probe(
        rheostat.inline(rng.choice([_ROW, -_ROW])),
        points=rng.choice(["resid_post", "resid_mid"]),
        layers=rng.choice([layers, layers[:1]]),
        where=rng.choice(_READS),
        bias=rng.choice([0.0, 0.0, 1.0]),
        normalise=rng.choice(["none", "unit", "cosine"]),
        activation=activation,
        theta=0.1 if activation == "jump_relu" else None,
        name=name,
    )


def _condition(rng: random.Random, probe: rheostat.Probe) -> Condition:
    options: dict[str, Any] = {"pool": rng.choice(_POOLS), "after_prompt": rng.random() < 0.2}
    bound = rng.choice([-1e6, 0.0, rng.gauss(0, 0.3), 1e6])
    kind = rng.randrange(4)
    if kind == 0:
        return probe.between(bound, bound + 1, for_tokens=rng.choice([1, 2]), **options)
    options |= {"for_tokens": rng.choice([1, 1, 3]), "combine": rng.choice(["any", "all", "vote"])}
    if kind == 1:
        return probe.below(bound, **options)
    if rng.random() < 0.2:
        options["until"] = bound - 0.2
    return probe.above(bound, **options)


def _placed(rng: random.Random, *, late: bool = False) -> rheostat.Intervention:
    """An intervention behind the layers that are read; `late`: before some of them."""
    dose = rheostat.inline(_ROW) * 0.1
    op = rng.choice([dose, dose, rheostat.ablate(rheostat.inline(_ROW))])
    layers = [1, 4] if late else [4, 5]
    return op.at(points="resid_post", layers=layers, where=rng.choice(_READS))


def _gated(rng: random.Random) -> list[rheostat.Intervention]:
    """Interventions, most behind gates, up to as many gates as there may be."""
    found = []
    for number in range(rng.choice([0, 1, 1, 2, 5, 32])):
        late = rng.random() < 0.2
        placed = _placed(rng, late=late)
        if rng.random() < 0.2:
            found.append(placed)
            continue
        probe = _probe(rng, f"probe-{number}", [number % 3, 3])
        smooth = (rheostat.Sigmoid(2.0, 0.0), rheostat.Ramp(-1.0, 1.0))
        form = None if late else rng.choice([None, None, *smooth])
        condition = _condition(rng, probe) if form is None else probe.summed(pool="mean")
        gate = rheostat.gate(
            condition,
            form=form,
            hold=rng.choice(_LATE_HOLDS if late else _HOLDS),
            invert=rng.random() < 0.1,
            signals=rng.random() < 0.3,
        )
        found.append(placed.when(gate))
    return found


def _rules(rng: random.Random, count: int, *, of_watch: bool = False) -> list[rheostat.Rule]:
    actions: list[rheostat.Observe | rheostat.Stop | rheostat.Steer | rheostat.Gain] = [
        rheostat.Observe(),
        rheostat.Observe(),
        rheostat.Stop(
            "why",
            drop_sampled=rng.random() < 0.5,
            all_samples=not of_watch and rng.random() < 0.3,
        ),
    ]
    if rng.random() < 0.2:  # because gated steering takes none
        factor, chosen = rng.choice([0.0, 0.5, 1.0, 16.0]), rng.choice([[], [], [0], [1, 40]])
        actions.append(rheostat.Gain(factor, chosen))
    late = rng.random() < 0.5
    count_steered = rng.choice([1, 1, 3])
    actions.append(rheostat.Steer([_placed(rng, late=late) for _ in range(count_steered)]))
    probes = [_probe(rng, f"ruled-{number}", [number, 3]) for number in range(2)]
    found = []
    for number in range(count):
        action = rng.choice(actions)
        held = isinstance(action, rheostat.Steer | rheostat.Gain)
        hold = rng.choice([None, *_LATE_HOLDS]) if held else None
        condition = _condition(rng, rng.choice(probes))
        found.append(rheostat.Rule(f"rule-{number}", condition, action, hold=hold))
    return found


def _policy(rng: random.Random) -> steering_service_pb2.SetGlobalRequest:
    """A policy; most calls take it away."""
    message = steering_service_pb2.SetGlobalRequest()
    message.policy.SetInParent()
    if rng.random() < 0.4:
        rules = _rules(rng, rng.choice([1, 1, 3]), of_watch=True)
        message.policy.probes.extend(probes_to_wire((), (), rules))
        message.policy.rules.extend(rule.to_wire(f"rules[{n}]") for n, rule in enumerate(rules))
        for probe in message.policy.probes:
            probe.signals = False
        for rule in message.policy.rules:
            if rule.HasField("gain") and rng.random() < 0.8:
                del rule.gain.interventions[:]
    if rng.random() < 0.1:
        message.expected_version = rng.choice([0, 1, 2**63])
    return message


def _name(rng: random.Random, number: int) -> str:
    """The id of a request that may run now."""
    return f"watched-{max(0, number - rng.randrange(30))}"


def _request(rng: random.Random, number: int) -> generation_service_pb2.GenerateRequest:
    probes = [_probe(rng, f"sent-{n}", [n, 5]) for n in range(rng.choice([0, 0, 1, 3]))]
    return generate_request(
        rng.choice(_PROMPTS),
        steering=_gated(rng),
        probes=probes,
        rules=_rules(rng, rng.choice([0, 0, 1, 3])),
        hold_back=rng.choice([None, None, 0, 1, 5]),
        max_tokens=rng.choice([2, 5, _TOKENS]),
        n=rng.choice([1, 1, 2]),
        request_id=rng.choice([None, f"watched-{number}", f"watched-{number}"]),
        labels={LABEL: rng.choice(["red", "blue"])},
        with_baseline=rng.random() < 0.05,
        when_full=rng.choice([None, "wait", "refuse"]),
    )


def _gain(rng: random.Random) -> gain_pb2.Gain:
    some = rng.choice([[], [], [0], [0, 1], [40]])
    return gain_pb2.Gain(factor=rng.choice([0.0, 0.5, 1.0, 16.0]), interventions=some)


def _replacing(rng: random.Random) -> steering_pb2.Steering:
    """Steering for a request that runs."""
    steering = rng.choice(
        [[], [_placed(rng)], [_placed(rng), _placed(rng, late=True)], _gated(rng)]
    )
    return steering_to_wire(steering) or steering_pb2.Steering()


def _session(rng: random.Random, number: int) -> Iterator[Message]:
    kind = generation_service_pb2.SessionRequest
    yield kind(start=_request(rng, number))
    for update_id in range(1, rng.choice([2, 4, 20])):
        if rng.random() < 0.8:
            yield kind(update_id=update_id, gain=_gain(rng))
        else:
            yield kind(update_id=update_id, steering=_replacing(rng))
    if rng.random() < 0.2:
        yield kind(update_id=99, stop=generation_service_pb2.SessionStop())


def _watch(rng: random.Random, number: int) -> Iterator[Message]:
    service = monitor_service_pb2
    kind = service.WatchRequest
    first = kind()
    opened = first.open
    if rng.random() < 0.1:
        opened.resume.watch_id = rng.choice(["", "nobody", "0" * 32])
        opened.resume.after_sequence = rng.choice([0, 1, 2**63])
    else:
        which = rng.randrange(4)
        if which == 0:
            opened.filter.every.SetInParent()
        elif which == 1:
            names = [f"watched-{number + ahead}" for ahead in range(9)]
            opened.filter.requests.request_ids.extend(names)
        else:
            opened.filter.labels.labels[LABEL] = rng.choice(["red", "blue", "green"])
        probes = [_probe(rng, f"read-{n}", [n % 5, 5]) for n in range(rng.choice([1, 1, 2, 9]))]
        rules = _rules(rng, rng.choice([0, 0, 1, 4]), of_watch=True)
        opened.probes.extend(probes_to_wire((), probes, rules))
        opened.rules.extend(rule.to_wire(f"rules[{n}]") for n, rule in enumerate(rules))
        opened.buffer_bytes = rng.choice([1 << 16, 1 << 16, 1 << 20, 1 << 20, 1])
        if rng.random() < 0.6:
            opened.report = rng.choice(service.WatchReport.values()[1:])
        if rng.random() < 0.6:
            opened.on_lost = rng.choice(service.WatchLost.values()[1:])
        opened.steers = rng.random() < 0.6
    opened.credit_bytes = rng.choice([0, 1, 1 << 10, 1 << 30, 1 << 30])
    opened.batches = rng.random() < 0.3
    yield first
    for update_id in range(1, rng.choice([1, 3, 9])):
        what = rng.randrange(6)
        if what == 0:
            yield kind(credit=capture_service_pb2.Credit(bytes=rng.choice([1, 1 << 20])))
        elif what == 1:
            yield kind(ack=capture_service_pb2.Ack(sequence=rng.choice([0, 1, 2])))
        elif what == 2:
            yield kind(stop={"update_id": update_id, "request_id": _name(rng, number)})
        else:
            change = service.WatchSteer(update_id=update_id, request_id=_name(rng, number))
            if what == 3:
                change.layer.CopyFrom(_replacing(rng))
            elif what == 4:
                change.replace.CopyFrom(_replacing(rng))
            else:
                change.gain.CopyFrom(_gain(rng))
            yield kind(steer=change)
    if rng.random() < 0.7:
        yield kind(leave={"end": rng.random() < 0.7})
