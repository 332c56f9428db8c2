"""Salts of the prefix cache, one per content of a plan.

Invariant: blocks that were computed while a plan was not in force are never found by a request that
comes after the engine said so. Such a request computed its KV without the plan, under its salt.
"""

from collections import OrderedDict

from rheostat_engine import Event, Installed, Plan, Released

_REMEMBERED = 16384
"""Plans of which nothing was heard: more than can be in flight; some are never scheduled."""


class CacheSalts:
    """Gives each plan its salt, another one from the time on that the first is spoilt."""

    def __init__(self) -> None:
        """No salt is spoilt."""
        self._spoilt: dict[str, int] = {}
        self._running: OrderedDict[str, str] = OrderedDict()

    def take(self, plan: Plan) -> str | None:
        """The salt under which a plan that starts now has its blocks cached, None: no salt."""
        salt = plan.cache_salt()
        if salt is None:
            return None
        self._running[plan.request_id] = salt
        if len(self._running) > _REMEMBERED:
            self._running.popitem(last=False)
        times = self._spoilt.get(salt, 0)
        return f"{salt}.{times}" if times else salt

    def hear(self, event: Event) -> None:
        """Learns from what the workers say of plans."""
        if isinstance(event, Installed) and event.error:
            salt = self._running.get(event.request_id)
            if salt is not None:
                self._spoilt[salt] = self._spoilt.get(salt, 0) + 1
        elif isinstance(event, Released):
            self._running.pop(event.request_id, None)
