"""What replaces the stream at a site decides all that follows; what equals it changes no bit.

Adding at every position the difference of two prompts' rows replaces one prompt's stream by the
other's. If an addition reached the branch and not the stream, or the stream and not the branch,
the logits would be neither prompt's.
"""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from rheostat_engine import Act, Kind, Plan
from rheostat_engine.plan.points import site_count

from .groups import group_of
from .models import LAYERS, VOCAB
from .offline import OfflineEngine, Outcome
from .plans import capture, prompts, steer
from .reference import Float

pytestmark = pytest.mark.integration

SITES = range(0, site_count(LAYERS), 2)
"""Where the stream is; a branch is not all that decides what follows."""
LENGTH = 12
(ONE,) = prompts(1, LENGTH, LENGTH + 1, seed=51)
OTHER = [(token + 60) % (VOCAB - 3) + 3 for token in ONE]
"""Another token at every position."""
TOLERANCE = 1e-4
"""Of log-probabilities in nats: a + (b - a) is b up to float32's rounding, 6e-8 of the larger, and
four layers make no more than a thousand times that of it."""


class Pair(NamedTuple):
    """An engine, and what it made of two prompts of equal length."""

    engine: OfflineEngine
    one: Outcome
    other: Outcome

    def run(self, plan: Plan | None) -> Outcome:
        """The first prompt with a plan; the log-probabilities are those of the next token."""
        (outcome,) = self.engine.run([ONE], [plan], max_tokens=1)
        return outcome


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, eager), marks=group_of(name, eager=eager))
        for name in ("llama", "granite")
        for eager in (False, True)
    ],
    ids=lambda param: f"{param[0]}-{'eager' if param[1] else 'compiled'}",
)
def pair(request: pytest.FixtureRequest, start: Callable[..., OfflineEngine]) -> Pair:
    """One model of each form of the stream (docs/engine.md)."""
    name, eager = request.param
    engine = start(name, enforce_eager=eager)
    one, other = (
        engine.run([prompt], [capture(*SITES)], max_tokens=1)[0] for prompt in (ONE, OTHER)
    )
    return Pair(engine, one, other)


def add_rows(engine: OfflineEngine, site: int, rows: Float) -> Plan:
    """Adds row p at position p of a site; [n, W]."""
    digest = hashlib.sha256(rows.tobytes()).digest()
    engine.load({digest: rows})
    return steer(
        *(
            Act(Kind.ADD, (digest,), ((site, (position,)),), ((position, position + 1),))
            for position in range(len(rows))
        )
    )


def test_the_two_prompts_differ_at_every_site(pair: Pair) -> None:
    assert np.abs(pair.one.logits() - pair.other.logits()).max() > 1000 * TOLERANCE
    for site in SITES:
        one, other = pair.one.stream(site), pair.other.stream(site)
        assert one.shape == other.shape
        assert (np.abs(one - other).max(axis=1) > 0.1).all()


@pytest.mark.parametrize("site", SITES)
def test_another_prompts_stream_at_any_site_gives_its_logits(pair: Pair, site: int) -> None:
    rows = pair.other.stream(site) - pair.one.stream(site)
    patched = pair.run(add_rows(pair.engine, site, rows))
    assert np.abs(patched.logits() - pair.other.logits()).max() < TOLERANCE
    assert patched.released is not None
    assert [dose.rows for dose in patched.released.doses] == [1] * LENGTH


@pytest.mark.parametrize("site", SITES)
def test_another_prompts_stream_at_all_positions_but_one_does_not(pair: Pair, site: int) -> None:
    rows = pair.other.stream(site) - pair.one.stream(site)
    rows[LENGTH - 1] = 0
    patched = pair.run(add_rows(pair.engine, site, rows))
    assert np.abs(patched.logits() - pair.other.logits()).max() > 100 * TOLERANCE


@pytest.mark.parametrize("site", SITES)
def test_a_prompts_own_stream_of_a_second_run_changes_no_bit(pair: Pair, site: int) -> None:
    again = pair.run(capture(*SITES))
    rows = again.stream(site) - pair.one.stream(site)
    assert not rows.any()
    patched, plain = pair.run(add_rows(pair.engine, site, rows)), pair.run(None)
    assert patched.logprobs == plain.logprobs == again.logprobs
