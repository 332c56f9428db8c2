"""Random calls of causal tracing end with typed errors, and leave nothing."""

from ...effort import FACTOR, at_length
from .tracing_calls import JitteryBackend, calls
from .tracing_fuzz import play

CALLS = 100 * FACTOR


@at_length
async def test_random_calls_end_as_they_should_and_leave_nothing(starter) -> None:
    running = await starter(JitteryBackend())
    outcome = await play(running, calls(0, CALLS))
    assert not outcome.problems, "\n".join(outcome.problems[:40])
    ended = sum(count for name, count in outcome.ends.items() if name.endswith("valid OK"))
    assert ended > CALLS / 3
    assert outcome.cells > CALLS
