"""Requests that run before the server serves."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

import pytest

from rheostat_engine import Codec, Kind
from rheostat_server import serve
from rheostat_server.config import ServerConfig
from rheostat_server.engine.backend import Delta, Job
from rheostat_server.engine.warm_up import warm_up
from rheostat_server.errors import Defect, EngineFailed, EngineLost
from rheostat_server.serve import run

from ..fakes import INFO, PARALLEL, SITES, ScriptedBackend, sites_with


@dataclass
class Dies(ScriptedBackend):
    """Loses its engine at one kind of request."""

    at: str = "greedy"

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        if job.plan.request_id.endswith(self.at):
            self.die()
            raise EngineLost("the engine died")
        async for delta in super().generate(job):
            yield delta


@dataclass
class Refuses(ScriptedBackend):
    """Cannot run one kind of request."""

    what: str = ""
    error: type[Exception] = ValueError

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        if job.plan.request_id.endswith(self.what):
            raise self.error("no such head")
        async for delta in super().generate(job):
            yield delta


async def test_one_request_of_every_kind_runs() -> None:
    backend = ScriptedBackend()
    await warm_up(backend)
    asked = [job.sampling for job in backend.jobs]
    assert {one.temperature for one in asked} == {0.0, 1.0}
    for name in ("top_k", "min_p", "logprobs", "prompt_logprobs", "stop", "stop_token_ids"):
        assert any(getattr(one, name) for one in asked), name
    assert {one.seed for one in asked} == {None, 0}
    assert any(one.top_p < 1 for one in asked)
    assert any(one.only_token is not None for one in asked)
    for name in ("repetition", "presence", "frequency"):
        assert len({getattr(one, f"{name}_penalty") for one in asked}) == 2
    assert {job.lora for job in backend.jobs} == {"", "fables"}
    assert {act.kind for job in backend.jobs for act in job.plan.acts} == {
        kind for kind in Kind if kind < Kind.GATE
    }
    forms = [capture.encoding for job in backend.jobs for capture in job.plan.captures]
    assert {form.codec for form in forms if form is not None} == set(Codec)
    assert any(form is not None and form.directions is not None for form in forms)
    assert None in forms


async def test_nothing_of_the_requests_stays() -> None:
    backend = ScriptedBackend()
    await warm_up(backend)
    assert backend.plans == {}
    assert backend.dropped == backend.loaded != []


@pytest.mark.parametrize(
    "backend",
    [
        ScriptedBackend(text=None, sites=PARALLEL),
        ScriptedBackend(info=replace(INFO, model_tokens=2, logprobs=0, loras=())),
        ScriptedBackend(sites=sites_with(bank_rows=0, directions=0)),
        ScriptedBackend(sites=replace(SITES, experts={1: 2})),
        ScriptedBackend(sites=replace(SITES, refused=dict.fromkeys(PARALLEL.refused, "no"))),
    ],
    ids=["no tokenizer", "two tokens", "no bank", "routers", "few points"],
)
async def test_no_request_asks_for_what_the_model_lacks(backend: ScriptedBackend) -> None:
    await warm_up(backend)
    info, sites = backend.info, backend.sites
    for job in backend.jobs:
        assert len(job.prompt) + job.sampling.max_tokens <= info.model_tokens
        assert max(job.prompt) < info.vocabulary
        assert (job.sampling.logprobs or 0) <= info.logprobs
        assert not job.sampling.stop or backend.text is not None
        assert not job.plan.acts or sites.capacity.bank_rows


@pytest.mark.parametrize("at", ["greedy", "log-probabilities", "penalties", "steering"])
async def test_an_engine_that_dies_at_a_first_request_has_failed(at: str) -> None:
    with pytest.raises(EngineFailed, match=rf"the model toy.*\({at}\): the engine died"):
        await warm_up(Dies(at=at))


async def test_an_engine_that_never_releases_a_request_has_failed(monkeypatch) -> None:
    monkeypatch.setattr("rheostat_server.engine.warm_up._RELEASE_SECONDS", 0.1)
    backend = ScriptedBackend()
    monkeypatch.setattr(backend, "_release", lambda job, computed: None)
    problem = r"\(captured rows\): the request ended, but no worker released it within 0.1 s"
    async with asyncio.timeout(10):
        with pytest.raises(EngineFailed, match=problem):
            await warm_up(backend)


async def test_an_engine_that_refuses_the_plain_request_has_failed() -> None:
    with pytest.raises(EngineFailed, match=r"first requests \(greedy\): no such head"):
        await warm_up(Refuses(what="greedy", error=Defect))


async def test_an_engine_that_refuses_another_kind_serves_and_says_so(caplog) -> None:
    await warm_up(Refuses(what="prompt log-probabilities"))
    (record,) = [one for one in caplog.records if one.name.startswith("rheostat")]
    assert "requests of this kind fail: prompt log-probabilities: no such head" in record.message


def test_a_server_whose_engine_dies_at_its_first_request_does_not_start(
    monkeypatch, capsys
) -> None:
    async def bring_up(_: ServerConfig) -> ScriptedBackend:
        backend = Dies()
        await warm_up(backend)
        return backend

    monkeypatch.setattr(serve, "start_backend", bring_up)
    assert run(ServerConfig(model="toy", port=0)) == EngineFailed.exit_code == 5
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("rheostat: the engine loaded the model toy, but failed at its first")
    assert "--enforce-eager" in said
