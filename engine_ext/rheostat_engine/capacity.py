"""Who may still enter: a ledger of what the engine can hold, kept at admission.

Invariant: as long as every plan passes through `admit` before it reaches the engine and is
released only after the worker has let go of it, the worker's tables and ring never overflow.
Everything is counted by content, exactly as the worker shares it. Captured rows are counted as if
all requests took their densest step at once, unless no step is large enough for that to matter.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from rheostat_engine.composition import Piece, compose, only_adds
from rheostat_engine.plan import Capture, Kind, Plan


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine can hold at the same time."""

    bank_rows: int
    """Distinct rows that are added."""
    directions: int
    """Distinct unit vectors of the other ops."""
    steps: int
    """Steps of distinct programs that do more than add."""
    slots: int
    """Distinct configurations."""
    token_rules: int
    """Distinct families of token-id sets that decide about generated tokens."""
    capture_rows: int
    """Rows that one step can capture."""
    ruled_pieces: int = 4096
    """Pieces that follow a rule about token ids, shared by nobody: of all running samples."""


class Shortage(NamedTuple):
    """Why a plan doesn't fit."""

    resource: str
    """A field of `Capacity`."""
    needed: int
    """How many more the plan needs."""
    free: int
    """How many are free now."""
    ever: bool
    """Whether it fits once others have finished; False: it never can."""


@dataclass(frozen=True, slots=True)
class _Holding:
    keys: Mapping[tuple[str, Hashable], int]
    own: Mapping[str, int]
    """What it shares with nobody, by resource."""
    sites: int
    """The most sites at which it captures a token."""


class CaptureNeed(NamedTuple):
    """What captures need of the ring."""

    rows: int
    """The most rows that one step can need."""
    sites: int
    """The most sites at which one token is captured."""

    @classmethod
    def of(
        cls, captures: Sequence[Capture], *, prompt_len: int, max_step_tokens: int
    ) -> "CaptureNeed":
        """What captures need that are in force together, for one sample."""
        plan = Plan("", captures=tuple(captures))
        rows = step_capture_rows(plan, prompt_len=prompt_len, max_step_tokens=max_step_tokens)
        return cls(rows, sum(len(capture.sites) for capture in captures))


