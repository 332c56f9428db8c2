"""Server-wide steering over a real channel."""

import asyncio
import gc
import time
import weakref

import grpc
import numpy as np
import pytest

from rheostat_engine import OPEN_END, Act, Kind
from rheostat_engine.plan import tables
from rheostat_server.admission.admit import admit
from rheostat_server.steering import estimates
from rheostat_wire.v1 import (
    engine_service_pb2,
    generation_service_pb2,
    receipt_pb2,
    replace_pb2,
    selector_pb2,
    steering_pb2,
    steering_service_pb2,
    types_pb2,
    vector_pb2,
)

from ..conftest import Refusal, rest
from ..fakes import WIDTH, ScriptedBackend, sites_with
from ..messages import (
    FIRST,
    GENERATED,
    ONES,
    PROMPT,
    SECOND,
    THIRD,
    ablate,
    add,
    at_post1,
    band,
    clamp,
    norm_add,
    request,
    scaled,
    selector,
    span,
    tensor,
    token_range,
    window,
)
from ..streams import kinds, settled, until
from ..uploads import chunk, digest, header, put, refusal_of, values

Code = grpc.StatusCode
pb = steering_service_pb2
POST1 = 8


async def set_global(running, *steer: steering_pb2.Intervention, **fields: int) -> int:
    steering = steering_pb2.Steering(interventions=steer)
    answer = await running.client.steering.SetGlobal(
        pb.SetGlobalRequest(policy={"steering": steering}, **fields)
    )
    return answer.version


async def global_refusal(running, *steer: steering_pb2.Intervention, **fields: int) -> Refusal:
    return await refusal_of(set_global(running, *steer, **fields))


async def held(running) -> steering_service_pb2.GetGlobalResponse:
    return await running.client.steering.GetGlobal(pb.GetGlobalRequest())


async def explained(running, message) -> generation_service_pb2.ExplainResponse:
    explain = generation_service_pb2.ExplainRequest(request=message)
    return await running.client.generation.Explain(explain)


def scales(running) -> list[list[float]]:
    """The scales of every job's acts."""
    return [[act.scale for act in job.plan.acts] for job in running.backend.jobs]


async def test_nothing_holds_at_startup(running) -> None:
    assert await held(running) == pb.GetGlobalResponse(policy={"steering": {}})


async def test_what_was_set_holds_with_digests_a_version_and_a_time(running) -> None:
    data = values(2.0)
    await put(running.client, header(name="joy"), chunk(data))
    steer = [
        add(vector_pb2.VectorRef(name="joy"), scale=0.5, where=selector(PROMPT)),
        norm_add(tensor(ONES)),
        ablate(tensor(FIRST), tensor(SECOND)),
        clamp(band(tensor(ONES), 1.0)),
        scaled(2.0, vector_pb2.VectorRef(digest=digest(data))),
    ]
    before = time.time()
    assert await set_global(running, *steer) == 1
    answer = await held(running)

    def inline(values: np.ndarray) -> vector_pb2.VectorRef:
        return vector_pb2.VectorRef(digest=digest(values.tobytes()))

    joy = vector_pb2.VectorRef(digest=digest(data))
    expected = [
        add(joy, scale=0.5, where=selector(PROMPT)),
        norm_add(inline(ONES)),
        ablate(inline(FIRST), inline(SECOND)),
        clamp(band(inline(ONES), 1.0)),
        scaled(2.0, joy),
    ]
    assert (answer.version, list(answer.policy.steering.interventions)) == (1, expected)
    assert before <= answer.set_time.ToNanoseconds() / 1e9 <= time.time()
    assert await set_global(running) == 2
    answer = await held(running)
    assert (answer.version, answer.policy.steering) == (2, steering_pb2.Steering())
    assert answer.HasField("set_time")


