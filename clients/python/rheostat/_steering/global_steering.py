"""The server-wide policy: interventions and rules, which can be passed to ``set_global`` again."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

from rheostat._errors import Unimplemented
from rheostat._fields import with_paths
from rheostat._notebook import table
from rheostat._points import read_site_set
from rheostat._selectors import from_wire as selector_from_wire
from rheostat._steering.gates import Probe
from rheostat._steering.interventions import Ablate, Band, Clamp, NormAdd, Scale
from rheostat._steering.read_gates import (
    read_combine,
    read_conditions,
    read_gate,
    read_hold,
    read_probe,
    stored_vector,
)
from rheostat._steering.readouts import COORDINATE, Readout, read_settings
from rheostat._steering.replacements import read_replace
from rheostat._steering.rules import Action, Gain, Observe, Rule, Steer, Stop
from rheostat._steering.vectors import Add, Intervention, Vector
from rheostat_wire.v1 import monitor_pb2, steering_pb2, steering_service_pb2, vector_pb2


@dataclass(frozen=True)
class GlobalSteering:
    """The server-wide steering. ``print`` shows it in words."""

    interventions: tuple[Intervention, ...]
    """In the order in which they act, before those of a request; vectors are given by digest."""
    version: int
    """0 at the server's start, incremented by every change."""
    set_time: datetime.datetime | None
    """Time of the last change, UTC; None for version 0."""
    rules: tuple[Rule, ...] = ()
    """The rules, which read every request."""

    def __str__(self) -> str:
        return "\n".join([self._title(), *(f"  {what}: {how}" for what, how in self._rows())])

    def _repr_html_(self) -> str:
        return table((self._title(), ""), self._rows())

    def _title(self) -> str:
        since = "" if self.set_time is None else f", set {self.set_time:%Y-%m-%d %H:%M:%S} UTC"
        return f"server-wide steering, version {self.version}{since}"

    def _rows(self) -> list[tuple[str, str]]:
        rows = [
            (str(number), str(intervention))
            for number, intervention in enumerate(self.interventions)
        ]
        rows += [(f"rule {rule.name}", _rule_text(rule)) for rule in self.rules]
        return rows or [("interventions", "none")]


def read_global(message: steering_service_pb2.GetGlobalResponse) -> GlobalSteering:
    """The server-wide steering of a message.

    Raises Unimplemented for parts that this client lacks, because setting the result again would
    remove them.
    """
    policy = message.policy
    probes = {
        probe.name: read_probe(probe, path, name=probe.name)
        for probe, path in with_paths(policy.probes, "probes")
    }
    return GlobalSteering(
        interventions=_read_interventions(policy.steering, probes, "interventions"),
        version=message.version,
        set_time=(
            message.set_time.ToDatetime(tzinfo=datetime.UTC)
            if message.HasField("set_time")
            else None
        ),
        rules=tuple(
            _read_rule(rule, probes, path) for rule, path in with_paths(policy.rules, "rules")
        ),
    )


def _rule_text(rule: Rule) -> str:
    action = type(rule.then).__name__.lower()
    if isinstance(rule.then, Gain):
        action += f" {rule.then.factor:g}"
    several = f"{rule.combine} of " if len(rule.conditions) > 1 else ""
    text = f"{action} when {several}{', '.join(map(str, rule.conditions))}"
    return text if rule.hold is None else f"{text}, held for {rule.hold}"


def _read_rule(message: monitor_pb2.Rule, probes: Mapping[str, Probe], path: str) -> Rule:
    action: Action
    match message.WhichOneof("action"):
        case "observe":
            action = Observe()
        case "stop":
            stop = message.stop
            dropped = stop.drop_sampled if stop.HasField("drop_sampled") else True
            action = Stop(stop.label, dropped, stop.all_samples)
        case "steer":
            action = Steer(_read_interventions(message.steer, {}, f"{path}.steer.interventions"))
        case "gain":
            action = Gain(message.gain.factor, tuple(message.gain.interventions))
        case _:
            raise Unimplemented(f"{path} of the server has an action unknown to this client")
    return Rule(
        message.name,
        read_conditions(message.conditions, probes, path),
        action,
        read_combine(message.combine, f"{path}.combine", "all"),
        message.threshold if message.HasField("threshold") else None,
        read_hold(message.hold) if message.HasField("hold") else None,
    )


def _read_interventions(
    message: steering_pb2.Steering, probes: Mapping[str, Probe], path: str
) -> tuple[Intervention, ...]:
    numbered = with_paths(message.interventions, path)
    return tuple(_read_intervention(intervention, probes, at) for intervention, at in numbered)


def _read_intervention(
    message: steering_pb2.Intervention, probes: Mapping[str, Probe], path: str
) -> Intervention:
    where = read_site_set(message.sites)
    if where is None:
        raise Unimplemented(f"{path} of the server acts at sites that this client cannot name")
    points, layers = where
    op = _read_op(message, path).at(
        points=points, layers=layers, where=selector_from_wire(message.where, f"{path}.where")
    )
    if not message.HasField("gate"):
        return op
    return op.when(read_gate(message.gate, probes, f"{path}.gate"))


def _read_op(message: steering_pb2.Intervention, path: str) -> Intervention:
    match message.WhichOneof("op"):
        case "add":
            add = message.add
            return Add(stored_vector(add.vector), add.scale if add.HasField("scale") else 1.0)
        case "norm_add":
            norm_add = message.norm_add
            scale = norm_add.scale if norm_add.HasField("scale") else 1.0
            return NormAdd(stored_vector(norm_add.vector), scale)
        case "ablate":
            ablate = message.ablate
            return Ablate(
                tuple(stored_vector(direction) for direction in ablate.directions),
                ablate.strength if ablate.HasField("strength") else 1.0,
            )
        case "clamp":
            bands = with_paths(message.clamp.bands, f"{path}.bands")
            return Clamp(tuple(_read_band(band, at) for band, at in bands))
        case "scale":
            scaled = message.scale
            read = _read_readout(scaled.read, f"{path}.read")
            return Scale(read, scaled.factor, _read_write(scaled))
        case "replace":
            return read_replace(message.replace, path)
        case op:
            raise Unimplemented(f"{path} of the server is {op}, which this client does not know")


def _read_band(message: steering_pb2.Band, path: str) -> Band:
    return Band(
        _read_readout(message.read, f"{path}.read"),
        message.min if message.HasField("min") else None,
        message.max if message.HasField("max") else None,
        message.strength if message.HasField("strength") else 1.0,
        _read_write(message),
        message.only_on,
    )


def _read_write(message: steering_pb2.Band | steering_pb2.Scale) -> Vector | None:
    return stored_vector(message.write) if message.HasField("write") else None


def _read_readout(message: vector_pb2.Readout, path: str) -> Vector | Readout:
    """A vector where the coordinate along it is read; otherwise a readout."""
    vector, settings = stored_vector(message.vector), read_settings(message, path)
    return vector if settings == COORDINATE else Readout(vector, settings)
