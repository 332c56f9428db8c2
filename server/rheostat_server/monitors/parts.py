"""What watches read of one request, beside what the request itself reads."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import MAX_COLUMNS, MAX_GATES, Gate
from rheostat_server.errors import NotSupported
from rheostat_server.monitors.signal_buffer import WatchedRequest
from rheostat_server.monitors.watch import Watch
from rheostat_server.selectors.prepared_selection import TooFragmented
from rheostat_server.selectors.selection import SelectionContext
from rheostat_server.steering.gates import Probe
from rheostat_server.steering.rules import Rule, SignalPlan

_FRAGMENTED = "what is read of it is too fragmented: use fewer, longer ranges"
_CROWDED = (
    f"the request and its other watches leave too little of the {MAX_COLUMNS} readings and "
    f"{MAX_GATES} gates and rules that a request may have: read or decide less"
)


class WatchPart(NamedTuple):
    """What one watch reads of a request."""

    watch: Watch
    first_column: int
    """The column of its first reading."""
    probes: tuple[Probe, ...] = ()
    rules: tuple[Rule, ...] = ()
    """Named after the watch, so that no rule of another has the name."""
    missed: str = ""
    """Why it reads nothing; empty if it does."""

    @property
    def steers(self) -> bool:
        """Whether the watch may change the request's steering."""
        return self.watch.settings.steers and not self.missed

    def without(self, reason: str) -> "WatchPart":
        """The part of a watch that reads nothing, and why."""
        return WatchPart(self.watch, self.first_column, missed=self.missed or reason)

    def gates(self, signals: SignalPlan | None) -> npt.NDArray[np.intp]:
        """The number of each rule's gate in the request's plan; -1: the rule cannot fire."""
        numbers: dict[Rule, int] = {}
        if signals is not None:
            numbers |= zip(signals.rules, signals.rule_gates.tolist(), strict=True)
        return np.array([numbers.get(rule, -1) for rule in self.rules], np.intp)


class WatchedPart(NamedTuple):
    """What one watch reads of a request that was announced to it."""

    part: WatchPart
    watched: WatchedRequest
    gates: npt.NDArray[np.intp]
    """See `WatchPart.gates`."""


def begin(
    parts: Sequence[WatchPart],
    request_id: str,
    labels: Mapping[str, str],
    samples: int,
    prompt_len: int,
    signals: SignalPlan | None,
) -> tuple[WatchedPart, ...]:
    """Announces a request to its watches; returns those that read it."""
    begun: list[WatchedPart] = []
    for part in parts:
        if part.missed:
            part.watch.miss(request_id, part.missed)
        elif part.watch.taking:
            watched = part.watch.begin(request_id, labels, samples, prompt_len)
            begun.append(WatchedPart(part, watched, part.gates(signals)))
    return tuple(begun)


def refuse_unwatched(parts: Sequence[WatchPart], *, with_baseline: bool) -> None:
    """Refuses a request if a watch with a rule that stops would not read all of it.

    Args:
        parts: what watches read of it.
        with_baseline: whether the request also runs without its steering and rules.

    Raises:
        NotSupported: there is such a watch.
    """
    for part in parts:
        if not part.watch.stops:
            continue
        if with_baseline:
            raise NotSupported(
                "a watch may stop this request and does not read its baseline: send it without one",
                field="with_baseline",
            )
        if part.missed:
            raise NotSupported(f"a watch may stop this request, but {part.missed}")


def watch_parts(
    watches: Sequence[Watch],
    context: SelectionContext,
    first_column: int,
    gates: Sequence[Gate],
) -> tuple[WatchPart, ...]:
    """What the watches of a request read.

    Args:
        watches: the watches that select the request.
        context: the request.
        first_column: the column behind the request's own readings.
        gates: its own gates, and those of its rules.
    """
    column = first_column
    used = set(gates)
    parts = []
    for watch in watches:
        try:
            resolved = watch.settings.readings.resolve(context, column)
        except TooFragmented:
            parts.append(WatchPart(watch, column, missed=_FRAGMENTED))
            continue
        wanted = used | {rule.gate for rule in resolved.rules}
        columns = watch.settings.readings.columns
        if column + columns > MAX_COLUMNS or len(wanted) > MAX_GATES:
            parts.append(WatchPart(watch, column, missed=_CROWDED))
            continue
        rules = tuple(rule._replace(watch=watch.name) for rule in resolved.rules)
        parts.append(WatchPart(watch, column, resolved.probes, rules))
        column, used = column + columns, wanted
    return tuple(parts)
