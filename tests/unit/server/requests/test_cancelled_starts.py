"""A client that cancels while its sample is being added to vLLM leaves nothing behind.

`AsyncLLM.add_request` registers a request, sends it to the engine, and then waits until the message
is on its way. A client may cancel at each of these moments.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from rheostat_server.engine import vllm_backend, vllm_templates
from rheostat_server.engine.backend import Start
from rheostat_server.engine.vllm_backend import VllmBackend
from rheostat_server.engine.vllm_templates import RequestTemplates
from rheostat_wire.v1 import generation_pb2

from ..fakes import ScriptedBackend
from ..messages import add, request
from ..streams import settled, until


class EngineDead(Exception):
    """Stands in for vLLM's."""


@dataclass
class Llm:
    """An `AsyncLLM` that waits before or after it sends a request to the engine."""

    engine: "Backend"
    after_sending: bool
    waits_for: int
    """The sample whose call does not return."""
    known: set[str] = field(default_factory=set)
    """Requests of its output processor."""
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    tokenizer: None = None

    async def add(self, request_id: str) -> SimpleNamespace:
        """Adds a request as `AsyncLLM.add_request` does."""
        self.known.add(request_id)
        stuck = f"#{self.waits_for}@" in request_id
        if stuck and not self.after_sending:
            await self._wait()
        await self.engine.scripted_add(request_id)
        if stuck:
            await self._wait()
        return SimpleNamespace(output=None)

    async def _wait(self) -> None:
        self.waiting.set()
        await asyncio.Event().wait()

    async def abort(self, request_ids: Sequence[str]) -> None:
        aborted = [one for one in request_ids if one in self.known]
        self.known.difference_update(aborted)
        await self.engine.scripted_abort(aborted)


class Template:
    """Stands in for `RequestTemplate`."""

    async def add(self, llm, request_id, *_: object) -> list[SimpleNamespace]:
        return [await llm.add(request_id)]


class Backend(ScriptedBackend):
    """The scripted engine behind the code that calls `AsyncLLM`."""

    def use(self, llm: Llm) -> None:
        """Gets all samples through an `AsyncLLM`."""
        self.llm = llm
        self.vllm = object.__new__(VllmBackend)
        self.vllm._loaded = SimpleNamespace(llm=llm, loras={})
        self.vllm._templates = RequestTemplates({}, has_tokenizer=False)
        self.vllm._texts = self.vllm._turns = None
        self.jobs_by_id = {}

    async def add_request(self, job, receive, fail) -> None:
        self.jobs_by_id[job.plan.request_id] = job, receive, fail
        await VllmBackend.add_requests(self.vllm, [Start(job, receive, fail)])

    async def abort(self, plan_ids: Sequence[str]) -> None:
        await VllmBackend.abort(self.vllm, plan_ids)

    async def scripted_add(self, plan_id: str) -> None:
        await super().add_request(*self.jobs_by_id[plan_id])

    async def scripted_abort(self, plan_ids: Sequence[str]) -> None:
        await super().abort(plan_ids)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the names of vLLM that the code imports."""
    monkeypatch.setattr(vllm_backend, "engine_dead_error", lambda: EngineDead)
    monkeypatch.setattr(vllm_templates, "_sampling_params", lambda *_: None)
    monkeypatch.setattr(vllm_templates, "request_template", lambda *_: Template())
    monkeypatch.setattr(vllm_backend, "receive_outputs", lambda *_: None)


@pytest.mark.parametrize("steer", [[], [add()]], ids=["plain", "steered"])
@pytest.mark.parametrize("sample", [0, 2])
@pytest.mark.parametrize("after_sending", [False, True])
async def test_a_cancel_while_a_sample_is_added_leaves_nothing(
    starter, steer, sample: int, after_sending: bool
) -> None:
    backend = Backend(hold=asyncio.Event())
    backend.use(llm := Llm(backend, after_sending, sample))
    running = await starter(backend)
    sampling = generation_pb2.Sampling(max_tokens=2, n=3, temperature=1.0)
    message = request(request_id="r", sampling=sampling, steer=steer)
    call = running.client.generation.Generate(message)
    await asyncio.wait_for(llm.waiting.wait(), 10)
    call.cancel()
    stats = await settled(running)
    await until(lambda: not backend.tasks)
    sent = [f"r#{number}" for number in range(sample + after_sending)]
    assert sorted(name.split("@")[0] for name in backend.aborted) == sent
    assert llm.known == set()
    assert (stats.leaked_count, stats.requests.aborted_count) == (0, 1)
    assert running.manager.ledger.requests == 0
    assert running.manager.store.pins == 0
