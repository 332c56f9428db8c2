"""The signals of each step: numbers that probes read, and how far gates are open.

The forward pass writes both to buffers, which the next step overwrites. After the pass, and after
the fold that completes the openness, the rows of all requests that want signals are gathered into
one new tensor. `RowSender` copies it to the host.

Invariants: the signals of a position are sent once, even if it is recomputed after a preemption. A
request's signals are sent in the order of positions. The cost on the step thread depends on the
number of requests, not on readings. If the signals of a step can't be sent, the server gets their
labels marked as lost, because requests may depend on them.

Why signals may wait
    Sending the signals of a step wakes several threads here and in the server, even for one number.
    So the signals of decode steps with the same requests are sent together, if each request of the
    steps allows it (`SignalsWait`). Many steps are sent together if only summaries use the signals.
    A few are sent together if nothing in the server reacts to the signals and many requests are
    read. In this case the server also sends tokens several at a time. Waiting signals are sent when
    a request begins or ends, when a step has other requests or columns, and at the limits below.
Why the same columns for all requests of a step
    A gather of different columns for each request would need an index for each number. The
    additional columns of small requests cost little, because a row has at most
    `MAX_COLUMNS` + `MAX_GATES` numbers.
"""

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.channel.events import SignalsHead
from rheostat_engine.plan.plan import SignalsWait
from rheostat_engine.worker.capture.request_progress import RequestProgress
from rheostat_engine.worker.state.buffers import GateBuffers
from rheostat_engine.worker.state.device_table import to_device
from rheostat_engine.worker.state.position_functions import Int64, consecutive, int64_bytes
from rheostat_engine.worker.transport.row_sender import RowSender

_KEPT_FREE = 8
"""While requests want signals, captured rows leave an eighth of the staging area free."""


WAITING_STEPS = 32
"""The most steps that are sent together if only summaries use their signals."""

FEW_STEPS = 4
"""The most steps that are sent together if nothing in the server reacts to their signals."""

FEW_REQUESTS = 64
"""`FEW_STEPS` holds only for steps that read more requests. Up to this many streams, the server
sends each token at once."""

_WAITING_ROWS = 1024
"""The most rows that wait. The server takes about 0.5 ms to process this many."""


class _Pending(NamedTuple):
    """The signals of the current step."""

    numbers: Int64
    """[n]: the worker's numbers of their requests."""
    starts: Int64
    """[n]: their first positions."""
    counts: Int64
    """[n]: their numbers of positions."""
    readings: int
    gates: int
    """Columns of each kind."""
    tokens: slice | torch.Tensor
    """Their tokens in the step: a range, or [n] indices on the device."""
    most_steps: int
    """How many steps may be sent together, this one included."""
    source: torch.Tensor | None
    """[n, columns]: the slice of `GateBuffers.readings` with all signals of the step. None if no
    single slice has them."""


