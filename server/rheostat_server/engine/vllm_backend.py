"""The engine behind `Backend`: vLLM's AsyncLLM, the workers' methods and the side channel."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import zmq

from rheostat_engine import (
    EXTRA_ARG,
    Event,
    GainsUpdate,
    ModelSites,
    Plan,
    StagingError,
    WorkerChannel,
    receive_outputs,
    send_gains,
    send_holds,
    stop_async_llm,
)
from rheostat_server.config import ModelInfo, ServerConfig
from rheostat_server.engine.backend import (
    CapturesUpdate,
    ControllerStats,
    LensReading,
    QueueStats,
    Start,
    SteeringUpdate,
    TokenDirections,
    WorkerStats,
)
from rheostat_server.engine.loras import Lora
from rheostat_server.engine.row_widths import cutting_expert_rows
from rheostat_server.engine.vllm_engine import (
    LoadedEngine,
    load_engine,
    remove_channel,
    what_happened,
)
from rheostat_server.engine.vllm_outputs import DeltaReader, OutputTurns, token_texts
from rheostat_server.engine.vllm_templates import RequestTemplates, engine_dead_error, lora_request
from rheostat_server.engine.warm_up import warm_up
from rheostat_server.errors import Defect, EngineFailed, EngineLost
from rheostat_server.prompts.tokenizer import HuggingFaceTokenizer, Tokenizer
from rheostat_server.tasks.allocator import keep_freed_memory
from rheostat_server.tasks.futures import begin_now
from rheostat_server.tasks.offload import offload
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Vector
from rheostat_wire.dtypes import FloatArray

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_HEARTBEAT = 1.0

_END_SECONDS = 20.0
"""Seconds that the engine has to end, before vLLM kills it. By default it has 5, but the engine
gives its workers 9, and on a busy machine it takes longer itself."""

_LOST = "the engine or one of its workers has died; restart the server"


_SPAN_BYTES = 256
"""Bytes that `offload` counts for serialising a span."""


async def start_backend(config: ServerConfig) -> "VllmBackend":
    """Loads a model, off the event loop, and runs its first requests.

    Raises:
        ModelNotFound: there is no such model.
        EngineFailed: vLLM did not come up, cannot load an adapter, or fails at a request.
    """
    if not keep_freed_memory():
        _LOG.debug("captured rows are slower to copy: the C library is not glibc")
    loaded = await asyncio.to_thread(load_engine, config)
    try:
        for lora in loaded.loras.values():
            await load_lora(loaded.llm, lora)
        described = loaded.llm.collective_rpc("rheostat_describe")
        reports = cast(list[Mapping[str, object]], await answered(loaded.llm, described))
        backend = VllmBackend(config, loaded, ModelSites.from_reports(reports))
        backend.attach(reports)
    except (EngineFailed, EngineLost, StagingError, ValueError, zmq.ZMQError) as error:
        await asyncio.to_thread(loaded.llm.shutdown, _END_SECONDS)
        remove_channel(loaded.settings)
        raise EngineFailed(str(error)) from error
    try:
        await backend.warm_up()
    except BaseException:
        await backend.close()
        raise
    return backend


class VllmBackend:
    """A running vLLM engine with the extension in it."""

    def __init__(self, config: ServerConfig, loaded: LoadedEngine, sites: ModelSites) -> None:
        """Takes over a loaded engine.

        Raises:
            zmq.ZMQError: the side channel cannot be bound.
        """
        self._loaded = loaded
        self._lens_turn = asyncio.Lock()
        self.sites = sites
        self.info = _model_info(config, loaded)
        self._channel = WorkerChannel(loaded.settings, ranks=sites.world_size)
        self._texts = token_texts(loaded.llm.tokenizer)
        self._turns = OutputTurns()
        self._templates = RequestTemplates(
            loaded.loras, has_tokenizer=loaded.llm.tokenizer is not None
        )
        self._watch: asyncio.Task[None] | None = None
        self._deliver: Callable[[Event], None] = lambda event: None
        self._lost: Callable[[str], None] = lambda reason: None
        self._warm_up_stats = WorkerStats()
        """The workers' counts after the warm-up. They are subtracted from later counts."""

    def attach(self, reports: Sequence[Mapping[str, object]]) -> None:
        """Opens the shared memory into which the workers write captured rows.

        Raises:
            StagingError: it cannot be opened. The side channel is then closed.
        """
        try:
            self._channel.attach(reports)
        except StagingError:
            self._channel.close()
            raise

    @property
    def _llm(self) -> "AsyncLLM":
        return self._loaded.llm

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if one is loaded."""
        inner = self._llm.tokenizer
        return None if inner is None else HuggingFaceTokenizer(inner)

    def start(self, deliver: Callable[[Event], None], lost: Callable[[str], None]) -> None:
        """Delivers events on the running loop, and watches the engine.

        A second call replaces the receivers of the first.
        """
        self._lost = lost
        if self.sites.experts:
            deliver = cutting_expert_rows(deliver, self.sites)
        self._deliver = deliver
        if self._watch is None:
            self._channel.start(asyncio.get_running_loop(), lambda event: self._deliver(event))
            self._watch = asyncio.create_task(self._watch_engine())

    async def warm_up(self) -> None:
        """Runs one request of every kind and removes their traces; see `warm_up`.

        Raises:
            EngineFailed: the engine cannot run requests.
        """
        try:
            await self._call("rheostat_save_random_state")
            await warm_up(self)
            await answered(self._llm, self._llm.reset_prefix_cache())
            await self._call("rheostat_restore_random_state")
            self._warm_up_stats = await self.worker_stats()
        except EngineLost as error:
            raise EngineFailed(f"the engine died after its first requests: {error}") from error
        self._loaded.counter.stats = QueueStats()

    async def add_requests(self, starts: Sequence[Start]) -> None:
        """Starts samples of one request. If their plans have windows, one message starts all."""
        if starts and starts[0].job.plan.window is not None:
            await self._add(starts)
            return
        for start in starts:
            await self._add([start])

    async def _add(self, starts: Sequence[Start]) -> None:
        """Starts samples with one message. Only the ids and windows of their plans may differ."""
        job, dead_error = starts[0].job, engine_dead_error()
        try:
            collectors = await self._templates.of(job).add(
                self._llm,
                job.plan.request_id,
                list(job.prompt),
                job.sampling.seed_of(job.sample),
                {EXTRA_ARG: job.plan.to_wire()} if job.has_plan else None,
                [
                    (start.job.plan.request_id, start.job.plan.window)
                    for start in starts[1:]
                    if start.job.plan.window is not None  # always true; needed by mypy
                ],
            )
        except dead_error as error:
            raise self._lost_engine() from error
        for (sample, receive, fail), collector in zip(starts, collectors, strict=True):
            failed = partial(self._fail, fail)
            reader = DeltaReader(sample, self._texts, self._turns, receive, failed)
            receive_outputs(self._llm, collector, reader.put, failed, sample.pace)

    def _fail(self, fail: Callable[[Exception], None], error: Exception) -> None:
        """Calls `fail` with an error. `EngineLost` replaces vLLM's error of a dead engine."""
        dead = isinstance(error, engine_dead_error())
        fail(self._lost_engine() if dead else error)

    async def abort(self, plan_ids: Sequence[str]) -> None:
        """Aborts samples."""
        with suppress(engine_dead_error()):
            await self._llm.abort(plan_ids)

    async def prepare(self, name: str, plan: Plan | None, plan_cost: int) -> tuple[bool, str]:
        """Builds a part of a plan's tables between two steps."""
        wire = None if plan is None else plan.to_wire()
        answers = cast(
            list[tuple[bool, str]], await self._call("rheostat_prepare", name, wire, plan_cost)
        )
        errors = [error for _, error in answers if error]
        return all(done for done, _ in answers), errors[0] if errors else ""

    async def release_prepared(self, names: Sequence[str]) -> bool:
        """Releases preparations by name, and a part of the tables that no request uses."""
        return any(cast(list[bool], await self._call("rheostat_release", list(names))))

    async def update_steering(
        self, updates: Sequence[SteeringUpdate]
    ) -> list[list[int | None] | Defect]:
        """Replaces the acts of running samples, each from its next step on, in one call."""
        wires = [
            (update.plan.to_wire(), list(update.plan_ids), update.not_before) for update in updates
        ]
        answers = cast(
            list[list[list[tuple[int, str]]]],
            await self._call("rheostat_update_steering", wires),
        )
        return [_positions(workers) for workers in zip(*answers, strict=True)]

    def set_gains(self, updates: Sequence[GainsUpdate]) -> Awaitable[None]:
        """Changes gains of samples, each from its next step on."""
        sending = begin_now(send_gains(self._llm, updates))  # sends the message before it returns
        return self._answered(sending)

    async def hold_samples(self, plan_ids: Sequence[str], *, held: bool) -> None:
        """Stops scheduling samples, from the next step on, or goes on with samples."""
        await self._answered(send_holds(self._llm, plan_ids, held=held))

    async def update_captures(self, changes: Mapping[str, CapturesUpdate | None]) -> None:
        """Changes the captures of samples, each from its next step on."""
        changed = [change for change in changes.values() if change is not None]
        spans = sum(len(capture.spans) for change in changed for capture in change.captures)
        wires = await offload(spans * _SPAN_BYTES, _capture_updates, changes)
        await self._call("rheostat_update_captures", wires)

    async def load_vectors(self, vectors: Sequence[Vector]) -> None:
        """Loads vectors into every worker."""
        size = sum(vector.size for vector in vectors)
        payload = await asyncio.to_thread(_payload, vectors)
        await self._call("rheostat_load_vectors", payload)
        _LOG.info("loaded %d vectors, %d bytes", len(vectors), size)

    async def drop_vectors(self, digests: Sequence[bytes]) -> None:
        """Removes vectors from every worker."""
        await self._call("rheostat_drop_vectors", [digest.hex() for digest in digests])
        _LOG.info("dropped %d vectors", len(digests))

    async def lens(
        self,
        rows: FloatArray,
        top_k: int,
        token_ids: Sequence[int],
        reference: FloatArray | None = None,
    ) -> LensReading:
        """Reads rows with the final norm and the unembedding."""
        against = b"" if reference is None else reference.astype("<f4").tobytes()
        data = rows.astype("<f4").tobytes()
        async with self._lens_turn:
            read = await self._call("rheostat_lens", data, top_k, list(token_ids), against)
        return _lens_reading(_only(cast(list[Mapping[str, bytes] | None], read)), len(rows))

    def text_of(self, token_id: int) -> str:
        """The text of a token."""
        return self._texts(token_id)

    async def directions(self, token_ids: Sequence[int]) -> TokenDirections:
        """The directions of tokens."""
        call = self._call("rheostat_directions", list(token_ids))
        rows, offsets = _only(cast(list[tuple[bytes, bytes] | None], await call))
        return TokenDirections(
            np.frombuffer(rows, "<f4").reshape(len(token_ids), -1), np.frombuffer(offsets, "<f4")
        )

    async def worker_stats(self) -> WorkerStats:
        """The use of memory and slots by the fullest worker, and the sums of all captured rows."""
        reports = cast(list[dict[str, object]], await self._call("rheostat_stats"))
        first = reports[0]

        def of_all(key: str) -> list[int]:  # only ranks that capture have these counts
            return [cast(int, report.get(key, 0)) for report in reports]

        def most(key: str) -> int:
            return max(of_all(key))

        before = self._warm_up_stats
        steps = cast(Mapping[str, int], first["steps"])
        return WorkerStats(
            bank_rows_used=most("bank_rows_used"),
            slots_used=most("slots_used"),
            unused_tables=any(of_all("unused_tables")),
            requests=most("requests"),
            captured_rows=sum(of_all("captured_rows")) - before.captured_rows,
            lost_rows=sum(of_all("lost_rows")) - before.lost_rows,
            left_bytes=sum(of_all("left_bytes")) - before.left_bytes,
            plain_rows=sum(of_all("plain_rows")) - before.plain_rows,
            ring_bytes=most("ring_bytes"),
            encode_bytes=most("encode_bytes"),
            staging_bytes=sum(of_all("staging_bytes")),
            controllers={
                name: ControllerStats(*counts)
                for report in reports
                for name, counts in cast(
                    Mapping[str, tuple[int, int, float, float, float, str]], report["controllers"]
                ).items()
            },
            steps={name: count - before.steps.get(name, 0) for name, count in steps.items()},
        )

    def queue_stats(self) -> QueueStats:
        """The scheduler's latest counts."""
        return self._loaded.counter.stats

    async def close(self) -> None:
        """Ends the engine and its processes. Calls that come meanwhile raise `EngineLost`."""
        self._lost = lambda reason: None  # the engine ends because it should
        if self._watch is not None:
            self._watch.cancel()
        await stop_async_llm(self._llm)
        await asyncio.to_thread(self._llm.shutdown, _END_SECONDS)
        del self._loaded.llm
        await asyncio.to_thread(self._channel.close)
        remove_channel(self._loaded.settings)

    async def _call(self, method: str, *args: object) -> object:
        return await self._answered(self._llm.collective_rpc(method, args=args))

    async def _answered(self, call: Awaitable[T]) -> T:
        """Awaits a call of the engine, and reports the engine's death.

        Raises:
            EngineLost: the engine is gone.
        """
        try:
            return await answered(self._llm, call)
        except EngineLost as error:
            self._lost(error.message)
            raise

    def _lost_engine(self) -> EngineLost:
        """Reports that the engine is gone, and returns the error for a sample."""
        self._lost(_LOST)
        return EngineLost(_LOST)

    async def _watch_engine(self) -> None:
        while not self._llm.errored:
            await asyncio.sleep(_HEARTBEAT)
        self._lost(_LOST)


