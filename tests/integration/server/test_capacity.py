"""A bank that is full: requests wait and then run steered, or are refused; never unsteered.

The small server's bank has room for 1535 rows, 511 directions, 4095 combinations and 32 rules about
token ids. A filler takes more than half of one of these, and little of the others. The bank also
has room for 1024 gates and 4096 states of gates. A request takes at most 32 and 2048 of them.
"""

import functools
import operator
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

import rheostat

from ..engine.reference import HfReference
from .facts import landmarks
from .naive import WIDTH, add, compare, everywhere, norm_add, row

pytestmark = pytest.mark.integration

PROMPT = "My day was"
ROWS = 1535
VECTOR = rheostat.inline(row(0).repeat(6, axis=0) * [[1.0], [0.9], [0.8], [0.7], [0.6], [0.5]])
OPTIONS = {"temperature": 0, "ignore_eos": True, "logprobs": 0}
ENOUGH = 150
"""Tokens to generate so that every token that a filler names can be an input."""


def filler(seed: int, tokens: int = 128) -> list[rheostat.Intervention]:
    """Additions that take six rows for each of some generated tokens."""
    return [
        (VECTOR * (0.001 * seed + 1e-6 * token)).at(
            points="resid_post", layers="all", where=rheostat.generated(token, token + 1)
        )
        for token in range(tokens)
    ]


def direction_filler(seed: int, tokens: int = 50) -> list[rheostat.Intervention]:
    """Steps along six directions of their own for each token."""
    rows = np.random.default_rng(seed).normal(size=(tokens, 6, WIDTH)).astype(np.float32)
    return [
        rheostat.norm_add(rheostat.inline(rows[token]), 0.05).at(
            points="resid_post", layers="all", where=rheostat.generated(token, token + 1)
        )
        for token in range(tokens)
    ]


def rule_filler(seed: int, tokens: int = 20) -> list[rheostat.Intervention]:
    """Additions of one vector, at each token unless it is a certain one."""
    return [
        (VECTOR * 0.1).at(
            points="resid_post",
            layers="all",
            where=rheostat.generated(token, token + 1) - rheostat.token_ids(40 * seed + token),
        )
        for token in range(tokens)
    ]


DIGITS = (*product(["resid_mid"], range(6)), ("resid_pre", 0), ("resid_post", 4), ("resid_post", 5))
"""Nine sites; `slot_filler` has four others."""


def slot_filler(seed: int, tokens: int = 140) -> list[rheostat.Intervention]:
    """Rows at sites that are the binary digits of a token's number, and at four more by its id.

    Sixteen ids make sixteen combinations of these four: 16 slots for each token.
    """
    vector = rheostat.inline(row(0)) * (0.01 * seed)
    digits = [
        vector.at(points=point, layers=layer, where=functools.reduce(operator.or_, ranges))
        for digit, (point, layer) in enumerate(DIGITS)
        if (ranges := [rheostat.generated(t, t + 1) for t in range(tokens) if t >> digit & 1])
    ]
    conditions = [
        vector.at(
            points="resid_post",
            layers=layer,
            where=rheostat.generated(0, tokens)
            - rheostat.token_ids(*(40 + one for one in range(16) if one >> layer & 1)),
        )
        for layer in range(4)
    ]
    return [*digits, *conditions]


def replaced_filler(seed: int, tokens: int = 128) -> list[rheostat.Intervention]:
    """Replacements by six rows for each of some generated tokens."""
    rows = np.random.default_rng(seed).normal(size=(6, tokens, WIDTH)).astype(np.float32)
    where = rheostat.generated(0, tokens)
    return [rheostat.replace(rows).at(points="resid_post", layers="all", where=where)]


class Filler(NamedTuple):
    """What fills one resource."""

    make: Callable[..., list[rheostat.Intervention]]
    """Of a seed and a number of tokens; two of different seeds don't fit together."""
    tokens: int
    """What it takes unless told otherwise. Twice as many never fit."""
    resource: str
    """As refusals name it."""


FILLERS = [
    Filler(filler, 128, "bank rows"),
    Filler(direction_filler, 50, "directions"),
    Filler(slot_filler, 140, "slots"),
    Filler(rule_filler, 20, "token rules"),
    Filler(replaced_filler, 128, "bank rows"),
]


@pytest.fixture(params=FILLERS, ids=lambda one: one.make.__name__)
def full(request: pytest.FixtureRequest) -> Filler:
    one: Filler = request.param
    return one


@contextmanager
def filled(
    small: rheostat.Engine, make: Callable[..., list[rheostat.Intervention]] = filler
) -> Iterator[rheostat.Stream]:
    """While a filler runs."""
    with small.stream(PROMPT, steering=make(1), max_tokens=480, **OPTIONS) as stream:
        next(stream)
        yield stream


