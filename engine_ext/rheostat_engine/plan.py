"""A request's interventions, resolved and validated at admission: integers, digests and scales.

Invariant: a plan speaks of absolute token positions only. Phases, windows and spans are resolved
before, so that chunking, preemption and batching can change nothing about which tokens it touches.
The plan rides into the worker with the request itself (`SamplingParams.extra_args`).
"""

import hashlib
import math
import struct
from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter

import msgspec

OPEN_END = 2**31 - 1
"""End of a span that has none."""

Spans = tuple[tuple[int, int], ...]
"""Half-open [start, end) token positions, ascending, disjoint, not touching."""

RowKey = tuple[tuple[bytes, int, float], ...]
"""What a bank row is made of: (digest, row of the vector, scale) of every addend, sorted."""

Combination = tuple[tuple[int, RowKey], ...]
"""(site, row key) of everything that is added at one token, ascending by site."""

MAX_EFFORT = 200_000
"""The most that a plan may cost (`Plan.effort`), so that no plan holds up a step."""

EXTRA_ARG = "rheostat"
"""The key of the plan in `SamplingParams.extra_args`."""


@dataclass(frozen=True, slots=True)
class Addition:
    """x + scale * v at some sites, for the tokens at some positions."""

    digest: bytes
    """SHA-256 that names the vector's content."""
    rows: tuple[tuple[int, int], ...]
    """(site index, row of the vector that is added there), ascending by site."""
    scale: float
    """Factor on the vector; finite."""
    spans: Spans
    """Positions that are touched."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Rows of the stream to copy out."""

    sites: tuple[int, ...]
    """Site indices, ascending."""
    spans: Spans
    """Positions that are captured."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the engine does to one request."""

    request_id: str
    """The server's name of the request; events come back under it."""
    additions: tuple[Addition, ...] = ()
    """Additions, in the order of the request. Where several meet, they are summed in float32."""
    captures: tuple[Capture, ...] = ()
    """Captures. Where several meet, a row is copied once."""

    @property
    def touches_kv(self) -> bool:
        """Whether the request's KV differs from that of the same tokens without interventions."""
        return any(a.scale != 0 and a.rows and a.spans for a in self.additions)

    def captures_prompt(self, prompt_len: int) -> bool:
        """Whether a captured position lies in a prompt of `prompt_len` tokens."""
        return any(c.sites and c.spans and c.spans[0][0] < prompt_len for c in self.captures)

    def cache_salt(self) -> str | None:
        """Content key of everything that touches KV; None where nothing does.

        Equal additions at equal absolute positions give equal keys whatever their order and
        names. Absolute positions make it safe to share between prompts of different length.
        """
        if not self.touches_kv:
            return None
        parts = sorted(
            _encode_addition(a) for a in self.additions if a.scale != 0 and a.rows and a.spans
        )
        digest = hashlib.sha256(b"rheostat plan 1")
        for part in parts:
            digest.update(struct.pack("<q", len(part)))
            digest.update(part)
        return digest.hexdigest()

    def pieces(self) -> list[tuple[int, Combination]]:
        """What is added from which position on: (first position, combination), ascending."""
        made: dict[tuple[int, ...], Combination] = {}
        pieces = []
        for start, active in segment(tuple(a.spans for a in self.additions)):
            if active not in made:
                made[active] = combine([self.additions[i] for i in active])
            pieces.append((start, made[active]))
        return pieces

    def effort(self) -> int:
        """What it costs to put the plan in force: its pieces, and what each combination holds."""
        total = 0
        for held, sizes in (
            (tuple(a.spans for a in self.additions), [len(a.rows) for a in self.additions]),
            (tuple(c.spans for c in self.captures), [len(c.sites) for c in self.captures]),
        ):
            pieces = segment(held)
            combinations = {members for _, members in pieces}
            total += len(pieces) + sum(sizes[i] for members in combinations for i in members)
        return total

    def row_keys(self) -> frozenset[RowKey]:
        """The distinct bank rows that the plan needs."""
        return frozenset(key for combination in self.combinations() for _, key in combination)

    def combinations(self) -> frozenset[Combination]:
        """The distinct (site, row) assignments over all positions: one slot each."""
        return frozenset(combination for _, combination in self.pieces() if combination)

    def to_wire(self) -> dict[str, object]:
        """The plan as plain data that vLLM can carry."""
        return {
            "id": self.request_id,
            "add": [
                [a.digest, [list(r) for r in a.rows], a.scale, [list(s) for s in a.spans]]
                for a in self.additions
            ],
            "capture": [[list(c.sites), [list(s) for s in c.spans]] for c in self.captures],
        }

    @classmethod
    def from_wire(cls, wire: object) -> "Plan":
        """The plan that `to_wire` wrote.

        Raises:
            ValueError: `wire` is no plan; says where.
        """
        try:
            plain = msgspec.convert(wire, _Wire, builtin_types=(bytes,))
        except msgspec.ValidationError as error:
            raise ValueError(f"this is no plan: {error}") from error
        plan = cls(
            request_id=plain.id,
            additions=tuple(Addition(*one) for one in plain.add),
            captures=tuple(Capture(*one) for one in plain.capture),
        )
        if not all(math.isfinite(a.scale) for a in plan.additions):
            raise ValueError("this is no plan: a scale is not finite")
        spans = [*(a.spans for a in plan.additions), *(c.spans for c in plan.captures)]
        if not all(map(_in_order, spans)):
            raise ValueError("this is no plan: spans are not ascending and apart")
        return plan


class _Wire(msgspec.Struct):
    id: str
    add: list[tuple[bytes, tuple[tuple[int, int], ...], float, Spans]]
    capture: list[tuple[tuple[int, ...], Spans]]


def segment(spans: tuple[Spans, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Cuts the positions where membership changes.

    Returns (start, members) for each piece from position 0 on, ascending by start, where members
    are the indices of the spans that hold the piece. The last piece has no end.
    """
    cuts = sorted({0, *(edge for one in spans for span in one for edge in span)} - {OPEN_END})
    pieces: list[tuple[int, tuple[int, ...]]] = []
    for start in cuts:
        members = tuple(i for i, one in enumerate(spans) if _holds(one, start))
        if not pieces or pieces[-1][1] != members:
            pieces.append((start, members))
    return pieces


def combine(additions: list[Addition]) -> Combination:
    """What several additions do together at one token: (site, row key), ascending by site."""
    by_site: dict[int, list[tuple[bytes, int, float]]] = {}
    for addition in additions:
        if addition.scale == 0:
            continue
        for site, row in addition.rows:
            by_site.setdefault(site, []).append((addition.digest, row, addition.scale))
    return tuple((site, tuple(sorted(by_site[site]))) for site in sorted(by_site))


def _encode_addition(addition: Addition) -> bytes:
    rows = b"".join(struct.pack("<qq", *row) for row in addition.rows)
    spans = b"".join(struct.pack("<qq", *span) for span in addition.spans)
    head = struct.pack("<dqq", addition.scale, len(addition.rows), len(addition.spans))
    return addition.digest + head + rows + spans


def _holds(spans: Spans, position: int) -> bool:
    after = bisect_right(spans, position, key=itemgetter(0))
    return after > 0 and position < spans[after - 1][1]


def _in_order(spans: Spans) -> bool:
    last = -1
    for start, end in spans:
        if not last < start < end <= OPEN_END:
            return False
        last = end
    return True
