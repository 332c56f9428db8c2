"""Gates: steering whose strength depends on the model's own activations.

A `Probe` reads a number from the stream at each token. A `Condition` compares it with bounds. A
`Gate` turns conditions into its openness, a number from 0 (shut) to 1 (open), and multiplies the
effect of an intervention by it: ``intervention.when(probe.above(2))``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias, get_args

from rheostat._errors import invalid
from rheostat._fields import checks_arguments, flag, probe_name, whole_number, with_paths, word
from rheostat._points import (
    Layers,
    LayersLike,
    Point,
    PointsLike,
    layers_of,
    missing_sites,
    points_of,
    site_set,
)
from rheostat._selectors import Selector, SelectorLike, selector_of
from rheostat._selectors import to_wire as selector_to_wire
from rheostat._steering.readouts import Activation, Normalise, ReadoutSettings
from rheostat._steering.vectors import Vector, finite, finite_or_none, refuse_dose, unfetched
from rheostat_wire.v1 import gate_pb2

Pool: TypeAlias = Literal["last", "mean", "max"]
"""How the value at a token follows from the sample's readings so far: the last reading, the mean of
all, or the largest."""

Combine: TypeAlias = Literal["all", "any", "sum", "vote"]
"""How several conditions or sites become one number, the evidence. "all": 1 if all hold. "any": 1
if one holds. "vote": the fraction that holds. "sum": the sum of the values."""

ProbeRows: TypeAlias = Literal["each", "prompt_mean"]
"""What a probe reads: "each" selected row, or once the mean of the selected rows of the prompt."""

Hold: TypeAlias = Literal["token", "next_token", "rest", "until_read"] | int
"""Where a gate acts that opened at a token. "token": at this token. "next_token": at the next
token. An integer: at this token and so many after it. "rest": at this token and the rest of the
sample. "until_read": at this token and later ones, until the probe reads again."""

POOLS = {name: gate_pb2.Pool.Value(f"POOL_{name.upper()}") for name in get_args(Pool)}
PROBE_ROWS = {
    name: gate_pb2.ProbeRows.Value(f"PROBE_ROWS_{name.upper()}") for name in get_args(ProbeRows)
}
COMBINES = {name: gate_pb2.Combine.Value(f"COMBINE_{name.upper()}") for name in get_args(Combine)}
_HOLDS = ("token", "next_token", "rest", "until_read")


@dataclass(frozen=True)
class Probe:
    """Reads activation(x.v + bias) of a row x, at its sites and tokens; made by `probe`.

    `above`, `below`, `between` and `summed` make conditions for a `gate` or a `Rule`.
    """

    vector: Vector
    points: tuple[Point, ...]
    layers: Layers
    where: Selector
    readout: ReadoutSettings
    given_name: str | None = None
    rows: ProbeRows = "each"

    @property
    def name(self) -> str:
        """The given name, or a hash of the other arguments."""
        if self.given_name is not None:
            return self.given_name
        content = self._message("", "probe").SerializeToString(deterministic=True)
        return f"probe-{hashlib.sha256(content).hexdigest()[:16]}"

    def above(
        self,
        number: float,
        *,
        pool: Pool = "last",
        combine: Combine = "any",
        after_prompt: bool = False,
        for_tokens: int = 1,
        until: float | None = None,
    ) -> Condition:
        """The condition that the value is above ``number``.

        Args:
            number: the bound, in the units of the readings.
            pool: how the readings so far become the value.
            combine: how several sites are combined.
            after_prompt: whether it is decided only once, at the last prompt token, from the prompt
                tokens that the probe reads.
            for_tokens: the value must be above the bound at so many of the probe's tokens in a row.
            until: a lower bound that applies while the condition holds, so that a value near
                ``number`` does not switch it at every token. Default: ``number``.
        """
        return Condition(
            self, number, None, pool, combine, after_prompt, for_tokens, stays_low=until
        )

    def below(
        self,
        number: float,
        *,
        pool: Pool = "last",
        combine: Combine = "any",
        after_prompt: bool = False,
        for_tokens: int = 1,
        until: float | None = None,
    ) -> Condition:
        """The condition that the value is below ``number``; the other arguments are as in `above`.

        ``until`` is a higher bound that applies while the condition holds.
        """
        return Condition(
            self, None, number, pool, combine, after_prompt, for_tokens, stays_high=until
        )

    def between(
        self,
        low: float,
        high: float,
        *,
        pool: Pool = "last",
        combine: Combine = "any",
        after_prompt: bool = False,
        for_tokens: int = 1,
    ) -> Condition:
        """The condition that the value is between ``low`` and ``high``; arguments as in `above`."""
        return Condition(self, low, high, pool, combine, after_prompt, for_tokens)

    def summed(self, *, pool: Pool = "last", after_prompt: bool = False) -> Condition:
        """The sum of the values of its sites, for a `gate` whose ``form`` is given."""
        return Condition(self, None, None, pool, "sum", after_prompt)

    def __lt__(self, number: object) -> NoReturn:
        _refuse_comparison(f"below({number!r})")

    def __gt__(self, number: object) -> NoReturn:
        _refuse_comparison(f"above({number!r})")

    __le__ = __lt__
    __ge__ = __gt__

    def to_wire(self, path: str) -> gate_pb2.Probe:
        """The message; ``path`` names it in errors.

        Raises InvalidRequest if numbers are out of range, or if the vector's rows do not match the
        layers.
        """
        return self._message(self.name, path)

    def _message(self, name: str, path: str) -> gate_pb2.Probe:
        message = gate_pb2.Probe(
            name=name,
            sites=site_set(self.points, self.layers),
            where=selector_to_wire(self.where),
            read=self.readout.to_wire(self.vector, self.layers, f"{path}.read"),
        )
        if self.rows != "each":  # the default, which servers of earlier versions know too
            message.rows = word(self.rows, PROBE_ROWS, f"{path}.rows")
        return message


def _refuse_comparison(method: str) -> NoReturn:
    raise invalid("gate.conditions", f"a probe is not compared: write probe.{method}")


class _Uncombined:
    """Refuses Python's operators, because ``a and b`` would be ``b`` alone, without an error."""

    def __bool__(self) -> NoReturn:
        _refuse_operator()

    def __and__(self, other: object) -> NoReturn:
        _refuse_operator()

    def __or__(self, other: object) -> NoReturn:
        _refuse_operator()

    def __invert__(self) -> NoReturn:
        _refuse_operator()


