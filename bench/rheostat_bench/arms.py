"""What the requests of a benchmark's batch are asked to do, arm by arm."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rheostat_bench.engines import ROWS, VECTOR
from rheostat_engine import (
    NEVER,
    OPEN_END,
    Act,
    Activation,
    Band,
    Capture,
    Combine,
    Control,
    Form,
    Gate,
    GateCondition,
    Hold,
    Kind,
    ModelSites,
    Normalise,
    PackedActs,
    Plan,
    Point,
    Pool,
    Reading,
    Site,
    Spans,
)

EVERYWHERE: Spans = ((0, OPEN_END),)
"""All positions."""

PROMPT = 32
"""Tokens of each prompt."""

Plans = Callable[[ModelSites, int], Sequence[Plan | None] | None]
"""The plans of a batch of so many requests; None: stock vLLM runs it."""


@dataclass(frozen=True)
class Arm:
    """One way to run a batch."""

    name: str
    """What the table calls it."""
    plans: Plans
    """What its requests do."""


def posts(sites: ModelSites) -> list[int]:
    """The `resid_post` of every layer."""
    return [Site(Point.RESID_POST, layer).index for layer in range(sites.num_layers)]


def middle(sites: ModelSites) -> list[int]:
    """The `resid_post` of the layer halfway up."""
    return [posts(sites)[sites.num_layers // 2]]


def act(
    kind: Kind,
    at: Sequence[int],
    row: int = 0,
    *,
    spans: Spans = EVERYWHERE,
    scale: float = 1.0,
    bands: tuple[Band, ...] = (),
) -> Act:
    """One row of the benchmarks' vector at some sites."""
    return Act(kind, (VECTOR,), tuple((site, (row,)) for site in at), spans, scale, bands)


def alike(acts: Callable[[ModelSites], Sequence[Act]]) -> Plans:
    """The same acts for every request."""
    return lambda sites, batch: [Plan("", tuple(acts(sites)))] * batch


def _captured(where: Callable[[ModelSites], list[int]], spans: Spans) -> Plans:
    return lambda sites, batch: [Plan("", (), (Capture(tuple(where(sites)), spans),))] * batch


def _distinct(count: int, where: Callable[[ModelSites], list[int]]) -> Plans:
    """`count` configurations, each with rows of its own at every one of its sites."""

    def plans(sites: ModelSites, batch: int) -> list[Plan | None]:
        made = [
            Plan(
                "",
                tuple(
                    act(Kind.ADD, [site], (number + i) % ROWS, scale=1.0 + number / 1024)
                    for i, site in enumerate(where(sites))
                ),
            )
            for number in range(count)
        ]
        return [made[i % count] for i in range(batch)]

    return plans


_READING = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, 0)


def controlled(name: str, share: Callable[[int], int] = lambda batch: batch) -> Plans:
    """An addition at one layer and a reading there; of some requests a controller sets the gain.

    Args:
        name: the controller.
        share: of how many requests of a batch.
    """

    def plans(sites: ModelSites, batch: int) -> list[Plan | None]:
        push = act(Kind.ADD, middle(sites))
        reading = _read(middle(sites)[0])
        gained = PackedActs((replace(push, gain=0), reading)).build()
        control = Control(name, gained, (0, 1), 1, PROMPT)
        plain = Plan("", (push, reading))
        with_controller = replace(plain, control=control, private_from=PROMPT)
        return [with_controller if i < share(batch) else plain for i in range(batch)]

    return plans


def _read(site: int) -> Act:
    return Act(Kind.READ, (VECTOR,), ((site, (0,)),), EVERYWHERE, reading=_READING)


