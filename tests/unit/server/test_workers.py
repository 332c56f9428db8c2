"""Questions to the workers, with a stand-in for vLLM's engine."""

import asyncio
from dataclasses import dataclass, field

import pytest

from rheostat_server import vllm_backend
from rheostat_server.errors import EngineLost
from rheostat_server.vllm_backend import ask_workers

from .streams import until


@dataclass
class Engine:
    """Answers once `answer` is set."""

    dead: bool = False
    looks: int = 0
    answer: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)

    @property
    def errored(self) -> bool:
        self.looks += 1
        return self.dead

    async def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[int]:
        self.asked.append((method, args))
        await self.answer.wait()
        return [1, 2]


async def test_an_answer_is_passed_on() -> None:
    llm = Engine()
    llm.answer.set()
    assert await ask_workers(llm, "count", 3) == [1, 2]
    assert llm.asked == [("count", (3,))]


async def test_a_slow_answer_is_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(vllm_backend, "_HEARTBEAT", 0.001)
    llm = Engine()
    asking = asyncio.create_task(ask_workers(llm, "count"))
    await until(lambda: llm.looks > 2)
    assert not asking.done()
    llm.answer.set()
    assert await asking == [1, 2]


async def test_a_dead_engine_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(vllm_backend, "_HEARTBEAT", 0.001)
    with pytest.raises(EngineLost):
        await ask_workers(Engine(dead=True), "count")
