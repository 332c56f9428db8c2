"""Extra keys of prefix-cache blocks: digests of the acts on each block of tokens.

The KV of a token depends on every act at or before it. vLLM chains a block's hash on the hash of
the block before it. A block's own key therefore covers only the acts on its own tokens. A block
without acts gets no key, so blocks before the first act keep vLLM's own hashes. The cost of a key
grows with the acts that begin or end in its block. Requests with equal acts share their keys.

Invariant: two requests with equal tokens share blocks if, and only if, equal acts apply in equal
order at equal positions. Blocks whose acts depend on when the request runs are private. So are
blocks in which a gate may be open. Before it, a gated act has no part in a key. Gates that are
decided once and stay shut change nothing, so a request whose gates are reported to be shut has the
keys of a request without them. Until the report, blocks in which a gate may be open have no key.
"""

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

from rheostat_engine.plan.acts import OPEN_END, Act, Band, Kind
from rheostat_engine.plan.gate_decisions import decided_once
from rheostat_engine.plan.plan import Plan, ReceivedPlan, Window
from rheostat_engine.plan.tables import SteeringTable


class _Occurrence(NamedTuple):
    number: int
    """Index of the clause in the table."""
    act: int
    """Index of its act."""
    condition: bytes
    """Digest of the clause's condition; empty if it has none."""


class SteeredBlocks:
    """Digests of the acts on blocks, shared by all requests with a table of acts."""

    def __init__(self, table: SteeringTable) -> None:
        self._table = table  # the worker, often in this process, need not parse it again then
        self.first_read, self.first_gated = table.first_read, table.first_gated
        self.decided_once = decided_once(table)
        self._contents = [hashlib.sha256(_content(act)).digest() for act in table.acts]
        self._kinds = [act.kind for act in table.acts]
        clauses = [
            _Occurrence(
                number,
                clause.act,
                b""
                if clause.tokens is None
                else _condition(table.sets[clause.tokens], clause.among),
            )
            for number, clause in enumerate(table.clauses)
        ]
        # A gated act changes nothing before `first_gated`, and blocks behind it are private.
        acting = {
            number for number, act in enumerate(table.acts) if act.strong and act.gate is None
        }
        self._starts = table.intervals.starts.tolist()
        self._sets = table.intervals.sets.tolist()
        self._members = [
            tuple(clauses[i] for i in members if clauses[i].act in acting)
            for members in table.intervals.members
        ]
        self._whole: dict[tuple[int, int], bytes] = {}
        self._fragmented: dict[tuple[int, int], bytes] = {}
        """Digests by block, because all samples of a request have the same blocks."""

    def touching(self, start: int, end: int, window: Window | None = None) -> bytes:
        """Digest of the acts on positions [start, end); empty if there are none."""
        if (
            window is not None
            and not window.first_act
            and not (window.start < end and start < window.end)
        ):  # most blocks of a sweep's cell
            return b""
        first = bisect_right(self._starts, start) - 1
        last = bisect_left(self._starts, end)
        if window is not None:
            if not window.first_act:  # no act applies outside
                first = max(first, bisect_right(self._starts, window.start) - 1)
                last = min(last, bisect_left(self._starts, window.end))
            return self._touching(first, last, start, end, window)
        if last - first > 1:
            block = start, end
            if block not in self._fragmented:
                self._fragmented[block] = self._touching(first, last, start, end)
            return self._fragmented[block]
        whole = self._sets[first], end - start
        if whole not in self._whole:
            self._whole[whole] = self._touching(first, last, start, end)
        return self._whole[whole]

    def _touching(
        self, first: int, last: int, start: int, end: int, window: Window | None = None
    ) -> bytes:
        """Digest of the acts on a block that meets intervals `first` to `last` - 1."""
        if last - first == 1:
            members = self._members[self._sets[first]]
            if not members:
                return b""
            if len(members) == 1:
                return self._only(members[0], first, start, end, window)
        edges: dict[_Occurrence, list[int]] = {}
        for interval in range(first, last):
            begins = max(self._starts[interval], start)
            ends = self._starts[interval + 1] if interval + 1 < len(self._starts) else OPEN_END
            ends = min(ends, end)
            for clause in self._members[self._sets[interval]]:
                low, high = begins, ends
                if window is not None and clause.act >= window.first_act:
                    low, high = max(low, window.start), min(high, window.end)
                    if low >= high:
                        continue
                positions = edges.setdefault(clause, [])
                if positions and positions[-1] == low - start:
                    positions.pop()
                else:
                    positions.append(low - start)
                positions.append(high - start)
        acts = [
            (
                self._kinds[act],
                self._contents[act] + b"".join(_tokens(c, edges[c]) for c in clauses),
            )
            for act, clauses in groupby(sorted(edges), attrgetter("act"))
        ]
        parts: list[bytes] = []
        for kind, neighbours in groupby(acts, itemgetter(0)):
            encoded = [part for _, part in neighbours]
            parts += sorted(encoded) if kind is Kind.ADD else encoded
        return _digest(parts) if parts else b""

    def _only(
        self, clause: _Occurrence, interval: int, start: int, end: int, window: Window | None
    ) -> bytes:
        """As `_touching`, if a single clause applies. So it is to most steered blocks of a cell."""
        low, high = max(self._starts[interval], start), end
        if interval + 1 < len(self._starts):
            high = min(high, self._starts[interval + 1])
        if window is not None and clause.act >= window.first_act:
            low, high = max(low, window.start), min(high, window.end)
            if low >= high:
                return b""
        tokens = _tokens(clause, (low - start, high - start))
        return _digest([self._contents[clause.act] + tokens])


