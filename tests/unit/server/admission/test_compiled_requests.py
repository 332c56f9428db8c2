"""Requests with equal steering and captures are compiled once, and never from what has changed."""

import asyncio
import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from rheostat_engine import MAX_COLUMNS
from rheostat_server import errors
from rheostat_server.admission import admit as admission
from rheostat_server.admission.admit import AdmissionContext, admit
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.admission.compiled_requests import CompiledRequests, parts_of
from rheostat_server.admission.global_steering import GlobalSteering
from rheostat_server.limits import CAPTURES, COMPILED_REQUESTS, RULES
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import VectorStore, make_vector
from rheostat_wire.v1 import (
    generation_pb2,
    steering_pb2,
    steering_service_pb2,
    types_pb2,
    vector_pb2,
)

from ..admissions import admission_context, admitted, named, stored
from ..fakes import WIDTH
from ..messages import (
    FIRST,
    ONES,
    ablate,
    add,
    capture,
    request,
    selector,
    tensor,
    token_range,
    window,
)
from ..streams import until
from ..subscribers import Subscriber, opening, wanted


def keeping(capacity: int = 1 << 20) -> AdmissionContext:
    at = admission_context(capacity=capacity)
    return replace(at, compiled=CompiledRequests(at.store))


def asked(length: int = 3, max_tokens: int = 4, **fields: object):
    ids = types_pb2.TokenIds(ids=[5, 6, 7, 8, 9][:length])
    sampling = generation_pb2.Sampling(max_tokens=max_tokens)
    return request(token_ids=ids, sampling=sampling, **fields)


def shared(one: AdmittedRequest, other: AdmittedRequest) -> bool:
    """Whether two requests were compiled once."""
    return one.plan.packed_acts is other.plan.packed_acts


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """An entry for each steering that is checked."""
    seen: list[object] = []
    resolve = admission.resolve_steering

    def noted(message, *args):
        seen.append(message)
        return resolve(message, *args)

    monkeypatch.setattr(admission, "resolve_steering", noted)
    return seen


def test_equal_steering_is_compiled_once_for_prompts_of_any_length(compilations) -> None:
    at = keeping()
    stored(at)
    first, *others = (
        admitted(asked(length, steer=[add(named())], captures=[capture()]), at)
        for length in (3, 4, 5)
    )
    assert len(compilations) == 1
    assert all(shared(first, other) for other in others)
    assert {one.request_id for one in (first, *others)} == {
        one.plan.request_id for one in (first, *others)
    }
    assert [one.prompt_len for one in (first, *others)] == [3, 4, 5]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """An entry for each request whose parts are checked."""
    seen: list[object] = []
    check = admission.check_ranges

    def noted(*parts):
        seen.append(parts)
        check(*parts)

    monkeypatch.setattr(admission, "check_ranges", noted)
    return seen


def test_parts_that_were_admitted_are_not_checked_again(checks) -> None:
    at = keeping()
    stored(at)
    parts = {"steer": [add(named())], "captures": [capture(where=selector(window(-1)))]}
    fresh, *again = (admitted(asked(length, **parts), at) for length in (3, 4, 5, 6))
    assert len(checks) == 2  # they are kept once they have come twice
    assert {one.work for one in again} == {fresh.work}
    admitted(asked(3, steer=parts["steer"]), at)
    assert len(checks) == 3


def test_parts_whose_work_depends_on_tokens_or_vectors_are_checked_again(checks) -> None:
    at = keeping()
    stored(at)
    for steer in (
        add(named(), where=selector(token_range(6))),
        ablate(tensor(FIRST), tensor(ONES)),
    ):
        for _ in range(3):
            admitted(asked(steer=[steer]), at)
    assert len(checks) == 6