def until_waiting(small: rheostat.Engine) -> None:
    """Returns once a request waits."""
    deadline = time.monotonic() + 10
    while not small.stats().waiting_request_count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_bank_is_as_small_as_these_tests_take_it_to_be(small: rheostat.Engine) -> None:
    assert small.model().limits.bank_rows == ROWS
    assert small.explain(PROMPT, steering=filler(1), max_tokens=200).new_bank_row_count == 768


def test_who_waits_for_room_runs_steered_as_if_alone(small: rheostat.Engine, full: Filler) -> None:
    options = {"steering": full.make(20), "max_tokens": ENOUGH, **OPTIONS}
    alone = small.generate(PROMPT, **options)
    with (
        filled(small, full.make) as first,
        small.stream(PROMPT, when_full="wait", **options) as second,
    ):
        until_waiting(small)
        first.cancel()
        out = second.result()
    assert (out.token_ids, out.logprobs) == (alone.token_ids, alone.logprobs)
    assert out.logprobs != small.generate(PROMPT, max_tokens=ENOUGH, **OPTIONS).logprobs
    rows = [
        [sum(site.row_count for site in done.sites) for done in one.receipt.interventions]
        for one in (out, alone)
    ]
    assert rows[0] == rows[1]
    assert sum(rows[0]) >= 11


def test_who_does_not_want_to_wait_is_refused_with_a_hint_when_to_come_back(
    small: rheostat.Engine, full: Filler
) -> None:
    with filled(small, full.make):
        with pytest.raises(rheostat.ResourceExhausted, match=f"more {full.resource};") as caught:
            small.generate(PROMPT, steering=full.make(2), max_tokens=200, when_full="refuse")
        assert caught.value.reason == "REASON_BANK_FULL"
        assert caught.value.path == "steering"
        assert caught.value.retry_after is not None
        assert caught.value.retry_after > 0
        alike = small.generate(
            PROMPT, steering=full.make(1), max_tokens=ENOUGH, when_full="refuse", **OPTIONS
        )
        assert len(alike.token_ids) == ENOUGH  # what others hold already takes no room


def test_what_never_fits_is_refused_at_once_and_without_a_hint(
    small: rheostat.Engine, full: Filler
) -> None:
    steering = full.make(1, 2 * full.tokens)
    refusals = []
    for call in (small.generate, small.explain):
        with pytest.raises(rheostat.ResourceExhausted, match=f"more {full.resource};") as caught:
            call(PROMPT, steering=steering, max_tokens=300, when_full="wait", timeout=10)
        refusals.append((caught.value.reason, caught.value.retry_after))
    assert refusals == [("REASON_BANK_FULL", None)] * 2


def test_server_wide_steering_that_never_fits_is_refused_and_changes_nothing(
    small: rheostat.Engine,
) -> None:
    version = small.steering.get_global().version
    with pytest.raises(rheostat.ResourceExhausted) as caught:
        small.steering.set_global(filler(1, 256))
    assert (caught.value.reason, caught.value.retry_after) == ("REASON_BANK_FULL", None)
    assert small.steering.get_global().version == version


def test_a_deadline_ends_the_wait(small: rheostat.Engine) -> None:
    with filled(small), pytest.raises(rheostat.DeadlineExceeded):
        small.generate(PROMPT, steering=filler(2), max_tokens=200, timeout=0.5)


def test_who_came_later_does_not_overtake_unless_it_needs_nothing(small: rheostat.Engine) -> None:
    little = {"steering": [everywhere(add(row(1), 0.5), [2]).ours], "max_tokens": 4, **OPTIONS}
    alone = small.generate(PROMPT, **little)
    with (
        filled(small) as first,
        small.stream(PROMPT, steering=filler(2), max_tokens=ENOUGH, **OPTIONS) as second,
    ):
        until_waiting(small)
        assert small.generate(PROMPT, max_tokens=4, **OPTIONS).text
        with pytest.raises(rheostat.ResourceExhausted) as caught:
            small.generate(PROMPT, when_full="refuse", **little)
        assert caught.value.retry_after is not None
        with small.stream(PROMPT, when_full="wait", **little) as third:
            while small.stats().waiting_request_count < 2:
                time.sleep(0.02)
            first.cancel()
            assert third.result().logprobs == alone.logprobs
        assert len(second.result().token_ids) == ENOUGH


def test_an_update_without_room_is_refused_and_the_session_goes_on_as_it_was(
    small: rheostat.Engine, reference: HfReference
) -> None:
    own = everywhere(norm_add(row(1), 0.2), [2])
    with (
        filled(small),
        small.session(PROMPT, steering=[own.ours], max_tokens=ENOUGH, **OPTIONS) as session,
    ):
        next(session)
        session.steer(filler(2))
        refused = [one for one in session if isinstance(one, rheostat.UpdateRefused)]
        out = session.result()
    assert [one.reason for one in refused] == ["REASON_BANK_FULL"]
    assert out.receipt.update_count == 0
    compare(reference, out, [own])


