"""Waits until the engine holds a sample no more.

Why silence is no proof: an engine that says nothing of a sample may never have scheduled it, or may
be busy. It takes messages in turn. So once it answers a question, it has received the abort that
was sent before, and it has reported what it had scheduled.
"""

import asyncio
import contextlib
import logging

from rheostat_server.engine.backend import WorkerStats
from rheostat_server.errors import EngineLost
from rheostat_server.requests.sequence import EngineSequence
from rheostat_server.tasks.shared_query import SharedQuery

_LOG = logging.getLogger(__name__)

RELEASE_GRACE = 60.0
"""Seconds that the engine has to release a sample that it has run."""

UNSCHEDULED_GRACE = 2.0
"""Seconds after which a sample of which the engine said nothing counts as never scheduled."""


async def until_released(sequence: EngineSequence, workers: SharedQuery[WorkerStats]) -> None:
    """Returns once the engine has released a sample, or has never had it.

    Args:
        sequence: a sample that was started and has ended, or was aborted.
        workers: a question that every worker answers.
    """
    if await _released_within(sequence, UNSCHEDULED_GRACE):
        return
    if not sequence.installed:
        with contextlib.suppress(EngineLost):
            await workers.fresh()
        if await _released_within(sequence, UNSCHEDULED_GRACE) or not sequence.installed:
            return
    if not await _released_within(sequence, RELEASE_GRACE):
        _LOG.error("the engine never released %s", sequence.plan_id)


async def _released_within(sequence: EngineSequence, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await sequence.released.wait()
    except TimeoutError:
        return False
    return True