def _refuse_operator() -> NoReturn:
    raise invalid(
        "gate.conditions",
        "conditions are not combined by and, or, not, &, | or ~: write rheostat.gate(a, b), "
        'rheostat.gate(a, b, combine="any") or rheostat.gate(a, invert=True); a rule takes a list',
    )


@dataclass(frozen=True)
class Condition(_Uncombined):
    """A comparison of a probe's readings with bounds; made by the methods of `Probe`."""

    probe: Probe
    low: float | None = None
    """The value must be above this; None: no such bound."""
    high: float | None = None
    """The value must be below this; None: no such bound."""
    pool: Pool = "last"
    combine: Combine = "any"
    after_prompt: bool = False
    for_tokens: int = 1
    stays_low: float | None = None
    """Replaces ``low`` while the condition holds; None: ``low``."""
    stays_high: float | None = None
    """Replaces ``high`` while the condition holds; None: ``high``."""

    def as_gate(self) -> Gate:
        """The gate that is open at the tokens at which this holds."""
        return gate(self)

    def __str__(self) -> str:
        low = "" if self.low is None else f"{self.low:.6g} < "
        high = "" if self.high is None else f" < {self.high:.6g}"
        return f"{low}{self.probe.given_name or self.probe.vector.label}{high}"

    def to_wire(self, path: str) -> gate_pb2.Condition:
        """The message; ``path`` names it in errors."""
        message = gate_pb2.Condition(
            probe_name=self.probe.name,
            pool=word(self.pool, POOLS, f"{path}.pool"),
            combine_sites=word(self.combine, COMBINES, f"{path}.combine"),
            after_prompt=flag(self.after_prompt, f"{path}.after_prompt", "after_prompt"),
            above=finite_or_none(self.low, f"{path}.above", "bound"),
            below=finite_or_none(self.high, f"{path}.below", "bound"),
            stays_above=finite_or_none(self.stays_low, f"{path}.stays_above", "bound"),
            stays_below=finite_or_none(self.stays_high, f"{path}.stays_below", "bound"),
        )
        if self.combine != "sum":
            message.for_tokens = whole_number(
                self.for_tokens, f"{path}.for_tokens", "a number of tokens", least=1
            )
        return message