def test_parts_of_a_request_with_too_many_are_not_serialized() -> None:
    for name, most in (("captures", CAPTURES), ("probes", MAX_COLUMNS), ("rules", RULES)):
        message = asked()
        for _ in range(most):
            getattr(message, name).add()
        assert parts_of(message) is not None
        getattr(message, name).add()
        assert parts_of(message) is None
        with pytest.raises(errors.InvalidValue, match="at most"):
            admitted(message, keeping())


def test_parts_with_a_few_inline_vectors_of_a_large_model_are_kept() -> None:
    row = np.ones((1, 4096), np.float32)
    assert parts_of(asked(steer=[add(tensor(row))] * 3)) is not None
    assert parts_of(asked(steer=[add(tensor(row))] * 4)) is None


def test_a_refused_request_is_checked_again(checks) -> None:
    at = keeping()
    for _ in range(2):
        with pytest.raises(errors.NameNotFound):
            admitted(asked(steer=[add(named())]), at)
    assert len(checks) == 2


def test_a_kept_request_is_admitted_as_if_it_were_compiled_again() -> None:
    message = asked(steer=[add(named(), where=selector(window(1, 2)))], captures=[capture()])
    message.request_id = "r"
    at, anew = keeping(), admission_context()
    stored(at), stored(anew)
    admitted(message, at)
    kept, fresh = admitted(message, at), admitted(message, anew)
    assert kept == fresh
    assert kept.plan.to_wire() == fresh.plan.to_wire()


def test_selectors_of_positions_are_compiled_for_each_length_of_prompt_and_answer() -> None:
    at = keeping()
    stored(at)
    last = add(named(), where=selector(window(-1)))
    for length in (3, 4, 3, 4):
        (act,) = admitted(asked(length, steer=[last]), at).plan.acts
        assert act.spans == ((length - 1, length),)
    far = add(named(), where=selector(window(0, 1), exclude=[window(2, 3)]))
    admitted(asked(3, max_tokens=4, steer=[far]), at)
    assert len(at.compiled or ()) == 3


def test_a_position_beyond_the_answer_is_refused_after_it_was_taken_for_a_longer_one() -> None:
    at = keeping()
    stored(at)
    late = add(named(), where=selector(window(4, 5)))
    admitted(asked(5, steer=[late]), at)
    with pytest.raises(errors.InvalidPosition):
        admitted(asked(3, max_tokens=1, steer=[late]), at)


def test_selectors_of_tokens_are_compiled_for_each_prompt() -> None:
    at = keeping()
    stored(at)
    where = selector(token_range(6))
    for ids, spans in (([5, 6], ((1, 2),)), ([6, 5], ((0, 1),))):
        message = request(token_ids=types_pb2.TokenIds(ids=ids), steer=[add(named(), where=where)])
        (act,) = admitted(message, at).plan.acts
        assert act.spans == spans
    assert not at.compiled


def test_a_name_that_moved_brings_its_new_vector() -> None:
    at = keeping()
    before = stored(at, value=2.0)
    message = asked(steer=[add(named())])
    assert admitted(message, at).vectors == (before,)
    after = stored(at, value=3.0)
    got = admitted(message, at)
    assert got.vectors == (after,)
    assert got.plan.acts[0].vectors == (after.digest,)


def test_a_name_that_is_gone_is_not_found() -> None:
    at = keeping()
    stored(at)
    message = asked(steer=[add(named())])
    admitted(message, at)
    at.store.delete_name("joy", "name")
    with pytest.raises(errors.NameNotFound):
        admitted(message, at)


def test_a_vector_that_was_evicted_is_not_found_and_takes_no_memory() -> None:
    size = 4 * WIDTH
    at = keeping(capacity=size)
    vector = unnamed(at.store, 2.0)
    message = asked(steer=[add(vector_pb2.VectorRef(digest=vector.digest))])
    admitted(message, at)
    assert len(at.compiled or ()) == 1
    unnamed(at.store, 3.0)
    assert not at.compiled
    with pytest.raises(errors.VectorNotFound):
        admitted(message, at)


