"""The events of a watch as text: lines for a log, JSON for programs, and curves on a terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from rheostat._cli._listing import Plain, plain
from rheostat._cli._stops import Bounds
from rheostat._fields import counted
from rheostat._positions import show_positions
from rheostat._responses.signals import SignalColumn
from rheostat._responses.updates import UpdateApplied, UpdateRefused
from rheostat._watches.events import (
    Readings,
    SignalsDropped,
    WatchedRequestBegun,
    WatchedRequestEnded,
    WatchedSignals,
    WatchEvent,
)
from rheostat._watches.table import column_names
from rheostat_wire.dtypes import FloatArray

_BLOCKS = "▁▂▃▄▅▆▇█"
"""From the smallest number of a curve to the largest."""
_KEPT = 512
"""Numbers of a curve that are kept: more than a terminal is wide."""
_LEAST_CURVE = 8
"""Characters of a curve on a narrow terminal."""
_MOST_NAME = 20
"""Characters of a column's name beside a curve: the last ones."""


def lines(event: WatchEvent, bounds: Bounds) -> list[str]:
    """Lines for a log: one for each sample of a step, and one for each other event."""
    match event:
        case WatchedSignals():
            return [_readings_line(readings, bounds) for readings in event]
        case WatchedRequestBegun():
            return [
                f"{event.request_id} begins: {counted(event.prompt_token_count, 'prompt token')}"
            ]
        case SignalsDropped():
            where = show_positions(event.positions)
            return [f"{event.request_id} sample {event.sample} lost its readings at {where}"]
        case WatchedRequestEnded():
            return [_end_line(event)]
        case UpdateApplied() | UpdateRefused():
            return []


def _readings_line(readings: Readings, bounds: Bounds) -> str:
    numbers = ", ".join(
        f"{name} {_numbers(readings.values[:, number])}"
        for number, name in enumerate(column_names(readings.columns))
        if not np.isnan(readings.values[:, number]).all()
    )
    stops = "".join(
        f"; stop: {bounds[rule].passed(readings, at)}" for rule, at in readings.firings.items()
    )
    where = show_positions(readings.positions)
    return f"{readings.request_id} sample {readings.sample} at {where}: {numbers}{stops}"


def _numbers(values: FloatArray) -> str:
    """As "0.25", or the range of several numbers, "0.1 to 0.5"."""
    low, high = f"{np.nanmin(values):.4g}", f"{np.nanmax(values):.4g}"
    return low if low == high else f"{low} to {high}"


def _end_line(event: WatchedRequestEnded) -> str:
    if event.missed_reason:
        return f"{event.request_id} is not read: {event.missed_reason}"
    columns = tuple(dict.fromkeys(summary.column for summary in event.summaries))
    names = dict(zip(columns, column_names(columns), strict=True))
    several = len({summary.sample for summary in event.summaries}) > 1
    parts = [
        (f"sample {summary.sample} " if several else "")
        + f"{names[summary.column]} mean {summary.mean:.4g}, "
        + f"largest {summary.max:.4g} at {summary.max_position}"
        for summary in event.summaries
    ]
    lost = event.dropped_position_count
    parts += [f"{counted(lost, 'position')} lost"] if lost else []
    how = ", ".join(event.finish_reasons) or "still running"
    return f"{event.request_id} end: {'; '.join([how, *parts])}"