@dataclass(frozen=True)
class Sigmoid:
    """Openness 1 / (1 + exp(-sharpness * (e - threshold))), with the evidence e."""

    sharpness: float
    """Above 0."""
    threshold: float = 0.5
    """The evidence at which the openness is 0.5."""


@dataclass(frozen=True)
class Ramp:
    """Openness 0 up to the evidence ``low``, 1 from ``high`` on, linear between."""

    low: float
    high: float
    """Above ``low``."""


@dataclass(frozen=True)
class Gate(_Uncombined):
    """A factor from 0 to 1 on the effect of interventions at each token; made by `gate`."""

    conditions: tuple[Condition, ...]
    combine: Combine = "all"
    form: float | Sigmoid | Ramp | None = None
    """From the evidence to the openness. A number: 1 above it, else 0. None: 0.5."""
    hold: Hold = "token"
    invert: bool = False
    signals: bool = False
    """Whether its openness is sent: `Signals.openness`."""

    def probes_to_wire(self) -> list[gate_pb2.Probe]:
        """The probes of its conditions, each once."""
        probes = dict.fromkeys(condition.probe for condition in self.conditions)
        return [probe.to_wire(f"probe {probe.name!r}") for probe in probes]

    def as_gate(self) -> Gate:
        """Itself."""
        return self

    def __str__(self) -> str:
        several = f" {self.combine} of" if len(self.conditions) > 1 else ""
        text = f"{'not' * self.invert}{several} {', '.join(map(str, self.conditions))}".strip()
        return text if self.hold == "token" else f"{text}, held for {self.hold}"

    def to_wire(self, path: str) -> gate_pb2.Gate:
        """The message; ``path`` names it in errors."""
        numbered = with_paths(self.conditions, f"{path}.conditions")
        message = gate_pb2.Gate(
            conditions=[condition.to_wire(at) for condition, at in numbered],
            combine=word(self.combine, COMBINES, f"{path}.combine"),
            invert=flag(self.invert, f"{path}.invert", "invert"),
            signals=flag(self.signals, f"{path}.signals", "signals"),
        )
        match self.form:
            case None:
                pass
            case Sigmoid(sharpness, threshold):
                message.sigmoid.sharpness = finite(
                    sharpness, f"{path}.sigmoid.sharpness", "sharpness"
                )
                message.sigmoid.threshold = finite(
                    threshold, f"{path}.sigmoid.threshold", "threshold"
                )
            case Ramp(low, high):
                message.ramp.low = finite(low, f"{path}.ramp.low", "bound")
                message.ramp.high = finite(high, f"{path}.ramp.high", "bound")
            case str() | type() as other:
                raise invalid(
                    f"{path}.form",
                    "a form is a number, rheostat.Ramp(low, high) or "
                    f"rheostat.Sigmoid(sharpness, threshold), not {other!r}",
                )
            case threshold:
                message.step.threshold = finite(threshold, f"{path}.step.threshold", "threshold")
        message.hold.CopyFrom(hold_to_wire(self.hold, f"{path}.hold"))
        return message


def hold_to_wire(held: Hold, path: str) -> gate_pb2.Hold:
    """The message; ``path`` names it in errors."""
    if not isinstance(held, str):
        count = whole_number(held, f"{path}.tokens", "a number of tokens", least=1)
        return gate_pb2.Hold(tokens=count)
    if held not in _HOLDS:
        words = ", ".join(map(repr, _HOLDS))
        raise invalid(
            path, f"hold is {words} or a number of tokens, not {held!r}", "REASON_UNKNOWN_ENUM"
        )
    hold = gate_pb2.Hold()
    getattr(hold, held).SetInParent()
    return hold


