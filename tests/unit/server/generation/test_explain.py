"""Explain: what a request would do, before it does it."""

import asyncio
from dataclasses import replace

import pytest

from rheostat_engine import OPEN_END, Act, Installed, Kind, Plan, Spans, TokenCondition
from rheostat_server.generation import explain
from rheostat_server.generation.explain import cache_keys
from rheostat_server.limits import LARGE_REQUESTS
from rheostat_wire.v1 import (
    generation_pb2,
    generation_service_pb2,
    steering_pb2,
    steering_service_pb2,
    types_pb2,
)

from ..conftest import rest
from ..fakes import INFO, ScriptedBackend
from ..messages import (
    FIRST,
    GENERATED,
    PROMPT,
    ablate,
    add,
    band,
    capture,
    clamp,
    generated,
    norm_add,
    request,
    scaled,
    selector,
    tensor,
    token_range,
    window,
)

pb = generation_service_pb2
POST1 = types_pb2.Site(point=types_pb2.POINT_RESID_POST, layer=1)
Run = types_pb2.PositionRun


async def explained(running, **fields: object) -> generation_service_pb2.ExplainResponse:
    message = pb.ExplainRequest(request=request(**fields))
    return await running.client.generation.Explain(message)


async def test_doses_are_told_where_they_do_not_depend_on_the_stream(running) -> None:
    steer = [
        add(tensor(3 * FIRST), scale=-2.0),
        norm_add(tensor(3 * FIRST), -0.5),
        ablate(tensor(FIRST)),
        clamp(band(low=0.0)),
        scaled(2.0),
    ]
    answer = await explained(running, steer=steer)
    dose = pb.SiteDose
    assert [list(one.doses) for one in answer.interventions] == [
        [dose(site=POST1, norm=6)],
        [dose(site=POST1, norm=0.5)],
        [],
        [],
        [],
    ]
    assert all(list(one.sites) == [POST1] for one in answer.interventions)


async def test_a_selection_says_which_generated_tokens_it_depends_on(running) -> None:
    steer = [
        add(where=selector(token_range(11, 40))),
        add(where=selector(window(0, 1), GENERATED, exclude=[token_range(40, 41)])),
        add(where=selector(token_range(11, 40), window(3, 4), exclude=[token_range(41)])),
        add(where=selector(PROMPT, token_range(40), exclude=[GENERATED])),
    ]
    answer = await explained(running, steer=steer, sampling=generation_pb2.Sampling(max_tokens=4))
    selection = pb.ResolvedSelection
    assert [one.selection for one in answer.interventions] == [
        selection(positions=[Run(start=1, count=1)], token_ids=[11, 40]),
        selection(
            positions=[Run(start=0, count=1), Run(start=3, count=3)],
            excluded_token_ids=[40, 41],
        ),
        selection(
            positions=[Run(start=1, count=1), Run(start=3, count=1)],
            token_ids=[11, 40],
            excluded_token_ids=[41],
        ),
        selection(positions=[Run(start=0, count=3)]),
    ]


async def test_ids_are_not_told_where_no_generated_token_is_an_input(running) -> None:
    answer = await explained(
        running,
        steer=[add(where=selector(token_range(11, 40)))],
        sampling=generation_pb2.Sampling(max_tokens=1),
    )
    assert answer.interventions[0].selection == pb.ResolvedSelection(
        positions=[Run(start=1, count=1)]
    )


async def test_bytes_of_a_capture_are_those_of_the_tokens_that_are_known(running) -> None:
    answer = await explained(running, captures=[capture(where=selector(token_range(10, 12, 99)))])
    (one,) = answer.captures
    assert (one.payload_bytes, list(one.selection.token_ids)) == (2 * 4 * 4, [10, 12, 99])


