"""Memory for what waits for slow readers: one limit for each request, one for all together.

The rule for who gives way, the same at both levels: those that hold most, each down to a common
level. The level is never below an equal share, so who holds no more than that loses nothing for
others. Each gives way under its own policy: it loses rows, spills them, or fails.

What has been told to go to a disk counts as gone for this rule. How much may be on its way there is
bounded by the spool.

The limit of all together is checked for every token. So the check looks through no request whose
rows did not change since the last one.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

PIECE_BYTES = 512
"""What a piece of rows takes in memory beside its rows, about."""

_UNCOUNTED = 64 << 10
"""Bytes beside the rows themselves that the limit of one request or subscription leaves out, so
that small limits can be given in rows. The limit of all requests together counts them."""

_SPARE = 16
"""What part of the limit of all together is freed at once when it is reached, so that not every row
that comes looks through all requests."""


class Meter:
    """Counts what waits. What counts in it counts in the whole that it is part of, too."""

    __slots__ = ("_closed", "_on_rows", "_whole", "bytes", "pieces", "rows", "token_bytes")

    def __init__(
        self, whole: "Meter | None" = None, on_rows: Callable[[], None] | None = None
    ) -> None:
        """Nothing waits; `on_rows` is called after each change of the rows."""
        self._whole = whole
        self._on_rows = on_rows
        self._closed = False
        self.bytes = 0
        self.pieces = 0
        """Pieces in which rows wait."""
        self.rows = 0
        self.token_bytes = 0
        """Memory of tokens and their log-probabilities."""

    def add(self, size: int, rows: int = 0, pieces: int = 0) -> None:
        """Counts more rows, or fewer if the numbers are negative."""
        if self._closed:
            return
        meter: Meter | None = self
        while meter is not None:
            meter.bytes += size
            meter.rows += rows
            meter.pieces += pieces
            if meter._on_rows is not None:
                meter._on_rows()
            meter = meter._whole

    def add_tokens(self, size: int) -> None:
        """Counts more bytes of tokens, or fewer if `size` is negative."""
        if self._closed:
            return
        meter: Meter | None = self
        while meter is not None:
            meter.token_bytes += size
            meter = meter._whole

    def close(self) -> None:
        """Counts nothing any more, and takes what it has counted out of the whole."""
        self.add(-self.bytes, -self.rows, -self.pieces)
        self.add_tokens(-self.token_bytes)
        self._closed = True

    @property
    def weight(self) -> int:
        """Bytes of memory, about."""
        return self.bytes + PIECE_BYTES * self.pieces + self.token_bytes


class Cost(IntEnum):
    """What it costs that something gives bytes up. Within a request the cheapest goes first."""

    TIME = 0
    """They go to a disk, and nothing is lost."""
    ROWS = 1
    """Rows are lost, as the request allows."""
    REQUEST = 2
    """The request fails."""


class Holder(Protocol):
    """Something in which bytes wait."""

    @property
    def cost(self) -> Cost:
        """What it costs to give them up."""

    @property
    def held(self) -> int:
        """Bytes that it can be asked to give up."""

    @property
    def leaving(self) -> int:
        """Bytes beyond these that are on their way to a disk, with the memory of their pieces.

        They change only when `give_up` is called or the share's meter counts rows.
        """

    @property
    def leaving_rows(self) -> int:
        """Bytes of the rows themselves that are on their way to a disk."""

    def give_up(self, size: int, why: str) -> None:
        """Frees at least so many bytes, or sends them to a disk, or fails and frees all of them.

        Args:
            size: at most `held`.
            why: which memory is full, for the reader of an error.
        """


class Share:
    """The memory of one request, or of one subscription: all that waits of it together."""

    def __init__(self, limit: int, why: str, budget: "Budget | None" = None) -> None:
        """Nothing waits.

        Args:
            limit: bytes that may wait.
            why: what an error says when they are full.
            budget: that of the server. None: the share is no part of it.
        """
        self.limit = limit
        whole = None if budget is None else budget.meter
        self.meter = Meter(whole, on_rows=None if budget is None else self._changed)
        self._why = why
        self._budget = budget
        self._holders: list[Holder] = []

    def add(self, holder: Holder) -> None:
        """Adds something in which bytes wait that count in `meter`."""
        self._holders.append(holder)

    @property
    def used(self) -> int:
        """Bytes that count against the limit."""
        return max(self.meter.bytes, self.meter.weight - _UNCOUNTED)

    @property
    def held(self) -> int:
        """Bytes that it can be asked to give up."""
        return max(0, self.meter.weight - self.leaving)

    @property
    def leaving(self) -> int:
        """Bytes on their way to a disk."""
        return sum(one.leaving for one in self._holders)

    @property
    def _over(self) -> int:
        """Bytes beyond the limit that are not on their way to a disk."""
        rows = self.meter.bytes - sum(one.leaving_rows for one in self._holders)
        return max(rows, self.held - _UNCOUNTED) - self.limit

    def give_up(self, size: int, why: str) -> None:
        """Frees bytes: first those that cost the least."""
        target = self.held - size
        for cost in Cost:
            if self.held > target:
                some = [one for one in self._holders if one.cost is cost]
                relieve(some, self.held - target, why)
        self._changed()

    def check(self) -> None:
        """Makes room where too much waits; to be called when more has come."""
        if self.used > self.limit and (over := self._over) > 0:
            self.give_up(over, self._why)
        if self._budget is not None:
            self._budget.check()

    @property
    def too_much_leaves(self) -> bool:
        """Whether more is on its way to disks, of all requests together, than may be.

        A holder may ask within `give_up`, so what it has just been told to move counts.
        """
        self._changed()
        return self._budget is not None and self._budget.leaving > self._budget.slack

    def close(self) -> None:
        """The request has ended."""
        if self._budget is not None:
            self._budget.remove(self)

    def _changed(self) -> None:
        """What is on its way to a disk may have changed."""
        if self._budget is not None:
            self._budget.note_change(self)


class Budget:
    """The memory of all requests together. Lives on the event loop."""

    def __init__(self, limit: int, request_limit: int, *, slack: int) -> None:
        """Nothing waits.

        Args:
            limit: bytes that may wait of all requests together.
            request_limit: bytes that may wait of one.
            slack: bytes beyond the limit that may be on their way to disks.
        """
        self.limit = limit
        self.request_limit = request_limit
        self.slack = slack
        self.meter = Meter()
        self._shares: dict[Share, int] = {}
        """With the bytes of each on their way to a disk when it was last looked at."""
        self._leaving = 0
        """Sum of these bytes."""
        self._changed: set[Share] = set()
        """Requests that are to be looked at again."""
        self._why = (
            f"the {limit} bytes that may wait for the readers of all requests (--buffers-mib) are "
            "full, and this request holds more than its share"
        )
        self._request_why = (
            f"the {request_limit} bytes that may wait for the readers of one request "
            "(--request-buffer-mib) are full"
        )

    def share(self) -> Share:
        """The memory of another request."""
        share = Share(self.request_limit, self._request_why, self)
        self._shares[share] = 0
        return share

    def remove(self, share: Share) -> None:
        """A request has ended."""
        self._leaving -= self._shares.pop(share, 0)
        self._changed.discard(share)

    def note_change(self, share: Share) -> None:
        """What a request has on its way to disks may have changed."""
        if share in self._shares:
            self._changed.add(share)

    @property
    def used(self) -> int:
        """Bytes that wait."""
        return self.meter.weight

    @property
    def leaving(self) -> int:
        """Bytes on their way to disks."""
        for share in self._changed:
            now = share.leaving
            self._leaving += now - self._shares[share]
            self._shares[share] = now
        self._changed.clear()
        return self._leaving

    def check(self) -> None:
        """Makes room where too much waits."""
        if self.used > self.limit and (over := self.used - self.leaving - self.limit) > 0:
            relieve([*self._shares], over + self.limit // _SPARE, self._why)


class _Held(Protocol):
    """A holder or a share."""

    @property
    def held(self) -> int: ...

    def give_up(self, size: int, why: str) -> None: ...


def relieve(holders: Sequence[_Held], size: int, why: str) -> None:
    """Lets those that hold most give up so many bytes, down to a common level.

    One that fails gives up more than it was asked to, which spares those that hold less.
    """
    if size <= 0:
        return
    ranked = sorted(((one.held, -n, one) for n, one in enumerate(holders)), reverse=True)
    level = _level([held for held, _, _ in ranked], size)
    for held, _, holder in ranked:
        if size <= 0 or held <= level:
            return
        holder.give_up(held - level, why)
        size -= held - holder.held


def _level(held: Sequence[int], size: int) -> int:
    """The level down to which the largest of some numbers, descending, give up `size` together."""
    total = 0
    for count, one in enumerate(held, start=1):
        total += one
        level = (total - size) // count
        if count == len(held) or level >= held[count]:
            return max(0, level)
    return 0
