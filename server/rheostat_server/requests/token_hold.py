"""Tokens of a sample that wait until it is known that they may be sent.

Why
    A rule that stops a sample fires at a row. The token that was sampled from this row must not be
    sent, but the engine goes on, and its tokens and signals reach the server on different ways.
Rule
    With P prompt tokens, token i of a sample was sampled from the row at position P + i - 1. It is
    released once the signals up to this position have come, unless a rule has fired up to there.
Consequence
    Tokens are released in order. Nothing of a token that is not released leaves this object: no
    id, text, log-probability, captured row or count. Text may lag behind its token, but never comes
    before it. So the text of the released tokens is in deltas that are released.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from rheostat_engine import OPEN_END
from rheostat_server.engine.backend import Delta, StoppedBy
from rheostat_server.requests.delta_weight import weight


class StopAt(NamedTuple):
    """Where a sample is stopped."""

    by: StoppedBy
    row: int
    """The position at which the rule fired."""
    kept: int
    """The number of tokens that are released, at most."""


class TokenHold:
    """The tokens of one sample that are not released."""

    def __init__(
        self, prompt_len: int, *, watched: bool, hold_back: int, count: Callable[[int], None]
    ) -> None:
        """No tokens.

        Args:
            prompt_len: P.
            watched: whether tokens wait for signals.
            hold_back: the newest tokens that wait in any case while the sample runs.
            count: is called with the number of bytes that wait in addition; negative if fewer wait.
        """
        self.ended = False
        """Whether the last delta was released. Later deltas are ignored."""
        self.fired_row = -1
        """The position of the row at which a rule has ended the sample; -1: none has."""
        self._prompt_len = prompt_len
        self._known = 0 if watched else OPEN_END
        """One past the last position whose signals have come."""
        self._hold_back = hold_back
        self._count = count
        self._deltas: deque[tuple[int, Delta]] = deque()
        """With the number of tokens up to the end of each."""
        self._generated = 0
        self._released = 0
        self._complete = False
        """Whether the engine has sent the last delta."""
        self._no_signals = False
        """Whether no more signals come."""
        self._stop: StopAt | None = None
        self._paused = False

    @property
    def stuck(self) -> bool:
        """Whether tokens wait for signals that never come."""
        waits = self._generated > self._known - self._prompt_len + 1
        return self._no_signals and waits and not self.ended and self._stop is None

    def add(self, delta: Delta) -> list[Delta]:
        """Adds a delta from the engine; returns what is released."""
        if self.ended:
            return []
        self._generated += len(delta.token_ids)
        self._deltas.append((self._generated, delta))
        self._count(weight(delta))
        self._complete = self._complete or delta.ending is not None
        return self._release()

    def advance(self, known: int) -> list[Delta]:
        """Notes that the signals before position `known` have come; returns what is released.

        To be called after `stop`, if a rule has fired before this position.
        """
        self._known = max(self._known, known)
        return self._release()

    def no_more_signals(self) -> None:
        """Notes that all signals have come."""
        self._no_signals = True

    def stop(self, row: int, by: StoppedBy, *, drop_sampled: bool) -> list[Delta]:
        """Ends the sample at a row at which a rule fired; returns what is released.

        The token that was the input of this row may still come, and is waited for. If the engine
        ends the sample before this row, that counts.

        Args:
            row: its position.
            by: the rule.
            drop_sampled: whether the token that was sampled from the row is dropped.
        """
        if self._stop is not None or self.ended:
            return []
        kept = row - self._prompt_len + 1 + (not drop_sampled)
        if row < self._prompt_len:
            kept = 0
        self._stop = StopAt(by, row, kept)
        return self._release()

    def pause(self) -> None:
        """Releases nothing until `go_on`, not even the end of the sample."""
        self._paused = True

    def go_on(self) -> list[Delta]:
        """Ends a pause; returns what is released."""
        self._paused = False
        return self._release()

    def drop(self) -> None:
        """Drops all tokens that are not released, because the sample has ended otherwise."""
        self.ended = True
        for _, delta in self._deltas:
            self._count(-weight(delta))
        self._deltas.clear()

    def _release(self) -> list[Delta]:
        if self.ended or self._paused:
            return []
        stop, released = self._stop, list[Delta]()
        while self._deltas and self._deltas[0][0] <= self._limit:
            end, delta = self._deltas.popleft()
            self._count(-weight(delta))
            self._released = end
            if (
                delta.ending is not None
                and stop is not None
                and end > stop.row - self._prompt_len + 1
            ):
                delta = delta._replace(ending=None, stop=None)
            released.append(delta)
            if delta.ending is not None:
                self.drop()
                return released
        if stop is not None and self._generated >= stop.kept:
            if self._deltas:
                rest = _cut(self._deltas[0][1], max(0, stop.kept - self._released))
                if rest is not None:
                    released.append(rest)
            released.append(Delta(ending=stop.by.ending, stop=stop.by))
            self.fired_row = stop.row
            self.drop()
        return released

    @property
    def _limit(self) -> int:
        """The number of tokens that may be released."""
        if self._stop is not None:
            return self._stop.kept
        limit = self._known - self._prompt_len + 1
        return limit if self._complete else min(limit, self._generated - self._hold_back)


def _cut(delta: Delta, kept: int) -> Delta | None:
    """The part of a delta that belongs to its first tokens, without text, which can't be cut."""
    if not kept and delta.prompt_logprobs is None:
        return None
    return Delta(
        token_ids=delta.token_ids[:kept],
        logprobs=delta.logprobs[:kept],
        prompt_logprobs=delta.prompt_logprobs,
        cached_tokens=delta.cached_tokens,
    )
