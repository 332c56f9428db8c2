"""The signals of a request: what its probes read, and where its rules fired.

Signals wait here until the tokens that were sampled from their rows were sent; those of a session,
until the tokens at their positions were sent. Then they leave in messages of several positions.
Signals that come later leave at once: if they waited for the next tokens, a client that steers by
them would lose a step. The memory of waiting signals is part of the request's. If it is full, the
oldest are dropped, and their positions are reported with the next ones.

The engine may compute a row beyond the last token of a sample, and report it before the token. So
whether a firing has ended the sample is noted once the sample has ended.

Invariants: where rules fire is decided when the signals come, so a slow client changes nothing for
rules. No signals of a position at or behind the end of a sample leave. Work for each step is a few
numpy calls for each request that has signals.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import OPEN_END, Spans
from rheostat_server.delivery.byte_budget import ByteCounter, Cost, Holder, Share
from rheostat_server.delivery.row_messages import add_runs
from rheostat_server.limits import CHUNK_BYTES
from rheostat_server.requests.policy_audit import PolicyAudit
from rheostat_server.selectors.spans import runs, united
from rheostat_server.steering.rules import Rule, SignalPlan
from rheostat_wire.v1 import monitor_pb2, tensor_pb2

_CHUNK_BYTES = 512
"""Memory of the signals of a step, without their numbers."""

_WAKE_BYTES = 256 << 10
"""Bytes of waiting signals of a prompt from which on they need not wait for the next token."""

FIRED_RUNS = 1024
"""Runs of positions at which a rule fired that a receipt lists for each sample."""


class Fired(NamedTuple):
    """A rule that ends its sample has fired."""

    row: int
    """The first position at which it fired."""
    rule: Rule


class _Undecided(NamedTuple):
    """A firing of a rule that ends its sample, if the sample has this row."""

    rule: Rule
    positions: Spans
    """All positions at which it fired in this step."""


class Firings:
    """Where a rule fired in one sample."""

    __slots__ = ("_runs", "count", "stopped")

    def __init__(self) -> None:
        """Nowhere."""
        self._runs: list[list[int]] = []
        self.count = 0
        """Number of positions."""
        self.stopped = False
        """Whether it ended the sample."""

    def add(self, spans: Spans) -> None:
        """Adds the next positions."""
        for start, end in spans:
            self.count += end - start
            if self._runs and self._runs[-1][1] == start:
                self._runs[-1][1] = end
            elif len(self._runs) < FIRED_RUNS:
                self._runs.append([start, end])

    @property
    def positions(self) -> Spans:
        """The positions, of the first `FIRED_RUNS` runs."""
        return tuple((start, end) for start, end in self._runs)


class _Chunk(NamedTuple):
    """Waiting signals of consecutive positions."""

    first: int
    values: npt.NDArray[np.float32]
    """[n, columns]."""
    fired: npt.NDArray[np.bool_] | None
    """[n, rules]; None: none fired."""
    weight: int
    """Bytes of memory."""

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + len(self.values)


class _SampleSignals:
    """The signals of one sample."""

    __slots__ = ("chunks", "dropped", "end", "firings", "sent", "undecided")

    def __init__(self) -> None:
        self.chunks: deque[_Chunk] = deque()
        self.dropped: list[tuple[int, int]] = []
        self.end = OPEN_END
        """One past the last position that counts."""
        self.sent = 0
        """One past the last position whose signals may leave, at the last `take`."""
        self.firings: dict[tuple[int, str], Firings] = {}
        """By the policy's version, or 0, and the name of the rule."""
        self.undecided: _Undecided | None = None


