"""Readings of the stream, and gates, which multiply the strength of acts.

A reading is a number that an act of `Kind.READ` computes from a token's row x. Each token has
`MAX_COLUMNS` columns for its readings, one for each site of each probe. A gate is a function of the
readings of one sample, in the order of positions. Its openness at a token, from 0 (shut) to 1, is
the factor on the strength of its acts.

Late gates
    A gate is late if some sites that it reads do not come before all sites at which it acts. Its
    readings of a token count from the next token on, so that its acts need no reading of their own
    forward pass. It is open only at generated tokens, because each of them has its own step. A
    sample that computes positions again keeps their decisions.

Invariants: a gate depends only on positions and readings, so chunks and batches can't change it. If
a gate is not late, a token's own readings count. A gate that has read nothing yet is shut.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Annotated, NamedTuple

import msgspec

from rheostat_engine.plan.gains import LARGEST_GAIN

MAX_TERMS = 64
"""The most terms of a gate: one for each column of each of its conditions."""

MAX_CONDITIONS = 16
"""The most conditions of a gate."""

MAX_GATES = 32
"""The most distinct gates of a plan."""

MAX_COLUMNS = 256
"""The most readings of a token."""

MAX_RECORDED = 1 << 24
"""The largest `Gate.end` of a recorded gate, because states store positions as float32."""

NEVER = -1
"""For `GateCondition.decided_at`: the condition is decided at each token that is read."""

# Ranges are checked where a worker parses a plan.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Normalise(IntEnum):
    """How v and x are normalised before x.v is read. u is v / |v|."""

    NONE = 0
    """x.v."""
    UNIT = 1
    """x.u."""
    COSINE = 2
    """x.u / |x|; 0 for a row of zeros."""
    PROJECTED_COSINE = 3
    """x.p / (|x| |p|), with p = tanh((x.u) u), element by element; 0 if x or p is zero.

    (x.u) u is the projection of x on v. Conditional activation steering reads this of a mean row.
    """


class Activation(IntEnum):
    """The function that is applied to z = normalise(x, v) + bias."""

    IDENTITY = 0
    RELU = 1
    JUMP_RELU = 2
    """z where z > theta, else 0."""
    TANH = 3


class Readout(NamedTuple):
    """How a number is computed from a row x and a vector v: activation(normalise(x, v) + bias)."""

    normalise: Normalise = Normalise.UNIT
    activation: Activation = Activation.IDENTITY
    bias: float = 0.0
    theta: float = 0.0
    """The threshold of `Activation.JUMP_RELU`."""


COORDINATE = Readout()
"""x.u: the coordinate of x along v."""


class Reading(NamedTuple):
    """How an act of `Kind.READ` computes a number: a `Readout`, its column, and which rows."""

    normalise: Normalise
    activation: Activation
    bias: float
    theta: float
    column: Natural
    """The column of its first site. The following sites have the following columns."""
    mean_at: Annotated[int, msgspec.Meta(ge=NEVER, lt=2**31)] = NEVER
    """`NEVER`: each selected row is read. Otherwise the mean of the selected rows is read, once, at
    this position. The act selects no row after it."""

    @property
    def of_mean(self) -> bool:
        """Whether the mean of the selected rows is read."""
        return self.mean_at != NEVER


class Pool(IntEnum):
    """How the value of a column follows from the sample's readings so far."""

    LAST = 0
    MEAN = 1
    MAX = 2


class Combine(IntEnum):
    """How several numbers become one."""

    ALL = 0
    """The least."""
    ANY = 1
    """The largest."""
    SUM = 2
    VOTE = 3
    """The mean."""


class GateCondition(NamedTuple):
    """A function of the values of some columns.

    With `Combine.SUM` it is the sum of the values. Otherwise each value counts 1 while it is
    between the bounds, else 0, and `combine` makes one number of these.
    """

    columns: tuple[Natural, ...]
    pool: Pool
    combine: Combine
    above: float
    """The value must be above this; or -inf."""
    below: float
    """The value must be below this; or inf."""
    for_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] = 1
    """A value counts 1 only after this many readings in a row were between the bounds."""
    decided_at: Annotated[int, msgspec.Meta(ge=NEVER, lt=2**31)] = NEVER
    """The only position at which it is decided, from the readings up to there; or `NEVER`."""
    stays_above: float | None = None
    """Replaces `above` while a value counts 1; None: `above`."""
    stays_below: float | None = None
    """Replaces `below` while a value counts 1; None: `below`."""


def _alike(one: GateCondition, other: GateCondition) -> bool:
    """Whether two conditions differ at most in their bounds."""
    bounds = (one.stays_above is None, one.stays_below is None)
    others = (other.stays_above is None, other.stays_below is None)
    return bounds == others and one[:3] == other[:3] and one[5:7] == other[5:7]


