"""Announces requests to watches, and delivers the signals of a step to requests and watches.

Why the signals of a step are delivered together
    A step of hundreds of requests has one row for each. Delivered together, a request costs a few
    dictionary lookups, and a watch a few numpy calls for all its requests.
"""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rheostat_engine import SignalRows
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.monitors.parts import WatchedPart, begin
from rheostat_server.monitors.watch import Rows, Watch
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.sequence import EngineSequence, SequenceKind

_Steps: TypeAlias = dict[tuple[Watch, int, bytes], list[Rows]]
"""The rows that a watch reads from a column on, with rules that have these gates."""


def begin_watches(admitted: AdmittedRequest) -> tuple[WatchedPart, ...]:
    """Announces a request to the watches that select it; returns those that read it."""
    if not admitted.watch_parts:
        return ()
    return begin(
        admitted.watch_parts,
        admitted.request_id,
        admitted.labels,
        admitted.sampling.samples,
        admitted.prompt_len,
        admitted.signals,
    )


def deliver_signals(
    event: SignalRows, routes: Mapping[str, tuple[ActiveRequest, EngineSequence]]
) -> None:
    """Delivers the signals of a step.

    Args:
        event: the signals.
        routes: requests and sequences, by the ids of their plans.
    """
    values, readings = event.values, event.readings
    opened = [False] * len(event.starts)
    if values is not None and values.shape[1] > readings:
        begins = np.cumsum((0, *event.counts[:-1]))
        largest = np.fmax.reduce(values[:, readings:], axis=1)
        opened = (np.fmax.reduceat(largest, begins) > 0).tolist()
    row = 0
    steps: _Steps = {}
    for request_id, first, count, may_fire in zip(
        event.request_ids, event.starts, event.counts, opened, strict=True
    ):
        route = routes.get(request_id)
        if route is not None:
            active, sequence = route
            part = None if values is None else values[row : row + count]
            active.add_signals(sequence, first, count, part, readings, opened=may_fire)
            if active.watched and sequence.kind is SequenceKind.OWN:
                _add_watched(steps, active, sequence, first, count, row, lost=part is None)
        row += count
    if values is None:
        return
    for (watch, column, gates), rows in steps.items():
        read = values[:, column : column + watch.settings.readings.columns]
        watch.add(rows, read, _fired(values, readings, np.frombuffer(gates, np.intp)))


def _add_watched(
    steps: _Steps,
    active: ActiveRequest,
    sequence: EngineSequence,
    first: int,
    count: int,
    row: int,
    *,
    lost: bool,
) -> None:
    """Adds the rows of a sample to the steps of its watches."""
    if sequence.ended:  # the engine may run a sample on for some steps
        end = active.admitted.prompt_len + len(sequence.tokens) - 1
        count = min(count, max(end, sequence.fired_row + 1) - first)
    if count <= 0:
        return
    for part, watched, gates in active.watched:
        if lost:
            part.watch.lose(watched, count)
            continue
        key = part.watch, part.first_column, gates.tobytes()
        steps.setdefault(key, []).append(Rows(watched, sequence.sample, first, count, row))


def _fired(
    values: npt.NDArray[np.float32], readings: int, gates: npt.NDArray[np.intp]
) -> npt.NDArray[np.bool_] | None:
    """[rows, rules]: where rules fired; None if there are no rules."""
    if not len(gates):
        return None
    fired = np.zeros((len(values), len(gates)), np.bool_)
    acting = gates >= 0
    fired[:, acting] = values[:, readings + gates[acting]] > 0
    return fired
