"""Answers under a gate that the prompt leaves shut are shared; all other gated answers are not."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rheostat_engine import (
    OPEN_END,
    Act,
    Activation,
    Combine,
    Form,
    Gate,
    GateCondition,
    Hold,
    Kind,
    Normalise,
    Plan,
    Pool,
    Reading,
    Signals,
)

from .groups import IN_TIGHT, PLAIN, TIGHT, group_of
from .offline import OfflineEngine, Outcome
from .plans import EVERYWHERE, add, prompts, vector

pytestmark = pytest.mark.integration

Start = Callable[..., OfflineEngine]
BLOCK = 32
ANSWER = 80
PROBE, PUSH, ELSE = 4, 5, 3
READ, ACT = 4, 10
SHUT, OPEN = 1e6, -1e6


def gated(
    end: int, above: float, *, each: bool = False, late: bool = False, pool: Pool = Pool.LAST
) -> Plan:
    """An addition whose gate is decided by a prompt of `end` tokens; or by each token."""
    where = ((end - 1, end),) if pool is Pool.LAST and not each else EVERYWHERE
    reading = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, 0)
    read = Act(Kind.READ, (vector(PROBE)[0],), ((READ, (0,)),), where, reading=reading)
    at = () if each else (1, end - 1)
    condition = GateCondition((0,), pool, Combine.ANY, above, math.inf, *at)
    hold = Hold.TOKEN if each else Hold.REST
    gate = Gate((condition,), Combine.ALL, Form.STEP, 0.5, 0.0, hold, late=end if late else 0)
    act = replace(add(PUSH, READ if late else ACT, EVERYWHERE, 2.0), gate=gate)
    return Plan("", (act, read))


def steered(plan: Plan) -> Plan:
    """A plan with another addition, which has no gate."""
    return replace(plan, acts=(add(ELSE, ACT, EVERYWHERE, 1.0), *plan.acts))


UNGATED = Plan("", (add(ELSE, ACT, EVERYWHERE, 1.0),))


def same(one: Outcome, other: Outcome) -> bool:
    """Equal up to what a hit changes: which tokens are computed in one matrix product."""
    return one.token_ids == other.token_ids and all(
        np.abs(one.logits(step) - other.logits(step)).max() < 1e-3
        for step in range(len(one.token_ids))
    )


def next_turn(
    engine: OfflineEngine,
    prompt: list[int],
    first: Plan | None,
    second: Plan | None = None,
    tokens: int = ANSWER,
) -> tuple[int, Outcome]:
    """Cached tokens of a turn after a request, and the request's outcome."""
    assert engine.llm.reset_prefix_cache()
    (outcome,) = engine.run([prompt], [first], max_tokens=tokens, skip_cache=False)
    turn = [*prompt, *outcome.token_ids, *range(3, 13)]
    (warm,) = engine.run([turn], [second], max_tokens=2, skip_cache=False)
    (cold,) = engine.run([turn], [second], max_tokens=2)  # last, because its blocks are cached
    assert same(cold, warm)
    return warm.cached, outcome


@pytest.fixture
def engine(start: Start) -> OfflineEngine:
    made = start()
    made.load(dict(vector(seed) for seed in range(6)))
    return made


@PLAIN
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("pool", [Pool.LAST, Pool.MEAN])
@pytest.mark.parametrize("end", [70, 63, 64, 65, 95, 96, 97])
def test_the_next_turn_finds_an_answer_under_a_gate_that_stays_shut(
    engine: OfflineEngine, end: int, late: bool, pool: Pool
) -> None:
    """Also if the prompt ends with a block, or just before or behind it."""
    (prompt,) = prompts(1, end, end + 1, seed=end)
    plain, alone = next_turn(engine, prompt, None)
    assert plain == (end + ANSWER - 1) // BLOCK * BLOCK
    shut, same_answer = next_turn(engine, prompt, gated(end, SHUT, late=late, pool=pool))
    assert (shut, same_answer.token_ids) == (plain, alone.token_ids)


@PLAIN
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("end", [70, 64])
def test_the_next_turn_finds_no_answer_under_a_gate_that_opens(
    engine: OfflineEngine, end: int, late: bool
) -> None:
    (prompt,) = prompts(1, end, end + 1, seed=end)
    opened = gated(end, OPEN, late=late)
    last = end if late and end % BLOCK == 0 else end - 1  # the last prompt token that is plain
    found, outcome = next_turn(engine, prompt, opened)
    assert found == last // BLOCK * BLOCK
    (alone,) = engine.run([prompt], [None], max_tokens=ANSWER)
    assert outcome.token_ids != alone.token_ids


