"""Keys of the prefix cache: what touches each block of tokens, by content.

The KV of a token depends on every act at or before it. vLLM chains a block's hash on the one before
it, so a block's own key has only to say what touches the tokens in it: blocks that nothing touches
keep vLLM's own keys until the chain has been touched.

Invariant: two requests with equal tokens find each other's blocks exactly if equal content acts in
equal order at equal positions. What depends on the time of the run is private.
"""

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from rheostat_engine.plan import Act, Kind, Plan, Spans


class BlockKeys:
    """The keys of one request."""

    def __init__(self, plan: Plan) -> None:
        """Encodes the acts of `plan` once."""
        acts = [act for act in plan.acts if act.acts]
        self._contents = [_content(act) for act in acts]
        self._kinds = [act.kind for act in acts]
        self._clauses = [
            [(act.spans, b""), *((c.spans, _condition(c.tokens, c.among)) for c in act.conditions)]
            for act in acts
        ]
        self._epoch = struct.pack("<q", plan.epoch)
        self._private_from = plan.private_from
        self._nonce = plan.request_id

    def key(self, start: int, end: int) -> str | None:
        """What touches the tokens at positions [start, end); None: nothing does."""
        if self._private_from is not None and end > self._private_from:
            return f"private {self._nonce}"
        touching = [
            (kind, content + _place(clauses, start, end))
            for kind, content, clauses in zip(
                self._kinds, self._contents, self._clauses, strict=True
            )
            if any(_reach(spans, start, end) for spans, _ in clauses)
        ]
        if not touching:
            return None
        digest = hashlib.sha256(b"rheostat block 1" + self._epoch)
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


def _place(clauses: Sequence[tuple[Spans, bytes]], start: int, end: int) -> bytes:
    """Which tokens of a block an act's clauses hold, counted from the block's start."""
    parts = []
    for spans, condition in clauses:
        held = _reach(spans, start, end)
        if held:
            inside = [
                edge for a, b in held for edge in (max(a, start) - start, min(b, end) - start)
            ]
            parts.append(condition + struct.pack(f"<{1 + len(inside)}q", len(inside), *inside))
    return b"".join(parts)


def _reach(spans: Spans, start: int, end: int) -> Spans:
    """The spans that hold a position of [start, end)."""
    first = bisect_left(spans, start + 1, key=itemgetter(1))
    last = bisect_left(spans, end, key=itemgetter(0))
    return spans[first:last]
