"""Counts the users of content that plans share.

Why two counts
    A plan of thousands of rows is counted in sorted arrays: some nanoseconds for each content in
    use and each content of the plan. For the few contents of a small plan, the calls of numpy
    would cost ten times as much as a dictionary.

Invariant: content is in use once, whether large plans, small plans or both use it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.needs import SHARED, Needs

_SMALL = 64
"""The most contents of a small plan."""


@dataclass(slots=True)
class _Use:
    """The plans with one `Needs` object."""

    needs: Needs
    users: int = 1


class SharedContent:
    """Reference counts. Plans with the same `Needs` object count as one user."""

    def __init__(self) -> None:
        """Nothing is in use."""
        self._keys = np.zeros(0, np.uint64)
        """The content of large plans, ascending."""
        self._users = np.zeros(0, np.int64)
        """The number of large plans with each of them."""
        self._small_users: dict[int, int] = {}
        """By content, the number of small plans with it."""
        self._uses: dict[int, _Use] = {}
        """By `id` of the needs, which the value keeps alive."""
        self.used = dict.fromkeys(SHARED, 0)
        """The amount of each resource in use."""

    def added_by(self, needs: Needs) -> Mapping[str, int]:
        """The amount of each resource that `acquire` would add."""
        if id(needs) in self._uses or not len(needs.keys):
            return {}
        if len(needs.keys) > _SMALL:
            return needs.part(~self._find(needs)[1] & ~self._in_small_plans(needs.keys))
        added: dict[str, int] = {}
        for key, resource, weight, in_large in self._contents(needs):
            if not in_large and key not in self._small_users:
                added[resource] = added.get(resource, 0) + weight
        return added

    def acquire(self, needs: Needs) -> None:
        """Counts one more plan with these needs."""
        use = self._uses.get(id(needs))
        if use is not None:
            use.users += 1
            return
        if not len(needs.keys):
            return
        self._uses[id(needs)] = _Use(needs)
        if len(needs.keys) > _SMALL:
            self._acquire_large(needs)
            return
        users = self._small_users
        for key, resource, weight, in_large in self._contents(needs):
            count = users[key] = users.get(key, 0) + 1
            if count == 1 and not in_large:
                self.used[resource] += weight

    def release(self, needs: Needs) -> None:
        """Counts one plan less."""
        use = self._uses.get(id(needs))
        if use is None:
            return
        use.users -= 1
        if use.users:
            return
        del self._uses[id(needs)]
        if len(needs.keys) > _SMALL:
            self._release_large(needs)
            return
        users = self._small_users
        for key, resource, weight, in_large in self._contents(needs):
            users[key] -= 1
            if users[key]:
                continue
            del users[key]
            if not in_large:
                self.used[resource] -= weight

    def _acquire_large(self, needs: Needs) -> None:
        at, present = self._find(needs)
        for resource, amount in needs.part(~present & ~self._in_small_plans(needs.keys)).items():
            self.used[resource] += amount
        self._users[at[present]] += 1
        self._keys = np.insert(self._keys, at[~present], needs.keys[~present])
        self._users = np.insert(self._users, at[~present], 1)

    def _release_large(self, needs: Needs) -> None:
        at, _ = self._find(needs)
        self._users[at] -= 1
        gone = self._users[at] == 0
        for resource, amount in needs.part(gone & ~self._in_small_plans(needs.keys)).items():
            self.used[resource] -= amount
        self._keys, self._users = np.delete(self._keys, at[gone]), np.delete(self._users, at[gone])

    def _contents(self, needs: Needs) -> Iterator[tuple[int, str, int, bool]]:
        """(key, resource, weight, whether a large plan has it) of a small plan's contents."""
        in_large = self._find(needs)[1].tolist() if len(self._keys) else [False] * len(needs.keys)
        resources = [SHARED[resource] for resource in needs.resources.tolist()]
        return zip(needs.keys.tolist(), resources, needs.weights.tolist(), in_large, strict=True)

    def _in_small_plans(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Whether a small plan has each content."""
        small = np.fromiter(self._small_users, np.uint64, len(self._small_users))
        return np.isin(keys, small)

    def _find(self, needs: Needs) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """The index of each content in `_keys`, and whether it is present there."""
        at = np.searchsorted(self._keys, needs.keys)
        present = np.zeros(len(at), np.bool_)
        inside = at < len(self._keys)
        present[inside] = self._keys[at[inside]] == needs.keys[inside]
        return at, present