class Form(IntEnum):
    """The function from the evidence e to the openness."""

    STEP = 0
    """1 where e > a, else 0."""
    SIGMOID = 1
    """1 / (1 + exp(-b * (e - a)))."""
    RAMP = 2
    """0 up to a, 1 from b on, linear between."""


class Hold(IntEnum):
    """Where a gate is open that opened at a token p.

    A gate opens at a token p that it reads if its form gives more than 0 there.
    """

    TOKEN = 0
    """At p alone."""
    NEXT_TOKEN = 1
    """At p + 1, and not at p."""
    TOKENS = 2
    """At p and at `Gate.tokens` positions after it."""
    REST = 3
    """At p and all later positions. Later readings don't count."""
    UNTIL_READ = 4
    """At p and later positions up to the next token that is read."""


class Gate(NamedTuple):
    """The factor on the strength of acts at each token."""

    conditions: tuple[GateCondition, ...]
    combine: Combine
    """Combines the conditions into the evidence."""
    form: Form
    a: float
    """See `Form`."""
    b: float
    """See `Form`."""
    hold: Hold
    tokens: _Count = 0
    """See `Hold.TOKENS`."""
    invert: bool = False
    """Whether the openness o becomes 1 + (`factor` - 1) * o."""
    late: _Count = 0
    """If it is late: the first position at which it may be open, not before the first generated
    token. 0: it is not late. Not with `Hold.TOKEN`."""
    end: Natural = 0
    """If it is recorded: one past the last position of its samples."""
    factor: Annotated[float, msgspec.Meta(ge=0, le=LARGEST_GAIN)] = 0.0
    """With `invert`: the openness where it was 1. A client's inverted gate has 0. The gain of a
    rule is an inverted gate with the gain as factor: 1 while the rule does not hold."""

    @property
    def recorded(self) -> bool:
        """Whether each sample stores the positions at which the gate was open.

        True for late gates that are decided more than once. They have `Form.STEP`.
        """
        return self.late > 0 and any(condition.decided_at == NEVER for condition in self.conditions)

    @property
    def columns(self) -> tuple[int, ...]:
        """The columns of all conditions, in order."""
        return tuple(column for condition in self.conditions for column in condition.columns)

    @property
    def shape(self) -> "Gate":
        """The gate with 0 in place of each bound and threshold.

        Gates of one shape read the same columns, and may be open at the same positions. So their
        programs differ only in these numbers.
        """
        conditions = [
            condition._replace(
                above=0.0,
                below=0.0,
                stays_above=None if condition.stays_above is None else 0.0,
                stays_below=None if condition.stays_below is None else 0.0,
            )
            for condition in self.conditions
        ]
        return self._replace(conditions=tuple(conditions), a=0.0, b=0.0)

    def has_shape_of(self, other: "Gate") -> bool:
        """Whether both have the same `shape`, which would take much longer to make."""
        return (
            (self.combine, self.form, self[5:]) == (other.combine, other.form, other[5:])
            and len(self.conditions) == len(other.conditions)
            and all(map(_alike, self.conditions, other.conditions))
        )

    def numbered(self, number: int) -> "Gate":
        """Its shape, with its number in the plan as `a`, so that gates of a plan stay distinct."""
        return self.shape._replace(a=float(number), b=number + 1.0)

    @property
    def opens_from(self) -> int:
        """The lowest position at which it may be open."""
        decided = min(condition.decided_at for condition in self.conditions)
        if self.invert:
            return 0
        if self.late:
            return self.late
        return 0 if decided == NEVER else decided + (self.hold is Hold.NEXT_TOKEN)


def gates_of(gates: Sequence[Gate | None]) -> tuple[Gate, ...]:
    """The distinct gates of a plan's acts, in order. A gate's index is its number in the plan."""
    return tuple(dict.fromkeys(gate for gate in gates if gate is not None))


class Signals(NamedTuple):
    """Which numbers of each token a worker sends to the server; see `SignalRows`."""

    readings: int = 0
    """Columns 0 to `readings` - 1 are sent."""
    gates: tuple[Gate, ...] = ()
    """Further gates, which may have no acts. In the plan they follow the acts' gates."""
    openness: bool = False
    """Whether the openness of every gate of the plan is sent."""
    kept: tuple[Gate, ...] = ()
    """In an update: the request's gates whose states it keeps, in their order. They are the first
    gates of the plan, also if no act has them."""
    means_kept: bool = False
    """In an update: whether it keeps the request's sums of rows. Only admission reads it."""

    def with_gates(self, gates: Mapping[Gate, Gate]) -> "Signals":
        """A copy with other gates. `gates` has the new gate of each old one."""
        if not (self.gates or self.kept):
            return self
        kept = tuple([gates[gate] for gate in self.kept])
        return self._replace(gates=tuple([gates[gate] for gate in self.gates]), kept=kept)

    @property
    def any(self) -> bool:
        """Whether anything is sent."""
        return self.readings > 0 or self.openness


NO_SIGNALS = Signals()
