"""Requests beside themselves without their steering, over a real channel."""

import asyncio
from collections import Counter
from dataclasses import replace

import grpc
import pytest

from rheostat_server.generation import responses as generation
from rheostat_server.generation.divergence import Listed, compare
from rheostat_server.requests import sequence as sequences
from rheostat_wire.v1 import (
    engine_service_pb2,
    generation_pb2,
    generation_service_pb2,
    steering_pb2,
    steering_service_pb2,
    types_pb2,
)

from ..conftest import rest
from ..fakes import INFO, VOCABULARY, ScriptedBackend, distribution, sites_with
from ..messages import add, capture, request, selector, window
from ..streams import kinds, settled, until

Sampling = generation_pb2.Sampling
Code = grpc.StatusCode


def compared(**fields: object) -> generation_service_pb2.GenerateRequest:
    return request(with_baseline=True, **{"steer": [add(scale=2.0)], **fields})


def of_kind(events, kind: str) -> list:
    return [getattr(event, kind) for event in events if event.WhichOneof("event") == kind]


def jobs(running, role: str) -> list:
    """Jobs by what they run for: "" the request, "b" its baseline, "s" scores."""
    found = {}
    for job in running.backend.jobs:
        name = job.plan.request_id.split("#")[1].split("@")[0]
        found[name] = job
    return [job for name, job in sorted(found.items()) if name.lstrip("0123456789") == role]


def top(token: int, *, steered: bool) -> Listed:
    """What the scripted engine tells of a distribution."""
    known = dict(list(distribution(token, steered=steered).items())[: INFO.logprobs])
    return Listed(known, min(known.values()))


async def set_global(running, *interventions: steering_pb2.Intervention) -> None:
    steering = steering_pb2.Steering(interventions=interventions)
    await running.client.steering.SetGlobal(
        steering_service_pb2.SetGlobalRequest(policy={"steering": steering})
    )


async def test_a_request_also_runs_without_its_steering_and_events_say_which_is_which(
    running,
) -> None:
    events = await running.client.generate(compared(request_id="r"))
    assert kinds(events)[0] == "started"
    assert kinds(events)[-1] == "receipt"
    said = [(t.baseline, one) for t in of_kind(events, "tokens") for one in t.token_ids]
    assert sorted(said) == [(False, 13), (False, 14), (True, 13), (True, 14)]
    assert sorted((f.baseline, f.token_count) for f in of_kind(events, "finished")) == [
        (False, 2),
        (True, 2),
    ]
    ((own,), (baseline,)) = jobs(running, ""), jobs(running, "b")
    assert [act.scale for act in own.plan.acts] == [2.0]
    assert baseline.plan.acts == ()
    assert baseline.prompt == own.prompt


