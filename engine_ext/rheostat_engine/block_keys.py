"""Keys of the prefix cache: what touches each block of tokens, by content.

The KV of a token depends on every act at or before it. vLLM chains a block's hash on the one before
it, so a block's own key has only to say what touches the tokens in it: blocks that nothing touches
keep vLLM's own keys until the chain has been touched. A key costs as much as the acts that begin or
end in its block; long stretches that are touched alike cost next to nothing.

Invariant: two requests with equal tokens find each other's blocks exactly if equal content acts in
equal order at equal positions. What depends on the time of the run is private.
"""

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

from rheostat_engine.pieces import segment
from rheostat_engine.plan import Act, Kind, Plan, Spans


class _Clause(NamedTuple):
    act: int
    """Index among the acts that can change anything."""
    spans: Spans
    condition: bytes
    """Digest of the condition under which it holds; empty: always."""


class BlockKeys:
    """The keys of one request."""

    def __init__(self, plan: Plan) -> None:
        """Encodes the acts of `plan` once."""
        acts = [act for act in plan.acts if act.acts]
        self._contents = [hashlib.sha256(_content(act)).digest() for act in acts]
        self._kinds = [act.kind for act in acts]
        self._clauses = [
            _Clause(index, spans, condition)
            for index, act in enumerate(acts)
            for spans, condition in (
                (act.spans, b""),
                *((one.spans, _condition(one.tokens, one.among)) for one in act.conditions),
            )
        ]
        pieces = segment([clause.spans for clause in self._clauses])
        self._starts = [start for start, _ in pieces]
        self._members = [members for _, members in pieces]
        self._whole: dict[tuple[tuple[int, ...], int], str | None] = {}
        self._epoch = struct.pack("<q", plan.epoch)
        self._private_from = plan.private_from
        self._nonce = plan.request_id

    def key(self, start: int, end: int) -> str | None:
        """What touches the tokens at positions [start, end); None: nothing does."""
        if self._private_from is not None and end > self._private_from:
            return f"private {self._nonce}"
        first = bisect_right(self._starts, start) - 1
        last = bisect_left(self._starts, end)
        members = self._members[first]
        if last - first > 1:
            return self._key(sorted(set().union(*self._members[first:last])), start, end)
        if (members, end - start) not in self._whole:
            self._whole[members, end - start] = self._key(members, start, end)
        return self._whole[members, end - start]

    def _key(self, members: Sequence[int], start: int, end: int) -> str | None:
        """The key where some of the clauses, ascending, touch a block."""
        if not members:
            return None
        touching = [
            (self._kinds[act], self._contents[act] + b"".join(_place(c, start, end) for c in run))
            for act, run in groupby((self._clauses[i] for i in members), attrgetter("act"))
        ]
        digest = hashlib.sha256(b"rheostat block 2" + self._epoch)
        for kind, run in groupby(touching, itemgetter(0)):
            parts = [part for _, part in run]
            for part in sorted(parts) if kind is Kind.ADD else parts:
                digest.update(struct.pack("<q", len(part)) + part)
        return digest.hexdigest()


def _content(act: Act) -> bytes:
    parts = [
        struct.pack("<qqd?", act.kind, len(act.vectors), act.scale, act.orthogonal),
        *act.vectors,
        *(struct.pack("<ddd", *band) for band in act.bands),
        struct.pack("<q", len(act.rows)),
        *(struct.pack(f"<{1 + len(rows)}q", site, *rows) for site, rows in act.rows),
    ]
    return b"".join(parts)


def _condition(tokens: Sequence[int], among: bool) -> bytes:
    return hashlib.sha256(struct.pack(f"<?{len(tokens)}q", among, *tokens)).digest()


def _place(clause: _Clause, start: int, end: int) -> bytes:
    """Which tokens of a block a clause holds, counted from the block's start."""
    first = bisect_left(clause.spans, start + 1, key=itemgetter(1))
    last = bisect_left(clause.spans, end, key=itemgetter(0))
    inside = [edge for a, b in clause.spans[first:last] for edge in (max(a, start), min(b, end))]
    shifted = (edge - start for edge in inside)
    return clause.condition + struct.pack(f"<{1 + len(inside)}q", len(inside), *shifted)
