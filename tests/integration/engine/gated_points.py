"""Acts whose gates read at one point and act at another: as plans, and as Hugging Face hooks.

A hook reads the rows of a site. From them, `openings` computes how far the gate is open.
"""

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch

from rheostat_engine import (
    Act,
    Activation,
    Combine,
    Form,
    Gate,
    GateCondition,
    Hold,
    Kind,
    Normalise,
    Point,
    Pool,
    Reading,
    Site,
)

from ...unit.engine.gated import apart, openings
from .models import LAYERS, NO_MID
from .plans import EVERYWHERE, vector
from .reference import Change, Float, HfReference, Run

PROBE, PUSH = 0, 1
"""Seeds of the vectors that are read and written."""
STRENGTHS = {Kind.ADD: 1.5, Kind.REPLACE: 0.5}
FORMS = (Form.STEP, Form.RAMP, Form.SIGMOID)
GENERATED = 3
READ_IN = {
    Point.RESID_PRE: 0,
    Point.ATTN_OUT: 1,
    Point.RESID_MID: 2,
    Point.MLP_OUT: 0,
    Point.RESID_POST: 1,
}
"""The layer in which gates read each point. Every other point has sites behind it."""
FAR = 1e6
"""No reading has a magnitude this large."""
MARGIN = 1e-4
"""The least distance of a reading from a bound, relative to the largest value of the stream. The
engine's rows differ less from the reference's, so both open the same gates."""
LEAD = 1e-4
"""The least lead of the likeliest token over the second, in nats, so that rounding changes no
token."""


class GatedAct(NamedTuple):
    """An act at some sites, whose gate reads at an earlier site."""

    read: int
    written: tuple[int, ...]
    """Sites, of one point."""
    kind: Kind
    gate: Gate

    @property
    def acts(self) -> tuple[Act, ...]:
        """The acts of a plan: the act that reads for the gate, and the gated act."""
        (probe, _), (push, _) = vector(PROBE), vector(PUSH)
        to_column = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, 0)
        rows = tuple((site, (0,)) for site in self.written)
        scale = STRENGTHS[self.kind]
        return (
            Act(Kind.READ, (probe,), ((self.read, (0,)),), EVERYWHERE, reading=to_column),
            Act(self.kind, (push,), rows, EVERYWHERE, scale, gate=self.gate),
        )


class GatedRun(NamedTuple):
    """A prompt and its greedy continuation under hooks."""

    gated: GatedAct
    token_ids: list[int]
    """Generated tokens."""
    run: Run
    """The run of the prompt and of all generated tokens but the last, which is never an input."""
    opened: list[float]
    """How far the gate was open, by position."""


class _Bounds(NamedTuple):
    """Bounds for gates, far from each reading of a site's rows."""

    low: float
    """About a third of the readings are lower."""
    high: float
    """About a third of the readings are higher."""
    above: float
    """Slightly above the largest reading."""


def gated_acts(name: str, plain: Run) -> tuple[list[GatedAct], list[GatedAct]]:
    """Acts at each point with gates that read at each other point.

    Args:
        name: the architecture.
        plain: the run without acts. The bounds of the gates are chosen by its rows.

    Returns:
        Two lists of acts. In the first, most gates change from token to token, some are always
        open, and some always shut. In the second, no token opens a gate.
    """
    some, shut = [], []
    forms, kinds = cycle(FORMS), cycle(STRENGTHS)
    points = [point for point in READ_IN if point is not Point.RESID_MID or name not in NO_MID]
    for point in points:
        read = Site(point, READ_IN[point]).index
        bounds = _bounds(plain.streams[read])
        for other in points:
            if other is point:
                continue
            sites = [Site(other, at).index for at in range(LAYERS)]
            behind = [site for site in sites if site > read]
            written = tuple(dict.fromkeys((behind[0], behind[-1])))
            form, kind = next(forms), next(kinds)
            some.append(GatedAct(read, written, kind, _gate(form, bounds.low, bounds.high)))
            shut.append(GatedAct(read, written, kind, _shut(form, bounds)))
        next(kinds)  # so that a point is not always written by the same kind
        some.append(GatedAct(read, written, Kind.ADD, _gate(next(forms), -FAR, 1 - FAR)))
        some.append(GatedAct(read, written, Kind.ADD, _shut(Form.STEP, bounds)))
    return some, shut