async def test_both_run_at_once(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    call = running.client.generation.Generate(compared())
    await until(lambda: len(running.backend.jobs) == 2)
    assert (len(jobs(running, "")), len(jobs(running, "b"))) == (1, 1)
    running.backend.hold.set()
    assert kinds(await rest(call))[-1] == "receipt"


async def test_a_sample_and_its_baseline_have_the_same_settings_but_for_logprobs(running) -> None:
    sampling = Sampling(max_tokens=2, n=3, seed=7, temperature=0.5, stop_token_ids=[99])
    await running.client.generate(compared(sampling=sampling))
    own, baseline = jobs(running, ""), jobs(running, "b")
    seeds = [[job.sampling.seed_of(job.sample) for job in side] for side in (own, baseline)]
    assert seeds == [[7, 8, 9], [7, 8, 9]]
    assert [job.sampling.logprobs for job in (own[0], baseline[0])] == [INFO.logprobs, None]
    assert own[0].sampling.stop_token_ids == baseline[0].sampling.stop_token_ids == (99,)


async def test_the_divergence_is_that_of_the_listed_tokens(running) -> None:
    events = await running.client.generate(compared())
    (found,) = of_kind(events, "divergence")
    expected = [compare(top(token, steered=True), top(token, steered=False)) for token in (13, 14)]
    assert list(found.kl) == [pytest.approx(one.kl, rel=1e-5) for one in expected]
    assert list(found.compared) == [pytest.approx(one.compared) for one in expected]
    assert list(found.baseline_logprobs) == [
        pytest.approx(distribution(token, steered=False)[token]) for token in (13, 14)
    ]
    assert found.mean_kl == pytest.approx(sum(one.kl for one in expected) / 2, rel=1e-5)
    assert found.mean_kl > 0.1
    order = kinds(events)
    own_end = next(i for i, e in enumerate(events) if e.HasField("finished"))
    assert own_end < order.index("divergence") < order.index("receipt")


async def test_a_request_without_steering_does_not_diverge(running) -> None:
    events = await running.client.generate(compared(steer=[]))
    (found,) = of_kind(events, "divergence")
    assert list(found.kl) == [0.0, 0.0]


async def test_the_baseline_reads_the_prompt_and_what_the_sample_generated(running) -> None:
    await running.client.generate(compared(sampling=Sampling(max_tokens=3)))
    (score,) = jobs(running, "s")
    assert score.prompt == (10, 11, 12, 13, 14, 15)
    assert score.plan.acts == ()
    settings = score.sampling
    assert (settings.max_tokens, settings.prompt_logprobs) == (1, INFO.logprobs)


async def test_every_sample_is_measured(running) -> None:
    events = await running.client.generate(compared(sampling=Sampling(max_tokens=2, n=3)))
    found = of_kind(events, "divergence")
    assert sorted((one.sample, len(one.kl)) for one in found) == [(0, 2), (1, 2), (2, 2)]
    assert all(one.mean_kl > 0.1 for one in found)


class Scoring(ScriptedBackend):
    """Counts the prompt tokens of the scores that run; none ends before `let_end` is set."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.let_end = asyncio.Event()
        self.tokens = self.most_tokens = 0
        self.ended = 0
        """Samples that have ended, of the request and of its baseline."""

    async def generate(self, job):
        score = "s@" in job.plan.request_id
        self.tokens += len(job.prompt) if score else 0
        self.most_tokens = max(self.most_tokens, self.tokens)
        async for delta in super().generate(job):
            if score:
                await self.let_end.wait()
            yield delta
        self.tokens -= len(job.prompt) if score else 0
        self.ended += not score


@pytest.mark.parametrize(("step_tokens", "most"), [(1, 5), (10, 10), (14, 10), (1000, 30)])
async def test_the_scores_of_a_request_that_run_at_a_time_fit_into_a_step(
    starter, step_tokens, most
) -> None:
    running = await starter(Scoring(info=replace(INFO, step_tokens=step_tokens)))
    backend = running.backend
    call = running.client.generation.Generate(compared(sampling=Sampling(max_tokens=2, n=6)))
    await until(lambda: backend.ended == 12 and backend.tokens >= most)
    await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
    assert backend.tokens == most  # no other score began, though it had the time
    backend.let_end.set()
    events = await rest(call)
    assert sorted(one.sample for one in of_kind(events, "divergence")) == [*range(6)]
    assert all(one.mean_kl > 0.1 for one in of_kind(events, "divergence"))
    assert backend.most_tokens == most
    await settled(running)


@pytest.mark.parametrize("asked", [None, 0, 2])
async def test_only_the_logprobs_that_were_asked_for_are_sent(running, asked) -> None:
    events = await running.client.generate(
        compared(sampling=Sampling(max_tokens=2, logprobs=asked))
    )
    for part in of_kind(events, "tokens"):
        counts = [len(reading.alternatives) for reading in part.logprobs]
        assert counts == ([] if asked is None else [asked] * len(part.token_ids))
    ends = of_kind(events, "finished")
    assert [end.HasField("cumulative_logprob") for end in ends] == [asked is not None] * 2
    assert len(of_kind(events, "divergence")[0].kl) == 2


async def test_asking_for_more_logprobs_compares_more(starter) -> None:
    info = replace(INFO, logprobs=VOCABULARY)
    for asked, listed in ((None, 20), (3, 20), (VOCABULARY, VOCABULARY)):
        running = await starter(ScriptedBackend(info=info))
        sampling = Sampling(max_tokens=1, logprobs=asked)
        events = await running.client.generate(compared(sampling=sampling))
        ((own,), (score,)) = jobs(running, ""), jobs(running, "s")
        assert (own.sampling.logprobs, score.sampling.prompt_logprobs) == (listed, listed)
    assert list(of_kind(events, "divergence")[0].compared) == [pytest.approx(1.0)]


async def test_prompt_logprobs_come_for_both_and_before_their_tokens(running) -> None:
    sampling = Sampling(max_tokens=2, n=2, prompt_logprobs=0)
    events = await running.client.generate(compared(sampling=sampling))
    assert sorted(one.baseline for one in of_kind(events, "prompt_logprobs")) == [False, True]
    for side in (False, True):
        mine = [
            kind
            for kind, event in zip(kinds(events), events, strict=True)
            if kind in ("tokens", "prompt_logprobs") and getattr(event, kind).baseline is side
        ]
        assert mine[0] == "prompt_logprobs"


@pytest.mark.parametrize(("prompt", "measured"), [(61, 2), (62, 1), (63, 0)])
async def test_a_sample_that_fills_the_context_is_measured_up_to_its_last_token(
    running, prompt, measured
) -> None:
    left = min(2, INFO.model_tokens - prompt)
    events = await running.client.generate(
        compared(token_ids=types_pb2.TokenIds(ids=[5] * prompt), sampling=Sampling(max_tokens=left))
    )
    (found,) = of_kind(events, "divergence")
    assert len(found.kl) == len(found.compared) == len(found.baseline_logprobs) == measured
    assert all(len(job.prompt) < INFO.model_tokens for job in running.backend.jobs)
    assert kinds(events)[-1] == "receipt"


async def test_server_wide_steering_stays_in_the_baseline_and_in_what_it_reads(running) -> None:
    await set_global(running, add(scale=0.5))
    await running.client.generate(compared())
    scales = [
        [[act.scale for act in job.plan.acts] for job in jobs(running, role)]
        for role in ("", "b", "s")
    ]
    assert scales == [[[0.5, 2.0]], [[0.5]], [[0.5]]]


async def test_the_receipt_is_about_the_requests_own_samples(running) -> None:
    await set_global(running, add(scale=0.5))
    events = await running.client.generate(compared(captures=[capture()]))
    receipt = events[-1].receipt
    assert receipt.generated_token_count == 2
    assert [one.sites[0].row_count for one in receipt.interventions] == [4, 4]
    assert [rows.sample for rows in receipt.interventions[0].rows] == [0]
    assert receipt.captures[0].sites[0].row_count == 4


async def test_captured_rows_of_the_baseline_are_marked(running) -> None:
    events = await running.client.generate(compared(captures=[capture()]))
    rows = Counter()
    for part in of_kind(events, "captured"):
        rows[part.baseline] += len(part.token_ids)
    assert rows == {False: 4, True: 4}
    assert jobs(running, "s")[0].plan.captures == ()


async def test_room_is_reserved_for_both_at_once(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(bank_rows=1)))
    await set_global(running, add(scale=0.5, where=selector(window(0, 1))))
    refusal = await running.client.refusal(compared())
    assert (refusal.reason, refusal.retry) == ("REASON_BANK_FULL", False)
    assert running.backend.jobs == []
    stats = await settled(running)
    assert (stats.leaked_count, running.manager.ledger.requests) == (0, 0)


async def test_what_the_baseline_reads_with_keeps_its_room_until_the_end(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    await set_global(running, add(scale=0.5))
    call = running.client.generation.Generate(compared())
    await until(lambda: len(running.backend.jobs) == 2)
    assert running.manager.ledger.used("bank_rows") == 2
    running.backend.hold.set()
    assert kinds(await rest(call))[-1] == "receipt"
    await settled(running)
    assert running.manager.ledger.used("bank_rows") == 0


async def test_a_client_that_leaves_ends_both(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    call = running.client.generation.Generate(compared(request_id="r"))
    await until(lambda: len(running.backend.jobs) == 2)
    await call.read()
    call.cancel()
    stats = await settled(running)
    assert sorted(plan_id.split("@")[0] for plan_id in running.backend.aborted) == ["r#0", "r#0b"]
    assert (stats.leaked_count, stats.requests.aborted_count) == (0, 1)


class Reading(ScriptedBackend):
    """Never ends reading what a sample generated."""

    async def generate(self, job):
        if "s@" in job.plan.request_id:
            self.jobs.append(job)
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted.append(job.plan.request_id)
        async for delta in super().generate(job):
            yield delta


async def test_a_client_that_leaves_while_the_baseline_reads_ends_that_too(starter) -> None:
    running = await starter(Reading())
    call = running.client.generation.Generate(compared(request_id="r"))
    await until(lambda: bool(jobs(running, "s")))
    call.cancel()
    stats = await settled(running)
    assert [plan_id.split("@")[0] for plan_id in running.backend.aborted] == ["r#0s"]
    assert stats.requests == engine_service_pb2.RequestCounts(admitted_count=1, aborted_count=1)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("server_wide", [[], [add(scale=0.5)]])
async def test_a_request_that_is_aborted_while_the_baseline_reads_goes_without_its_divergence(
    starter, monkeypatch, server_wide, samples
) -> None:
    monkeypatch.setattr(sequences, "UNSCHEDULED_GRACE", 0.01)
    monkeypatch.setattr(generation, "UNSCHEDULED_GRACE", 0.01)
    running = await starter(Reading())
    await set_global(running, *server_wide)
    sampling = Sampling(max_tokens=2, n=samples)
    call = running.client.generation.Generate(compared(sampling=sampling))
    await until(lambda: len(jobs(running, "s")) == min(samples, 3))  # those that fit into a step
    await running.manager.drain(0)
    events = await rest(call)
    assert [one.reason for one in of_kind(events, "finished")] == [
        types_pb2.FINISH_REASON_LENGTH
    ] * (2 * samples)
    assert of_kind(events, "divergence") == []
    assert events[-1].receipt.generated_token_count == 2 * samples


async def test_samples_that_are_aborted_are_not_measured(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    call = running.client.generation.Generate(compared())
    await until(lambda: len(running.backend.jobs) == 2)
    await running.manager.drain(0)
    events = await rest(call)
    reasons = [one.reason for one in of_kind(events, "finished")]
    assert reasons == [types_pb2.FINISH_REASON_ABORTED] * 2
    assert of_kind(events, "divergence") == []
    assert kinds(events)[-1] == "receipt"


async def test_a_baseline_that_fails_fails_the_request(starter) -> None:
    class Broken(ScriptedBackend):
        async def generate(self, job):
            if "b@" in job.plan.request_id:
                raise KeyError("secret")
            async for delta in super().generate(job):
                yield delta

    running = await starter(Broken())
    refusal = await running.client.refusal(compared())
    assert refusal.brief == (Code.INTERNAL, "REASON_INTERNAL", "")
    stats = await settled(running)
    assert (stats.leaked_count, stats.requests.failed_count) == (0, 1)