async def test_rows_may_be_replaced_server_wide_but_not_by_position(running) -> None:
    dimensions = replace_pb2.DimensionMask(dimensions=replace_pb2.Dimensions(dimensions=[0]))
    zeros = replace_pb2.Replace(zeros=replace_pb2.ZeroSource(), mask=dimensions)
    everywhere = selector(PROMPT)
    assert await set_global(running, at_post1(replace=zeros, where=everywhere)) == 1
    await running.client.generate(request())
    ((act,),) = [job.plan.acts for job in running.backend.jobs]
    assert (act.kind, act.spans) == (Kind.REPLACE, ((0, 3),))
    rows = replace_pb2.Replace(rows=tensor(np.ones((1, 3, WIDTH))).inline)
    run = replace_pb2.Replace(run=replace_pb2.RunSource(run_id="a"))
    noise = replace_pb2.Replace(noise=replace_pb2.NoiseSource(std=1.0))
    for source, field in ((rows, "rows"), (run, "run"), (noise, "noise")):
        refusal = await global_refusal(running, at_post1(replace=source, where=everywhere))
        field = f"policy.steering.interventions[0].replace.{field}"
        assert refusal.brief == (Code.FAILED_PRECONDITION, "REASON_NOT_SUPPORTED", field)


async def test_a_range_of_layers_that_holds_has_an_end(running) -> None:
    (steer := add()).sites.range.start = 1
    await set_global(running, steer)
    (one,) = (await held(running)).policy.steering.interventions
    assert (one.sites.range.start, one.sites.range.stop) == (1, running.manager.sites.num_layers)


async def test_every_request_is_steered_and_says_by_which_version(running) -> None:
    await set_global(running, add(scale=3.0), add(where=selector(GENERATED), scale=4.0))
    events = await running.client.generate(request(steer=[add(scale=5.0)]))
    receipt = events[-1].receipt
    everywhere, generated = ((0, OPEN_END),), ((3, OPEN_END),)
    vectors = (digest(ONES.tobytes()),)
    assert running.backend.jobs[0].plan.acts == tuple(
        Act(Kind.ADD, vectors, ((POST1, (0,)),), spans, scale=scale)
        for spans, scale in ((everywhere, 3.0), (generated, 4.0), (everywhere, 5.0))
    )
    refs = [
        receipt_pb2.InterventionRef(origin=origin, index=index, op=receipt_pb2.OP_ADD)
        for origin, index in (
            (receipt_pb2.ORIGIN_GLOBAL, 0),
            (receipt_pb2.ORIGIN_GLOBAL, 1),
            (receipt_pb2.ORIGIN_REQUEST, 0),
        )
    ]
    assert [one.intervention for one in receipt.interventions] == refs
    assert [one.sites[0].row_count for one in receipt.interventions] == [4, 1, 4]
    assert [one.sites[0].dose.norm for one in receipt.interventions] == [6, 8, 10]
    answer = await explained(running, request(steer=[add(scale=5.0)]))
    assert [one.intervention for one in answer.interventions] == refs
    stats = await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
    assert (receipt.global_version, answer.global_version, stats.global_version) == (1, 1, 1)


async def test_a_plain_request_is_steered_too(running) -> None:
    await set_global(running, add(scale=3.0))
    events = await running.client.generate(request())
    assert kinds(events)[-1] == "receipt"
    assert scales(running) == [[3.0]]


async def test_each_request_holds_what_it_takes_of_the_engine(starter) -> None:
    running = await starter(
        ScriptedBackend(hold=asyncio.Event(), sites=sites_with(bank_rows=1)), capacity_wait=0.01
    )
    await set_global(running, add(scale=3.0))
    calls = [running.client.generation.Generate(request()) for _ in range(2)]
    for call in calls:
        await call.read()
    assert (running.manager.ledger.requests, running.manager.ledger.used("bank_rows")) == (2, 1)
    refusal = await running.client.refusal(request(steer=[add(where=selector(PROMPT))]))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_BANK_FULL", "steering")
    running.backend.hold.set()
    for call in calls:
        assert (await rest(call))[-1].HasField("receipt")