@checks_arguments
def probe(
    vector: Vector,
    *,
    points: PointsLike | None = None,
    layers: LayersLike | None = None,
    where: SelectorLike = None,
    bias: float = 0.0,
    normalise: Normalise = "none",
    activation: Activation = "identity",
    theta: float | None = None,
    rows: ProbeRows = "each",
    name: str | None = None,
) -> Probe:
    """A probe, which reads activation(x.v + bias) from a row x of the stream, in float32.

    It reads in the forward pass, after all ops at its sites. For example, it can read a feature of
    a sparse autoencoder, or be a linear classifier.

    Args:
        vector: v: one row for all layers, [1, width], or one row for each layer.
        points: where it reads. Default: the vector's points.
        layers: where it reads. Default: the vector's layers.
        where: which tokens it reads. Default: every token.
        bias: added to the number.
        normalise: "unit" divides x.v by |v|, "cosine" by |x| |v|. "projected_cosine" is the cosine
            of x and p = tanh((x.v / v.v) v), where tanh acts on each element.
        activation: the function that is applied last.
        theta: the threshold of "jump_relu".
        rows: "prompt_mean" reads one number, at the last prompt token, from the mean of the rows of
            all prompt tokens that ``where`` selects. With "projected_cosine" it is the number of
            conditional activation steering (CAST; Lee et al., 2024).
        name: its name in signals, receipts and errors. Default: a hash of the other arguments.

    Raises:
        InvalidRequest: points or layers are missing, or the name is not valid.
    """
    refuse_dose(vector, "probe.vector")
    if not isinstance(vector, Vector):
        raise invalid(
            "probe.vector",
            "a probe reads along a vector, such as rheostat.named(name) or rheostat.inline(array), "
            f"not {type(vector).__name__}",
        )
    at_points = vector.points if points is None else points_of(points)
    at_layers = vector.layers if layers is None else layers_of(layers)
    if at_points is None or at_layers is None:
        raise missing_sites(
            "probe.sites", vector.label, at_points, at_layers, "{}", named=unfetched([vector])
        )
    if name is not None:
        probe_name(name, "probe.name")
    readout = ReadoutSettings(bias=bias, normalise=normalise, activation=activation, theta=theta)
    return Probe(vector, at_points, at_layers, selector_of(where), readout, name, rows)


def gate(
    *conditions: Condition,
    combine: Combine = "all",
    form: float | Sigmoid | Ramp | None = None,
    hold: Hold = "token",
    invert: bool = False,
    signals: bool = False,
) -> Gate:
    """A gate, which multiplies the effect of interventions by its openness, 0 (shut) to 1 (open).

    If all its probes read at sites before those at which the interventions act, it acts at the
    token that was read. Otherwise it needs a ``hold`` for later tokens, and opens at the first
    generated token at the earliest. Its ``form`` must then be a number, unless the prompt decides
    it (``after_prompt``). A gate is shut until its first condition is decided.

    Args:
        conditions: 1 to 16.
        combine: how they become the evidence.
        form: from the evidence to the openness. A number: 1 above it, else 0; required if
            something is summed. Default: 0.5.
        hold: where it acts after it opened.
        invert: whether the openness becomes 1 minus the openness.
        signals: whether the openness at each token is sent: `Signals.openness`.

    Raises:
        InvalidRequest: there are no conditions, or something is summed without a form.
    """
    if not conditions:
        raise invalid("gate.conditions", "a gate needs a condition", "REASON_MISSING_FIELD")
    for condition in conditions:
        if not isinstance(condition, Condition):
            raise invalid(
                "gate.conditions",
                f"a gate takes conditions, such as probe.above(2), not {type(condition).__name__}",
            )
    summed = combine == "sum" or any(condition.combine == "sum" for condition in conditions)
    if form is None and summed:
        raise invalid(
            "gate.form",
            "a sum is any number: give form=, a number above which the gate is open, or "
            "rheostat.Ramp(low, high) or rheostat.Sigmoid(sharpness, threshold)",
            "REASON_MISSING_FIELD",
        )
    return Gate(conditions, combine, form, hold, invert, signals)