class _Waiting:
    """The signals of consecutive steps with one position of each of the same requests."""

    __slots__ = ("first", "most_steps", "parts", "steps", "values")

    def __init__(self, first: _Pending, readings: torch.Tensor) -> None:
        """No step is added.

        Args:
            first: the signals of the first step.
            readings: a tensor of their type and device.
        """
        self.first = first
        count, columns = len(first.numbers), first.readings + first.gates
        self.most_steps = min(first.most_steps, -(-_WAITING_ROWS // count))
        self.steps = 0
        self.values = readings.new_empty(count, self.most_steps, columns)
        """[n, most_steps, columns]: the values of `steps` steps."""
        self.parts = self.values.unbind(1)
        """The values of each step."""

    def continues(self, pending: _Pending) -> bool:
        """Whether a step is the next of these."""
        first = self.first
        return (
            np.array_equal(pending.numbers, first.numbers)
            and np.array_equal(pending.starts, first.starts + self.steps)
            and (pending.readings, pending.gates) == (first.readings, first.gates)
        )


class _Labels(NamedTuple):
    """The labels of the last signals, for later ones of the same requests."""

    numbers: Int64
    """`_Pending.numbers`."""
    steps: int
    """How many steps were sent together."""
    head: SignalsHead


class StepSignals:
    """The requests that want signals, and their part in each step."""

    def __init__(self, gates: GateBuffers, row_sender: RowSender | None, rank: int) -> None:
        """No request wants signals. `row_sender` is None on a rank that doesn't report."""
        self._gates = gates
        self._row_sender = row_sender
        self._rank = rank
        self._columns: npt.NDArray[np.int64] = np.zeros((1, 2), np.int64)
        """By request number: how many columns of readings and of gates the request wants."""
        self._waits: npt.NDArray[np.int8] = np.zeros(1, np.int8)
        """By request number: the request's `SignalsWait`."""
        self._wanting: set[int] = set()
        """The numbers of the requests that want signals."""
        self._pending: _Pending | None = None
        self._last: _Pending | None = None
        """The signals of the last step, for a step that repeats it. None if a request that wants
        signals did not compute exactly one new token in it, or if a request has changed since."""
        self._later = 0
        """How many steps have repeated that step since."""
        self._waiting: _Waiting | None = None
        self._labels: _Labels | None = None

    @property
    def repeatable(self) -> bool:
        """Whether `repeat` may prepare a step that repeats the last one."""
        return self._last is not None or not self._wanting

    def put(
        self, number: int, readings: int, gates: int, *, wait: SignalsWait = SignalsWait.NEVER
    ) -> None:
        """Sets how many columns of readings and of gates a request wants; 0 and 0: no signals.

        Sends the signals that wait, so that they precede the end of a request that wanted signals.
        `wait`: how long the request's signals may wait.
        """
        wants = readings > 0 or gates > 0
        if self._row_sender is None or not (wants or number in self._wanting):
            return
        self._last = None
        self._send_waiting()
        if number >= len(self._columns):
            grow = max(number + 1 - len(self._columns), len(self._columns))
            self._columns = np.pad(self._columns, ((0, grow), (0, 0)))
            self._waits = np.pad(self._waits, (0, grow))
        self._wanting.discard(number)
        if wants:
            self._wanting.add(number)
        self._columns[number] = readings, gates
        self._waits[number] = wait
        area = self._row_sender.area
        self._row_sender.kept_free = area.size // _KEPT_FREE if self._wanting else 0

    def begin(
        self,
        numbers: Int64,
        computed: Int64,
        scheduled: Int64,
        progress: RequestProgress,
        *,
        repeated: bool = False,
    ) -> bool:
        """Prepares a step; returns whether it has signals.

        Args:
            numbers: [r]: the number of each request of the batch.
            computed: [r]: the position of its first token.
            scheduled: [r]: the number of its tokens.
            progress: the progress before this step.
            repeated: see `StepTokens`.
        """
        if not self._wanting:
            return False
        last, self._last = self._last, None
        later, self._later = self._later, 0
        if repeated and last is not None:
            self._pending = self._last = last._replace(starts=last.starts + later + 1)
            return True
        columns = self._columns[np.where(numbers < len(self._columns), numbers, 0)]
        begins = np.cumsum(scheduled) - scheduled
        starts = np.maximum(computed, progress.computed_end[numbers])
        have_columns = columns.any(axis=1)
        counts = np.where(have_columns, computed + scheduled - starts, 0)
        (wanted,) = np.nonzero(counts > 0)
        if not len(wanted):
            return False
        starts, counts, wanting = starts[wanted], counts[wanted], numbers[wanted]
        readings, gates = columns[wanted].max(axis=0).tolist()
        firsts = begins[wanted] + starts - computed[wanted]
        steps = self._most_steps(wanting) if (counts == 1).all() else 1
        tokens = self._tokens(firsts, counts)
        source = None
        if isinstance(tokens, slice) and not gates:
            source = self._gates.readings[tokens, :readings]
        self._pending = _Pending(wanting, starts, counts, readings, gates, tokens, steps, source)
        if (scheduled == 1).all() and len(wanted) == np.count_nonzero(have_columns):
            self._last = self._pending
        return True

    def repeat(self) -> None:
        """Prepares a step that repeats the last one. `end_repeated` ends it."""
        self._later += 1

    def end_repeated(self) -> None:
        """As `end`, after `repeat`."""
        last = self._last
        if last is None:  # no request wants signals
            return
        if self._waiting is not None:  # the last step is its last one
            self._add(self._waiting, last)
        else:
            self._send_or_wait(last._replace(starts=last.starts + self._later))

    def end(self) -> None:
        """Sends the signals of the step, or adds them to the waiting ones.

        The step's forward pass and fold were launched.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            self._send_waiting()  # their requests were preempted, and may resume late
            return
        waits = pending.most_steps > 1
        if self._waiting is not None and not (waits and self._waiting.continues(pending)):
            self._send_waiting()
        self._send_or_wait(pending)

    def _send_or_wait(self, pending: _Pending) -> None:
        if pending.most_steps > 1:
            self._waiting = self._waiting or _Waiting(pending, self._gates.readings)
            self._add(self._waiting, pending)
        else:
            self._send(pending, self._gathered(pending))

    def _add(self, waiting: _Waiting, pending: _Pending) -> None:
        """Adds the signals of the step to those that wait, and sends them if they are enough."""
        part = waiting.parts[waiting.steps]
        part.copy_(self._gathered(pending) if pending.source is None else pending.source)
        waiting.steps += 1
        if waiting.steps == waiting.most_steps:
            self._send_waiting()

    def _gathered(self, pending: _Pending) -> torch.Tensor:
        """[sum of counts, columns]: a copy of the signals of the step."""
        if pending.source is not None:
            return pending.source.clone(memory_format=torch.contiguous_format)
        tokens = pending.tokens
        readings = self._gates.readings[:, : pending.readings]
        openness = self._gates.openness[:, : pending.gates]
        if isinstance(tokens, slice):
            return torch.cat([readings[tokens], openness[tokens]], dim=1)
        return torch.cat([part.index_select(0, tokens) for part in (readings, openness)], dim=1)

    def _most_steps(self, numbers: Int64) -> int:
        """How many decode steps of these requests may be sent together. 1: each at once."""
        wait = self._waits[numbers].min()
        if wait == SignalsWait.MANY_STEPS:
            return WAITING_STEPS
        return FEW_STEPS if wait == SignalsWait.FEW_STEPS and len(numbers) > FEW_REQUESTS else 1

    def _send_waiting(self) -> None:
        """Sends the signals that wait, in one block for each request."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        values = waiting.values
        if waiting.steps < waiting.most_steps:
            values = values[:, : waiting.steps]
        self._send(waiting.first, values.flatten(0, 1), waiting.steps)

    def _send(self, pending: _Pending, values: torch.Tensor, steps: int = 1) -> None:
        """Sends the signals of a step and of `steps` - 1 later ones, [sum of counts, columns]."""
        assert self._row_sender is not None  # otherwise `put` stores no request
        labels = self._labels
        if labels is None or labels.numbers is not pending.numbers or labels.steps != steps:
            head = SignalsHead(
                rank=self._rank,
                readings=pending.readings,
                gates=pending.gates,
                number=int64_bytes(pending.numbers),
                start=b"",
                count=int64_bytes(steps * pending.counts),
            )
            self._labels = labels = _Labels(pending.numbers, steps, head)
        head = msgspec.structs.replace(labels.head, start=int64_bytes(pending.starts))
        self._row_sender.send_signals(head, values)

    def _tokens(self, firsts: Int64, counts: Int64) -> slice | torch.Tensor:
        """The tokens of blocks, by the first token and number of tokens of each."""
        first, end = int(firsts[0]), int(firsts[-1] + counts[-1])
        if end - first == counts.sum():
            return slice(first, end)
        indices = consecutive(firsts, counts)
        return to_device(torch.from_numpy(indices), self._gates.readings.device)
