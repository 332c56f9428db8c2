"""Gains of sessions, against Hugging Face's model under hooks that are as strong as they say."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
import pytest
import torch

import rheostat
from rheostat import generated, window

from ..engine.reference import Float, HfReference
from .conftest import Server
from .naive import OPS, TOLERANCE, Op, Placed, Where, everywhere, expected

pytestmark = pytest.mark.integration

PROMPT = "The Eiffel Tower is in the city of"
OPTIONS = {"temperature": 0, "ignore_eos": True, "logprobs": 0}
FACTORS = (0.0, 0.25, 1.0, 1.5, 3.0)
LINEAR = [name for name in OPS if name != "clamp-bands"]
"""Ops whose change is multiplied as a whole. Of several bands, each has the gain for itself."""


def as_strong(op: Op, gain: float) -> Op:
    """An op whose change is multiplied."""

    def formula(x: torch.Tensor) -> torch.Tensor:
        return x + gain * (op.formula(x) - x)

    return op._replace(formula=formula)


class Gains:
    """What a client sent, and the positions from which on the server says that it acts."""

    def __init__(self, interventions: int) -> None:
        self._count = interventions
        self._sent: dict[int, tuple[float, Sequence[int]]] = {}
        self._firsts: dict[int, Mapping[int, int]] = {}

    def send(self, session: rheostat.Session, factor: float, *interventions: int) -> None:
        """Sends a gain, unless the session has ended: its last events may still be read then."""
        try:
            update_id = session.gain(factor, interventions)
        except rheostat.Refused:
            return
        self.note_sent(update_id, factor, *interventions)

    def note_sent(self, update_id: int, factor: float, *interventions: int) -> None:
        """Notes a gain that was sent."""
        self._sent[update_id] = factor, interventions or range(self._count)

    def note_applied(self, update_id: int, firsts: Mapping[int, int]) -> None:
        """Notes the first position of a gain, by sample."""
        self._firsts[update_id] = firsts

    def note(self, event: rheostat.SessionEvent) -> None:
        """Notes answers. Only gains that find every sample ended are refused."""
        if isinstance(event, rheostat.UpdateApplied):
            self.note_applied(event.update_id, event.first_positions)
        elif isinstance(event, rheostat.UpdateRefused):
            assert event.reason == "REASON_REQUEST_NOT_FOUND", event

    @property
    def applied(self) -> int:
        """How many the server carried out."""
        return len(self._firsts)

    def at(self, sample: int, position: int) -> list[float]:
        """The gain of each intervention at a position."""
        gains = [1.0] * self._count
        for update_id, firsts in sorted(self._firsts.items()):
            if firsts.get(sample, position + 1) <= position:
                factor, interventions = self._sent[update_id]
                for index in interventions:
                    gains[index] = factor
        return gains

    def placed(self, placed: Sequence[Placed], sample: int, length: int) -> list[Placed]:
        """The ops of a sample, each as strong as its gains say."""
        return multiplied(placed, self.table(sample, length))

    def table(self, sample: int, length: int) -> Float:
        """The gains at positions, [length, interventions]."""
        table = np.ones((length, self._count))
        for update_id, firsts in sorted(self._firsts.items()):
            if sample in firsts:
                factor, interventions = self._sent[update_id]
                table[firsts[sample] :, list(interventions)] = factor
        return table


def multiplied(placed: Sequence[Placed], table: Float) -> list[Placed]:
    """Ops, each as strong as its gains say, [positions, ops]."""
    found = []
    for index, one in enumerate(placed):
        for gain in np.unique(table[:, index]).tolist():
            found.append(
                one._replace(op=as_strong(one.op, gain), holds=where(one, table[:, index] == gain))
            )
    return found


def where(placed: Placed, mask: np.ndarray) -> Where:
    """Where an op acts, within a mask of positions."""
    return lambda p, token, n: placed.holds(p, token, n) and bool(mask[p])


def check(
    reference: HfReference, out: rheostat.Generation, placed: Sequence[Placed], gains: Gains
) -> None:
    """Every sample's log-probabilities are those of the hooks."""
    for number, sample in enumerate(out.samples):
        length = len(out.prompt_token_ids) + len(sample.token_ids)
        check_sample(reference, out, number, gains.placed(placed, number, length))