class RequestSignals(Holder):
    """The waiting signals of a request, and its firings."""

    cost = Cost.ROWS
    """Signals may be dropped, and are counted then."""

    def __init__(
        self,
        plan: SignalPlan,
        samples: int,
        share: Share,
        wake: Callable[[], None],
        request_id: str,
        audit: PolicyAudit,
    ) -> None:
        """No signals have come.

        Args:
            plan: what is done with them.
            samples: the number of the request's own samples.
            share: the memory of the request.
            wake: is called if signals wait that should leave before the next token.
            request_id: the request.
            audit: logs where rules of the policy fire.
        """
        self.plan = plan
        self._samples = [_SampleSignals() for _ in range(samples)]
        self._byte_counter = ByteCounter(share.byte_counter)
        self._share = share
        self._wake = wake
        self._awake = False
        self._readings = np.array(plan.readings, np.intp)
        self._gates = np.array(plan.gates, np.intp)
        self._plain = not len(self._gates) and plan.readings == tuple(range(len(plan.readings)))
        """Whether the client gets the first columns, in their order."""
        self._own_rules = plan.own_rules
        self._noted_rules = plan.own_rules + plan.policy_rules
        self._request_id = request_id
        self._audit = audit
        self._closed = False
        self._stopping = [n for n, rule in enumerate(plan.rules) if rule.stop is not None]
        share.add(self)

    @property
    def freeable(self) -> int:
        """Bytes of the signals that wait."""
        return self._byte_counter.token_bytes

    def give_up(self, size: int, why: str) -> None:
        """Drops the oldest waiting signals of the samples that hold most."""
        target = self.freeable - size
        while self.freeable > target:
            sample = max(self._samples, key=lambda sample: len(sample.chunks))
            if not sample.chunks:
                return
            chunk = sample.chunks.popleft()
            self._byte_counter.add_tokens(-chunk.weight)
            sample.dropped.append((chunk.first, chunk.end))

    def add(
        self, sample: int, first: int, values: npt.NDArray[np.float32], readings: int, opened: bool
    ) -> Fired | None:
        """Takes the signals of a step. After `close`, only firings are noted.

        Args:
            sample: the sample.
            first: the first position.
            values: [n, readings + gates]: as in `SignalRows`.
            readings: the number of columns of readings.
            opened: whether any gate is open; False: no rule fires.

        Returns:
            The first firing of a rule that ends the sample, if there is one.
        """
        signals = self._samples[sample]
        count = min(len(values), signals.end - first)
        if count <= 0:
            return None
        values = values[:count]
        fired, ends = None, None
        if opened and len(self.plan.rules):
            fired = values[:, readings + self.plan.rule_gates] > 0
            ends = self._ends(first, fired)
            if ends is not None:
                count = ends.row + 1 - first
                values, fired = values[:count], fired[:count]
                signals.end = ends.row + 1
            fired = fired[:, : self._noted_rules]
            if fired.any():
                self._note(sample, first, fired, ends)
            fired = fired[:, : self._own_rules]
            if not fired.any():
                fired = None
        if not self._closed:
            self._keep(signals, first, values, readings, fired)
        return ends

    def lose(self, sample: int, first: int, count: int) -> None:
        """Notes that the signals of some positions are lost."""
        end = min(first + count, self._samples[sample].end)
        if first < end:
            self._samples[sample].dropped.append((first, end))
            policy = [rule.policy for rule in self.plan.rules if rule.policy]
            if policy:
                self._audit.unread(self._request_id, sample, policy[0], first, end)

    def take(
        self, sample: int, end: int, prompt: Sequence[int], tokens: Sequence[int]
    ) -> monitor_pb2.Signals | None:
        """Removes the waiting signals before a position; None if there are none.

        Args:
            sample: the sample.
            end: one past the last position that may leave.
            prompt: the prompt's tokens.
            tokens: the generated tokens that were sent.
        """
        signals, self._awake = self._samples[sample], False
        signals.sent = end
        while True:
            chunks = self._taken(signals, end)
            dropped = [span for span in signals.dropped if span[0] < end]
            if not chunks and not dropped:
                return None
            if dropped:
                signals.dropped = [span for span in signals.dropped if span[0] >= end]
            message = self._message(sample, chunks, dropped, prompt, tokens)
            if message is not None:
                return message

    def firings(self, sample: int) -> Mapping[tuple[int, str], Firings]:
        """Where rules fired in a sample, by the policy's version, or 0, and the rule's name."""
        return self._samples[sample].firings

    def decide(self, sample: int, *, stopped: bool) -> Rule | None:
        """Notes whether a firing has ended a sample; returns its rule if it has.

        Args:
            sample: a sample that has ended.
            stopped: whether it ended at the row of the firing.
        """
        signals = self._samples[sample]
        undecided, signals.undecided = signals.undecided, None
        if undecided is None:
            return None
        rule, positions = undecided
        self._firings(sample, rule).stopped = stopped
        self._log(sample, rule, positions, stopped=stopped)
        return rule if stopped else None

    def close(self) -> None:
        """Drops all waiting signals, which count no more, and keeps no later ones."""
        self._closed = True
        for number, sample in enumerate(self._samples):
            sample.chunks.clear()
            self.decide(number, stopped=False)
        self._byte_counter.close()

    def _ends(self, first: int, fired: npt.NDArray[np.bool_]) -> Fired | None:
        """The first firing of a rule that ends the sample."""
        rows = np.flatnonzero(fired[:, self._stopping].any(axis=1))
        if not len(rows):
            return None
        row = int(rows[0])
        number = self._stopping[int(np.argmax(fired[row, self._stopping]))]
        return Fired(first + row, self.plan.rules[number])

    def _note(
        self,
        sample: int,
        first: int,
        fired: npt.NDArray[np.bool_],
        ends: Fired | None,
    ) -> None:
        """Counts firings."""
        for number in np.flatnonzero(fired.any(axis=0)).tolist():
            rule = self.plan.rules[number]
            positions = runs(first + np.flatnonzero(fired[:, number]))
            self._firings(sample, rule).add(positions)
            if ends is not None and ends.rule is rule and not self._closed:
                self._samples[sample].undecided = _Undecided(rule, positions)
            else:
                self._log(sample, rule, positions, stopped=False)

    def _firings(self, sample: int, rule: Rule) -> Firings:
        key = rule.policy, rule.name
        return self._samples[sample].firings.setdefault(key, Firings())

    def _log(self, sample: int, rule: Rule, positions: Spans, *, stopped: bool) -> None:
        if rule.policy:
            self._audit.fired(self._request_id, sample, rule, positions, stopped=stopped)

    def _keep(
        self,
        signals: _SampleSignals,
        first: int,
        values: npt.NDArray[np.float32],
        readings: int,
        fired: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Adds signals that the client gets. `_message` leaves out what was not read.

        The values are copied, because a view would keep the array of the whole step.
        """
        if not self.plan.columns:
            if fired is None:
                return
            values = np.empty((len(values), 0), np.float32)
        elif self._plain:
            values = values[:, : self.plan.columns].copy()
        else:
            values = values[:, np.concatenate([self._readings, readings + self._gates])]
        weight = _CHUNK_BYTES + values.nbytes
        signals.chunks.append(_Chunk(first, values, fired, weight))
        self._byte_counter.add_tokens(weight)
        if (weight > _WAKE_BYTES or first < signals.sent) and not self._awake:
            self._awake = True
            self._wake()
        self._share.check()

    def _taken(self, signals: _SampleSignals, end: int) -> list[_Chunk]:
        """Removes and returns chunks before a position, of about `CHUNK_BYTES`."""
        chunks: list[_Chunk] = []
        size = 0
        while signals.chunks and size < CHUNK_BYTES:
            chunk = signals.chunks[0]
            if chunk.first >= end:
                break
            signals.chunks.popleft()
            self._byte_counter.add_tokens(-chunk.weight)
            if chunk.end > end:
                rest = _part(chunk, end - chunk.first, None)
                signals.chunks.appendleft(rest)
                self._byte_counter.add_tokens(rest.weight)
                chunk = _part(chunk, 0, end - chunk.first)
            size += chunk.weight
            chunks.append(chunk)
        return chunks

    def _message(
        self,
        sample: int,
        chunks: Sequence[_Chunk],
        dropped: Sequence[tuple[int, int]],
        prompt: Sequence[int],
        tokens: Sequence[int],
    ) -> monitor_pb2.Signals | None:
        """The message of chunks; None if nothing was read or fired, and nothing is dropped."""
        message = monitor_pb2.Signals()
        if sample:
            message.sample = sample
        if dropped:
            add_runs(message.dropped_positions.add, united(dropped))
        if not chunks:
            return message
        values = chunks[0].values
        if len(chunks) > 1:
            values = np.concatenate([chunk.values for chunk in chunks])
        spans: Spans = tuple([(chunk.first, chunk.end) for chunk in chunks])
        fired = None
        if any(chunk.fired is not None for chunk in chunks):
            fired = np.concatenate([self._fired(chunk) for chunk in chunks])
        kept = self._kept(values, fired)
        if kept is not None:
            positions = np.concatenate([np.arange(start, end) for start, end in spans])[kept]
            spans, values = runs(positions), values[kept]
            fired = None if fired is None else fired[kept]
        if not spans:
            return message if dropped else None
        add_runs(message.positions.add, united(spans))
        count = len(prompt)
        for start, end in spans:
            if start < count:
                message.token_ids.extend(prompt[start:end])
            if end > count:
                message.token_ids.extend(tokens[max(0, start - count) : end - count])
        if self.plan.columns:
            tensor = message.values
            tensor.dtype = tensor_pb2.DTYPE_FLOAT32
            tensor.shape.extend(values.shape)
            tensor.encoding = tensor_pb2.ENCODING_RAW
            tensor.inline = values.tobytes()
        if fired is not None:
            for number, rule in enumerate(self.plan.rules[: self._own_rules]):
                rows = np.flatnonzero(fired[:, number]).tolist()
                if rows:
                    message.firings.add(rule_name=rule.name, rows=rows)
        return message

    def _fired(self, chunk: _Chunk) -> npt.NDArray[np.bool_]:
        if chunk.fired is not None:
            return chunk.fired
        return np.zeros((len(chunk.values), self._own_rules), np.bool_)

    def _kept(
        self, values: npt.NDArray[np.float32], fired: npt.NDArray[np.bool_] | None
    ) -> npt.NDArray[np.bool_] | None:
        """[n]: the positions at which something was read or fired; None: all of them."""
        if len(self._gates):
            return None
        if len(values) == 1 and any(number == number for number in values[0].tolist()):
            return None  # one position with a reading is usual; the calls of numpy take longer
        unread: npt.NDArray[np.bool_] = np.logical_and.reduce(np.isnan(values), axis=1)
        if not unread.any():
            return None
        if fired is not None:
            unread &= ~fired.any(axis=1)
        return ~unread


def _part(chunk: _Chunk, start: int, end: int | None) -> _Chunk:
    """Some positions of a chunk."""
    values = chunk.values[start:end]
    fired = None if chunk.fired is None else chunk.fired[start:end]
    return _Chunk(chunk.first + start, values, fired, _CHUNK_BYTES + values.nbytes)
