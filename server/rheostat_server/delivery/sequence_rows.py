"""The rows of one of a request's sequences of tokens, for one reader.

Invariant: each position that a capture selects leaves once, as a row or as a loss.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from rheostat_engine import OPEN_END, Released, Rows, Spans
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.block import Block
from rheostat_server.delivery.byte_budget import ByteCounter
from rheostat_server.delivery.capture_rows import CaptureRows
from rheostat_server.delivery.row_batch import RowBatch
from rheostat_server.selectors.spans import length, subtracted, united
from rheostat_server.tensors import FloatType


class SequenceRows:
    """The rows of one sequence for one reader."""

    def __init__(
        self,
        prompt: Sequence[int],
        captures: Mapping[int, ResolvedCapture],
        refused: Collection[int],
        row_type: FloatType,
        byte_counter: ByteCounter,
    ) -> None:
        """No rows have come.

        Args:
            prompt: the request's tokens.
            captures: the reader's captures, by number.
            refused: captures for which the engine has no room.
            row_type: element type of raw rows.
            byte_counter: counts waiting rows.
        """
        self.tokens: list[int] = []
        """Generated so far."""
        self.waits = bool(refused)
        """Whether rows wait, or losses may have to be reported."""
        self._newest = -1
        """The highest position of which rows came."""
        self._awaited = -1
        """Waiting rows leave once the token after this position is known."""
        self._prompt = prompt
        self._captures = captures
        self._refused = refused
        self._rows = {
            number: CaptureRows(number, capture, row_type, len(prompt), byte_counter)
            for number, capture in captures.items()
            if number not in refused
        }
        self._reached = 0
        """One past the last position that has a row in any case."""
        self._closed_at: int | None = None
        """Number of tokens after which no row leaves; None while the feed is open."""
        self._released: Released | None = None
        self._lossy: int | None = 0 if refused else None
        """First position from which unreported rows may be missing; None if none is."""
        self._reported: dict[int, Spans] = {}
        """Reported lost positions of each capture."""
        self._start: int | None = 0
        """First captured position; `OPEN_END`: none; None until the engine has reported it."""
        self._early: list[Rows] = []
        """Rows that came before the engine has reported it."""

    def attach(self, token_ids: Sequence[int]) -> None:
        """Attaches to a sequence that has generated some tokens. Its rows wait until `begin`."""
        self._start = None
        self.tokens += token_ids

    def begin(self, first: int) -> list[Rows]:
        """Sets the first captured position; returns the rows that came before the call."""
        self._start = first
        early, self._early = self._early, []
        return early

    def refuse(self, numbers: Collection[int]) -> None:
        """Counts all rows of these captures as lost."""
        self._refused = numbers
        self._lossy = 0
        self.waits = True
        for number in numbers:
            if (capture_rows := self._rows.pop(number, None)) is not None:
                capture_rows.discard()

    def add(self, rows: Rows) -> list[RowBatch]:
        """Adds rows; returns the batches that hold them."""
        last = int(rows.positions[-1])
        if not self.waits:
            self._awaited = last
        self._newest = max(self._newest, last)
        self.waits = True
        if self._start is None:
            self._early.append(rows)
            return []
        if self._start and rows.positions[0] < self._start:
            kept = rows.positions >= self._start
            rows = replace(rows, positions=rows.positions[kept], data=rows.data[:, kept])
        return [batch for capture_rows in self._rows.values() for batch in capture_rows.add(rows)]

    @property
    def token_lets_leave(self) -> bool:
        """Whether rows or losses can leave after the newest token.

        Rows that came together leave together. If each left with its own token, a server whose
        tokens come later than its rows would send a message for each token, and fall behind
        further.
        """
        return self.waits and (self._lossy is not None or self._awaited < self._end)

    def note_pulled(self) -> None:
        """Rows and losses were pulled as far as they can leave."""
        self.waits = self._lossy is not None or any(
            capture_rows.waits for capture_rows in self._rows.values()
        )
        self._awaited = self._newest

    def leave_before_token(self, batches: Sequence[RowBatch]) -> bool:
        """Whether rows that came leave before the next token, because none of them needs it."""
        counted = [batch for batch in batches if batch.count]
        return bool(counted) and all(batch.last < self._end for batch in counted)

    def lose_from(self, position: int) -> None:
        """Notes that rows from a position on may be missing."""
        self.waits = True
        self._lossy = position if self._lossy is None else min(self._lossy, position)

    def release(self, released: Released) -> None:
        """Handles the engine's last report."""
        self._released = released
        if released.lost_rows:
            self.lose_from(0)

    def close(self) -> None:
        """Takes no more rows."""
        if self._closed_at is None:
            self._closed_at = len(self.tokens)
            self._early.clear()

    def reach(self, end: int) -> None:
        """Takes note that the rows before a position were computed, whatever token comes next."""
        self._reached = max(self._reached, end)

    def discard(self) -> None:
        """Drops all waiting rows."""
        for capture_rows in self._rows.values():
            capture_rows.discard()

    def blocks(self, chunk_bytes: int, *, last: bool) -> Iterator[tuple[Block, list[int]]]:
        """Removes and yields the rows that can leave, and the tokens at their positions."""
        end = self._row_end(self._count(last=last))
        for capture_rows in self._rows.values():
            if not capture_rows.waits:
                continue
            for block in capture_rows.ready(self.tokens, end, last=last, chunk_bytes=chunk_bytes):
                yield block, self._token_ids(block.positions.tolist())

    def losses(self, *, last: bool) -> Iterator[tuple[int, Spans]]:
        """Yields the unreported lost positions of each capture."""
        if self._lossy is None and not last:
            return
        tokens, start = self._count(last=last), 0 if last else self._lossy or 0
        computed = None
        for number in self._captures:
            end = self._computed(number, tokens)
            computed = end if computed is None else min(computed, end)
            reported = self._reported.get(number, ())
            missing = self._missing(number, self._selected(number, end, start))
            lost = subtracted(missing, reported)
            if lost:
                self._reported[number] = united((*reported, *lost))
                yield number, lost
        if self._lossy is not None and computed is not None:
            self._lossy = max(self._lossy, computed)

    def counts(self, number: int) -> tuple[int, int]:
        """Number of positions of a capture that left or wait, and number of lost ones."""
        selected = self._selected(number, self._computed(number, len(self.tokens)))
        lost = length(self._missing(number, selected))
        return length(selected) - lost, lost

    def _count(self, *, last: bool) -> int:
        """Number of tokens that decide which rows leave."""
        closed_at = self._closed_at if last else None
        return len(self.tokens) if closed_at is None else closed_at

    def _missing(self, number: int, selected: Spans) -> Spans:
        return selected if number in self._refused else self._rows[number].lost(selected)

    def _selected(self, number: int, end: int, start: int = 0) -> Spans:
        start = max(start, OPEN_END if self._start is None else self._start)
        if start >= end:
            return ()
        selection = self._captures[number].selection
        return selection.selected(len(self._prompt), self.tokens, start, end)

    @property
    def _end(self) -> int:
        """One past the last position that has a row for certain after the newest token."""
        return self._row_end(len(self.tokens))

    def _row_end(self, tokens: int) -> int:
        """One past the last position that has a row for certain after some tokens."""
        reached = min(self._reached, len(self._prompt) + tokens)
        return max(0, reached, len(self._prompt) + tokens - 1)

    def _computed(self, number: int, tokens: int) -> int:
        """One past the last position whose row has come, or is lost."""
        if number in self._refused:
            return self._row_end(tokens)
        if self._released is not None:
            return min(self._row_end(tokens), self._released.computed[1])
        return min(self._row_end(tokens), self._rows[number].frontier)

    def _token_ids(self, positions: Sequence[int]) -> list[int]:
        prompt, count = self._prompt, len(self._prompt)
        return [prompt[p] if p < count else self.tokens[p - count] for p in positions]
