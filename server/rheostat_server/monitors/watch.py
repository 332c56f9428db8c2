"""A watch: streams readings of requests of other calls to a client, and how each request ended."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rheostat_server.errors import InvalidValue, QueueFull, WatchLost
from rheostat_server.limits import RETRY_SECONDS
from rheostat_server.monitors.readings import WatchedReadings
from rheostat_server.monitors.signal_buffer import SignalBuffer, SignalMessage, Step, WatchedRequest
from rheostat_server.monitors.summaries import Float32, Int64, Summaries, Summary
from rheostat_server.subscriptions.event_stream import EventStream, Outgoing
from rheostat_server.subscriptions.observed import ObservedRequests
from rheostat_server.subscriptions.pending_changes import MissedRequest
from rheostat_server.subscriptions.replay_window import Sent
from rheostat_wire.message_parts import MessageParts
from rheostat_wire.v1 import capture_service_pb2, monitor_service_pb2, types_pb2

_pb = monitor_service_pb2

Response = monitor_service_pb2.WatchResponse

MESSAGE_FIRINGS = 2048
"""Most firings in a message. Encoding them takes about a millisecond."""

_LARGE_STEP_BYTES = 2 << 20
"""Twice the size of the most readings that workers send together: 1,024 rows of 256 numbers."""

_NONE_FIRED: Int64 = np.zeros((0, 2), np.int64)

_Bools: TypeAlias = npt.NDArray[np.bool_]

FinishReason: TypeAlias = types_pb2.FinishReason.ValueType


class WatchedSamples(NamedTuple):
    """Samples that a watch reads. Each field has one entry per sample."""

    watched: list[WatchedRequest]
    """Their requests."""
    samples: list[int]
    """Their numbers in the requests."""
    slots: Int64
    """Their slots in the summaries."""

    @classmethod
    def of(cls, samples: Sequence[tuple[WatchedRequest, int]]) -> "WatchedSamples":
        """The samples with these requests and numbers."""
        slots = np.array([watched.slots[sample] for watched, sample in samples], np.int64)
        return cls([watched for watched, _ in samples], [sample for _, sample in samples], slots)

    def take(self, indices: npt.NDArray[np.intp]) -> "WatchedSamples":
        """Some of the samples."""
        chosen = indices.tolist()
        return WatchedSamples(
            [self.watched[index] for index in chosen],
            [self.samples[index] for index in chosen],
            self.slots[indices],
        )


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """The settings that the client of a watch has chosen."""

    requests: ObservedRequests
    """Which requests are watched."""
    readings: WatchedReadings
    """The probes and rules."""
    report: monitor_service_pb2.WatchReport.ValueType
    """Which tokens are reported."""
    on_lost: monitor_service_pb2.WatchLost.ValueType
    """What happens to the requests if the watch is lost."""
    steers: bool
    """Whether the client may change the steering of the requests."""


class Watch(EventStream[SignalMessage]):
    """Readings of some requests for one reader. Used on the event loop alone."""

    kind = "watch"

    def __init__(
        self,
        name: str,
        settings: WatchSettings,
        *,
        buffer_bytes: int,
        heartbeat: float,
        resume_window: float,
        on_failed: Callable[[str], None],
    ) -> None:
        """No call reads the watch yet.

        Args:
            name: its id.
            settings: the client's settings.
            buffer_bytes: bytes that may wait or be unacknowledged.
            heartbeat: seconds without other events after which a heartbeat is sent.
            resume_window: seconds that it waits to be resumed after the connection broke.
            on_failed: called once, with its id, when it fails.
        """
        self.settings = settings
        self.missed: Sequence[MissedRequest] = ()
        """Selected requests that ran before it was opened."""
        self.buffer = SignalBuffer(buffer_bytes, self.fail)
        super().__init__(
            name,
            self.buffer,
            self.buffer,
            heartbeat=heartbeat,
            resume_window=resume_window,
            on_failed=on_failed,
        )
        self.acts = settings.steers
        """Whether its client acts on what it reads: it may steer, or it has stopped a request."""
        self._columns = settings.readings.columns
        self._summaries = Summaries(self._columns)
        self._running: dict[WatchedRequest, None] = {}
        self.removals = 0
        """Number of requests that were removed. A change of it tells other code to call `watches`
        again."""
        self._ended: dict[int, WatchedRequest] = {}
        """Requests whose end was not sent, by number."""
        self._numbers = 0
        self._last_update = 0

    @property
    def stops(self) -> bool:
        """Whether one of its rules may end a request."""
        return any(rule.WhichOneof("action") == "stop" for rule in self.settings.readings.rules)

    @property
    def stops_if_lost(self) -> bool:
        """Whether its requests end if it is lost."""
        return self.settings.on_lost in (_pb.WATCH_LOST_STOP, _pb.WATCH_LOST_HOLD)

    @property
    def holds_if_lost(self) -> bool:
        """Whether its requests are held while no call reads it."""
        return self.settings.on_lost == _pb.WATCH_LOST_HOLD

    @property
    def reads_at_once(self) -> bool:
        """Whether readings must be sent without waiting for those of later steps.

        True if the client acts on them, if the requests may be held, or if buffer or credit are too
        small for the readings of several steps.
        """
        small = self.buffer.limit < _LARGE_STEP_BYTES or not (
            self._credit.endless or self._credit.window >= _LARGE_STEP_BYTES
        )
        return self.acts or self.holds_if_lost or small

    @property
    def holding(self) -> bool:
        """Whether its requests are held now."""
        return self.holds_if_lost and self.taking and not self.connected and not self.dismissed

    def check_not_lost(self) -> None:
        """Checks that its requests may run.

        Raises:
            WatchLost: it was lost, and its requests are to end.
        """
        if self.failure is not None and self.stops_if_lost and not self.dismissed:
            raise lost_watch_error(self.name, self.settings.requests)

    def selects(self, request_id: str, labels: Mapping[str, str]) -> bool:
        """Whether it watches a request that is admitted now."""
        return self.taking and self.settings.requests.hold(request_id, labels)

    def begin(
        self, request_id: str, labels: Mapping[str, str], samples: int, prompt_len: int
    ) -> WatchedRequest:
        """Begins to read a request.

        Args:
            request_id: the request.
            labels: its labels.
            samples: the number of its samples.
            prompt_len: the number of its prompt tokens.
        """
        self._numbers += 1
        slots = tuple([self._summaries.acquire() for _ in range(samples)])
        watched = WatchedRequest(self._numbers, request_id, slots)
        self._running[watched] = None
        response = Response()
        begun = response.begun
        begun.number, begun.request_id = watched.number, request_id
        begun.sample_count, begun.prompt_token_count = samples, prompt_len
        if labels:  # an empty update takes as long as all other fields
            begun.labels.update(labels)
        self.buffer.add_notice(response, begins=watched)
        return watched

    def add(
        self,
        samples: WatchedSamples,
        firsts: Int64,
        counts: Int64,
        values: Float32,
        fired: _Bools | None,
    ) -> None:
        """Adds the readings of a step.

        Args:
            samples: n different samples, at least one. `watches` is true for their requests.
            firsts: [n]: the first position of each.
            counts: [n]: the number of rows of each, at least 1.
            values: [sum of counts, columns]: the rows of the samples, one after the other; NaN
                where nothing was read.
            fired: [rows, rules]: whether a rule fired; None: none did.
        """
        if not self.taking:
            return
        self._summaries.add(samples.slots, firsts, counts, values)
        if self.settings.report == _pb.WATCH_REPORT_SUMMARY:
            return
        kept = self._kept(values, fired)
        if kept is None and fired is None:
            self.buffer.add_step(
                Step(
                    samples.watched,
                    samples.samples,
                    firsts.tolist(),
                    counts.tolist(),
                    np.ascontiguousarray(values, np.float32),
                    _NONE_FIRED,
                )
            )
            return
        owners = np.repeat(np.arange(len(counts)), counts)
        positions = np.repeat(firsts + counts - np.cumsum(counts), counts) + np.arange(len(owners))
        if kept is not None:
            owners, positions, values = owners[kept], positions[kept], values[kept]
            fired = None if fired is None else fired[kept]
        length = len(owners)
        if fired is not None and np.count_nonzero(fired) > MESSAGE_FIRINGS:
            length = MESSAGE_FIRINGS // fired.shape[1]
        for start in range(0, len(owners), max(1, length)):
            part = slice(start, start + length)
            firings = np.argwhere(fired[part]) if fired is not None else _NONE_FIRED
            step = _step(samples, owners[part], positions[part], values[part], firings)
            self.buffer.add_step(step)

    def _kept(self, values: Float32, fired: _Bools | None) -> _Bools | None:
        """[rows]: whether a row is reported; None: all are."""
        if self.settings.report == _pb.WATCH_REPORT_FIRED:
            kept: _Bools = np.zeros(len(values), np.bool_)
        else:
            unread = np.isnan(values)
            if not unread.any():
                return None
            kept = np.any(~unread, axis=1)
        if fired is not None:
            kept |= fired.any(axis=1)
        return kept

    def answer_later(self, message: Response) -> None:
        """Sends the answer to an earlier message, if a call still reads the watch.

        If too many answers wait to be read, the call ends.
        """
        if self._call is not None:
            try:
                self.answer(message)
            except QueueFull as error:
                self.interrupt(self._call, error)

    def check_update(self, number: int) -> None:
        """Checks the id of an update.

        Raises:
            InvalidValue: it is not above the last one.
        """
        if number <= self._last_update:
            raise InvalidValue(
                f"update ids must rise; the last was {self._last_update}", field="update_id"
            )
        self._last_update = number

    def watches(self, watched: WatchedRequest) -> bool:
        """Whether it still reads a request."""
        return watched in self._running

    def lose(self, watched: WatchedRequest, count: int) -> None:
        """Counts positions whose readings were lost on their way from the workers."""
        watched.dropped_position_count += count
        self.buffer.lost_positions += count

    def end(self, watched: WatchedRequest, reasons: Sequence[FinishReason]) -> None:
        """Reports the end of a request. Later readings of it are ignored."""
        if watched not in self._running:
            return
        del self._running[watched]
        self.removals += 1
        response = Response()
        ended = response.ended
        ended.number, ended.request_id = watched.number, watched.request_id
        ended.finish_reasons.extend(reasons)
        for sample, slot in enumerate(watched.slots):
            _write_summary(ended, sample, self._summaries.release(slot))
        self._ended[watched.number] = watched
        self.buffer.add_notice(response)

    def miss(self, request_id: str, reason: str) -> None:
        """Reports a request that it selects but cannot read."""
        response = Response()
        response.ended.request_id, response.ended.missed_reason = request_id, reason
        self.buffer.add_notice(response)

    def release(self) -> None:
        """Stops reading all requests."""
        self._drop_sources()

    @property
    def _has_sources(self) -> bool:
        return bool(self._running)

    def _close_sources(self) -> None:
        for watched in list(self._running):
            self.end(watched, ())

    def _drop_sources(self) -> None:
        self.removals += 1
        self._running.clear()
        self._ended.clear()

    def _opened(self, next_sequence: int) -> Response:
        opened = _pb.WatchOpened(
            watch_id=self.name, next_sequence=next_sequence, table=self.settings.readings.table
        )
        opened.heartbeat_interval.FromNanoseconds(int(self._heartbeat * 1e9))
        opened.resume_window.FromNanoseconds(int(self._resume_window * 1e9))
        for missed in self.missed:
            opened.missed.add(request_id=missed.request_id, reason=missed.reason)
        return Response(opened=opened)

    def _silent(self, sign: capture_service_pb2.Heartbeat) -> Response:
        return Response(heartbeat=sign)

    @property
    def _joins_answers(self) -> bool:
        return self.buffer.batched

    def _response(
        self, sent: Sequence[Sent[SignalMessage]], answers: Sequence[Outgoing] = ()
    ) -> MessageParts:
        events = [
            MessageParts((answer.SerializeToString(),))
            for answer in answers
            if isinstance(answer, Response)
        ]
        events += [event.message.numbered(event.sequence) for event in sent]
        if len(events) == 1:
            return events[0]
        number = _pb.WatchEventBatch.EVENTS_FIELD_NUMBER
        batch = MessageParts(part for event in events for part in event.as_field(number))
        return batch.as_field(Response.BATCH_FIELD_NUMBER)

    def _take(self, message: SignalMessage) -> None:
        self.buffer.take()
        if message.response.HasField("ended"):
            watched = self._ended.pop(message.response.ended.number, None)
            if watched is not None:
                ended = message.response.ended
                ended.position_count = watched.position_count
                ended.dropped_position_count = watched.dropped_position_count


def lost_watch_error(name: str, requests: ObservedRequests) -> WatchLost:
    """The error for a request that a lost watch selects. It has the filter of the watch."""
    return WatchLost(
        f"the watch {name} of {requests} selects this request and was lost, and its setting is to "
        "stop its requests: open a watch with the same filter first; it may be closed at once",
        retry_after=RETRY_SECONDS,
    )


def _step(
    samples: WatchedSamples, owners: Int64, positions: Int64, values: Float32, firings: Int64
) -> Step:
    """The readings of some positions, with one entry for each run of positions of a sample.

    Args:
        samples: the samples.
        owners: [n]: the index of each position's sample, ascending.
        positions: [n].
        values: [n, columns].
        firings: [firings, 2]: the index of the position, and the rule.
    """
    breaks = (np.diff(owners) != 0) | (np.diff(positions) != 1)
    begins = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    labelled = samples.take(owners[begins])
    return Step(
        labelled.watched,
        labelled.samples,
        positions[begins].tolist(),
        np.diff(begins, append=len(owners)).tolist(),
        np.ascontiguousarray(values, np.float32),
        firings,
    )


def _write_summary(
    ended: monitor_service_pb2.WatchedRequestEnded, sample: int, summary: Summary
) -> None:
    means = summary.total / np.maximum(summary.readings, 1)
    columns = zip(
        summary.readings.tolist(),
        summary.largest.tolist(),
        summary.largest_at.tolist(),
        means.tolist(),
        strict=True,
    )
    for column, (count, largest, largest_at, mean) in enumerate(columns):
        if count:
            ended.summaries.add(
                sample=sample,
                column=column,
                position_count=count,
                max=largest,
                max_position=largest_at,
                mean=mean,
            )
