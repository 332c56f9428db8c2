"""The audit log of the server-wide policy: a line for each firing of its rules.

Why a limit
    A rule that observes may fire at every token of every request. Writing thousands of lines a
    second would hold up the event loop. So lines come out of a budget, and what it does not cover
    is counted by rule, and the counts are logged.

Invariant: each firing is either in a line of its own or in the count of a later line, also if the
client has cancelled the request meanwhile. So is each loss of what the rules would have read. A
firing is a rule and the positions of one sample at which it fired in one step.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from rheostat_engine import Spans
from rheostat_server.selectors.spans import length
from rheostat_server.steering.rules import Rule

AUDIT_LOG = logging.getLogger("rheostat_server.audit")
"""Where firings are logged. Operators route it by this name. It is not below "rheostat", to which
the program gives a handler of its own, so that each line would come twice."""

_BURST = 200
"""Most lines at once."""
_RATE = 20.0
"""Lines a second, in the long run."""
_COUNT_SECONDS = 5.0
"""Seconds until what has no line of its own is counted in one."""
_LISTED = 8
"""Most runs of positions in a line."""


class _Source(NamedTuple):
    """A group of counts: the firings of a rule, or the losses under a version of the policy."""

    version: int
    rule: str = ""
    """Empty: losses."""
    action: str = ""


class PolicyAudit:
    """Writes the audit log. Used on the event loop alone."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Nothing has fired.

        Args:
            now: seconds.
        """
        self._now = now
        self._lines = float(_BURST)
        """Lines that may be written now."""
        self._filled = now()
        self._unlogged: Counter[_Source] = Counter()
        """Firings and losses that were not logged yet."""
        self._positions: Counter[_Source] = Counter()
        """Their positions."""
        self._timer: asyncio.TimerHandle | None = None

    def fired(
        self, request_id: str, sample: int, rule: Rule, positions: Spans, *, stopped: bool
    ) -> None:
        """Logs the positions at which a rule has fired in one step of a sample.

        Args:
            request_id: the request.
            sample: its sample.
            rule: a rule of the policy.
            positions: in ascending order.
            stopped: whether it ended the sample.
        """
        if self._may_write():
            shown = ",".join(_run(*span) for span in positions[:_LISTED])
            more = f" runs={len(positions)}" if len(positions) > _LISTED else ""
            AUDIT_LOG.info(
                "policy version=%d rule=%s action=%s request=%s sample=%d positions=%s%s%s",
                rule.policy,
                rule.name,
                rule.action,
                request_id,
                sample,
                shown,
                more,
                " ended=sample" if stopped else "",
            )
            return
        self._count(_Source(rule.policy, rule.name, rule.action), length(positions))

    def unread(self, request_id: str, sample: int, version: int, first: int, end: int) -> None:
        """Logs positions of which nothing is known, because the workers' signals were lost."""
        if not self._may_write():
            self._count(_Source(version), end - first)
            return
        AUDIT_LOG.warning(
            "policy version=%d request=%s sample=%d unread=%s",
            version,
            request_id,
            sample,
            _run(first, end),
        )

    def flush(self) -> None:
        """Logs the counts of what has no line of its own."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for source, count in self._unlogged.items():
            positions = self._positions[source]
            if source.rule:
                AUDIT_LOG.warning(
                    "policy version=%d rule=%s action=%s firings=%d positions=%d "
                    "(in no other line)",
                    *source,
                    count,
                    positions,
                )
            else:
                AUDIT_LOG.warning(
                    "policy version=%d losses=%d unread_positions=%d (in no other line)",
                    source.version,
                    count,
                    positions,
                )
        self._unlogged.clear()
        self._positions.clear()

    def _count(self, source: _Source, positions: int) -> None:
        self._unlogged[source] += 1
        self._positions[source] += positions
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_COUNT_SECONDS, self.flush)

    def _may_write(self) -> bool:
        now = self._now()
        self._lines = min(_BURST, self._lines + (now - self._filled) * _RATE)
        self._filled = now
        if self._lines < 1:
            return False
        self._lines -= 1
        return True


def _run(start: int, end: int) -> str:
    return str(start) if end == start + 1 else f"{start}-{end - 1}"
