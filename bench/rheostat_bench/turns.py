"""Turns: what clients saw of streams that began together, and the figures of it."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Streamed(NamedTuple):
    """One request, as its client sees it. Moments by `time.monotonic`."""

    began: float
    first: float
    """When its first token was there."""
    middle: float
    """When half of its messages were there, rounded down."""
    last: float
    """When its last token was there."""
    tokens: int
    later: float
    """Tokens that came later than `middle`. A message may have several."""
    rows: int
    moments: tuple[float, ...] = ()
    """When each token was there, or each chunk of a few tokens."""


def streamed(began: float, moments: Sequence[float], tokens: int, rows: int = 0) -> Streamed:
    """A request of so many tokens. `moments`: when each arrived, or each chunk of a few tokens."""
    middle = moments[max(1, len(moments) // 2) - 1]
    later = sum(moment > middle for moment in moments) * tokens / len(moments)
    return Streamed(began, moments[0], middle, moments[-1], tokens, later, rows, tuple(moments))


class Turn(NamedTuple):
    """The figures of one turn."""

    tokens_per_s: float
    requests_per_s: float
    per_token_ms: float
    """Median of the streams; zero if each has one token."""
    second_half_per_token_ms: float
    """The same for the second half of a stream's tokens. By then no stream waits for the prompts of
    others any more, if streams are long enough."""
    together_per_token_ms: float
    """The same from the moment when every stream has its first token, until one ends: while all
    run, and nobody waits for an admission or a prompt. Zero if they never do."""
    first_token_ms: float
    """Median of the streams, each from its own call."""
    first_token_of_burst_ms: float
    """Median over the streams of the time from the first stream's call to a stream's first token.
    Calls in one process wait for each other: the last of 256 calls of `AsyncLLM.generate` begins
    about 60 ms after the first. `first_token_ms` does not include this wait."""
    last_token_of_burst_ms: float
    """Median over the streams of the time from the first stream's call to a stream's last token.
    `per_token_ms` grows if first tokens come earlier: a stream that has begun waits for the prompts
    of the others."""
    lost_rows: int


def turn(streams: Sequence[Streamed], wanted_rows: int, watched_rows: int) -> Turn:
    """The figures of streams that began together.

    Args:
        streams: the streams.
        wanted_rows: rows that all clients together should have got.
        watched_rows: rows that a subscriber got.
    """
    began = min(stream.began for stream in streams)
    seconds = max(stream.last for stream in streams) - began
    steps = [stream for stream in streams if stream.tokens > 1]
    rows = sum(stream.rows for stream in streams) + watched_rows
    return Turn(
        sum(stream.tokens for stream in streams) / seconds,
        len(streams) / seconds,
        1e3 * statistics.median((step.last - step.first) / (step.tokens - 1) for step in steps)
        if steps
        else 0.0,
        1e3 * statistics.median((step.last - step.middle) / max(1, step.later) for step in steps)
        if steps
        else 0.0,
        1e3 * statistics.median(_together(steps) or [0.0]),
        1e3 * statistics.median(stream.first - stream.began for stream in streams),
        1e3 * statistics.median(stream.first - began for stream in streams),
        1e3 * statistics.median(stream.last - began for stream in streams),
        wanted_rows - rows,
    )


def _together(streams: Sequence[Streamed]) -> list[float]:
    """Seconds per token of each stream while all of them run; see `together_per_token_ms`."""
    begin = max((stream.first for stream in streams), default=0.0)
    end = min((stream.last for stream in streams), default=0.0)
    times = []
    for stream in streams:
        inside = [moment for moment in stream.moments if begin <= moment <= end]
        if inside and inside[-1] > inside[0]:
            chunks = sum(moment > inside[0] for moment in inside)
            tokens = chunks * stream.tokens / len(stream.moments)
            times.append((inside[-1] - inside[0]) / tokens)
    return times
