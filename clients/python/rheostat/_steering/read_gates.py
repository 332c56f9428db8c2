"""Gates, conditions and probes of messages that a server sent.

Raises Unimplemented for parts that this client lacks, because sending the result again would remove
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from rheostat._errors import ServerError, Unimplemented
from rheostat._fields import with_paths
from rheostat._points import read_site_set
from rheostat._selectors import from_wire as selector_from_wire
from rheostat._steering.gates import (
    COMBINES,
    POOLS,
    PROBE_ROWS,
    Combine,
    Condition,
    Gate,
    Hold,
    Pool,
    Probe,
    ProbeRows,
    Ramp,
    Sigmoid,
)
from rheostat._steering.readouts import read_settings
from rheostat._steering.vectors import Vector
from rheostat_wire.v1 import gate_pb2, vector_pb2

_Word = TypeVar("_Word")

POOL_WORDS: dict[int, Pool] = {value: name for name, value in POOLS.items()}
_PROBE_ROWS: dict[int, ProbeRows] = {value: name for name, value in PROBE_ROWS.items()}
_COMBINES: dict[int, Combine] = {value: name for name, value in COMBINES.items()}


def stored_vector(ref: vector_pb2.VectorRef, name: str | None = None) -> Vector:
    """A vector that the server names by its digest."""
    if ref.WhichOneof("ref") != "digest":
        raise ServerError("the server sent steering whose vectors are not resolved to digests")
    return Vector(ref.digest.hex(), name, row_layers=tuple(ref.row_layers.layers) or None)


def read_probe(message: gate_pb2.Probe, path: str, *, name: str | None) -> Probe:
    """A probe of this name; None: the name follows from what it reads."""
    where = read_site_set(message.sites)
    if where is None:
        raise Unimplemented(f"{path} of the server reads at sites that this client cannot name")
    points, layers = where
    return Probe(
        stored_vector(message.read.vector),
        points,
        layers,
        selector_from_wire(message.where, f"{path}.where"),
        read_settings(message.read, f"{path}.read"),
        name,
        read_rows(message.rows, f"{path}.rows"),
    )


def read_rows(value: int, path: str) -> ProbeRows:
    """Of which rows a probe reads. 0: the server, maybe of an earlier version, names none."""
    return known(_PROBE_ROWS, value, path) if value else "each"


def read_condition(message: gate_pb2.Condition, probe: Probe, path: str) -> Condition:
    """A condition of a probe."""
    return Condition(
        probe,
        message.above if message.HasField("above") else None,
        message.below if message.HasField("below") else None,
        known(POOL_WORDS, message.pool, f"{path}.pool") if message.HasField("pool") else "last",
        read_combine(message.combine_sites, f"{path}.combine_sites", "any"),
        message.after_prompt,
        message.for_tokens if message.HasField("for_tokens") else 1,
        message.stays_above if message.HasField("stays_above") else None,
        message.stays_below if message.HasField("stays_below") else None,
    )


def read_conditions(
    messages: Iterable[gate_pb2.Condition], probes: Mapping[str, Probe], path: str
) -> tuple[Condition, ...]:
    """The conditions of a gate or a rule."""
    conditions = []
    for condition, at in with_paths(messages, f"{path}.conditions"):
        if condition.probe_name not in probes:
            raise ServerError(f"the server sent no probe {condition.probe_name!r}")
        conditions.append(read_condition(condition, probes[condition.probe_name], at))
    return tuple(conditions)


def read_gate(message: gate_pb2.Gate, probes: Mapping[str, Probe], path: str) -> Gate:
    """A gate of probes, by name."""
    if message.signals:
        raise Unimplemented(f"{path} of the server sends signals, which this client does not know")
    conditions = read_conditions(message.conditions, probes, path)
    combine = read_combine(message.combine, f"{path}.combine", "all")
    form, hold = _form(message), read_hold(message.hold)
    return Gate(conditions, combine, form, hold, message.invert)


def known(names: Mapping[int, _Word], value: int, path: str) -> _Word:
    """The word for the value of an enum."""
    if value not in names:
        raise Unimplemented(f"{path} of the server is one that this client does not know")
    return names[value]


def read_combine(value: int, path: str, default: Combine) -> Combine:
    """How conditions or sites are combined."""
    return known(_COMBINES, value, path) if value else default


def _form(message: gate_pb2.Gate) -> float | Sigmoid | Ramp | None:
    match message.WhichOneof("form"):
        case "sigmoid":
            sigmoid = message.sigmoid
            threshold = sigmoid.threshold if sigmoid.HasField("threshold") else 0.5
            return Sigmoid(sigmoid.sharpness, threshold)
        case "ramp":
            return Ramp(message.ramp.low, message.ramp.high)
        case "step" if message.step.HasField("threshold"):
            return message.step.threshold
        case _:
            return None


def read_hold(message: gate_pb2.Hold) -> Hold:
    """How long a gate stays open, or a rule acts."""
    kind = message.WhichOneof("kind")
    return message.tokens if kind == "tokens" else kind or "token"
