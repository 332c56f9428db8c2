"""The ledger of the engine's resources, which admission consults before a request enters.

Invariant: the worker's tables and ring never overflow. Every plan must pass `admit` before it
reaches the engine, and is released only after the worker has released it.

Resources are counted by content, exactly as the worker shares them. Ring rows are counted as if all
requests ran their densest step together, unless even the largest step fits. Captures added to a
running request are counted with `observe`.

A plan is packed on another thread. Here it is a few arrays, so even the largest plan costs the
event loop little.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from rheostat_engine.plan.needs import Needs
from rheostat_engine.plan.plan import Plan
from rheostat_engine.plan.shared_content import SharedContent
from rheostat_engine.plan.tables import CaptureNeed

MAX_BANK_ROWS = (1 << 22) - 1
"""The largest `Capacity.bank_rows`. One int32 names a row and its gate or gain; see `ROW_UNIT`."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The amount of each engine resource."""

    bank_rows: int
    """Distinct rows that are added."""
    directions: int
    """Distinct unit vectors of the other ops."""
    steps: int
    """Steps of distinct programs that do more than add."""
    slots: int
    """Distinct configurations."""
    token_rules: int
    """Distinct tuples of token-id sets on which acts depend."""
    capture_rows: int
    """Rows that one step can capture."""
    gates: int = 1024
    """Distinct gates."""
    gate_states: int = 4096
    """Gates and their records, summed over running samples. Not shared."""
    row_sums: int = 256
    """Sums of rows, from which numbers of mean rows are read, over all running samples. Not
    shared."""
    ruled_intervals: int = 4096
    """Combinations that depend on token ids, summed over running samples. Not shared."""
    intervals: int = 1 << 21
    """Intervals of positions, summed over distinct tables."""


class Shortage(NamedTuple):
    """Why a plan doesn't fit."""

    resource: str
    """A field of `Capacity`."""
    needed: int
    """The additional amount that the plan needs."""
    free: int
    """The amount that is free now."""
    ever: bool
    """Whether the plan will fit once other requests have ended."""


class _Reserved(NamedTuple):
    needs: tuple[Needs, ...]
    """Resources shared by content."""
    unshared: Mapping[str, int]
    """Amounts by resource."""
    sites: int
    """The most sites at which the plan captures one token."""


