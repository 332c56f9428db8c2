"""Readings of the stream, and gates that open as they say.

A reading is a number that an act of `Kind.READ` makes of a row x. It goes to a column of the token.
A gate is a function of the readings of one sample, in the order of positions. At each token it is
open by a number from 0 to 1, by which the strength of its acts is multiplied there.

A late gate also acts at sites that are not behind all that it reads. So what is read of a token
counts from the next token on, and the gate is open at generated tokens alone, each of which has a
step of its own. Its acts then need no reading of their own forward pass. A sample that computes
positions again keeps what was decided.

Invariants: a gate depends on positions and readings alone, so chunking and batching can't change
it. All sites that are read for a gate that is not late come before all sites at which it acts, so
a token's own readings count. A gate that has read nothing yet is shut.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Annotated, NamedTuple

import msgspec

from rheostat_engine.plan.gains import LARGEST_GAIN

MAX_TERMS = 64
"""The most readings on which a gate depends."""

MAX_CONDITIONS = 16
"""The most conditions of a gate."""

MAX_GATES = 32
"""The most distinct gates of a plan."""

MAX_COLUMNS = 256
"""The most readings of a token."""

MAX_RECORDED = 1 << 24
"""The largest end of a recorded gate, because states have positions in float32."""

NEVER = -1
"""As `Condition.decided_at`: the condition is decided at each token that is read."""

# Ranges are checked where a worker parses a plan.
_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
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
    """What is made of the number z that was read."""

    IDENTITY = 0
    RELU = 1
    JUMP_RELU = 2
    """z where z > theta, else 0."""
    TANH = 3


class Readout(NamedTuple):
    """A number that is made of a row x with a vector v: activation(normalise(x, v) + bias)."""

    normalise: Normalise = Normalise.UNIT
    activation: Activation = Activation.IDENTITY
    bias: float = 0.0
    theta: float = 0.0
    """The threshold of `Activation.JUMP_RELU`."""


COORDINATE = Readout()
"""x.u: the coordinate of x along v."""


class Reading(NamedTuple):
    """The number that an act of `Kind.READ` makes of a row: activation(normalise(x, v) + bias)."""

    normalise: Normalise
    activation: Activation
    bias: float
    theta: float
    column: _Natural
    """The column of its first site. The following sites have the following columns."""
    mean_at: Annotated[int, msgspec.Meta(ge=NEVER, lt=2**31)] = NEVER
    """`NEVER`: a number is read of each selected row. Otherwise one number is read, at this
    position, of the mean of the rows that the act selects; it selects none after the position."""

    @property
    def of_mean(self) -> bool:
        """Whether one number is read, of the mean of the selected rows."""
        return self.mean_at != NEVER


class Pool(IntEnum):
    """The value of a column at a token, of all that the sample has read so far."""

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


class Condition(NamedTuple):
    """A number that follows from some columns.

    With `Combine.SUM` it is the sum of their values. Otherwise each value counts 1 while it lies
    between the bounds, else 0.
    """

    columns: tuple[_Natural, ...]
    pool: Pool
    combine: Combine
    above: float
    """The value must be above this; or -inf."""
    below: float
    """The value must be below this; or inf."""
    for_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] = 1
    """A value counts once it lay between the bounds at so many of its tokens in a row."""
    decided_at: Annotated[int, msgspec.Meta(ge=NEVER, lt=2**31)] = NEVER
    """The position at which it is decided once, of the readings up to there; or `NEVER`."""
    stays_above: float | None = None
    """Replaces `above` for a value that counts already; None: `above`."""
    stays_below: float | None = None
    """Replaces `below` for a value that counts already; None: `below`."""


class Form(IntEnum):
    """From the evidence e to how far a gate is open."""

    STEP = 0
    """1 where e > a, else 0."""
    SIGMOID = 1
    """1 / (1 + exp(-b * (e - a)))."""
    RAMP = 2
    """0 up to a, 1 from b on, linear between."""


class Hold(IntEnum):
    """How long a gate that opened stays open.

    A gate opens at a token p that it reads, if `Form` then gives more than 0.
    """

    TOKEN = 0
    """At p. What is read at p counts at p alone."""
    NEXT_TOKEN = 1
    """At p + 1, and not at p."""
    TOKENS = 2
    """At p and so many positions after it."""
    REST = 3
    """At p and all later positions. What is read later does not count."""
    UNTIL_READ = 4
    """At p and later positions up to the next token that is read."""


class Gate(NamedTuple):
    """How far acts are open at each token."""

    conditions: tuple[Condition, ...]
    combine: Combine
    """Makes the evidence of the conditions."""
    form: Form
    a: float
    b: float
    hold: Hold
    tokens: _Count = 0
    """Of `Hold.TOKENS`."""
    invert: bool = False
    """Whether it is open by 1 less the number, or as `factor` says."""
    late: _Natural = 0
    """Of a late gate: the first position at which it may be open, not before the first generated
    token. 0: it is not late. Not for `Hold.TOKEN`."""
    end: _Natural = 0
    """Of a recorded gate: one past the last position of its samples."""
    factor: Annotated[float, msgspec.Meta(ge=0, le=LARGEST_GAIN)] = 0.0
    """With `invert`: how far it is open where the number is 1; between, in proportion. Other than 0
    if a rule multiplies the strength of acts while it holds."""

    @property
    def recorded(self) -> bool:
        """Whether a sample keeps at which positions it was open, to compute them again.

        It does so for late gates that are decided more than once. They have `Form.STEP`.
        """
        return self.late > 0 and any(condition.decided_at == NEVER for condition in self.conditions)

    @property
    def columns(self) -> tuple[int, ...]:
        """The columns of all conditions, in order."""
        return tuple(column for condition in self.conditions for column in condition.columns)

    @property
    def shape(self) -> "Gate":
        """The gate with 0 in place of each number that readings are compared with.

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
    """The numbers of each token that a worker sends to the server; see `SignalRows`."""

    readings: int = 0
    """Columns 0 to `readings` - 1 are sent."""
    gates: tuple[Gate, ...] = ()
    """Gates that need not multiply any act. Their numbers follow those of the acts' gates."""
    openness: bool = False
    """Whether the openness of every gate of the plan is sent."""
    kept: tuple[Gate, ...] = ()
    """Of an update: the gates of the request, in their order, whose states it keeps. They are the
    first gates of the plan, whether or not acts have them."""
    means_kept: bool = False
    """Of an update: whether it keeps the request's sums of rows. Only admission reads it."""

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