def unnamed(store: VectorStore, value: float):
    data = np.full((1, WIDTH), value, dtype="<f4").tobytes()
    vector = make_vector(FloatType.FLOAT32, 1, WIDTH, data, "v")
    store.put(vector)
    return vector


def test_a_request_counts_as_a_use_of_its_vectors() -> None:
    at = keeping(capacity=2 * 4 * WIDTH)
    used, other = unnamed(at.store, 1.0), unnamed(at.store, 2.0)
    message = asked(steer=[add(vector_pb2.VectorRef(digest=used.digest))])
    admitted(message, at)
    at.store.get(other.digest, "")
    admitted(message, at)
    unnamed(at.store, 3.0)
    assert used.digest in at.store
    assert other.digest not in at.store


def test_server_wide_steering_that_changed_acts_at_once() -> None:
    at = keeping()
    vector = stored(at)
    message = asked(steer=[add(named())])
    (alone,) = admitted(message, at).interventions
    steering = steering_pb2.Steering(interventions=[add(named())])
    wide = GlobalSteering(1, steering_service_pb2.Policy(steering=steering), (alone.op,))
    under = replace(at, server_wide=wide)
    assert len(admitted(message, under).plan.acts) == 2
    assert admitted(message, under).server_wide.version == 1
    assert len(admitted(message, replace(at, server_wide=GlobalSteering(2))).plan.acts) == 1
    assert admitted(message, at).vectors == (vector,)


def test_no_more_are_kept_than_the_limit() -> None:
    at = keeping()
    stored(at)
    for number in range(COMPILED_REQUESTS + 5):
        admitted(asked(steer=[add(named(), scale=1.0 + number)]), at)
    assert len(at.compiled or ()) == COMPILED_REQUESTS


async def test_requests_that_are_observed_alike_share_a_plan(running) -> None:
    last = opening(specs=[wanted(1, where=selector(window(-1)))])
    await Subscriber.open(running, last)
    first, second, longer = [
        await admit(asked(length), running.manager.admission) for length in (3, 3, 4)
    ]
    assert first.plan.packed_captures is second.plan.packed_captures
    assert [one.plan.captures[0].spans for one in (first, longer)] == [((2, 3),), ((3, 4),)]
    await Subscriber.open(running, last)
    both = await admit(asked(), running.manager.admission)
    assert len(both.observer_captures) == 2
    assert both.plan.captures == first.plan.captures


async def test_what_is_observed_of_tokens_is_looked_for_in_each_prompt(running) -> None:
    await Subscriber.open(running, opening(specs=[wanted(1, where=selector(token_range(6)))]))
    for ids, spans in (([5, 6, 7], ((1, 2),)), ([6, 5, 7], ((0, 1),))):
        got = await admit(request(token_ids=types_pb2.TokenIds(ids=ids)), running.manager.admission)
        (one,) = got.plan.captures
        assert one.spans[0] == spans[0]


async def test_a_subscription_that_has_ended_observes_nothing_more(running) -> None:
    await Subscriber.open(running, opening(specs=[wanted(1)]))
    assert (await admit(asked(), running.manager.admission)).plan.captures
    (one,) = running.manager.subscriptions.selecting("r", {})
    one.close(errors.Draining("it ends"))
    assert not (await admit(asked(), running.manager.admission)).plan.captures


async def test_nothing_of_a_subscription_stays_in_the_plans_of_requests(running) -> None:
    await Subscriber.open(running, opening(specs=[wanted(1)]))
    got = await admit(asked(), running.manager.admission)
    captures = weakref.ref(got.plan.packed_captures)
    del got
    gc.collect()
    assert captures() is not None
    (one,) = running.manager.subscriptions.selecting("r", {})
    one.close(errors.Draining("it ends"))
    del one
    await until(lambda: len(running.manager.subscriptions) == 0)
    for _ in range(50):
        gc.collect()
        if captures() is None:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the plan with the subscription's captures is still in memory")