def gated(
    count: int,
    where: Callable[[ModelSites], list[int]],
    bound: float,
    *,
    pool: Pool = Pool.LAST,
    hold: Hold = Hold.TOKEN,
    decided_at: int = NEVER,
) -> Plans:
    """Additions under one of `count` gates, which reads each token in front of all of them.

    Args:
        count: how many different gates there are.
        where: the sites at which rows are added.
        bound: far below what is read, it leaves the gates open; far above, shut.
        pool: which of the readings so far counts.
        hold: how long a gate stays open; `Hold.TOKENS`: eight tokens.
        decided_at: the position that decides it once, if any.
    """

    def plans(sites: ModelSites, batch: int) -> list[Plan | None]:
        steered = where(sites)
        reading = _read(steered[0] - 4)
        made: list[Plan | None] = []
        for number in range(count):
            above = bound * (1 + number / 1024)
            condition = GateCondition((0,), pool, Combine.ANY, above, math.inf, 1, decided_at)
            gate = Gate((condition,), Combine.ALL, Form.STEP, 0.5, 0.0, hold, 8)
            made.append(Plan("", (replace(act(Kind.ADD, steered), gate=gate), reading)))
        return [made[i % count] for i in range(batch)]

    return plans


def behind_the_first(sites: ModelSites) -> list[int]:
    """The `resid_post` of every layer but the first."""
    return posts(sites)[1:]


def _pull(low: float, high: float, strength: float) -> Plans:
    band = (Band(low, high, strength),)
    return alike(lambda sites: [act(Kind.PULL, posts(sites), bands=band)])


def _too_little(sites: ModelSites) -> list[Act]:
    """An addition that is lost in rounding, so that the texts are those of a shut gate."""
    return [act(Kind.ADD, middle(sites), scale=1e-30)]


STOCK = Arm("stock", lambda sites, batch: None)
_IDLE = Arm("idle", lambda sites, batch: [None] * batch)
_ADD_ALL = alike(lambda sites: [act(Kind.ADD, posts(sites))])

SUITES: dict[str, tuple[Arm, ...]] = {
    "serving": (
        STOCK,
        _IDLE,
        Arm("steered, one layer", alike(lambda sites: [act(Kind.ADD, middle(sites))])),
        Arm("steered, all layers", _ADD_ALL),
        Arm("captured, one layer", _captured(middle, EVERYWHERE)),
        Arm("captured, all layers, last prompt token", _captured(posts, ((PROMPT - 1, PROMPT),))),
        Arm("captured, all layers, generated tokens", _captured(posts, ((PROMPT, OPEN_END),))),
    ),
    "ops": (
        STOCK,
        Arm("add, all layers", _ADD_ALL),
        Arm(
            "norm_add, all layers",
            alike(lambda sites: [act(Kind.NORM_ADD, posts(sites), scale=0.01)]),
        ),
        Arm("ablate, all layers", _pull(0.0, 0.0, 1.0)),
        Arm("clamp, all layers", _pull(-0.5, 0.5, 1.0)),
        Arm("scale, all layers", _pull(0.0, 0.0, 0.5)),
    ),
    "configurations": (
        STOCK,
        *(Arm(f"{k} at one layer", _distinct(k, middle)) for k in (1, 16, 64, 256)),
        *(Arm(f"{k} at all layers", _distinct(k, posts)) for k in (1, 16, 64, 256)),
    ),
    "gates": (
        STOCK,
        Arm("one layer", alike(lambda sites: [act(Kind.ADD, middle(sites))])),
        Arm("one layer, one gate, open", gated(1, middle, -1e9)),
        Arm("one layer, without effect", alike(_too_little)),
        Arm("one layer, one gate, shut", gated(1, middle, 1e9)),
        Arm("one layer, 256 gates, open", gated(256, middle, -1e9)),
        Arm(
            "all layers but one",
            alike(lambda sites: [act(Kind.ADD, behind_the_first(sites))]),
        ),
        Arm("all layers but one, one gate, open", gated(1, behind_the_first, -1e9)),
    ),
    "controllers": (
        STOCK,
        _IDLE,
        Arm("one layer, one reading", controlled("", lambda batch: 0)),
        Arm("controller, gains of 1", controlled("bench-unchanged")),
        Arm("controller, new gains", controlled("bench-stepped")),
        Arm("controller of one request", controlled("bench-stepped", lambda batch: 1)),
    ),
}
"""Arms that are measured together, by what they show; the first one is the reference."""