async def test_a_baseline_is_steered_as_the_server_is(running) -> None:
    await set_global(running, add(scale=3.0))
    await running.client.generate(request(steer=[add(scale=5.0)], with_baseline=True))
    assert sorted(scales(running)[:2]) == [[3.0], [3.0, 5.0]]


async def test_a_version_is_replaced_only_by_who_knows_it(running) -> None:
    assert await set_global(running, add(), expected_version=0) == 1
    refusal = await global_refusal(running, expected_version=0)
    assert refusal == Refusal(
        Code.FAILED_PRECONDITION,
        "REASON_VERSION_CONFLICT",
        "expected_version",
        "the steering has version 1, not 0",
        metadata=(("version", "1"),),
        precondition=True,
    )
    assert await set_global(running, expected_version=1) == 2
    assert await set_global(running) == 3


async def test_a_running_request_keeps_what_it_started_with(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    await set_global(running, add(scale=3.0))
    call = running.client.generation.Generate(request())
    await call.read()
    await call.read()
    await set_global(running, add(scale=4.0))
    running.backend.hold.set()
    first = (await rest(call))[-1].receipt
    second = (await running.client.generate(request()))[-1].receipt
    assert (first.global_version, second.global_version) == (1, 2)
    assert [one.interventions[0].sites[0].dose.norm for one in (first, second)] == [6, 8]


async def test_a_name_that_moves_later_leaves_it_as_it_is(running) -> None:
    await put(running.client, header(name="joy"), chunk(values(2.0)))
    await set_global(running, add(vector_pb2.VectorRef(name="joy")))
    await put(running.client, header(name="joy"), chunk(values(3.0)))
    await running.client.steering.DeleteName(pb.DeleteNameRequest(name="joy"))
    await running.client.generate(request())
    assert running.backend.jobs[0].plan.acts[0].vectors == (digest(values(2.0)),)


async def test_its_vectors_are_loaded_before_it_holds_and_stay_while_it_does(starter) -> None:
    class Slow(ScriptedBackend):
        gate = asyncio.Event()

        async def load_vectors(self, vectors) -> None:
            await super().load_vectors(vectors)
            await self.gate.wait()

    running = await starter(Slow(), vector_store_bytes=2 * WIDTH * 4)
    setting = asyncio.create_task(set_global(running, add(tensor(2 * ONES), scale=0.0)))
    await until(lambda: bool(running.backend.loaded))
    assert (await held(running)).version == 0
    running.backend.gate.set()
    assert await setting == 1
    for value in (3.0, 4.0):
        await put(running.client, header(), chunk(values(value)))
    assert digest(values(2.0)) in running.manager.store
    assert running.backend.dropped == []
    await set_global(running)
    for value in (5.0, 6.0):
        await put(running.client, header(), chunk(values(value)))
    await until(lambda: running.backend.dropped == [digest(values(2.0)).hex()])


async def test_a_caller_that_leaves_while_vectors_are_loaded_leaves_nothing_held(starter) -> None:
    class Slow(ScriptedBackend):
        gate = asyncio.Event()

        async def load_vectors(self, vectors) -> None:
            await super().load_vectors(vectors)
            await self.gate.wait()

    running = await starter(Slow(), vector_store_bytes=WIDTH * 4)
    call = running.client.steering.SetGlobal(
        pb.SetGlobalRequest(policy={"steering": steering_pb2.Steering(interventions=[add()])})
    )
    await until(lambda: bool(running.backend.loaded))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: not running.manager.server_wide._turn.locked())
    running.backend.gate.set()
    await put(running.client, header(), chunk(values(9.0)))
    assert (await held(running)).version == 0