def test_many_requests_that_never_fit_together_all_run_steered(small: rheostat.Engine) -> None:
    placed = everywhere(add(row(3), 0.7), [4])
    streams = [
        small.stream(
            PROMPT, steering=[*filler(10 + i), placed.ours], max_tokens=ENOUGH + i, **OPTIONS
        )
        for i in range(5)
    ]
    for number, stream in enumerate(streams):
        out = stream.result()
        rows = [sum(site.row_count for site in one.sites) for one in out.receipt.interventions]
        made = ENOUGH - 1 + number
        assert rows == [6] * 128 + [len(out.prompt_token_ids) + made]


def test_cells_that_wait_for_room_are_those_of_a_sweep_alone(small: rheostat.Engine) -> None:
    """Beside the filler there is room for one cell of five layers, and never for two of them."""
    nearly_all = functools.partial(filler, tokens=247)
    taken = small.explain(PROMPT, steering=nearly_all(1), max_tokens=480).new_bank_row_count
    everywhere = {"all": rheostat.window(0)}
    pairs = [replace(pair, groups=everywhere) for pair in landmarks(24)]
    needed = [5 * len(small.tokenize(pair.prompt).token_ids) for pair in pairs]
    assert max(needed) <= ROWS - taken < 2 * min(needed)
    options = {"points": "resid_post", "window": 5, "grades": "logprob", "pair_values": True}
    alone = small.sweep(pairs, watch=False, **options)
    with filled(small, nearly_all):
        beside = small.sweep(pairs, watch=False, priority="normal", **options)
        assert small.stats().running_request_count == 1, "the filler has ended too early"
    assert not beside.skipped
    np.testing.assert_allclose(beside.pair_values, alone.pair_values, rtol=0, atol=1e-4)
    assert np.abs(alone.array() - alone.base()).max() > 0.1


class GateFiller(NamedTuple):
    """Requests that together fill a resource of gates."""

    requests: int
    samples: int
    """Of each request."""
    alike: bool
    """Whether the requests have the same gates, and therefore share them."""
    resource: str
    """Its name in refusals."""


GATE_FILLERS = [GateFiller(32, 1, False, "gates"), GateFiller(2, 64, True, "gate states")]


def gated_filler(seed: int) -> list[rheostat.Intervention]:
    """Additions under 32 gates that stay shut."""
    read = rheostat.probe(rheostat.inline(row(0)), points="resid_post", layers=0)
    added = rheostat.inline(row(1)).at(points="resid_post", layers=2)
    return [added.when(read.above(1e6 + 32 * seed + number)) for number in range(32)]


@contextmanager
def gates_filled(small: rheostat.Engine, full: GateFiller) -> Iterator[None]:
    """Requests fill a resource of gates during the block."""
    with ExitStack() as streams:
        for seed in range(full.requests):
            stream = small.stream(
                PROMPT,
                steering=gated_filler(0 if full.alike else seed),
                n=full.samples,
                max_tokens=480,
                ignore_eos=True,
                when_full="refuse",
            )
            next(streams.enter_context(stream))
        yield


@pytest.mark.parametrize("full", GATE_FILLERS, ids=lambda full: full.resource)
def test_a_request_with_a_gate_waits_or_is_refused_while_gates_are_full(
    small: rheostat.Engine, reference: HfReference, full: GateFiller
) -> None:
    read = rheostat.probe(rheostat.inline(row(0)), points="resid_post", layers=0)
    own = everywhere(norm_add(row(2), 0.2), [2])
    options = {"steering": own.ours.when(read.above(-1e6)), "max_tokens": 8, **OPTIONS}
    with ThreadPoolExecutor(1) as reader, gates_filled(small, full):
        with pytest.raises(rheostat.ResourceExhausted, match=f"1 more {full.resource};") as caught:
            next(small.stream(PROMPT, when_full="refuse", **options))
        assert (caught.value.reason, caught.value.path) == ("REASON_BANK_FULL", "steering")
        assert caught.value.retry_after is not None
        ungated = small.stream(PROMPT, when_full="refuse", **options | {"steering": own.ours})
        next(ungated)  # it is admitted, and runs once the fillers leave a place in the batch
        waiting = small.stream(PROMPT, when_full="wait", **options)
        admitted = reader.submit(next, waiting)
        with pytest.raises(TimeoutError):
            admitted.result(1)
    compare(reference, ungated.result(), [own])
    compare(reference, waiting.result(), [own])
    compare(reference, small.generate(PROMPT, when_full="refuse", **options), [own])
