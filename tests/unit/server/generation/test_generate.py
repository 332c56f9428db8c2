"""Generate over a real channel, with a scripted engine behind it."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import grpc
import numpy as np
import pytest

from rheostat_server.admission.admit import admit
from rheostat_server.engine.backend import Delta, Job
from rheostat_server.generation.responses import run
from rheostat_wire.v1 import (
    generation_pb2,
    receipt_pb2,
    tensor_pb2,
    types_pb2,
)

from ..conftest import rest
from ..fakes import INFO, STREAM_NORM, WIDTH, ScriptedBackend, row
from ..messages import (
    GENERATED,
    ONES,
    PROMPT,
    add,
    capture,
    request,
    selector,
    site_set,
    tensor,
    window,
)
from ..streams import captured, kinds, received, settled, tokens, until
from .by_hand import InOneStep

PRE, POST = types_pb2.POINT_RESID_PRE, types_pb2.POINT_RESID_POST
Sampling = generation_pb2.Sampling
Code = grpc.StatusCode


async def test_a_plain_request_streams_tokens_and_ends_with_a_receipt(running) -> None:
    events = await running.client.generate(request(request_id="r", return_prompt_token_ids=True))
    assert kinds(events)[0] == "started"
    assert kinds(events)[-2:] == ["finished", "receipt"]
    assert {*kinds(events)[1:-2]} == {"tokens"}
    assert events[0].started == generation_pb2.Started(
        request_id="r",
        model_name="toy",
        prompt_token_count=3,
        prompt_token_ids=types_pb2.TokenIds(ids=[10, 11, 12]),
    )
    parts = [event.tokens for event in events[1:-2]]
    assert [(p.offset + k, t) for p in parts for k, t in enumerate(p.token_ids)] == [
        (0, 13),
        (1, 14),
    ]
    assert "".join(part.text for part in parts) == "\r\x0e"
    finished = events[-2].finished
    assert (finished.reason, finished.token_count) == (types_pb2.FINISH_REASON_LENGTH, 2)
    assert not finished.HasField("cumulative_logprob")
    assert finished.finished_after.ToNanoseconds() >= finished.first_token_after.ToNanoseconds() > 0
    assert events[-1].receipt == receipt_pb2.Receipt(
        request_id="r", prompt_token_count=3, generated_token_count=2
    )


async def test_text_and_chat_reach_the_engine_as_tokens(running) -> None:
    await running.client.generate(request(text="ab"))
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role="u", content="x")])
    await running.client.generate(request(chat=chat))
    assert [job.prompt for job in running.backend.jobs] == [
        (1, 97, 98),
        tuple(ord(char) for char in "u: x\n>"),
    ]


async def test_samples_run_with_plans_and_seeds_of_their_own(running) -> None:
    sampling = Sampling(max_tokens=3, n=3, seed=7)
    events = await running.client.generate(
        request(request_id="r", sampling=sampling, steer=[add()])
    )
    assert [tokens(events, i) for i in range(3)] == [[13, 14, 15]] * 3
    jobs = sorted(running.backend.jobs, key=lambda job: job.sample)
    ids = [job.plan.request_id for job in jobs]
    assert [plan_id.split("@")[0] for plan_id in ids] == ["r#0", "r#1", "r#2"]
    assert [job.sampling.seed_of(job.sample) for job in jobs] == [7, 8, 9]
    receipt = events[-1].receipt
    assert receipt.generated_token_count == 9
    assert [rows.sample for rows in receipt.interventions[0].rows] == [0, 1, 2]
    assert receipt.interventions[0].sites[0].row_count == 3 * 5


async def test_logprobs_come_if_asked_for_and_the_prompts_first(running) -> None:
    sampling = Sampling(max_tokens=2, n=2, logprobs=1, prompt_logprobs=0)
    events = await running.client.generate(request(sampling=sampling))
    assert kinds(events)[1] == "prompt_logprobs"
    assert kinds(events).count("prompt_logprobs") == 1
    assert [t.token.token_id for t in events[1].prompt_logprobs.tokens] == [11, 12]
    parts = [e.tokens for e in events if e.WhichOneof("event") == "tokens"]
    assert all(len(part.logprobs) == len(part.token_ids) for part in parts)
    assert sorted(tokens(events, 0) + tokens(events, 1)) == [13, 13, 14, 14]
    ends = [e.finished for e in events if e.WhichOneof("event") == "finished"]
    assert [end.cumulative_logprob for end in ends] == [pytest.approx(2 * math.log(0.5))] * 2


async def test_the_receipt_says_what_was_touched_where_and_how_strongly(running) -> None:
    vector = tensor(np.full((1, WIDTH), 2.0))
    steer = [
        add(vector, sites=site_set(PRE, layers=[2, 1]), scale=-0.5, where=selector(PROMPT)),
        add(vector, scale=0),
        add(vector, where=selector(GENERATED, exclude=[window(4, 5)])),
    ]
    events = await running.client.generate(request(sampling=Sampling(max_tokens=4), steer=steer))
    (digest,) = running.backend.jobs[0].plan.acts[0].vectors

    def applied(index, sites, positions) -> receipt_pb2.AppliedIntervention:
        message = receipt_pb2.AppliedIntervention(
            intervention=receipt_pb2.InterventionRef(
                origin=receipt_pb2.ORIGIN_REQUEST, index=index, op=receipt_pb2.OP_ADD
            ),
            digests=[digest],
            sites=[
                receipt_pb2.AppliedSite(
                    site=types_pb2.Site(point=point, layer=layer), row_count=rows, dose=dose
                )
                for point, layer, rows, dose in sites
            ],
        )
        if positions is not None:
            runs = [types_pb2.PositionRun(start=start, count=n) for start, n in positions]
            message.rows.add(sample=0, positions=runs)
        return message

    def dose(norm: float) -> receipt_pb2.Dose:
        relative = norm / STREAM_NORM
        return receipt_pb2.Dose(norm=norm, relative_mean=relative, relative_max=relative)

    assert list(events[-1].receipt.interventions) == [
        applied(0, [(PRE, 1, 3, dose(2)), (PRE, 2, 3, dose(2))], [(0, 3)]),
        applied(1, [(POST, 1, 0, None)], None),
        applied(2, [(POST, 1, 2, dose(4))], [(3, 1), (5, 1)]),
    ]


async def test_inline_captures_bring_every_selected_row_once_with_its_label(running) -> None:
    specs = [
        capture(site_set(PRE, POST, layers=[1, 0])),
        capture(site_set(PRE, layers=[2]), where=selector(window(-1), GENERATED)),
    ]
    events = await running.client.generate(
        request(sampling=Sampling(max_tokens=3, n=2), captures=specs)
    )
    indices = {(PRE, 0): 0, (POST, 0): 4, (PRE, 1): 4, (POST, 1): 8}
    expected = {
        (0, sample, *site, position): row(index, position).tolist()
        for sample in (0, 1)
        for site, index in indices.items()
        for position in range(5)
    }
    expected |= {
        (1, sample, PRE, 2, position): row(8, position).tolist()
        for sample in (0, 1)
        for position in (2, 3, 4)
    }
    assert captured(events) == expected
    labels = [list(e.captured.token_ids) for e in events if e.WhichOneof("event") == "captured"]
    assert {token for part in labels for token in part} == {10, 11, 12, 13, 14}
    receipt = events[-1].receipt
    assert [[site.row_count for site in c.sites] for c in receipt.captures] == [[10] * 4, [6]]


async def test_rows_beyond_the_last_token_are_not_rows_of_the_request(starter) -> None:
    running = await starter(ScriptedBackend(overrun=2))
    events = await running.client.generate(request(captures=[capture()]))
    assert sorted(key[-1] for key in captured(events)) == [0, 1, 2, 3]


async def test_rows_come_in_the_type_that_was_asked_for(running) -> None:
    spec = capture(dtype=tensor_pb2.DTYPE_BFLOAT16)
    events = await running.client.generate(request(captures=[spec]))
    parts = [e.captured.tensor for e in events if e.WhichOneof("event") == "captured"]
    assert {part.dtype for part in parts} == {tensor_pb2.DTYPE_BFLOAT16}
    assert sum(len(part.inline) for part in parts) == 4 * WIDTH * 2


async def test_vectors_are_loaded_once_and_pinned_while_they_are_used(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    vector = tensor(ONES)
    calls = [running.client.generation.Generate(request(steer=[add(vector)])) for _ in range(2)]
    for call in calls:
        assert (await call.read()).HasField("started")
        assert (await call.read()).HasField("tokens")
    assert (len(running.backend.loaded), running.manager.store.pins) == (1, 2)
    running.backend.hold.set()
    for call in calls:
        assert (await rest(call))[-1].HasField("receipt")
    stats = await settled(running)
    assert (running.manager.store.pins, stats.vector_count, stats.leaked_count) == (0, 1, 0)


async def test_a_vector_that_left_the_store_leaves_the_workers_and_can_come_back(starter) -> None:
    running = await starter(vector_store_bytes=WIDTH * 4)
    first, second = tensor(ONES), tensor(2 * ONES)
    for vector in (first, second, first):
        await running.client.generate(request(steer=[add(vector)]))
    one, two = running.backend.loaded[:2]
    assert running.backend.loaded == [one, two, one]
    assert running.backend.dropped == [one, two]


async def test_a_running_id_is_refused_and_free_again_afterwards(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    call = running.client.generation.Generate(request(request_id="same"))
    await call.read()
    refusal = await running.client.refusal(request(request_id="same"))
    assert refusal.brief == (Code.ALREADY_EXISTS, "REASON_DUPLICATE_REQUEST", "request_id")
    assert refusal.resource == "same"
    running.backend.hold.set()
    assert (await rest(call))[-1].HasField("receipt")
    assert kinds(await running.client.generate(request(request_id="same")))[-1] == "receipt"


async def test_a_step_too_many_does_not_count(starter) -> None:
    running = await starter(ScriptedBackend(overrun=1, recomputed=7))
    events = await running.client.generate(request(steer=[add()]))
    receipt = events[-1].receipt
    assert receipt.recomputed_token_count == 7
    assert [site.row_count for site in receipt.interventions[0].sites] == [4]
    assert list(receipt.interventions[0].rows[0].positions) == [
        types_pb2.PositionRun(start=0, count=4)
    ]


class Starting(ScriptedBackend):
    """Notes in which iteration of the event loop each sample starts."""

    def __init__(self, **script: object) -> None:
        super().__init__(**script)
        self.iteration = 0
        self.starts: list[int] = []

    def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        self.starts.append(self.iteration)
        return super().generate(job)

    def count_iterations(self) -> None:
        self.iteration += 1
        asyncio.get_running_loop().call_soon(self.count_iterations)


async def test_samples_of_a_long_prompt_start_in_different_iterations_of_the_event_loop(
    starter,
) -> None:
    info = replace(INFO, model_tokens=16 << 10, running_samples=64)
    running = await starter(Starting(info=info))
    running.backend.count_iterations()
    ids = types_pb2.TokenIds(ids=[5] * 15_000)
    sampling = generation_pb2.Sampling(max_tokens=2, n=16, temperature=1.0)
    events = await rest(
        running.client.generation.Generate(request(token_ids=ids, sampling=sampling))
    )
    assert kinds(events).count("finished") == 16
    assert len(set(running.backend.starts)) == 16
    running.backend.starts.clear()
    await rest(running.client.generation.Generate(request(text="ab", sampling=sampling)))
    assert len(set(running.backend.starts)) == 2, "a short prompt needs no pauses"


class Gated(ScriptedBackend):
    """Takes a request only once a gate is open."""

    def __init__(self, **script: object) -> None:
        super().__init__(**script)
        self.gate = asyncio.Event()
        self.asked = 0

    async def add_request(
        self, job: Job, receive: Callable[[Delta], None], fail: Callable[[Exception], None]
    ) -> None:
        self.asked += 1
        await self.gate.wait()
        await super().add_request(job, receive, fail)


async def test_a_sample_does_not_start_after_its_client_has_left(starter) -> None:
    running = await starter(Gated())
    call = running.client.generation.Generate(request())
    await until(lambda: running.backend.asked == 1)
    call.cancel()
    await settled(running)
    running.backend.gate.set()
    await asyncio.sleep(0.05)
    assert running.backend.jobs == []


async def test_a_request_that_the_engine_refuses_fails_alone(starter) -> None:
    class Refuses(ScriptedBackend):
        async def add_request(self, job: Job, receive, fail) -> None:
            if job.plan.request_id.startswith("bad"):
                raise ValueError("no such head")
            await super().add_request(job, receive, fail)

    running = await starter(Refuses())
    refusal = await running.client.refusal(request(request_id="bad"))
    assert refusal.brief[1] == "REASON_INTERNAL"
    assert "no such head" not in refusal.message
    assert kinds(await running.client.generate(request()))[-1] == "receipt"


async def test_tokens_wait_for_the_rows_of_few_requests(starter) -> None:
    running, count = await starter(InOneStep()), 40
    order: list[str] = []

    async def stream(request_id: str) -> None:
        sampling = Sampling(max_tokens=1)
        wanted = request(request_id=request_id, sampling=sampling, captures=[capture()])
        admitted = await admit(wanted, running.manager.admission)
        async for response in run(admitted, running.manager):
            order.append(received(response).WhichOneof("event"))

    streams = [asyncio.create_task(stream(f"r{number}")) for number in range(count)]
    await until(lambda: order == ["started"] * count)
    running.backend.step()
    await asyncio.gather(*streams)
    last_token = max(place for place, kind in enumerate(order) if kind == "tokens")
    assert order[:last_token].count("captured") <= 2  # while readers wait, one in each iteration
    assert order.count("captured") == count