async def test_bank_rows_that_others_hold_are_not_new(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    steer = [add(scale=2.0), add(where=selector(PROMPT))]
    assert (await explained(running, steer=steer)).new_bank_row_count == 2
    call = running.client.generation.Generate(request(steer=[add(scale=2.0)]))
    await call.read()
    assert (await explained(running, steer=steer)).new_bank_row_count == 1
    running.backend.hold.set()
    await rest(call)


async def test_keys_change_with_the_server_wide_steering_and_the_epoch(running) -> None:
    async def key() -> bytes:
        (one,) = (await explained(running, steer=[norm_add()])).cache_keys
        return one.digest

    plain = await key()
    assert await key() == plain
    await running.client.steering.SetGlobal(
        steering_service_pb2.SetGlobalRequest(
            policy={"steering": steering_pb2.Steering(interventions=[add()])}
        )
    )
    steered = await key()
    running.backend.deliver(Installed("somebody", "no such vector"))
    assert len({plain, steered, await key()}) == 3


def act(spans: Spans, scale: float = 1.0, kind: Kind = Kind.NORM_ADD, conditions=()) -> Act:
    return Act(kind, (bytes(32),), ((4, (0,)),), spans, scale=scale, conditions=conditions)


def keyed(*acts: Act, **fields: object) -> list[tuple[int, bytes]]:
    return [(key.position, key.digest) for key in cache_keys(Plan("r", acts, **fields))]


def test_there_is_a_key_for_every_piece_that_is_touched() -> None:
    acts = (act(((2, 5), (8, OPEN_END))), act(((4, 6),), 2.0))
    assert [position for position, _ in keyed(*acts)] == [2, 4, 5, 8]
    assert keyed(act(())) == []
    assert all(len(digest) == 32 for _, digest in keyed(*acts))


def test_keys_are_equal_as_far_as_plans_are() -> None:
    one = keyed(act(((0, 4),)), act(((6, OPEN_END),), 2.0))
    other = keyed(act(((0, 4),)), act(((6, OPEN_END),), 3.0))
    assert one[0] == other[0]
    assert one[1] != other[1]


@pytest.mark.parametrize(
    "other",
    [
        act(((1, 5),)),
        act(((2, 6),)),
        act(((2, 5),), 1.5),
        act(((2, 5),), kind=Kind.ADD),
        act((), conditions=(TokenCondition(((2, 5),), (7,), True),)),
    ],
)
def test_keys_differ_where_plans_do(other) -> None:
    assert keyed(other)[-1][1] != keyed(act(((2, 5),)))[-1][1]


def test_what_comes_before_is_part_of_a_key() -> None:
    late = act(((6, OPEN_END),))
    assert keyed(act(((0, 1),)), late)[-1][0] == keyed(late)[-1][0]
    assert keyed(act(((0, 1),)), late)[-1][1] != keyed(late)[-1][1]


def test_blocks_that_two_plans_cut_differently_have_different_keys() -> None:
    beside = act(((4, 8),), 2.0)
    whole = keyed(act(((0, 8),)), beside)
    halves = keyed(act(((0, 4),)), act(((4, 8),)), beside)
    assert whole[0] == halves[0]
    assert whole[1] != halves[1]


def test_sums_have_one_key_in_any_order() -> None:
    first, second = (act(((2, 5),), scale, Kind.ADD) for scale in (1.0, 2.0))
    assert keyed(first, second) == keyed(second, first)


def test_nothing_is_shared_where_a_plan_says_so() -> None:
    keys = cache_keys(Plan("r", (act(((2, OPEN_END),)),), private_from=5))
    assert [(key.position, key.private, bool(key.digest)) for key in keys] == [
        (2, False, True),
        (5, True, False),
    ]
    for start in (0, 5):
        (key,) = cache_keys(Plan("r", private_from=start))
        assert key == pb.CacheKey(position=start, private=True)


async def test_few_large_requests_are_explained_at_a_time(starter, monkeypatch) -> None:
    """Each occupies a thread, and the event loop waits whenever it needs Python's lock."""
    most = now = 0

    async def watched(size: int, work, *args: object):
        nonlocal most, now
        if work is not explain._explain:
            return work(*args)
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.1)  # meanwhile all have come
        now -= 1
        return work(*args)

    monkeypatch.setattr(explain, "offload", watched)
    running = await starter(ScriptedBackend(info=replace(INFO, model_tokens=4096)))
    windows = (generated(2 * i, 2 * i + 1) for i in range(200))
    steer = [add(where=selector(*windows))]
    sampling = generation_pb2.Sampling(max_tokens=1000)
    request_messages = (explained(running, steer=steer, sampling=sampling) for _ in range(6))
    await asyncio.gather(*request_messages)
    assert most == LARGE_REQUESTS