def _only(answers: Sequence[T | None]) -> T:
    """The answer of a worker that has one, such as the first of the last pipeline stage."""
    return next(answer for answer in answers if answer is not None)


def _lens_reading(answer: Mapping[str, bytes], rows: int) -> LensReading:
    """The answer of `rheostat_lens`."""
    whole, tables = ("top_ids", "ranks"), ("top_ids", "top_logprobs", "logprobs", "ranks")
    arrays = {
        name: np.frombuffer(data, "<i4" if name in whole else "<f4")
        for name, data in answer.items()
    }
    for name in tables:
        arrays[name] = arrays[name].reshape(rows, arrays[name].size // rows)
    return LensReading(**arrays)


def _positions(workers: Sequence[Sequence[tuple[int, str]]]) -> list[int | None] | Defect:
    """The first positions of an update, from each worker's results for each sample."""
    for result in workers:
        for _, error in result:
            if error:
                return Defect(f"a worker did not install an update: {error}")
    first, *others = ([position for position, _ in result] for result in workers)
    if any(other != first for other in others):
        return Defect("the workers installed an update at different positions")
    return [None if position < 0 else position for position in first]


async def load_lora(llm: "AsyncLLM", lora: Lora) -> None:
    """Loads an adapter into every worker.

    Requests would load it too, but within a step, where a failure ends the engine.

    Raises:
        EngineFailed: it cannot be loaded.
    """
    try:
        await answered(llm, llm.add_lora(lora_request(lora)))
    except Exception as error:  # vLLM reports any error of a worker as a plain Exception
        raise EngineFailed(
            f"vLLM cannot load the adapter {lora.name} from {lora.path}: {what_happened(error)}. "
            "Repair it, or start without it"
        ) from error


async def answered(llm: "AsyncLLM", call: Awaitable[T]) -> T:
    """Awaits a call of the engine, unless the engine dies.

    Raises:
        EngineLost: the engine is gone.
    """
    answer = asyncio.ensure_future(call)
    try:
        while not answer.done():
            await asyncio.wait({answer}, timeout=_HEARTBEAT)
            if llm.errored:
                raise EngineLost(_LOST)
        if answer.exception() is not None and llm.errored:
            raise EngineLost(_LOST)  # a call that was begun before may have failed at once
        return answer.result()
    finally:
        answer.cancel()


def _payload(vectors: Sequence[Vector]) -> dict[str, tuple[tuple[float, ...], bytes]]:
    """The argument of `rheostat_load_vectors`."""
    return {
        vector.digest.hex(): (
            vector.norms,
            vector.data if vector.kind is FloatType.FLOAT32 else vector.float32_bytes(),
        )
        for vector in vectors
    }


def _model_info(config: ServerConfig, loaded: LoadedEngine) -> ModelInfo:
    import torch
    import vllm

    settings = loaded.llm.vllm_config
    vocabulary = settings.model_config.get_vocab_size()
    most = settings.model_config.max_logprobs
    return ModelInfo(
        name=config.model,
        vocabulary=vocabulary,
        model_tokens=settings.model_config.max_model_len,
        step_tokens=settings.scheduler_config.max_num_batched_tokens,
        running_samples=settings.scheduler_config.max_num_seqs,
        logprobs=vocabulary if most < 0 else most,
        device=loaded.device,
        compiled=bool(settings.compilation_config.mode),
        prefix_caching=bool(settings.cache_config.enable_prefix_caching),
        loras=tuple(loaded.loras),
        tensor_parallel=settings.parallel_config.tensor_parallel_size,
        pipeline_parallel=settings.parallel_config.pipeline_parallel_size,
        vllm_version=vllm.__version__,
        torch_version=torch.__version__,
        head_loras=tuple(lora.name for lora in loaded.loras.values() if lora.changes_head),
    )


def _capture_updates(
    changes: Mapping[str, CapturesUpdate | None],
) -> dict[str, tuple[int, bytes, int] | None]:
    """The argument of `rheostat_update_captures`."""
    plans: dict[int, Plan] = {}
    wired: dict[str, tuple[int, bytes, int] | None] = {}
    for name, change in changes.items():
        if change is None:
            wired[name] = None
            continue
        plan = plans.get(id(change.captures))
        if plan is None:  # all samples of a request have the same captures
            plan = plans[id(change.captures)] = Plan(name, (), tuple(change.captures)).pack()
        wire = replace(plan, request_id=name).to_wire()
        wired[name] = change.number, wire, change.not_before
    return wired