def run_gated(model: HfReference, gated: GatedAct, prompt: Sequence[int], plain: Run) -> GatedRun:
    """Continues a prompt by `GENERATED` greedy tokens, each computed from scratch.

    `plain` is the run without acts.
    """
    margin = MARGIN * float(np.abs(plain.streams[gated.read]).max())
    tokens = list(prompt)
    for _ in range(GENERATED):
        opened: list[float] = []
        run = model.run(tokens, _hooks(gated, len(tokens), opened, margin))
        second, first = np.sort(run.logprobs[-1])[-2:]
        assert first - second > LEAD, "with this prompt, rounding may change a token"
        tokens.append(int(run.logprobs[-1].argmax()))
    return GatedRun(gated, tokens[len(prompt) :], run, opened)


def _readings(rows: Float) -> Float:
    """[n]: the readings of the gates of rows [n, W], in float64."""
    probe = vector(PROBE)[1][0].astype(np.float64)
    return rows.astype(np.float64) @ (probe / np.linalg.norm(probe))


def _bounds(rows: Float) -> _Bounds:
    """Bounds for the readings of rows [n, W]."""
    ordered = np.sort(_readings(rows))
    fifth = len(ordered) // 5

    def widest_gap(first: int, last: int) -> float:
        at = first + int(np.argmax(np.diff(ordered[first : last + 1])))
        return float(ordered[at : at + 2].mean())

    low, high = widest_gap(fifth, 2 * fifth), widest_gap(3 * fifth, 4 * fifth)
    return _Bounds(low, high, float(ordered[-1] + 0.01 * (ordered[-1] - ordered[0])))


def _gate(form: Form, low: float, high: float) -> Gate:
    """A gate that opens above `low` (STEP), or more and more between `low` and `high`."""
    if form is Form.STEP:
        condition = GateCondition((0,), Pool.LAST, Combine.ANY, low, FAR)
        return Gate((condition,), Combine.ALL, form, 0.5, 0.0, Hold.TOKEN)
    condition = GateCondition((0,), Pool.LAST, Combine.SUM, -np.inf, np.inf)
    if form is Form.RAMP:
        return Gate((condition,), Combine.ALL, form, low, high, Hold.TOKEN)
    steepness = 4 / (high - low)
    return Gate((condition,), Combine.ALL, form, (low + high) / 2, steepness, Hold.TOKEN)


def _shut(form: Form, bounds: _Bounds) -> Gate:
    """A gate that no token opens. A sigmoid is exactly 0 only if its e^x is infinite."""
    if form is Form.SIGMOID:
        return _gate(form, FAR, FAR + 1)
    return _gate(form, bounds.above, bounds.above + 1)


def _hooks(gated: GatedAct, count: int, opened: list[float], margin: float) -> list[Change]:
    """Hooks for `count` tokens. The first one fills `opened`, and the others act accordingly."""
    row = torch.from_numpy(vector(PUSH)[1][0]).double()
    strength = STRENGTHS[gated.kind]

    def decide_apart(number: float, *bounds: float) -> None:
        assert apart(number, bounds, margin), "with this prompt, rounding may change a gate"

    def read(x: torch.Tensor) -> torch.Tensor:
        history = [{0: number} for number in _readings(x.numpy()).tolist()]
        opened.extend(openings(gated.gate, history, 0, decide_apart))
        return x

    def act(x: torch.Tensor) -> torch.Tensor:
        weight = strength * torch.tensor(opened, dtype=torch.float64)[:, None]
        change = row - x if gated.kind is Kind.REPLACE else row
        return (x + weight * change).to(x.dtype)

    everything = range(count)
    return [
        Change(gated.read, read, everything),
        *(Change(site, act, everything) for site in gated.written),
    ]