async def test_nothing_compiled_under_replaced_steering_stays_in_memory(running) -> None:
    async def compiled(admission) -> "weakref.ref[object]":
        got = await admit(request(steer=[add(tensor(2 * ONES))]), admission)
        return weakref.ref(got.plan.packed_acts)

    await set_global(running, add(tensor(ONES)))
    before = running.manager.admission
    kept = await compiled(before)
    gc.collect()
    assert kept() is not None
    await set_global(running)
    gc.collect()
    assert kept() is None
    late = await compiled(before)  # its admission began before
    gc.collect()
    assert late() is None


async def test_vectors_that_do_not_fit_beside_those_that_hold_are_refused(starter) -> None:
    running = await starter(vector_store_bytes=2 * WIDTH * 4)
    await set_global(running, add(tensor(ONES)))
    refusal = await global_refusal(running, add(tensor(2 * ONES)), add(tensor(3 * ONES)))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_STORE_FULL", "")
    assert (await held(running)).version == 1
    assert await set_global(running, add(tensor(2 * ONES))) == 2


async def test_windows_that_a_prompt_does_not_have_select_nothing(running) -> None:
    await set_global(running, add(where=selector(window(-5, -1))), add(where=selector(window(40))))
    await running.client.generate(request())
    await running.client.generate(request(text="abcdef"))
    assert [[act.spans for act in job.plan.acts] for job in running.backend.jobs] == [
        [],
        [((2, 6),)],
    ]
    receipt = (await running.client.generate(request()))[-1].receipt
    assert [one.sites[0].row_count for one in receipt.interventions] == [0, 0]


async def test_token_ids_are_looked_for_in_every_prompt(running) -> None:
    await set_global(running, norm_add(where=selector(token_range(11, 13))))
    receipt = (await running.client.generate(request()))[-1].receipt
    assert list(receipt.interventions[0].rows[0].positions) == [
        types_pb2.PositionRun(start=1, count=1),
        types_pb2.PositionRun(start=3, count=1),
    ]


@pytest.mark.parametrize(
    ("steer", "code", "reason", "field"),
    [
        ([steering_pb2.Intervention()], "INVALID_ARGUMENT", "MISSING_FIELD", "[0]"),
        (
            [add(), add(where=selector(span("x")))],
            "INVALID_ARGUMENT",
            "INVALID_VALUE",
            "[1].where.include[0].text",
        ),
        ([add(where=selector_pb2.Selector())], "INVALID_ARGUMENT", "EMPTY_SELECTOR", "[0].where"),
        (
            [add(where=selector(token_range(128)))],
            "INVALID_ARGUMENT",
            "UNKNOWN_TOKEN",
            "[0].where.include[0].token_ids.ids[0]",
        ),
        ([norm_add(tensor(0 * ONES))], "INVALID_ARGUMENT", "ZERO_VECTOR", "[0].norm_add.vector"),
        (
            [ablate(tensor(ONES), tensor(ONES))],
            "INVALID_ARGUMENT",
            "INVALID_VALUE",
            "[0].ablate.directions[1]",
        ),
        (
            [add(vector_pb2.VectorRef(name="x"))],
            "NOT_FOUND",
            "NAME_NOT_FOUND",
            "[0].add.vector.name",
        ),
        ([add(tensor(ONES * 3e38), scale=2.0)], "INVALID_ARGUMENT", "NON_FINITE", "[0].add.scale"),
        ([add()] * 257, "INVALID_ARGUMENT", "INVALID_VALUE", ""),
        (
            [add(where=selector(*[PROMPT] * 1024))] * 5,
            "INVALID_ARGUMENT",
            "INVALID_VALUE",
            "[4].where",
        ),
    ],
)
async def test_wrong_steering_is_refused_by_field_and_what_holds_goes_on_holding(
    running, steer, code, reason, field
) -> None:
    await set_global(running, add(scale=3.0))
    refusal = await global_refusal(running, *steer)
    assert refusal.brief == (
        Code[code],
        f"REASON_{reason}",
        f"policy.steering.interventions{field}",
    )
    await running.client.generate(request())
    assert ((await held(running)).version, scales(running)) == (1, [[3.0]])


