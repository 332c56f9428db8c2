"""A ledger of the engine's resources in use, which admission asks before a request enters.

Invariant: the worker's tables and ring never overflow. Every plan must pass through `admit` before
it reaches the engine, and may be released only after the worker has released it.

Resources are counted by content, exactly as the worker shares them. Captured rows are counted as if
all requests took their densest step at once, unless no step is large enough for that to matter.
Captures that a running request gets beside its plan are counted with the request (`observe`).

A thread reads a plan's content when it packs the plan. Here a plan is a few arrays, so that the
event loop pays little for the largest plan.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.needs import Needs
from rheostat_engine.plan.plan import PackedCaptures, Plan
from rheostat_engine.plan.tables import CaptureNeed


@dataclass(frozen=True, slots=True)
class Capacity:
    """The resources of the engine."""

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
    ruled_intervals: int = 4096
    """Combinations under a rule about token ids, of all running samples. They are not shared."""
    intervals: int = 1 << 21
    """Intervals into which distinct plans cut the positions of their requests."""


class Shortage(NamedTuple):
    """Why a plan doesn't fit."""

    resource: str
    """A field of `Capacity`."""
    needed: int
    """The number that the plan needs in addition."""
    free: int
    """The number that is free now."""
    ever: bool
    """Whether the plan fits when other requests have ended; False if it can never fit."""


@dataclass(frozen=True, slots=True)
class _Reserved:
    needs: tuple[Needs, ...]
    """Resources that it shares by content."""
    own: Mapping[str, int]
    """Resources that it does not share, by name."""
    sites: int
    """The most sites at which it captures a token."""


class CapacityLedger:
    """Counts the resources of admitted plans."""

    def __init__(self, capacity: Capacity) -> None:
        """No resource is in use. The worker reports `capacity` (`ModelSites`)."""
        self._limits: dict[str, int] = asdict(capacity)
        self._shared = _Shared()
        self._own: Counter[str] = Counter()
        self._admitted: dict[str, _Reserved] = {}
        self._observed: dict[str, CaptureNeed] = {}
        self._sites: Counter[int] = Counter()
        """Numbers of requests, by the most sites at which they capture a token."""

    @property
    def requests(self) -> int:
        """Plans admitted and not released, and requests with captures beside their plan."""
        return len(self._admitted) + len(self._observed)

    def used(self, resource: str) -> int:
        """The amount of a resource, a field of `Capacity`, that admitted plans use."""
        return self._own[resource] + self._shared.used[resource]

    def lacks(self, plan: Plan) -> Counter[str]:
        """The amount of each resource that a plan's steering needs beside all admitted plans."""
        lacking = self._shared.fresh(plan.packed_acts.needs)
        lacking["ruled_intervals"] = plan.packed_acts.ruled
        return lacking

    def admit(
        self, plan: Plan, *, prompt_len: int, max_step_tokens: int, samples: int = 1
    ) -> Shortage | None:
        """Reserves all resources that a plan needs, or none.

        Args:
            plan: the request's plan; its id must not be admitted. A plan that is not packed is
                packed here, which may take long.
            prompt_len: tokens of the prompt.
            max_step_tokens: the most tokens that one step computes.
            samples: the number of engine requests that carry out the plan at the same time.

        Returns:
            The missing resource; None if all were reserved.

        Raises:
            ValueError: no engine can carry out the plan.
        """
        if plan.request_id in self._admitted:
            raise ValueError(f"request {plan.request_id!r} is already admitted")
        acts, captures = plan.packed_acts, plan.packed_captures
        needs = (acts.needs, captures.needs)
        need = capture_need(captures, prompt_len=prompt_len, max_step_tokens=max_step_tokens)
        own = {"capture_rows": samples * need.rows, "ruled_intervals": samples * acts.ruled}
        fresh = Counter(own)
        for part in needs:
            fresh.update(self._shared.fresh(part))
        short = [
            resource
            for resource, limit in self._limits.items()
            if (fresh[resource] or (need.sites and resource == "capture_rows"))
            and self.used(resource) + fresh[resource] > limit
            and not (
                resource == "capture_rows" and self._any_step_fits(need.sites, max_step_tokens)
            )
        ]
        if short:
            return self._shortage(short, fresh, Counter(own) + needs[0].total + needs[1].total)
        for part in needs:
            self._shared.take(part)
        self._own.update(own)
        self._count_sites(need.sites, 1)
        self._admitted[plan.request_id] = _Reserved(needs, own, need.sites)
        return None

    def _shortage(
        self, short: Sequence[str], fresh: Mapping[str, int], alone: Mapping[str, int]
    ) -> Shortage:
        """The shortage to report: of a resource that can never suffice, if there is one.

        Args:
            short: the resources of which a plan needs more than are free.
            fresh: the amounts that it needs beside all admitted plans.
            alone: the amounts that it would need without any other plan.
        """
        shortages = [
            Shortage(
                resource,
                fresh[resource],
                max(0, self._limits[resource] - self.used(resource)),
                alone[resource] <= self._limits[resource],
            )
            for resource in short
        ]
        return min(shortages, key=lambda shortage: shortage.ever)

    def observed(self, name: str) -> CaptureNeed:
        """The reservation that `observe` made under a name."""
        return self._observed.get(name, CaptureNeed(0, 0))

    def observe(self, name: str, need: CaptureNeed, *, max_step_tokens: int) -> Shortage | None:
        """Reserves ring rows for captures that a running request gets beside its plan.

        Args:
            name: the name of the reservation; no plan may have it. An earlier reservation with this
                name is replaced.
            need: rows of these captures for all samples, without the rows of the request's plans;
                sites at which a token is captured, with the sites of the plans.
            max_step_tokens: the most tokens that one step computes.

        Returns:
            The missing resource; None if the rows were reserved.
        """
        before = self.observed(name)
        self._count_sites(before.sites, -1)
        used, limit = self._own["capture_rows"], self._limits["capture_rows"]
        more = need.rows - before.rows
        if used + more > limit and not self._any_step_fits(need.sites, max_step_tokens):
            self._count_sites(before.sites, 1)
            return Shortage("capture_rows", more, max(0, limit - used), ever=True)
        self._own["capture_rows"] += more
        self._count_sites(need.sites, 1)
        self._observed[name] = need
        if not need.sites:
            del self._observed[name]
        return None

    def release(self, request_id: str) -> None:
        """Gives back the resources of a request, if it has any."""
        observed = self._observed.pop(request_id, None)
        if observed is not None:
            self._own["capture_rows"] -= observed.rows
            self._count_sites(observed.sites, -1)
        reserved = self._admitted.pop(request_id, None)
        if reserved is None:
            return
        for part in reserved.needs:
            self._shared.give(part)
        self._own.subtract(reserved.own)
        self._count_sites(reserved.sites, -1)

    def _any_step_fits(self, sites: int, max_step_tokens: int) -> bool:
        """Whether every step fits into the ring if a request captures a token at `sites` sites.

        A step has at most as many rows as its tokens times the most sites of any request.
        """
        widest = max((*self._sites, sites))
        return widest * max_step_tokens <= self._limits["capture_rows"]

    def _count_sites(self, sites: int, change: int) -> None:
        if sites:
            self._sites[sites] += change
            if not self._sites[sites]:
                del self._sites[sites]


