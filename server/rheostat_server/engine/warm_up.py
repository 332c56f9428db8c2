"""Warm-up: requests that a new engine runs before the server serves.

Why before
    The first request of each kind makes vLLM import, compile and allocate. This takes seconds, and
    every other stream waits. Also, a model that the engine cannot run fails only at its first
    token. The server must then not start.

Invariant: every kind of request that a client may send has run once, alone or beside others. The
plain request runs first, because without it no other can succeed.
"""

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rheostat_engine import (
    OPEN_END,
    Act,
    Activation,
    Band,
    CapacityLedger,
    Capture,
    Codec,
    Combine,
    Directions,
    Event,
    Form,
    Gate,
    GateCondition,
    Hold,
    Installed,
    Kind,
    ModelSites,
    Normalise,
    Plan,
    Point,
    Pool,
    Reading,
    Released,
    RowEncoding,
    Site,
)
from rheostat_server.config import ModelInfo
from rheostat_server.engine.backend import Backend, Delta, Job, Start
from rheostat_server.engine.sampling import SamplingSettings
from rheostat_server.errors import EngineFailed, EngineLost, RheostatError
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Vector, make_vector

_LOG = logging.getLogger(__name__)

_PROMPT_TOKENS = 8
_NEW_TOKENS = 3
"""One token of the prefill, and two of decode steps, because the second decode step reuses compiled
code and buffers of the first."""

_EVERYWHERE = ((0, OPEN_END),)

_RELEASE_SECONDS = 60.0
"""Seconds that the workers have to release a request that has ended. They release it in their next
step."""

_SCALE = 1e-3
"""Scale of all changes of the steered requests. Their tokens are discarded."""


class WarmUpRequest(NamedTuple):
    """A request of the warm-up."""

    name: str
    """Its kind, for messages."""
    sampling: SamplingSettings
    plan: Plan = Plan("")
    """The plan; its request id is set when the request runs."""
    lora: str = ""
    """Name of the adapter; empty for none."""


async def warm_up(backend: Backend) -> None:
    """Runs one request of every kind. Returns when the workers have released all of them.

    Cached prefixes and counts remain in the engine; the caller drops them.

    Raises:
        EngineFailed: the plain request failed, the engine died, or a worker kept a request.
    """
    await _WarmUp(backend).run()


def warm_up_requests(
    info: ModelInfo, sites: ModelSites, vector: bytes, *, texts: bool
) -> tuple[list[WarmUpRequest], list[WarmUpRequest]]:
    """Returns requests to run one after another, and requests to run together after them.

    Both are needed, because vLLM compiles some functions once for one request and once for several.

    Args:
        info: the model.
        sites: the sites that may be captured and steered.
        vector: digest of a loaded vector with one row.
        texts: whether the model has a tokenizer. Without one, stop texts are refused.
    """
    new_tokens = max(1, min(_NEW_TOKENS, info.model_tokens - 1))
    logprobs = min(2, info.logprobs)
    greedy = SamplingSettings(new_tokens, temperature=0.0, ignore_eos=True)
    random = replace(greedy, temperature=1.0)
    filtered = replace(random, top_k=min(5, info.vocabulary), top_p=0.9, min_p=0.01)
    alone = [
        WarmUpRequest("greedy", greedy),
        WarmUpRequest("random", random),
        WarmUpRequest("log-probabilities", replace(greedy, logprobs=logprobs)),
    ]
    together = [
        WarmUpRequest("random beside others", random),
        WarmUpRequest("top_k, top_p and min_p", filtered),
        WarmUpRequest("seed", replace(filtered, seed=0)),
        WarmUpRequest(
            "penalties",
            replace(
                random,
                logprobs=logprobs,
                repetition_penalty=1.1,
                presence_penalty=0.1,
                frequency_penalty=0.1,
            ),
        ),
        WarmUpRequest(
            "a question of a sweep", replace(greedy, logprobs=min(1, logprobs), only_token=0)
        ),
        WarmUpRequest("prompt log-probabilities", replace(greedy, prompt_logprobs=logprobs)),
        WarmUpRequest(
            "stop tokens and min_tokens",
            replace(greedy, stop_token_ids=(info.vocabulary - 1,), min_tokens=1),
        ),
    ]
    if texts:
        together.append(WarmUpRequest("stop texts", replace(greedy, stop=("\n\n\n",))))
    together += [WarmUpRequest(f"adapter {name}", greedy, lora=name) for name in info.loras[:1]]
    together += [WarmUpRequest(name, greedy, plan) for name, plan in _plans(info, sites, vector)]
    return alone, together


