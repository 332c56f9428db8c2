"""A bank that is full: requests wait and then run steered, or are refused; never unsteered.

The small server's bank has room for 1535 rows. A filler takes 768 of them: an addition of its own
at each of 128 generated tokens, at six layers.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import rheostat

from ..engine.reference import HfReference
from .naive import Placed, add, compare, everywhere, norm_add, row

pytestmark = pytest.mark.integration

PROMPT = "My day was"
ROWS = 1535
VECTOR = rheostat.inline(row(0).repeat(6, axis=0) * [[1.0], [0.9], [0.8], [0.7], [0.6], [0.5]])
OPTIONS = {"temperature": 0, "ignore_eos": True, "logprobs": 0}


def filler(seed: int, tokens: int = 128) -> list[rheostat.Intervention]:
    """Additions that take six rows for each token."""
    return [
        (VECTOR * (0.001 * seed + 1e-6 * token)).at(
            points="resid_post", layers="all", where=rheostat.generated(token, token + 1)
        )
        for token in range(tokens)
    ]


@contextmanager
def filled(small: rheostat.Engine) -> Iterator[rheostat.Stream]:
    """While a filler runs."""
    with small.stream(PROMPT, steering=filler(1), max_tokens=480, **OPTIONS) as stream:
        next(stream)
        yield stream


def until_waiting(small: rheostat.Engine) -> None:
    """Returns once a request waits."""
    deadline = time.monotonic() + 10
    while not small.stats().waiting:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_bank_is_as_small_as_these_tests_take_it_to_be(small: rheostat.Engine) -> None:
    assert small.model().limits.bank_rows == ROWS
    assert small.explain(PROMPT, steering=filler(1), max_tokens=200).new_bank_rows == 768


def test_who_waits_for_room_runs_steered_as_if_alone(
    small: rheostat.Engine, reference: HfReference
) -> None:
    options = {"steering": filler(400), "max_tokens": 12, **OPTIONS}
    alone = small.generate(PROMPT, **options)
    with filled(small) as first, small.stream(PROMPT, when_full="wait", **options) as second:
        until_waiting(small)
        first.cancel()
        out = second.result()
    assert (out.token_ids, out.logprobs) == (alone.token_ids, alone.logprobs)
    assert out.logprobs != small.generate(PROMPT, max_tokens=12, **OPTIONS).logprobs
    rows = [sum(site.rows for site in one.sites) for one in out.receipt.interventions]
    assert rows == [6] * 11 + [0] * 117


def test_who_does_not_want_to_wait_is_refused_with_a_hint_when_to_come_back(
    small: rheostat.Engine,
) -> None:
    with filled(small):
        with pytest.raises(rheostat.ResourceExhausted) as caught:
            small.generate(PROMPT, steering=filler(2), max_tokens=200, when_full="refuse")
        assert caught.value.reason == "REASON_BANK_FULL"
        assert caught.value.path == "steering"
        assert caught.value.retry_after is not None
        assert caught.value.retry_after > 0
        alike = small.generate(
            PROMPT, steering=filler(1), max_tokens=20, when_full="refuse", **OPTIONS
        )
        assert len(alike.token_ids) == 20  # what others hold already takes no room


def test_what_never_fits_is_refused_at_once_and_without_a_hint(small: rheostat.Engine) -> None:
    refusals = []
    for call in (small.generate, small.explain):
        with pytest.raises(rheostat.ResourceExhausted) as caught:
            call(PROMPT, steering=filler(1, 256), max_tokens=300, when_full="wait", timeout=10)
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
        small.stream(PROMPT, steering=filler(2), max_tokens=4, **OPTIONS) as second,
    ):
        until_waiting(small)
        assert small.generate(PROMPT, max_tokens=4, **OPTIONS).text
        with pytest.raises(rheostat.ResourceExhausted) as caught:
            small.generate(PROMPT, when_full="refuse", **little)
        assert caught.value.retry_after is not None
        with small.stream(PROMPT, when_full="wait", **little) as third:
            while small.stats().waiting < 2:
                time.sleep(0.02)
            first.cancel()
            assert third.result().logprobs == alone.logprobs
        assert len(second.result().token_ids) == 4


def test_an_update_without_room_is_refused_and_the_session_goes_on_as_it_was(
    small: rheostat.Engine, reference: HfReference
) -> None:
    own = everywhere(norm_add(row(1), 0.2), [2])
    with (
        filled(small),
        small.session(PROMPT, steering=[own.ours], max_tokens=24, **OPTIONS) as session,
    ):
        next(session)
        session.steer(filler(2))
        refused = [one for one in session if isinstance(one, rheostat.UpdateRefused)]
        out = session.result()
    assert [one.reason for one in refused] == ["REASON_BANK_FULL"]
    assert out.receipt.updates == 0
    compare(reference, out, [own])


def test_many_requests_that_never_fit_together_all_run_steered(
    small: rheostat.Engine, reference: HfReference
) -> None:
    placed = Placed(add(row(3), 0.7), [4], "all", lambda p, token, length: True)
    streams = [
        small.stream(PROMPT, steering=[*filler(10 + i), placed.ours], max_tokens=4 + i, **OPTIONS)
        for i in range(5)
    ]
    for number, stream in enumerate(streams):
        out = stream.result()
        rows = [sum(site.rows for site in one.sites) for one in out.receipt.interventions]
        made = 3 + number
        assert rows == [6] * made + [0] * (128 - made) + [len(out.prompt_token_ids) + made]
