"""A real server with a scripted engine, in a thread of its own, and both clients that subscribe."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator

import rheostat
from rheostat_engine import Point, Site
from rheostat_server.config import ServerConfig
from rheostat_server.serve import RunningServer, start

from ..server.fakes import WIDTH, ScriptedBackend, row

ROW = 4 * WIDTH
"""Bytes of a row."""
PROMPT = [10, 11, 12]


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine) -> object:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def do(self, act: Callable) -> object:
        async def done() -> object:
            return act()

        return self.run(done())

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class RowsServer:
    """A server that runs."""

    def __init__(self, backend: ScriptedBackend | None = None, **config: object) -> None:
        self.backend = backend or ScriptedBackend()
        self._thread = LoopThread()
        settings = ServerConfig(**{"model": "toy", "port": 0, "drain_grace": 0.0, **config})

        async def bring_up(_: ServerConfig) -> ScriptedBackend:
            return self.backend

        self._server = self._thread.run(start(settings, bring_up))
        self.port = self._server.port
        self.target = f"127.0.0.1:{self.port}"
        self.engine = rheostat.connect(self.target)
        """A client that runs requests."""

    def generate(self, request_id: str, tokens: int = 3, **options: object) -> rheostat.Generation:
        """Run a request of three prompt tokens."""
        return self.engine.generate(
            PROMPT, request_id=request_id, max_tokens=tokens, temperature=0, **options
        )

    def do(self, act: Callable) -> object:
        """Do something on the server's loop."""
        return self._thread.do(act)

    def ask(self, question: Callable) -> object:
        """What the host's subscriptions answer."""
        return self.do(lambda: question(self._server.readiness.manager().subscriptions))

    def ask_watches(self, question: Callable) -> object:
        """What the host's watches answer."""
        return self.do(lambda: question(self._server.readiness.manager().watches))

    def kept(self, name: str) -> int:
        """Bytes of a subscription that were sent and are not acknowledged."""
        return self.ask(lambda them: them.named(name, "").buffer.kept)

    def crash(self) -> None:
        """End every call and close the port, without a word to anybody."""
        self._thread.run(self._server.grpc.stop(0))

    def stop(self) -> None:
        self.engine.close()
        self._thread.run(self._server.stop(0))
        self._thread.end()


class LoadingServer:
    """A server that listens and never has its model."""

    def __init__(self, port: int) -> None:
        self._thread = LoopThread()
        self._server = self._thread.run(self._bound(port))

    @staticmethod
    async def _bound(port: int) -> RunningServer:
        server = RunningServer(ServerConfig(model="toy", port=port, drain_grace=0.0))
        await server.bind()
        return server

    def stop(self) -> None:
        self._thread.run(self._server.stop(0))
        self._thread.end()


class SyncSubscriber:
    """The synchronous client."""

    def __init__(self, target: str) -> None:
        self.engine = rheostat.connect(target)

    def subscribe(self, **options: object) -> rheostat.Subscription:
        return self.engine.subscribe(**options)

    def resume(self, cursor: rheostat.Cursor, **options: object) -> rheostat.Subscription:
        return self.engine.resume(cursor, **options)

    def watch(self, **options: object) -> rheostat.Watch:
        return self.engine.watch(**options)

    def cut(self, subscription: "rheostat.Subscription | rheostat.Watch") -> None:
        """Break its connection."""
        subscription._worker._responses.cancel()

    def end(self) -> None:
        self.engine.close()


class _Driven:
    """A subscription or watch of the asyncio client with the face of the synchronous one."""

    def __init__(
        self, thread: LoopThread, subscription: "rheostat.aio.Subscription | rheostat.aio.Watch"
    ) -> None:
        self.thread, self.inner = thread, subscription

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        async def step() -> object:
            return await anext(self.inner, None)

        event = self.thread.run(step())
        if event is None:
            raise StopIteration
        return event

    def ack(self) -> None:
        self.thread.do(self.inner.ack)

    def stop(self, request_id: str, label: str = "") -> int:
        return self.thread.do(lambda: self.inner.stop(request_id, label))

    def steer(self, request_id: str, steering: object) -> int:
        return self.thread.do(lambda: self.inner.steer(request_id, steering))

    def gain(self, request_id: str, factor: float) -> int:
        return self.thread.do(lambda: self.inner.gain(request_id, factor))

    def finish(self) -> None:
        self.thread.do(self.inner.finish)

    def leave(self) -> None:
        self.thread.run(self.inner.leave())

    def close(self) -> None:
        self.thread.run(self.inner.close())

    def __enter__(self) -> "_Driven":
        return self

    def __exit__(self, *error: object) -> None:
        self.thread.run(self.inner.__aexit__(*error))


def inner(subscription: "rheostat.Subscription | _Driven") -> object:
    """The client's own subscription."""
    return subscription.inner if isinstance(subscription, _Driven) else subscription


class AioSubscriber:
    """The asyncio client, in a loop that runs meanwhile."""

    def __init__(self, target: str) -> None:
        self.thread = LoopThread()
        self.engine = rheostat.aio.connect(target)

    def subscribe(self, **options: object) -> _Driven:
        return self._entered(lambda: self.engine.subscribe(**options))

    def resume(self, cursor: rheostat.Cursor, **options: object) -> _Driven:
        return self._entered(lambda: self.engine.resume(cursor, **options))

    def watch(self, **options: object) -> _Driven:
        return self._entered(lambda: self.engine.watch(**options))

    def _entered(self, make: Callable) -> _Driven:
        async def enter() -> _Driven:
            return _Driven(self.thread, await make().__aenter__())

        return self.thread.run(enter())

    def cut(self, subscription: _Driven) -> None:
        self.thread.do(subscription.inner._worker._responses.cancel)

    def end(self) -> None:
        self.thread.run(self.engine.close())
        self.thread.end()


def expected(request_id: str, *layers: int, tokens: int = 3) -> dict:
    """Every row of such a request at resid_post: (request, layer, position, token) -> row."""
    return {
        (request_id, layer, position, 10 + position): row(
            Site(Point.RESID_POST, layer).index, position
        ).tolist()
        for layer in layers
        for position in range(len(PROMPT) + tokens - 1)
    }


def rows_of(events) -> dict:
    """(request, layer, position, token) -> row; each once."""
    found = {}
    for event in events:
        if not isinstance(event, rheostat.CapturedRows):
            continue
        for site, rows in zip(event.sites, event.values, strict=True):
            for position, token, values in zip(
                event.positions.tolist(), event.token_ids.tolist(), rows.tolist(), strict=True
            ):
                key = (event.request_id, site.layer, position, token)
                assert key not in found
                found[key] = values
    return found


def ends_of(events) -> dict[str, rheostat.EndOfRequest]:
    """By request."""
    return {event.request_id: event for event in events if isinstance(event, rheostat.EndOfRequest)}


def until_ends(subscription, count: int = 1) -> list:
    """The events until so many requests have ended."""
    events = []
    while len(ends_of(events)) < count:
        events.append(next(subscription))
    return events


def until(true: Callable[[], bool]) -> None:
    """Waits for something that happens soon."""
    for _ in range(500):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")
