"""Rules: actions that the server takes when conditions on the model's own activations hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rheostat._errors import InvalidRequest, invalid
from rheostat._fields import flag, probe_name, utf8_text, with_paths, word
from rheostat._steering.gates import COMBINES, Combine, Condition, Hold, Probe, hold_to_wire
from rheostat._steering.steering import SteeringLike, indices_of, steering_to_wire
from rheostat._steering.vectors import Intervention, finite, finite_or_none
from rheostat_wire.v1 import gate_pb2, monitor_pb2, steering_pb2

ProbesLike: TypeAlias = Probe | Sequence[Probe] | None
"""Probes whose readings are sent: one, or several."""


@dataclass(frozen=True)
class Observe:
    """Only report the tokens at which the rule fired."""


@dataclass(frozen=True)
class Stop:
    """End the sample where the rule fires, with the finish reason "rule"."""

    label: str = ""
    """The reason, for people: `Finished.label`. At most 255 bytes."""
    drop_sampled: bool = True
    """Whether the token is withheld that was sampled from the row at which the rule fired. Later
    tokens are always withheld. If the rule fires at a prompt token, nothing is generated."""
    all_samples: bool = False
    """Whether the other samples end too."""


@dataclass(frozen=True)
class Steer:
    """Steer the sample after the rule has fired, at the tokens that `Rule.hold` allows.

    If all sites of an intervention come after the probes' sites in the forward pass, it also acts
    at the token at which the rule fires. Otherwise it acts from the next token on, and only at
    generated tokens.
    """

    steering: SteeringLike
    """Interventions without gates of their own: the rule decides when they act."""


@dataclass(frozen=True)
class Gain:
    """Multiply the request's own steering after the rule has fired.

    Each intervention is multiplied at the tokens at which it would act as part of a `Steer`.
    """

    factor: float
    """0 (off) to 16."""
    interventions: Sequence[int] = ()
    """Indices in the request's steering. Empty: all of it. Such an intervention may have no gate
    and no other rule's gain. If it adds, no other addition may act at its sites and tokens."""


Action: TypeAlias = Observe | Stop | Steer | Gain
"""The action of a rule."""