class BlockKeys:
    """The block keys of one request."""

    def __init__(self, plan: Plan | ReceivedPlan, steered: SteeredBlocks | None) -> None:
        """`steered` is None if the plan has no acts."""
        self.first_read = OPEN_END if steered is None else steered.first_read
        self._steered = steered
        self._window = plan.window
        self._epoch = struct.pack("<q", plan.epoch)
        self._always_private_from = OPEN_END if plan.private_from is None else plan.private_from
        gated = OPEN_END if steered is None else steered.first_gated
        self._may_be_private_from = min(self._always_private_from, gated)
        self._private_from = self._may_be_private_from
        self.decided_once = None if steered is None else steered.decided_once
        self.keyed_end = OPEN_END
        """Blocks that end after this position have no key yet: it depends on a worker's report."""
        self._nonce = plan.request_id
        self._keys: dict[bytes, str] = {}

    @property
    def window_start(self) -> int:
        """The first position of the plan's window; 0: it has none."""
        return 0 if self._window is None else self._window.start

    def await_decision(self) -> None:
        """Withholds keys until `decide`. `decided_once` must not be None."""
        assert self.decided_once is not None
        self._private_from = self._may_be_private_from
        self.keyed_end = min(self._private_from, self.decided_once.position)

    def decide(self, *, shut: bool) -> None:
        """Makes all keys available. `shut`: whether all gates of the request stay shut."""
        self.keyed_end = OPEN_END
        if shut:
            self._private_from = self._always_private_from

    def key(self, start: int, end: int) -> str | None:
        """The key of the block [start, end); None if no act applies to it.

        The caller must not use keys of blocks that end after `keyed_end`: they may change.
        """
        return self._key(start, end, self._window)

    def outside_window(self, start: int, end: int) -> str | None:
        """The key that the block [start, end) would have if the plan's window were elsewhere."""
        assert self._window is not None
        if not self._window.first_act and end <= self._private_from:
            return None  # every act is limited to the window
        return self._key(start, end, self._window._replace(start=OPEN_END - 1, end=OPEN_END))

    def _key(self, start: int, end: int, window: Window | None) -> str | None:
        if end > self._private_from:
            return f"private {self._nonce}"
        touching = b"" if self._steered is None else self._steered.touching(start, end, window)
        if not touching:
            return None
        if touching not in self._keys:
            self._keys[touching] = hashlib.sha256(touching + self._epoch).hexdigest()
        return self._keys[touching]


def _digest(parts: Sequence[bytes]) -> bytes:
    """The digest of the acts on a block, each encoded."""
    framed = [struct.pack("<q", len(part)) + part for part in parts]
    return hashlib.sha256(b"".join([b"rheostat block 5", *framed])).digest()


def _content(act: Act) -> bytes:
    parts = [
        struct.pack(
            "<qqqd?", act.kind, len(act.vectors), len(act.bands), act.scale, act.orthogonal
        ),
        *act.vectors,
        *map(_band, act.bands),
        struct.pack("<q", len(act.rows)),
        act.site_rows.sites.tobytes(),
        act.site_rows.rows.tobytes(),
    ]
    return b"".join(parts)


def _band(band: Band) -> bytes:
    bounds = struct.pack("<ddd", band.low, band.high, band.strength)
    return bounds + struct.pack("<qqdd??", *band.readout, band.writes, band.only_on)


def _condition(tokens: bytes, among: bool) -> bytes:
    return hashlib.sha256(struct.pack("<?", among) + tokens).digest()


def _tokens(clause: _Occurrence, edges: Sequence[int]) -> bytes:
    """A clause's condition and its positions, counted from the block's start."""
    return clause.condition + struct.pack(f"<{1 + len(edges)}q", len(edges), *edges)
