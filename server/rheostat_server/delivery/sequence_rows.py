"""The rows of one of a request's sequences of tokens, for one reader.

Invariant: each position that a capture selects leaves once, as a row or as a loss.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from rheostat_engine import OPEN_END, Released, Rows, Spans
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.byte_budget import ByteCounter
from rheostat_server.delivery.row_batch import RowBatch
from rheostat_server.delivery.stream import Block, CaptureStream
from rheostat_server.selectors.spans import length, subtracted, united
from rheostat_server.tensors import FloatType


class SequenceRows:
    """The rows of one track."""

    def __init__(
        self,
        prompt: Sequence[int],
        captures: Mapping[int, ResolvedCapture],
        refused: Collection[int],
        held: FloatType,
        byte_counter: ByteCounter,
    ) -> None:
        """Nothing has come.

        Args:
            prompt: the request's.
            captures: what is wanted, by number.
            refused: captures of which nothing comes.
            held: element type in which rows come.
            byte_counter: counts what waits.
        """
        wanted = {number: one for number, one in captures.items() if number not in refused}
        self.tokens: list[int] = []
        """Generated so far."""
        self.waits = bool(refused)
        """Whether rows wait, or losses may have to be reported. Tokens let them leave."""
        self._prompt = prompt
        self._captures = captures
        self._refused = refused
        self._stream = CaptureStream(wanted, held, len(prompt), byte_counter)
        self._closed_at: int | None = None
        """Tokens from which on nothing leaves any more."""
        self._released: Released | None = None
        self._lossy: int | None = 0 if refused else None
        """First position from which rows may be missing that were not reported; None: none is."""
        self._reported: dict[int, Spans] = {}
        """Lost positions of each capture that were reported."""
        self._start: int | None = 0
        """First position that is wanted; `OPEN_END`: none; None: that is not known yet."""
        self._early: list[Rows] = []
        """Rows that came before that was known."""

    def join(self, token_ids: Sequence[int]) -> None:
        """Takes up a track that has generated some tokens. Its rows wait until `begin`."""
        self._start = None
        self.tokens += token_ids

    def begin(self, first: int) -> list[Rows]:
        """Positions from `first` on are wanted; `OPEN_END`: none. The rows that came before."""
        self._start = first
        early, self._early = self._early, []
        return early

    def refuse(self, numbers: Collection[int]) -> None:
        """Nothing of these captures comes: all of it is lost."""
        self._refused = numbers
        self._lossy = 0
        self.waits = True
        self._stream.drop(numbers)

    def add(self, rows: Rows) -> list[RowBatch]:
        """Takes rows; what of them waits."""
        self.waits = True
        if self._start is None:
            self._early.append(rows)
            return []
        if not self._start:
            return self._stream.add(rows)
        if rows.positions[-1] < self._start:
            return []
        if rows.positions[0] < self._start:
            kept = rows.positions >= self._start
            rows = replace(rows, positions=rows.positions[kept], data=rows.data[:, kept])
        return self._stream.add(rows)

    def note_pulled(self) -> None:
        """Rows and losses were pulled as far as they can leave."""
        self.waits = self._lossy is not None or self._stream.waits

    def leave_before_token(self, pieces: Sequence[RowBatch]) -> bool:
        """Whether rows that came should leave before the next token.

        If only the last of them needs the next token, all of them leave with it in one chunk.
        """
        end = len(self._prompt) + len(self.tokens) - 1
        ready = any(piece.count and piece.first < end for piece in pieces)
        return ready and not any(piece.count and piece.last == end for piece in pieces)

    def lose_from(self, position: int) -> None:
        """Rows from a position on may be missing."""
        self.waits = True
        self._lossy = position if self._lossy is None else min(self._lossy, position)

    def release(self, released: Released) -> None:
        """Takes what the engine says of its end."""
        self._released = released
        if released.lost_rows:
            self.lose_from(0)

    def close(self) -> None:
        """What comes from now on does not leave."""
        if self._closed_at is None:
            self._closed_at = len(self.tokens)
            self._early.clear()

    def discard(self) -> None:
        """Loses what waits."""
        self._stream.discard()

    def blocks(self, chunk_bytes: int, *, last: bool) -> Iterator[tuple[Block, list[int]]]:
        """Rows that can leave, about so many bytes at a time, and the tokens at their positions."""
        end = self._row_end(self._count(last=last))
        for block in self._stream.ready(self.tokens, end, last=last, chunk_bytes=chunk_bytes):
            yield block, self._token_ids(block.positions.tolist())

    def losses(self, *, last: bool) -> Iterator[tuple[int, Spans]]:
        """Positions of each capture that are lost and were not reported."""
        if self._lossy is None and not last:
            return
        tokens, start = self._count(last=last), 0 if last else self._lossy or 0
        known = None
        for number in self._captures:
            end = self._computed(number, tokens)
            known = end if known is None else min(known, end)
            reported = self._reported.get(number, ())
            missing = self._missing(number, self._selected(number, end, start))
            lost = subtracted(missing, reported)
            if lost:
                self._reported[number] = united((*reported, *lost))
                yield number, lost
        if self._lossy is not None and known is not None:
            self._lossy = max(self._lossy, known)

    def counts(self, number: int) -> tuple[int, int]:
        """Positions of a capture that left or wait, and that are lost."""
        selected = self._selected(number, self._computed(number, len(self.tokens)))
        gone = length(self._missing(number, selected))
        return length(selected) - gone, gone

    def _count(self, *, last: bool) -> int:
        """Tokens that count for what leaves."""
        closed_at = self._closed_at if last else None
        return len(self.tokens) if closed_at is None else closed_at

    def _missing(self, number: int, selected: Spans) -> Spans:
        return selected if number in self._refused else self._stream.lost(number, selected)

    def _selected(self, number: int, end: int, start: int = 0) -> Spans:
        start = max(start, OPEN_END if self._start is None else self._start)
        if start >= end:
            return ()
        selection = self._captures[number].selection
        return selection.held(len(self._prompt), self.tokens, start, end)

    def _row_end(self, tokens: int) -> int:
        """One past the last position that is known to have a row after so many tokens."""
        return max(0, len(self._prompt) + tokens - 1)

    def _computed(self, number: int, tokens: int) -> int:
        """One past the last position whose row has come by then, or has been lost."""
        if number in self._refused:
            return self._row_end(tokens)
        if self._released is not None:
            return min(self._row_end(tokens), self._released.computed[1])
        return min(self._row_end(tokens), self._stream.frontier(number))

    def _token_ids(self, positions: Sequence[int]) -> list[int]:
        prompt, count = self._prompt, len(self._prompt)
        return [prompt[p] if p < count else self.tokens[p - count] for p in positions]