class CapacityLedger:
    """Counts the resources of admitted plans."""

    def __init__(self, capacity: Capacity) -> None:
        """The worker reports `capacity` in `ModelSites`."""
        self._limits: dict[str, int] = asdict(capacity)
        self._shared = SharedContent()
        self._unshared = dict.fromkeys(self._limits, 0)
        self._admitted: dict[str, _Reserved] = {}
        self._observed: dict[str, CaptureNeed] = {}
        self._sites: Counter[int] = Counter()
        """Number of requests, by the most sites at which they capture one token."""

    @property
    def requests(self) -> int:
        """Number of admitted plans and of reservations by `observe`."""
        return len(self._admitted) + len(self._observed)

    def used(self, resource: str) -> int:
        """The amount of a resource (a field of `Capacity`) in use."""
        return self._unshared[resource] + self._shared.used.get(resource, 0)

    def additional_needs(self, plan: Plan) -> Counter[str]:
        """The amount of each resource that a plan's steering would add to `used`."""
        amounts: Counter[str] = Counter()
        acts = plan.packed_acts
        parts = [acts.needs, acts.gate_needs, plan.packed_outside.needs]
        if plan.control is not None:
            parts.append(plan.control.acts.needs)
        for part in parts:
            amounts.update(self._shared.added_by(part))
        amounts["ruled_intervals"] = plan.packed_acts.ruled
        amounts["gate_states"] = plan.packed_acts.gate_states
        amounts["row_sums"] = plan.packed_acts.row_sums
        return amounts

    def admit(
        self, plan: Plan, *, prompt_len: int, max_step_tokens: int, samples: int = 1
    ) -> Shortage | None:
        """Reserves all resources that a plan needs, or none.

        Args:
            plan: the request's plan. It is packed here unless `Plan.pack` did so before, which may
                take long.
            prompt_len: tokens of the prompt.
            max_step_tokens: the most tokens that one step computes.
            samples: the number of engine requests with this plan that run at once.

        Returns:
            The missing resource; None if all were reserved.

        Raises:
            ValueError: the id is already admitted, or the plan's acts can't be combined.
        """
        if plan.request_id in self._admitted:
            raise ValueError(f"request {plan.request_id!r} is already admitted")
        acts, captures = plan.packed_acts, plan.packed_captures
        needs = plan.needs
        need = captures.need(prompt_len=prompt_len, max_step_tokens=max_step_tokens)
        unshared: dict[str, int] = {}  # without what is not needed: most plans need one of them
        if need.sites:
            unshared["capture_rows"] = samples * need.rows
        if acts.ruled:
            unshared["ruled_intervals"] = samples * acts.ruled
        if acts.gate_states:
            unshared["gate_states"] = samples * acts.gate_states
        if acts.row_sums:
            unshared["row_sums"] = samples * acts.row_sums
        added = dict(unshared)
        for part in needs:
            for resource, amount in self._shared.added_by(part).items():
                added[resource] = added.get(resource, 0) + amount
        short = [
            resource
            for resource, amount in added.items()
            if self.used(resource) + amount > self._limits[resource]
            and not (
                resource == "capture_rows" and self._any_step_fits(need.sites, max_step_tokens)
            )
        ]
        if short:
            alone = sum((part.total for part in needs), Counter(unshared))
            return self._shortage(short, added, alone)
        for part in needs:
            self._shared.acquire(part)
        for resource, amount in unshared.items():
            self._unshared[resource] += amount
        self._count_sites(need.sites, 1)
        self._admitted[plan.request_id] = _Reserved(needs, unshared, need.sites)
        return None

    def _shortage(
        self, short: Sequence[str], added: Mapping[str, int], alone: Mapping[str, int]
    ) -> Shortage:
        """The shortage to report; a resource that can never suffice comes first.

        Args:
            short: the resources of which too little is free.
            added: the amounts that the plan would add.
            alone: the amounts that it would need without any other plan.
        """
        shortages = [
            Shortage(
                resource,
                added[resource],
                max(0, self._limits[resource] - self.used(resource)),
                alone[resource] <= self._limits[resource],
            )
            for resource in self._limits
            if resource in short
        ]
        return min(shortages, key=lambda shortage: shortage.ever)

    def observed(self, name: str) -> CaptureNeed:
        """The current reservation under a name; see `observe`."""
        return self._observed.get(name, CaptureNeed(0, 0))

    def observe(self, name: str, need: CaptureNeed, *, max_step_tokens: int) -> Shortage | None:
        """Reserves ring rows for captures that are added to a running request.

        Args:
            name: the name of the reservation, which must differ from every plan's. An earlier
                reservation with this name is replaced.
            need: `rows` counts these captures in all samples, without the request's plans; `sites`
                includes the sites of its plans.
            max_step_tokens: the most tokens that one step computes.

        Returns:
            The missing resource; None if the rows were reserved.
        """
        before = self.observed(name)
        self._count_sites(before.sites, -1)
        used, limit = self._unshared["capture_rows"], self._limits["capture_rows"]
        more = need.rows - before.rows
        if used + more > limit and not self._any_step_fits(need.sites, max_step_tokens):
            self._count_sites(before.sites, 1)
            return Shortage("capture_rows", more, max(0, limit - used), ever=True)
        self._unshared["capture_rows"] += more
        self._count_sites(need.sites, 1)
        self._observed[name] = need
        if not need.sites:
            del self._observed[name]
        return None

    def release(self, request_id: str) -> None:
        """Releases the resources of a plan or reservation, if there are any."""
        observed = self._observed.pop(request_id, None)
        if observed is not None:
            self._unshared["capture_rows"] -= observed.rows
            self._count_sites(observed.sites, -1)
        reserved = self._admitted.pop(request_id, None)
        if reserved is None:
            return
        for part in reserved.needs:
            self._shared.release(part)
        for resource, amount in reserved.unshared.items():
            self._unshared[resource] -= amount
        self._count_sites(reserved.sites, -1)

    def _any_step_fits(self, sites: int, max_step_tokens: int) -> bool:
        """Whether every step fits into the ring, with a request that captures `sites` sites.

        A step captures at most its tokens times the most sites of any request.
        """
        widest = max((*self._sites, sites))
        return widest * max_step_tokens <= self._limits["capture_rows"]

    def _count_sites(self, sites: int, change: int) -> None:
        if sites:
            self._sites[sites] += change
            if not self._sites[sites]:
                del self._sites[sites]
