"""Reads the events of a watch, and checks that no readings are missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rheostat._capture.activations import positions_of
from rheostat._capture.encodings import read_tensor
from rheostat._errors import DataLoss, ServerError
from rheostat._fields import counted, same_fields
from rheostat._responses.results import read_finish_reason
from rheostat._responses.signals import SignalColumn
from rheostat._watches.events import (
    SignalsDropped,
    SignalSummary,
    WatchedRequestBegun,
    WatchedRequestEnded,
    WatchedSignals,
    WatchEvent,
)
from rheostat_wire.v1 import monitor_service_pb2

_NONE_FIRED = np.zeros((0, 2), np.int64)


@dataclass
class _Watched:
    """A request that is read."""

    request_id: str
    position_count: int = 0
    dropped_position_count: int = 0


class WatchReader:
    """Reads events in the order of their numbers, and counts the positions of each request."""

    def __init__(self, rules: Iterable[str]) -> None:
        """``rules`` are the names of the watch's rules."""
        self.columns: tuple[SignalColumn, ...] = ()
        self._rules = tuple(rules)
        self._watched: dict[int, _Watched] = {}
        """By the numbers by which events name them."""

    def read(self, message: monitor_service_pb2.WatchResponse) -> WatchEvent | None:
        """The event of a numbered message; None if this client does not know its kind.

        Raises DataLoss if readings are missing, ServerError if the message cannot be read.
        """
        match message.WhichOneof("event"):
            case "begun":
                return self._begun(message.sequence, message.begun)
            case "signals":
                return self._signals(message.sequence, message.signals)
            case "dropped":
                return self._dropped(message.sequence, message.dropped)
            case "ended":
                return self._ended(message.sequence, message.ended)
        return None

    def _begun(
        self, sequence: int, message: monitor_service_pb2.WatchedRequestBegun
    ) -> WatchedRequestBegun:
        self._watched[message.number] = _Watched(message.request_id)
        return WatchedRequestBegun(
            sequence, labels=dict(message.labels), **same_fields(WatchedRequestBegun, message)
        )

    def _signals(
        self, sequence: int, message: monitor_service_pb2.WatchedSignals
    ) -> WatchedSignals:
        values = read_tensor(message.values).values
        runs = len(message.numbers)
        counts = np.fromiter(message.row_counts, np.int64, len(message.row_counts))
        fired = _NONE_FIRED
        if message.firings:
            fired = np.array([(firing.row, firing.rule) for firing in message.firings], np.int64)
        if (
            values.shape != (counts.sum(), len(self.columns))
            or not runs == len(message.samples) == len(message.first_positions) == len(counts)
            or np.any(fired >= (len(values), len(self._rules)))
        ):
            raise ServerError("the server sent readings whose parts do not fit together")
        watched = [self._of(number) for number in message.numbers]
        for request, count in zip(watched, message.row_counts, strict=True):
            request.position_count += count
        return WatchedSignals(
            sequence,
            self.columns,
            self._rules,
            tuple(request.request_id for request in watched),
            np.fromiter(message.samples, np.int64, runs),
            np.fromiter(message.first_positions, np.int64, runs),
            counts,
            values,
            fired,
        )

    def _dropped(
        self, sequence: int, message: monitor_service_pb2.SignalsDropped
    ) -> SignalsDropped:
        watched, positions = self._of(message.number), positions_of(message.positions)
        watched.dropped_position_count += len(positions)
        return SignalsDropped(sequence, watched.request_id, message.sample, positions)

    def _ended(
        self, sequence: int, message: monitor_service_pb2.WatchedRequestEnded
    ) -> WatchedRequestEnded:
        if message.number:
            self._check(self._of(message.number), message)
            del self._watched[message.number]
        if any(summary.column >= len(self.columns) for summary in message.summaries):
            raise ServerError("the server sent a summary of a column that the watch lacks")
        return WatchedRequestEnded(
            sequence,
            **same_fields(WatchedRequestEnded, message),
            finish_reasons=tuple(map(read_finish_reason, message.finish_reasons)),
            summaries=tuple(
                SignalSummary(
                    summary.sample,
                    self.columns[summary.column],
                    summary.position_count,
                    summary.max,
                    summary.max_position,
                    summary.mean,
                )
                for summary in message.summaries
            ),
        )

    def _check(self, came: _Watched, sent: monitor_service_pb2.WatchedRequestEnded) -> None:
        """Compares the positions that came with those that the server counts.

        Readings that the workers lost are counted by the server, and have no event.
        """
        missing = sent.position_count - came.position_count
        if missing or came.dropped_position_count > sent.dropped_position_count:
            raise DataLoss(
                f"of {came.request_id} came the readings of "
                f"{counted(came.position_count, 'position')}, with "
                f"{came.dropped_position_count} dropped, of {sent.position_count} that were sent "
                f"and {sent.dropped_position_count} that were dropped",
                reason="REASON_ROWS_LOST",
                metadata={"rows": str(max(0, missing))},
            )

    def _of(self, number: int) -> _Watched:
        watched = self._watched.get(number)
        if watched is None:
            raise ServerError("the server sent an event of a request that it did not announce")
        return watched