def _plans(info: ModelInfo, sites: ModelSites, vector: bytes) -> Iterator[tuple[str, Plan]]:
    """Yields captures in every form, steering and a gate, at the points of the middle layer."""
    layer = sites.num_layers // 2
    served = [site for site in (Site(point, layer) for point in Point) if not sites.supports(site)]
    stream = tuple(sorted(site.index for site in served if site.point is not Point.ROUTER_LOGITS))
    routers = tuple(site.index for site in served if site.point is Point.ROUTER_LOGITS)
    if routers:
        yield "router logits", Plan("", (), (Capture(routers, _EVERYWHERE),))
    if not stream:
        return
    kept = max(1, sites.width // 8)
    forms = {
        "captured rows": None,
        "captured rows as float16": RowEncoding(Codec.CAST, "float16"),
        "captured rows as full8": RowEncoding(Codec.FULL8),
        "captured rows as rp8": RowEncoding(Codec.RP8, kept=kept),
        "captured rows as topk8": RowEncoding(Codec.TOPK8, kept=kept),
        "projected rows": RowEncoding(
            Codec.CAST, "float32", directions=Directions((vector,), (0,))
        ),
    }
    for name, form in forms.items():
        yield name, Plan("", (), (Capture(stream, _EVERYWHERE, form),))
    rows = tuple((site, (0,)) for site in stream)
    acts = (
        Act(Kind.ADD, (vector,), rows, _EVERYWHERE, _SCALE),
        Act(Kind.NORM_ADD, (vector,), rows, _EVERYWHERE, _SCALE),
        Act(Kind.PULL, (vector,), rows, _EVERYWHERE, bands=(Band(0.0, 0.0, _SCALE),)),
        Act(Kind.REPLACE, (vector,), rows, _EVERYWHERE, _SCALE),
        Act(Kind.ADD_LAST, (vector,), rows, _EVERYWHERE, _SCALE),
    )
    steering = [("steering", Plan("", acts))]
    if len(stream) > 1 and not info.no_gates:
        steering.append(("a gate", _gated(vector, stream)))
    for name, plan in steering:
        need = {"prompt_len": _PROMPT_TOKENS, "max_step_tokens": info.step_tokens}
        if CapacityLedger(sites.capacity).admit(plan, **need) is None:
            yield name, plan


def _gated(vector: bytes, stream: Sequence[int]) -> Plan:
    """Steering at all sites but the first, where it is read how far it acts."""
    condition = GateCondition((0,), Pool.LAST, Combine.ANY, -math.inf, math.inf)
    gate = Gate((condition,), Combine.ALL, Form.STEP, 0.5, 0.0, Hold.TOKEN)
    reading = Reading(Normalise.NONE, Activation.IDENTITY, 0.0, 0.0, 0)
    behind = tuple((site, (0,)) for site in stream[1:])
    acts = (
        Act(Kind.ADD, (vector,), behind, _EVERYWHERE, _SCALE, gate=gate),
        Act(Kind.READ, (vector,), ((stream[0], (0,)),), _EVERYWHERE, reading=reading),
    )
    return Plan("", acts)


class _WarmUp:
    """Runs requests on an engine, and receives the engine's events. It is the only user then."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._released: dict[str, asyncio.Event] = {}
        self._lost = asyncio.Event()
        self._errors: list[str] = []

    async def run(self) -> None:
        """Runs all requests."""
        backend = self._backend
        backend.start(self._deliver, lambda reason: self._lost.set())
        vector = _vector(backend.sites.width)
        alone, together = warm_up_requests(
            backend.info, backend.sites, vector.digest, texts=backend.tokenizer() is not None
        )
        _LOG.info("running %d requests before serving", len(alone) + len(together))
        for request in alone:
            await self._run(request)
        try:
            await backend.load_vectors([vector])
            await self._run_together(together)
            await backend.drop_vectors([vector.digest])
        except EngineLost as error:
            raise self._failed("loading a vector", error) from error
        for said in self._errors:
            _LOG.warning("%s", said)

    async def _run_together(self, requests: Sequence[WarmUpRequest]) -> None:
        tasks = [asyncio.create_task(self._run(request)) for request in requests]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _run(self, request: WarmUpRequest) -> None:
        """Runs a request until the workers have released it.

        Raises:
            EngineFailed: the engine failed, and not the request alone.
        """
        backend = self._backend
        plan_id = f"warm-up/{request.name}"
        model_tokens, vocabulary = backend.info.model_tokens, backend.info.vocabulary
        length = max(1, min(_PROMPT_TOKENS, model_tokens - request.sampling.max_tokens))
        job = Job(
            replace(request.plan, request_id=plan_id),
            tuple(number % vocabulary for number in range(length)),
            request.sampling,
            0,
            request.lora,
        )
        if job.has_plan:
            self._released[plan_id] = asyncio.Event()
        try:
            await self._until_ended(job)
            if job.has_plan:
                await self._until_released(plan_id)
        except (EngineLost, TimeoutError) as error:
            raise self._failed(request.name, error) from error
        except (RheostatError, ValueError) as error:  # vLLM refuses a request with a ValueError
            if request.name == "greedy":
                raise self._failed(request.name, error) from error
            self._errors.append(f"requests of this kind fail: {request.name}: {error}")

    async def _until_ended(self, job: Job) -> None:
        """Runs a sample to its end.

        Raises:
            Exception: the engine cannot run it.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def receive(delta: Delta) -> None:
            if delta.ending is not None and not ended.done():
                ended.set_result(None)

        def fail(error: Exception) -> None:
            if not ended.done():
                ended.set_exception(error)

        try:
            await self._backend.add_requests([Start(job, receive, fail)])
            await ended
        except asyncio.CancelledError:
            await self._backend.abort([job.plan.request_id])
            raise

    async def _until_released(self, plan_id: str) -> None:
        """Returns once the workers have released the request.

        Raises:
            EngineLost: the engine died instead.
            TimeoutError: the engine reported nothing for `_RELEASE_SECONDS`.
        """
        waits = [
            asyncio.create_task(event.wait()) for event in (self._released[plan_id], self._lost)
        ]
        done, _ = await asyncio.wait(
            waits, timeout=_RELEASE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        for wait in waits:
            wait.cancel()
        if self._lost.is_set():
            raise EngineLost("the engine or one of its workers has died")
        if not done:
            raise TimeoutError(
                f"the request ended, but no worker released it within {_RELEASE_SECONDS:g} s"
            )

    def _failed(self, what: str, error: Exception) -> EngineFailed:
        return EngineFailed(
            f"the engine loaded the model {self._backend.info.name}, but failed at its first "
            f"requests ({what}): {error}. The lines above are vLLM's reason; try "
            "--enforce-eager, another --dtype or less memory"
        )

    def _deliver(self, event: Event) -> None:
        """Receives the engine's events. Rows are discarded."""
        if isinstance(event, Released):
            self._released[event.request_id].set()
        elif isinstance(event, Installed) and event.error:
            self._errors.append(f"a plan was not installed: {event.request_id}: {event.error}")


def _vector(width: int) -> Vector:
    """A vector of ones, [1, width]."""
    return make_vector(FloatType.FLOAT32, 1, width, np.ones(width, "<f4").tobytes(), "warm-up")