async def test_steering_that_no_engine_can_carry_out_is_refused(running) -> None:
    eight = [band(tensor(ONES), float(i)) for i in range(8)]
    refusal = await global_refusal(running, *[clamp(*eight)] * 9)
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_INVALID_VALUE", "policy.steering")
    assert refusal.message == "72 steps meet at one site; at most 64 can"


async def test_steering_that_could_never_be_in_force_is_refused(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(directions=1)))
    refusal = await global_refusal(running, ablate(tensor(FIRST), tensor(SECOND)))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_BANK_FULL", "policy.steering")
    assert not refusal.retry


async def test_a_request_that_is_impossible_with_it_is_told_so(running) -> None:
    eight = [band(tensor(ONES), float(i)) for i in range(8)]
    await set_global(running, *[clamp(*eight)] * 7, add(tensor(ONES * 3e38)))
    too_long = await running.client.refusal(request(steer=[clamp(*eight), scaled(2.0)]))
    assert too_long.brief == (Code.INVALID_ARGUMENT, "REASON_INVALID_VALUE", "steering")
    assert too_long.message == (
        "together with the server-wide steering: 66 steps meet at one site; at most 64 can"
    )
    too_large = await running.client.refusal(request(steer=[add(tensor(ONES * 2e38))]))
    assert too_large.brief == (
        Code.INVALID_ARGUMENT,
        "REASON_NON_FINITE",
        "steering.interventions[0].add.scale",
    )
    assert "(server-wide steering included)" in too_large.message
    alone = await running.client.refusal(request(steer=[add(tensor(ONES * 2e38), scale=2.0)]))
    assert alone.reason == "REASON_NON_FINITE"


async def test_what_a_request_alone_makes_impossible_is_not_blamed_on_it(
    running, monkeypatch
) -> None:
    await set_global(running, add())
    monkeypatch.setattr(tables, "MAX_PLAN_COST", 0)
    refusal = await running.client.refusal(request(steer=[add(where=selector(window(0, 1)))]))
    assert refusal.message.startswith("the selectors cut the request")


async def test_two_that_set_it_at_once_follow_each_other(running) -> None:
    versions = await asyncio.gather(
        *(set_global(running, add(tensor(one))) for one in (FIRST, SECOND, THIRD))
    )
    assert sorted(versions) == [1, 2, 3]
    last = [FIRST, SECOND, THIRD][versions.index(3)]
    (one,) = (await held(running)).policy.steering.interventions
    assert one.add.vector.digest == digest(last.tobytes())


async def test_it_holds_nothing_that_counts_as_leaked(running) -> None:
    await set_global(running, add())
    await running.client.generate(request())
    stats = await settled(running)
    assert (stats.leaked_count, stats.vector_count) == (0, 1)
    (vector,) = (await running.client.steering.ListVectors(pb.ListVectorsRequest())).vectors
    assert vector.request_count == 0


async def test_admissions_do_not_estimate_the_policy_anew(running, monkeypatch) -> None:
    estimated: list[steering_pb2.Steering] = []
    estimate = estimates.estimate_steering

    def counted(steering: steering_pb2.Steering, *rest: object) -> int:
        estimated.append(steering)
        return estimate(steering, *rest)

    monkeypatch.setattr(estimates, "estimate_steering", counted)
    await set_global(running, add(), add(scale=2.0))
    once = len(estimated)
    assert once > 0
    for prompt_len in range(1, 6):
        ids = types_pb2.TokenIds(ids=[10] * prompt_len)
        await running.client.generate(request(token_ids=ids, steer=[add(scale=1.0 + prompt_len)]))
    own = estimated[once:]
    assert own
    assert {len(steering.interventions) for steering in own} == {1}