def check_sample(
    reference: HfReference, out: rheostat.Generation, number: int, placed: Sequence[Placed]
) -> None:
    """The log-probabilities of a sample are those of the hooks."""
    sample = out.samples[number]
    run = expected(reference, out.prompt_token_ids, sample.token_ids, placed).run
    first = len(out.prompt_token_ids) - 1
    want = [run.logprobs[first + i][t] for i, t in enumerate(sample.token_ids)]
    got = [step.token.logprob for step in sample.logprobs]
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def schedule(seed: int, interventions: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Factors, and the interventions that they multiply."""
    rng = np.random.default_rng(seed)
    while True:
        chosen = rng.integers(-1, interventions)
        yield float(rng.choice(FACTORS)), () if chosen < 0 else (int(chosen),)


@pytest.mark.parametrize("name", LINEAR)
def test_a_gain_of_every_token_is_that_of_hugging_faces_hooks(
    engine: rheostat.Engine, reference: HfReference, name: str
) -> None:
    second = LINEAR[(LINEAR.index(name) + 1) % len(LINEAR)]
    placed = [everywhere(OPS[name], [1, 3]), everywhere(OPS[second], [3])]
    gains, factors = Gains(2), schedule(LINEAR.index(name), 2)
    with engine.session(
        PROMPT, steering=[one.ours for one in placed], max_tokens=60, **OPTIONS
    ) as session:
        for event in session:
            gains.note(event)
            if isinstance(event, rheostat.Tokens):
                factor, chosen = next(factors)
                gains.send(session, factor, *chosen)
        out = session.result()
    assert gains.applied == out.receipt.gain_count > 20
    assert out.receipt.update_count == 0
    check(reference, out, placed, gains)
    length = len(out.prompt_token_ids) + len(out.token_ids) - 1
    for index, done in enumerate(out.receipt.interventions):
        changed = sum(gains.at(0, position)[index] != 0 for position in range(length))
        assert {site.row_count for site in done.sites} == {changed}


def test_4000_gains_in_one_request(engine: rheostat.Engine, reference: HfReference) -> None:
    """Several for each token, of which the last acts."""
    placed = [everywhere(OPS["add"], [2])]
    gains = Gains(1)
    sent = 0
    with engine.session(PROMPT, steering=[placed[0].ours], max_tokens=490, **OPTIONS) as session:
        for event in session:
            gains.note(event)
            if isinstance(event, rheostat.Tokens) and sent < min(5000, gains.applied + 400):
                for _ in range(20):
                    gains.send(session, sent % 50 / 20)
                    sent += 1
        out = session.result()
    assert gains.applied == out.receipt.gain_count >= 4000
    check(reference, out, placed, gains)


def test_a_gain_of_1_changes_no_bit(engine: rheostat.Engine) -> None:
    """Also if additions are summed and rounded once, as those at one site are."""
    steering = [OPS[name].does.at(points="resid_post", layers=[2]) for name in ("add", "norm_add")]
    steering = [steering[0], steering[0], *steering]
    found = []
    for gain in (None, 1.0):
        with engine.session(PROMPT, steering=steering, max_tokens=40, **OPTIONS) as session:
            for event in session:
                if isinstance(event, rheostat.Tokens) and gain is not None:
                    with suppress(rheostat.Refused):  # the last tokens
                        session.gain(gain)
            out = session.result()
        found.append([step.token.logprob for step in out.logprobs])
        assert (out.receipt.gain_count > 0) is (gain is not None)
    assert found[0] == found[1]


def test_gains_of_preempted_samples_are_those_of_their_positions(
    small_server: Server, small: rheostat.Engine, reference: HfReference
) -> None:
    rng = np.random.default_rng(5)
    # As in `test_preemption`, a sample may be preempted twice.
    prompts = [rng.integers(3, 1900, 230).tolist() for _ in range(3)]
    placed = [
        Placed(OPS["add"], [1], window(90) | generated(), lambda p, token, n: p >= 90),
        Placed(OPS["ablate"], [4], generated(7), lambda p, token, n: p >= n + 7),
    ]

    async def run(number: int) -> tuple[rheostat.Generation, Gains]:
        gains, factors = Gains(2), schedule(number, 2)
        async with (
            rheostat.aio.connect(small_server.target) as client,
            client.session(
                prompts[number],
                steering=[one.ours for one in placed],
                max_tokens=170,
                n=6,
                seed=1,
                ignore_eos=True,
                logprobs=0,
            ) as session,
        ):
            async for event in session:
                gains.note(event)
                if isinstance(event, rheostat.Tokens) and event.sample == 5:
                    factor, chosen = next(factors)
                    gains.send(session, factor, *chosen)
            return await session.result(), gains

    async def run_all() -> list[tuple[rheostat.Generation, Gains]]:
        return await asyncio.gather(*map(run, range(3)))

    outs = asyncio.run(run_all())
    assert sum(out.receipt.preemption_count for out, _ in outs) > 0
    for out, gains in outs:
        assert gains.applied > 20
        check(reference, out, placed, gains)


def test_a_session_that_is_left_holds_nothing(engine: rheostat.Engine) -> None:
    """The fixture looks whether anything is held afterwards."""
    steering = [everywhere(OPS["norm_add"], [1]).ours]
    for _ in range(3):
        with engine.session(PROMPT, steering=steering, max_tokens=400, **OPTIONS) as session:
            for event in session:
                if isinstance(event, rheostat.Tokens):
                    session.gain(2.0)
                if isinstance(event, rheostat.UpdateApplied):
                    break


def test_wrong_gains_are_refused_by_field_and_the_request_goes_on(
    engine: rheostat.Engine,
) -> None:
    wrong = {
        (float("nan"), ()): ("REASON_NON_FINITE", "gain.factor"),
        (17.0, ()): ("REASON_INVALID_VALUE", "gain.factor"),
        (1.0, (9,)): ("REASON_INVALID_VALUE", "gain.interventions[0]"),
    }
    steering = [everywhere(OPS["add"], [1]).ours]
    answers: list[tuple[str, str]] = []
    with engine.session(PROMPT, steering=steering, max_tokens=60, **OPTIONS) as session:
        for event in session:
            if isinstance(event, rheostat.Started):
                for factor, chosen in wrong:
                    session.gain(factor, chosen)
            if isinstance(event, rheostat.UpdateRefused):
                answers.append((event.reason, event.field))
        out = session.result()
    assert answers == list(wrong.values())
    assert (len(out.token_ids), out.receipt.gain_count) == (60, 0)