@dataclass(slots=True)
class _Use:
    """Content that plans with one and the same `Needs` use."""

    needs: Needs
    users: int = 1


class _Shared:
    """Shared content in use, as sorted arrays: a plan of thousands of rows costs a few numpy calls.

    An operation takes a few nanoseconds for each content in use, and for each content of the plan.
    Plans that share a `Needs` count as one user of its content: the second costs a reference.
    """

    def __init__(self) -> None:
        self._keys = np.zeros(0, np.uint64)
        self._users = np.zeros(0, np.int64)
        self._uses: dict[int, _Use] = {}
        """By identity of the needs, which a use keeps in memory."""
        self.used: Counter[str] = Counter()
        """The amount of each resource in use."""

    def fresh(self, needs: Needs) -> Counter[str]:
        """The amount of each resource that `take` would add."""
        if id(needs) in self._uses or not len(needs.keys):
            return Counter()
        return needs.part(~self._find(needs)[1])

    def take(self, needs: Needs) -> None:
        """Adds a use of content."""
        use = self._uses.get(id(needs))
        if use is not None:
            use.users += 1
            return
        if not len(needs.keys):
            return
        self._uses[id(needs)] = _Use(needs)
        at, present = self._find(needs)
        self.used += needs.part(~present)
        self._users[at[present]] += 1
        self._keys = np.insert(self._keys, at[~present], needs.keys[~present])
        self._users = np.insert(self._users, at[~present], 1)

    def give(self, needs: Needs) -> None:
        """Ends one use of content that was taken."""
        use = self._uses.get(id(needs))
        if use is None:
            return
        use.users -= 1
        if use.users:
            return
        del self._uses[id(needs)]
        at, _ = self._find(needs)
        self._users[at] -= 1
        gone = self._users[at] == 0
        self.used -= needs.part(gone)
        self._keys, self._users = np.delete(self._keys, at[gone]), np.delete(self._users, at[gone])

    def _find(self, needs: Needs) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """The index of each content in `_keys`, and whether it is present there."""
        at = np.searchsorted(self._keys, needs.keys)
        present = np.zeros(len(at), np.bool_)
        inside = at < len(self._keys)
        present[inside] = self._keys[at[inside]] == needs.keys[inside]
        return at, present


def capture_need(captures: PackedCaptures, *, prompt_len: int, max_step_tokens: int) -> CaptureNeed:
    """The rows of the ring that captures of a plan need, for one sample."""
    return captures.need(prompt_len, max_step_tokens)