def documents(event: WatchEvent, bounds: Bounds) -> list[dict[str, Plain]]:
    """JSON objects: one for each sample of a step, and one for each other event."""
    match event:
        case WatchedSignals():
            return [
                {
                    "event": "readings",
                    "request_id": readings.request_id,
                    "sample": readings.sample,
                    "positions": plain(readings.positions),
                    "values": {
                        name: plain(readings.values[:, number])
                        for number, name in enumerate(column_names(readings.columns))
                    },
                    "firings": {
                        str(bounds[rule]): plain(at) for rule, at in readings.firings.items()
                    },
                }
                for readings in event
            ]
        case WatchedRequestBegun():
            return [_document("begun", event)]
        case SignalsDropped():
            return [_document("dropped", event)]
        case WatchedRequestEnded():
            summaries: list[Plain] = [
                {
                    "sample": summary.sample,
                    "probe": summary.column.probe,
                    "site": plain(summary.column.site),
                    "position_count": summary.position_count,
                    "max": plain(summary.max),
                    "max_position": summary.max_position,
                    "mean": plain(summary.mean),
                }
                for summary in event.summaries
            ]
            return [_document("ended", event) | {"summaries": summaries}]
        case UpdateApplied() | UpdateRefused():
            return []


def _document(name: str, event: WatchEvent) -> dict[str, Plain]:
    fields = plain(event)
    assert isinstance(fields, dict)
    return {"event": name} | fields


class Curves:
    """The newest readings of the newest samples, as one curve for each sample and column."""

    def __init__(self, columns: Sequence[SignalColumn], bounds: Bounds) -> None:
        """``columns`` and ``bounds`` are those of the watch."""
        self._bounds = bounds
        self._names = [name[-_MOST_NAME:] for name in column_names(tuple(columns))]
        self._name_width = max(map(len, self._names), default=0)
        self._numbers: dict[tuple[str, int], list[deque[float]]] = {}
        """By request and sample, oldest first: the numbers of each column."""
        self._stops: dict[str, str] = {}
        """By request: why its first sample was stopped, in words."""
        self._ends: dict[str, str] = {}

    def add(self, event: WatchEvent) -> None:
        """Take the readings of an event, or the end of its request."""
        match event:
            case WatchedSignals():
                for readings in event:
                    self._extend(readings)
            case WatchedRequestEnded() if not event.missed_reason:
                stop = self._stops.pop(event.request_id, "")
                how = ", ".join(event.finish_reasons) or "still running"
                why = f": {stop}" if stop and "watch" in event.finish_reasons else ""
                self._ends[event.request_id] = how + why

    def _extend(self, readings: Readings) -> None:
        key = readings.request_id, readings.sample
        if key not in self._numbers:
            self._numbers[key] = [deque(maxlen=_KEPT) for _ in self._names]
        for number, curve in enumerate(self._numbers[key]):
            values = readings.values[:, number]
            curve.extend(values[~np.isnan(values)].tolist())
        for rule, at in readings.firings.items():
            self._stops.setdefault(readings.request_id, self._bounds[rule].passed(readings, at))

    def lines(self, width: int, height: int) -> list[str]:
        """At most ``height`` lines of at most ``width`` characters.

        Forgets the samples for which there is no room: first those that have ended, oldest first.
        """
        most = max(height // max(len(self._names), 1), 1)
        ended = [key for key in self._numbers if key[0] in self._ends]
        running = [key for key in self._numbers if key[0] not in self._ends]
        for key in (ended + running)[: max(0, len(self._numbers) - most)]:
            del self._numbers[key]
        kept = {request_id for request_id, _ in self._numbers}
        self._ends = {name: how for name, how in self._ends.items() if name in kept}
        return [
            self._line(key, name, curve, width)
            for key, curves in self._numbers.items()
            for name, curve in zip(self._names, curves, strict=True)
        ][:height]

    def _line(self, key: tuple[str, int], name: str, curve: deque[float], width: int) -> str:
        request_id, sample = key
        last = f"{curve[-1]:9.3g}" if curve else " " * 9
        head = f"{request_id[-20:]:>20}/{sample} {name:<{self._name_width}} {last} "
        end = f" {self._ends[request_id]}" if request_id in self._ends else ""
        room = max(_LEAST_CURVE, width - len(head) - len(end) - 1)
        return f"{head}{_curve(list(curve)[-room:])}{end}"[: max(width - 1, 1)]


def _curve(numbers: Sequence[float]) -> str:
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((number - low) * scale)] for number in numbers)
