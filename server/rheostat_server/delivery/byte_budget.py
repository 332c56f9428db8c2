"""Memory of rows and tokens that wait for slow readers: a limit for each request, and one for all.

Which requests give up memory
    The rule is the same within a request and for all requests: the largest holders shrink to a
    common level. The level is never below an equal share, so a request that holds no more than its
    share loses nothing because of others. A request gives up memory by its own policy: it drops
    rows, spills them to disk, or fails.

Rows that are being written to a disk count as given up. The spool limits their bytes.

The limit of all requests is checked for every token. The check therefore skips requests whose rows
have not changed since the last check.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum

ROW_BATCH_BYTES = 512
"""Approximate memory of a batch of rows, without the rows."""

_UNCOUNTED = 64 << 10
"""Bytes beside the rows themselves that the limit of one request or subscription leaves out, so
that small limits can be given in rows. The limit of all requests together counts them."""

_SPARE = 16
"""When the limit of all requests is exceeded, a sixteenth of it is freed in addition. The next rows
then need not scan all requests again."""


class ByteCounter:
    """Counts waiting rows and tokens, in itself and in the counter that it is a part of."""

    __slots__ = ("_closed", "_on_rows", "_whole", "batches", "bytes", "rows", "token_bytes")

    def __init__(
        self, whole: "ByteCounter | None" = None, on_rows: Callable[[], None] | None = None
    ) -> None:
        """Nothing waits; `on_rows` is called after each change of the rows."""
        self._whole = whole
        self._on_rows = on_rows
        self._closed = False
        self.bytes = 0
        self.batches = 0
        """Batches in which rows wait."""
        self.rows = 0
        self.token_bytes = 0
        """Memory of tokens and their log-probabilities."""

    def add(self, size: int, rows: int = 0, batches: int = 0) -> None:
        """Counts more rows, or fewer if the numbers are negative."""
        if self._closed:
            return
        byte_counter: ByteCounter | None = self
        while byte_counter is not None:
            byte_counter.bytes += size
            byte_counter.rows += rows
            byte_counter.batches += batches
            if byte_counter._on_rows is not None:
                byte_counter._on_rows()
            byte_counter = byte_counter._whole

    def add_tokens(self, size: int) -> None:
        """Counts more bytes of tokens, or fewer if `size` is negative."""
        if self._closed:
            return
        byte_counter: ByteCounter | None = self
        while byte_counter is not None:
            byte_counter.token_bytes += size
            byte_counter = byte_counter._whole

    def close(self) -> None:
        """Stops counting, and subtracts its counts from the counter that it is a part of."""
        self.add(-self.bytes, -self.rows, -self.batches)
        self.add_tokens(-self.token_bytes)
        self._closed = True

    def ignore_rows(self) -> None:
        """Does not call `on_rows` any more."""
        self._on_rows = None

    @property
    def weight(self) -> int:
        """Approximate bytes of memory."""
        return self.bytes + ROW_BATCH_BYTES * self.batches + self.token_bytes


class Cost(IntEnum):
    """The consequence of giving up bytes. Within a request the mildest one is chosen first."""

    TIME = 0
    """Rows are written to a disk, and none is lost."""
    ROWS = 1
    """Rows are lost, as the request allows."""
    REQUEST = 2
    """The request fails."""


class Holder(ABC):
    """A buffer of waiting rows or tokens."""

    @property
    @abstractmethod
    def cost(self) -> Cost:
        """The consequence of giving up its bytes."""

    @property
    @abstractmethod
    def freeable(self) -> int:
        """Bytes that `give_up` can free."""

    @property
    def spilling(self) -> int:
        """Further bytes that are being written to a disk, with the memory of their batches.

        They change only when `give_up` is called or the share's counter counts rows.
        """
        return 0

    @property
    def spilling_rows(self) -> int:
        """Bytes of rows that are being written to a disk."""
        return self.spilling

    @abstractmethod
    def give_up(self, size: int, why: str) -> None:
        """Frees at least `size` bytes, starts writing them to a disk, or fails and frees all bytes.

        Args:
            size: at most `freeable`.
            why: the memory that is full, for the error's message.
        """


class Share:
    """The memory of all waiting rows and tokens of one request, or of one subscription."""

    def __init__(self, limit: int, why: str, budget: "Budget | None" = None) -> None:
        """Nothing waits.

        Args:
            limit: bytes that may wait.
            why: the text of errors when the limit is reached.
            budget: the server's budget; None if the share does not count in it.
        """
        self.limit = limit
        whole = None if budget is None else budget.byte_counter
        self.byte_counter = ByteCounter(whole, on_rows=None if budget is None else self._changed)
        self._why = why
        self._budget = budget
        self._holders: list[Holder] = []

    def add(self, holder: Holder) -> None:
        """Adds a buffer whose bytes count in `byte_counter`."""
        self._holders.append(holder)

    def remove(self, holder: Holder) -> None:
        """Removes a buffer that holds nothing any more."""
        if holder in self._holders:
            self._holders.remove(holder)

    @property
    def used(self) -> int:
        """Bytes that count against the limit."""
        return max(self.byte_counter.bytes, self.byte_counter.weight - _UNCOUNTED)

    @property
    def freeable(self) -> int:
        """Bytes that `give_up` can free."""
        return max(0, self.byte_counter.weight - self.spilling)

    @property
    def spilling(self) -> int:
        """Bytes that are being written to a disk."""
        return sum(holder.spilling for holder in self._holders)

    @property
    def _over(self) -> int:
        """Bytes above the limit that are not being written to a disk."""
        rows = self.byte_counter.bytes - sum(holder.spilling_rows for holder in self._holders)
        return max(rows, self.freeable - _UNCOUNTED) - self.limit

    def give_up(self, size: int, why: str) -> None:
        """Frees bytes, with the mildest consequence first; see `Cost`."""
        target = self.freeable - size
        for cost in Cost:
            if self.freeable > target:
                some = [holder for holder in self._holders if holder.cost is cost]
                relieve(some, self.freeable - target, why)
        self._changed()

    def check(self) -> None:
        """Frees bytes above the limits. To be called after rows or tokens were added."""
        # `used` is at most the weight. Most calls need only this comparison.
        if self.byte_counter.weight > self.limit < self.used and (over := self._over) > 0:
            self.give_up(over, self._why)
        if self._budget is not None:
            self._budget.check()

    @property
    def spills_too_much(self) -> bool:
        """Whether the rows that all requests are writing to disks exceed their limit.

        A holder may ask within `give_up`. The rows that it has just been asked to move count.
        """
        self._changed()
        return self._budget is not None and self._budget.spilling > self._budget.slack

    def close(self) -> None:
        """The request has ended. Nothing that the share refers to refers to the share any more."""
        if self._budget is not None:
            self._budget.remove(self)
        self._holders.clear()
        self.byte_counter.ignore_rows()

    def _changed(self) -> None:
        """Notes that `spilling` may have changed."""
        if self._budget is not None:
            self._budget.note_change(self)


class Budget:
    """The memory of all requests. Used on the event loop alone."""

    def __init__(self, limit: int, request_limit: int, *, slack: int) -> None:
        """Nothing waits.

        Args:
            limit: bytes that may wait for all requests.
            request_limit: bytes that may wait for one request.
            slack: further bytes that may be in the process of being written to disks.
        """
        self.limit = limit
        self.request_limit = request_limit
        self.slack = slack
        self.byte_counter = ByteCounter()
        self._shares: dict[Share, int] = {}
        """The shares of all requests, each with its `spilling` when it was last read."""
        self._spilling = 0
        """Sum of these bytes."""
        self._changed: set[Share] = set()
        """Shares whose `spilling` must be read again."""
        self._why = (
            f"the {limit} bytes that may wait for the readers of all requests (--buffers-mib) are "
            "full, and this request holds more than its share"
        )
        self._request_why = (
            f"the {request_limit} bytes that may wait for the readers of one request "
            "(--request-buffer-mib) are full"
        )

    def share(self) -> Share:
        """Adds the share of a new request."""
        share = Share(self.request_limit, self._request_why, self)
        self._shares[share] = 0
        return share

    def remove(self, share: Share) -> None:
        """Removes the share of an ended request."""
        self._spilling -= self._shares.pop(share, 0)
        self._changed.discard(share)

    def note_change(self, share: Share) -> None:
        """Notes that the `spilling` of a share may have changed."""
        if share in self._shares:
            self._changed.add(share)

    @property
    def used(self) -> int:
        """Bytes that wait."""
        return self.byte_counter.weight

    @property
    def spilling(self) -> int:
        """Bytes that are being written to disks."""
        for share in self._changed:
            now = share.spilling
            self._spilling += now - self._shares[share]
            self._shares[share] = now
        self._changed.clear()
        return self._spilling

    def check(self) -> None:
        """Frees bytes above the limit."""
        if self.used > self.limit and (over := self.used - self.spilling - self.limit) > 0:
            relieve([*self._shares], over + self.limit // _SPARE, self._why)


def relieve(holders: Sequence[Holder | Share], size: int, why: str) -> None:
    """Makes the largest holders give up `size` bytes in all, down to a common level.

    A holder that fails frees more bytes than it was asked for. Smaller holders then keep theirs.
    """
    if size <= 0:
        return
    ranked = sorted(
        [(holder.freeable, -n, holder) for n, holder in enumerate(holders)], reverse=True
    )
    level = _level([before for before, _, _ in ranked], size)
    for before, _, holder in ranked:
        if size <= 0 or before <= level:
            return
        holder.give_up(before - level, why)
        size -= before - holder.freeable


def _level(sizes: Sequence[int], excess: int) -> int:
    """The level to which the largest of `sizes`, descending, must shrink to free `excess`."""
    total = 0
    for count, size in enumerate(sizes, start=1):
        total += size
        level = (total - excess) // count
        if count == len(sizes) or level >= sizes[count]:
            return max(0, level)
    return 0