@PLAIN
def test_the_next_turn_finds_no_answer_under_a_gate_that_each_token_decides(
    engine: OfflineEngine,
) -> None:
    (prompt,) = prompts(1, 70, 71, seed=70)
    found, _ = next_turn(engine, prompt, gated(70, SHUT, each=True))
    assert found == 0
    once = gated(70, SHUT)
    other = replace(gated(70, SHUT, each=True).acts[0], spans=((71, OPEN_END),))
    found, _ = next_turn(engine, prompt, replace(once, acts=(*once.acts, other)))
    assert found == 64


@PLAIN
def test_ungated_steering_beside_a_shut_gate_is_part_of_the_key(engine: OfflineEngine) -> None:
    (prompt,) = prompts(1, 70, 71, seed=70)
    both = steered(gated(70, SHUT))
    assert next_turn(engine, prompt, both, UNGATED)[0] == 128
    assert next_turn(engine, prompt, both, None)[0] == 0
    assert next_turn(engine, prompt, UNGATED, UNGATED)[0] == 128


@PLAIN
def test_samples_and_mates_of_a_request_are_decided_apart(engine: OfflineEngine) -> None:
    """One batch: the same gate opens for one prompt and stays shut for another."""
    batch = prompts(6, 70, 71, seed=1)
    reads = replace(gated(70, SHUT), signals=Signals(1))
    read = [one.signals[69][0][0] for one in engine.run(batch, [reads] * 6, max_tokens=1)]
    bound = float(np.sort(read)[2:4].mean())
    assert engine.llm.reset_prefix_cache()
    outcomes = engine.run(batch, [gated(70, bound)] * 6, max_tokens=ANSWER, skip_cache=False)
    turns = [[*p, *o.token_ids, 5, 6, 7] for p, o in zip(batch, outcomes, strict=True)]
    warm = engine.run(turns, max_tokens=2, skip_cache=False)
    cold = engine.run(turns, max_tokens=2)
    assert [one.cached for one in warm] == [64 if number > bound else 128 for number in read]
    assert all(map(same, cold, warm))


@group_of("gemma3", eager=True)
@pytest.mark.parametrize("end", [70, 64])
def test_layers_that_attend_in_a_window_share_as_much(start: Start, end: int) -> None:
    engine = start("gemma3")
    engine.load(dict(vector(seed) for seed in range(6)))
    (prompt,) = prompts(1, end, end + 1, seed=end)
    plain, _ = next_turn(engine, prompt, None)  # vLLM keeps few blocks of a window
    assert plain > 0
    for late in (False, True):
        assert next_turn(engine, prompt, gated(end, SHUT, late=late))[0] == plain
    assert next_turn(engine, prompt, gated(end, OPEN))[0] <= (end - 1) // BLOCK * BLOCK


@IN_TIGHT
def test_preempted_requests_share_what_was_computed_under_shut_gates_alone(start: Start) -> None:
    """Prompts come in pieces of 7 tokens, and 8 blocks hold less than the requests need."""
    engine = start(**TIGHT)
    engine.load(dict(vector(seed) for seed in range(6)))
    batch = prompts(6, 33, 34, seed=2)
    gates = [gated(33, (SHUT, OPEN)[at % 2]) for at in range(6)]
    assert engine.llm.reset_prefix_cache()
    outcomes = engine.run(batch, gates, max_tokens=64, skip_cache=False)
    assert sum(one.released.preemptions for one in outcomes if one.released is not None) > 0
    turns = [[*p, *o.token_ids, 5, 6, 7] for p, o in zip(batch, outcomes, strict=True)]
    warm = [engine.run([turn], max_tokens=2, skip_cache=False)[0] for turn in reversed(turns)]
    cold = [engine.run([turn], max_tokens=2)[0] for turn in reversed(turns)]
    assert all(map(same, cold, warm))
    assert max(one.cached for one in warm) > 33  # the others' blocks have been evicted
    plain = engine.run(batch, max_tokens=64)
    alike = [a.token_ids == b.token_ids for a, b in zip(outcomes, plain, strict=True)]
    assert alike == [True, False] * 3
