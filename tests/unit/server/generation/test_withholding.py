"""No token sampled at or after the row at which a rule fired reaches a client.

The engine's tokens and signals reach the server on two ways, in any order between them. Each trial
draws the order, the row, how the sample would end by itself, and what the rule withholds.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest

from rheostat_engine import Installed, Released, SignalRows
from rheostat_server.engine.backend import Delta, Ending, Job
from rheostat_wire.v1 import generation_pb2, monitor_pb2, types_pb2

from ....effort import FACTOR, at_length
from ..fakes import ScriptedBackend
from ..messages import capture, request
from .test_rules import finished, receipt_of, rule, text_of, tokens_of
from .test_signals import all_signals, sent

TRIALS = 100 if FACTOR == 1 else 1000 * FACTOR
P = 3


@dataclass
class Shuffled(ScriptedBackend):
    """Computes ahead of the server, and delivers tokens and signals in a drawn order."""

    draw: random.Random = field(default_factory=random.Random)
    row: int | None = None
    """The position at which the gate is open; None: nowhere."""
    overruns: int = 0
    """Rows that are computed beyond the last token."""
    ends: Ending = Ending.LENGTH

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        self.jobs.append(job)
        plan = job.plan
        self.openness = lambda gate, position: float(position == self.row)
        self.deliver(Installed(plan.request_id, ""))
        tokens, signals, computed = self._steps(job)
        finished = False
        last = 0
        try:
            while tokens or signals:
                if tokens and (not signals or self.draw.random() < 0.5):
                    yield tokens.popleft()
                else:
                    rows = signals.popleft()
                    last = rows.starts[0] + rows.counts[0]
                    self.deliver(rows)
                if self.draw.random() < 0.3:
                    await asyncio.sleep(0)
            finished = True
        finally:
            if not finished:
                self.aborted.append(plan.request_id)
            for rows in signals:  # computed already, so they come before the end
                self.deliver(rows)
                last = rows.starts[0] + rows.counts[0]
            span = (0, max(last, computed if finished else last))
            self.deliver(Released(plan.request_id, (), True, {}, 0, 0, span))

    def _steps(self, job: Job) -> tuple[deque[Delta], deque[SignalRows], int]:
        """All tokens and signals that the engine would make, chunk by chunk."""
        tokens: deque[Delta] = deque()
        signals: deque[SignalRows] = deque()
        position = 0
        while position < P:
            end = min(P, position + self.draw.randint(1, P))
            position = self._compute(job, position, end, signals)
        count = job.sampling.max_tokens
        for step in range(count + self.overruns):
            if step:
                position = self._compute(job, position, position + 1, signals)
            if step < count:
                delta = self._delta(job, 13 + step, first=step == 0, last=step == count - 1)
                if delta.ending is not None:
                    delta = delta._replace(ending=self.ends)
                tokens.append(delta)
        return tokens, signals, position

    def _compute(self, job: Job, start: int, end: int, signals: deque[SignalRows]) -> int:
        rows = self.signals(job.plan, start, end)
        assert rows is not None
        signals.append(rows)
        self._capture(job, start, end)
        return end


@at_length
@pytest.mark.parametrize("captured", [False, True])
async def test_no_withheld_token_reaches_a_client(starter, captured: bool) -> None:
    backend = Shuffled()
    running = await starter(backend)
    stopped = 0
    for trial in range(TRIALS // 2):
        draw = backend.draw = random.Random(f"{captured} {trial}")
        count = draw.randint(1, 8)
        row = backend.row = draw.choice([None, *range(P + count + 1)])
        backend.overruns = draw.randint(0, 2)
        backend.ends = draw.choice([Ending.LENGTH, Ending.STOP])
        dropped = draw.random() < 0.7
        events = await running.client.generate(
            request(
                rules=[rule(stop=monitor_pb2.Stop(drop_sampled=dropped))],
                probes=[sent()],
                captures=[capture()] if captured else [],
                hold_back=draw.choice([0, 0, 1, 3]),
                sampling=generation_pb2.Sampling(max_tokens=count, logprobs=1),
            ),
            timeout=30,
        )
        about = f"trial {trial} of captured={captured}: row {row} of {count} tokens"
        # Row r yields token r - P + 1. The last token has no row, so rows of the sample end here.
        rows, kept, reason = P + count - 1, count, types_pb2.FINISH_REASON_LENGTH
        if backend.ends is Ending.STOP:
            reason = types_pb2.FINISH_REASON_STOP
        fires = row is not None and row < rows
        if fires:
            kept = 0 if row < P else row - P + 1 + (not dropped)
            rows, reason = row + 1, types_pb2.FINISH_REASON_RULE
        stopped += fires
        assert tokens_of(events) == list(range(13, 13 + kept)), about
        assert text_of(events) == "".join(map(chr, range(13, 13 + kept))), about
        messages = [event.tokens for event in events if event.HasField("tokens")]
        assert sum(len(message.logprobs) for message in messages) == kept, about
        end = finished(events)
        assert (end.reason, end.token_count) == (reason, kept), about
        assert receipt_of(events) == ({0: [row]} if fires else {}), about
        assert all_signals(events)[0] == list(range(rows)), about
        sent_rows = [
            p
            for event in events
            if event.HasField("captured")
            for run in event.captured.positions
            for p in range(run.start, run.start + run.count)
        ]
        # Rows of prompt tokens behind the firing one were computed in the same chunk, or are not.
        if captured and not (fires and row < P - 1):
            assert sent_rows == list(range(rows)), about
        assert max(sent_rows, default=0) < max(rows, P), about
    assert stopped > TRIALS // 8