@dataclass(frozen=True)
class Rule:
    """An action that the server takes at tokens at which conditions hold.

    The forward pass decides where the rule fires. No client gets a token that a rule withholds.

        gloom = rheostat.probe(direction, points="resid_post", layers=12, where="generated")
        rule = rheostat.Rule("grim", gloom.above(2), rheostat.Stop("too gloomy"))
        out = engine.generate("The weather was", rules=rule)
        out.finish_reason, out.signals.firings["grim"]
        cheer = rheostat.Rule("cheer", gloom.above(2), rheostat.Steer(4 * calm), hold=8)
    """

    name: str
    """1 to 64 of [A-Za-z0-9._-], first a letter or digit."""
    when: Condition | Sequence[Condition]
    """1 to 16 conditions."""
    then: Action = Stop()
    combine: Combine = "all"
    """How the conditions become the evidence."""
    threshold: float | None = None
    """It fires if the evidence is above this; required if something is summed. None: 0.5."""
    hold: Hold | None = None
    """Where it acts after it fired; only with `Steer` and `Gain`. None: the rest of the sample."""

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions, as a tuple."""
        return tuple(self.when) if isinstance(self.when, Sequence) else (self.when,)

    def to_wire(self, path: str) -> monitor_pb2.Rule:
        """The message; ``path`` names it in errors.

        Raises InvalidRequest if the name is not valid, or a number is out of range.
        """
        numbered = with_paths(self.conditions, f"{path}.conditions")
        message = monitor_pb2.Rule(
            name=probe_name(self.name, f"{path}.name"),
            conditions=[condition.to_wire(at) for condition, at in numbered],
            combine=word(self.combine, COMBINES, f"{path}.combine"),
            threshold=finite_or_none(self.threshold, f"{path}.threshold", "threshold"),
        )
        match self.then:
            case Observe():
                message.observe.SetInParent()
            case Stop(label, drop_sampled, all_samples):
                message.stop.label = utf8_text(label, f"{path}.stop.label", "a label")
                message.stop.drop_sampled = flag(
                    drop_sampled, f"{path}.stop.drop_sampled", "drop_sampled"
                )
                message.stop.all_samples = flag(
                    all_samples, f"{path}.stop.all_samples", "all_samples"
                )
            case Steer(steering):
                message.steer.CopyFrom(_steering_to_wire(steering, f"{path}.steer.interventions"))
            case Gain(factor, interventions):
                indices = indices_of(interventions, f"{path}.gain.interventions", "an index")
                message.gain.interventions.extend(indices)
                message.gain.factor = finite(factor, f"{path}.gain.factor", "factor")
            case other:
                raise invalid(
                    f"{path}.then",
                    "a rule's action is Observe(), Stop(), Steer(...) or Gain(...), not "
                    f"{type(other).__name__}",
                )
        if self.hold is not None:
            message.hold.CopyFrom(hold_to_wire(self.hold, f"{path}.hold"))
        return message


def _steering_to_wire(steering: SteeringLike, path: str) -> steering_pb2.Steering:
    message = steering_to_wire(steering, path)
    if message is None:
        raise invalid(path, "at least one intervention is required", "REASON_MISSING_FIELD")
    for intervention, at in with_paths(message.interventions, path):
        if intervention.HasField("gate"):
            raise invalid(
                f"{at}.gate",
                "what a rule steers has no gate of its own: the rule decides when it acts",
            )
    return message


RulesLike: TypeAlias = Rule | Sequence[Rule] | None
"""One rule, or several."""


def rules_of(rules: RulesLike) -> tuple[Rule, ...]:
    """The rules of an argument.

    Raises InvalidRequest if one of them is no rule, or takes something else than conditions.
    """
    listed = () if rules is None else (rules,) if isinstance(rules, Rule) else tuple(rules)
    for rule, at in with_paths(listed, "rules"):
        if not isinstance(rule, Rule):
            raise invalid(at, f"a rule is a rheostat.Rule, not {type(rule).__name__}")
        for condition in rule.conditions:
            if not isinstance(condition, Condition):
                raise invalid(
                    f"{at}.conditions",
                    "a rule takes conditions, such as probe.above(2), not "
                    f"{type(condition).__name__}",
                )
    return listed


def _not_a_probe(given: object, path: str) -> InvalidRequest:
    kind = type(given).__name__
    return invalid(path, f"a probe is a rheostat.probe(vector, points=..., layers=...), not {kind}")


def probes_to_wire(
    interventions: Iterable[Intervention], probes: ProbesLike = None, rules: Sequence[Rule] = ()
) -> list[gate_pb2.Probe]:
    """The probes of a request, each once: those that are sent, then those of gates and rules.

    Raises InvalidRequest if two different probes have one name.
    """
    if probes is not None and not isinstance(probes, Iterable | Probe):
        raise _not_a_probe(probes, "probes")
    sent = () if probes is None else (probes,) if isinstance(probes, Probe) else tuple(probes)
    for probe, at in with_paths(sent, "probes"):
        if not isinstance(probe, Probe):
            raise _not_a_probe(probe, at)
    ruled = [condition.probe for rule in rules for condition in rule.conditions]
    messages = [
        *(probe.to_wire(f"probe {probe.name!r}") for probe in sent),
        *(
            message
            for intervention in interventions
            if intervention.gate is not None
            for message in intervention.gate.probes_to_wire()
        ),
        *(probe.to_wire(f"probe {probe.name!r}") for probe in dict.fromkeys(ruled)),
    ]
    found: dict[str, gate_pb2.Probe] = {}
    for message in messages:
        if found.setdefault(message.name, message) != message:
            raise invalid(
                f"probes[{len(found)}].name",
                f"two different probes have the name {message.name!r}: give each its own",
            )
    for probe in sent:
        found[probe.name].signals = True
    return list(found.values())