class CapacityLedger:
    """Counts what the admitted plans hold."""

    def __init__(self, capacity: Capacity) -> None:
        """Nothing is held. `capacity` is what the worker reports (`ModelSites`)."""
        self._limits: dict[str, int] = asdict(capacity)
        self._users: Counter[tuple[str, Hashable]] = Counter()
        self._used: Counter[str] = Counter()
        self._held: dict[str, _Holding] = {}
        self._observed: dict[str, CaptureNeed] = {}
        self._sites: Counter[int] = Counter()
        """How many requests capture a token at so many sites."""

    @property
    def requests(self) -> int:
        """Plans admitted and not released, and requests with captures beside their plan."""
        return len(self._held) + len(self._observed)

    def used(self, resource: str) -> int:
        """How much of a resource, a field of `Capacity`, admitted plans hold."""
        return self._used[resource]

    def lacks(self, plan: Plan) -> Counter[str]:
        """What a plan needs of each resource for steering beyond what admitted plans hold."""
        pieces = compose(plan.acts)
        lacking = Counter(ruled_pieces=_ruled(pieces))
        for key, weight in _shared(pieces).items():
            lacking[key[0]] += weight if key not in self._users else 0
        return lacking

    def admit(
        self, plan: Plan, *, prompt_len: int, max_step_tokens: int, runs: int = 1
    ) -> Shortage | None:
        """Reserves what `plan` needs, or says what is missing and reserves nothing.

        Args:
            plan: the request's plan; its id must not be held.
            prompt_len: tokens of the prompt.
            max_step_tokens: the most tokens that one step computes.
            runs: how many of the engine's requests carry it out at the same time.
        """
        if plan.request_id in self._held:
            raise ValueError(f"request {plan.request_id!r} is already admitted")
        pieces = compose(plan.acts)
        keys = _shared(pieces)
        rows = step_capture_rows(plan, prompt_len=prompt_len, max_step_tokens=max_step_tokens)
        own = {"capture_rows": runs * rows, "ruled_pieces": runs * _ruled(pieces)}
        sites = sum(len(capture.sites) for capture in plan.captures)
        any_step_fits = self._any_step_fits(sites, max_step_tokens)
        alone: Counter[str] = Counter(own)
        fresh: Counter[str] = Counter(own)
        for key, weight in keys.items():
            alone[key[0]] += weight
            fresh[key[0]] += weight if key not in self._users else 0
        shortages = [
            Shortage(
                resource,
                fresh[resource],
                max(0, limit - self._used[resource]),
                alone[resource] <= limit,
            )
            for resource, limit in self._limits.items()
            if self._used[resource] + fresh[resource] > limit
            and not (any_step_fits and resource == "capture_rows")
        ]
        if shortages:
            return min(shortages, key=lambda shortage: shortage.ever)
        self._users.update(keys.keys())
        self._used.update(fresh)
        self._count_sites(sites, 1)
        self._held[plan.request_id] = _Holding(keys, own, sites)
        return None

    def observed(self, name: str) -> CaptureNeed:
        """What `observe` has reserved under a name."""
        return self._observed.get(name, CaptureNeed(0, 0))

    def observe(self, name: str, need: CaptureNeed, *, max_step_tokens: int) -> Shortage | None:
        """Reserves what is captured of a running request beside its plan, or says what is missing.

        Args:
            name: of the reservation, which no plan has. What was reserved under it is replaced.
            need: rows beside those of the request's plans, for all samples together; sites at
                which a token is captured, those of the plan included.
            max_step_tokens: the most tokens that one step computes.
        """
        before = self.observed(name)
        self._count_sites(before.sites, -1)
        missing = self._used["capture_rows"] - before.rows + need.rows
        missing -= self._limits["capture_rows"]
        if missing > 0 and not self._any_step_fits(need.sites, max_step_tokens):
            self._count_sites(before.sites, 1)
            free = max(0, self._limits["capture_rows"] - self._used["capture_rows"])
            return Shortage("capture_rows", need.rows - before.rows, free, ever=True)
        self._used["capture_rows"] += need.rows - before.rows
        self._count_sites(need.sites, 1)
        self._observed[name] = need
        if not need.sites:
            del self._observed[name]
        return None

    def _any_step_fits(self, sites: int, max_step_tokens: int) -> bool:
        """Whether the ring holds any step that also captures a token at so many sites.

        A step's rows are at most its tokens, each at as many sites as any request captures.
        """
        widest = max((*self._sites, sites))
        return widest * max_step_tokens <= self._limits["capture_rows"]

    def _count_sites(self, sites: int, change: int) -> None:
        if sites:
            self._sites[sites] += change
            self._sites = +self._sites

    def release(self, request_id: str) -> None:
        """Gives back what a request holds; nothing if it holds nothing."""
        observed = self._observed.pop(request_id, None)
        if observed is not None:
            self._used["capture_rows"] -= observed.rows
            self._count_sites(observed.sites, -1)
        holding = self._held.pop(request_id, None)
        if holding is None:
            return
        for key, weight in holding.keys.items():
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._used[key[0]] -= weight
        self._used.subtract(holding.own)
        self._count_sites(holding.sites, -1)


def needs(plan: Plan) -> dict[tuple[str, Hashable], int]:
    """What a plan takes of each shared resource: (resource, content) and how much that is.

    Raises:
        ValueError: no engine can compose it (see `compose`).
    """
    return _shared(compose(plan.acts))


def step_capture_rows(plan: Plan, *, prompt_len: int, max_step_tokens: int) -> int:
    """The most ring rows that one step can need for a plan: its densest chunk times its sites.

    A chunk of the prompt is at most `max_step_tokens` long. Generated tokens come one in a step; a
    preempted request that computes them again has had their rows delivered already.
    """
    total = 0
    for capture in plan.captures:
        in_prompt = sum(max(0, min(end, prompt_len) - start) for start, end in capture.spans)
        generated = any(end > prompt_len for _, end in capture.spans)
        total += len(capture.sites) * max(min(in_prompt, max_step_tokens), int(generated))
    return total


def _ruled(pieces: Sequence[Piece]) -> int:
    return sum(bool(piece.sets) for piece in pieces)


def _shared(pieces: Sequence[Piece]) -> dict[tuple[str, Hashable], int]:
    keys: dict[tuple[str, Hashable], int] = {}
    for piece in {id(piece.variants): piece for piece in pieces}.values():
        _count_piece(piece, keys)
    return keys


def _count_piece(piece: Piece, keys: dict[tuple[str, Hashable], int]) -> None:
    if piece.sets:
        keys["token_rules", piece.sets] = 1
    for variant in piece.variants:
        if not variant.combination:
            continue
        keys["slots", variant.combination] = 1
        for _, program in variant.combination:
            for step in program:
                if step.kind is Kind.ADD:
                    keys["bank_rows", step.addends] = 1
                else:
                    keys["directions", step.direction] = 1
            if not only_adds(program):
                keys["steps", program] = len(program)
