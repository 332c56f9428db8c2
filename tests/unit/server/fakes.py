"""A scripted engine behind the server's `Backend`."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np

from rheostat_engine import (
    OPEN_END,
    ROUTERS,
    Act,
    Attached,
    Capacity,
    Codec,
    Dose,
    Event,
    Gained,
    GainsUpdate,
    Installed,
    Kind,
    ModelSites,
    Plan,
    Point,
    Released,
    RowEncoding,
    Rows,
    SignalRows,
    Spans,
)
from rheostat_engine.plan.row_encodings import RAW_KEY
from rheostat_server.capture.encodings import Form
from rheostat_server.config import ModelInfo
from rheostat_server.engine.backend import (
    CapturesUpdate,
    Delta,
    Ending,
    Job,
    LensReading,
    QueueStats,
    Start,
    SteeringUpdate,
    TokenDirections,
    WorkerStats,
)
from rheostat_server.errors import Defect, EngineLost
from rheostat_server.prompts.tokenizer import Tokenizer
from rheostat_server.tensors import FloatType, converted
from rheostat_server.vectors.store import Vector
from rheostat_wire.v1 import (
    generation_pb2,
    tensor_pb2,
)

from ..engine.updates import update_captures, update_steering
from .characters import CharTokenizer

WIDTH = 4
LAYERS = 3
VOCABULARY = 128

SITES = ModelSites(
    architecture="ToyForCausalLM",
    num_layers=LAYERS,
    width=WIDTH,
    dtype="float32",
    runner="V1",
    refused={},
    capacity=Capacity(
        bank_rows=8, directions=8, steps=64, slots=8, token_rules=4, capture_rows=1000
    ),
    world_size=1,
    block_layouts={0: "pair", 1: "pair", 2: "single"},
    variants=("active", "plain"),
)


def sites_with(**limits: int) -> ModelSites:
    """The toy's sites with other limits."""
    return replace(SITES, capacity=replace(SITES.capacity, **limits))


PARALLEL = replace(SITES, refused={Point.RESID_MID: "attention and MLP run in parallel"})

INFO = ModelInfo(
    name="toy",
    vocabulary=VOCABULARY,
    model_tokens=64,
    step_tokens=16,
    running_samples=4,
    logprobs=5,
    device="cpu",
    compiled=False,
    prefix_caching=True,
    loras=("fables", "headed"),
    tensor_parallel=1,
    pipeline_parallel=1,
    vllm_version="0.32.0",
    torch_version="2.13.0",
    head_loras=("headed",),
)


_ENCODINGS = {
    Codec.FULL8: tensor_pb2.ENCODING_FULL8,
    Codec.RP8: tensor_pb2.ENCODING_RP8,
    Codec.TOPK8: tensor_pb2.ENCODING_TOPK8,
}


def row(site: int, position: int) -> np.ndarray:
    """The row that the scripted engine captures: [WIDTH]."""
    return np.arange(WIDTH, dtype=np.float32) + 100 * site + 1000 * position


def reading(column: int, position: int) -> float:
    """The number that the scripted engine reads."""
    return column + position / 8


def positions_of(spans: Spans, start: int, end: int) -> list[int]:
    return [p for p in range(start, end) if any(a <= p < b for a, b in spans)]


UNEMBEDDING = np.random.default_rng(7).normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
"""Directions of the scripted engine's tokens."""

OFFSETS = np.random.default_rng(8).normal(size=VOCABULARY).astype(np.float32)
"""What its logits have without any row."""

SCALE = 0.001
"""The scale of its final norm."""

STREAM_NORM = 4.0
"""Norm of every row of the scripted engine's stream."""

PULLED = 0.5
"""How far it moves a row along directions."""


def touches(act: Act, position: int, token: int) -> bool:
    """Whether an act touches a token, by the letter of `Act`."""
    return bool(positions_of(act.spans, position, position + 1)) or any(
        positions_of(one.spans, position, position + 1) and (token in one.tokens) == one.among
        for one in act.conditions
    )


def distribution(token: int, *, steered: bool) -> dict[int, float]:
    """Log-probabilities that the scripted engine has where `token` comes next, best first."""
    best = 0.75 if steered else 0.5
    rest = (1 - best) / (VOCABULARY - 1)
    others = {other: math.log(rest) for other in range(VOCABULARY) if other != token}
    return {token: math.log(best), **others}


@dataclass
class ScriptedBackend:
    """Generates the token after the last one, and does what a real engine says that it does."""

    info: ModelInfo = INFO
    sites: ModelSites = SITES
    text: Tokenizer | None = field(default_factory=CharTokenizer)
    hold: asyncio.Event | None = None
    """If set, samples stop after their first token until it is set."""
    install_error: str = ""
    lost_positions: frozenset[int] = frozenset()
    openness: Callable[[int, int], float] = lambda gate, position: 0.0
    """How far a gate, by its number in the plan, is open at a position."""
    lost_signals: frozenset[int] = frozenset()
    """Positions whose signals are lost."""
    overrun: int = 0
    """Steps that run beyond the last token before the engine notices."""
    recomputed: int = 0
    """Tokens that every sample computes again."""
    cached: int = 0
    """Prompt tokens that every sample takes from the prefix cache."""
    measured: bool = True
    """Whether it measures what acts change."""
    broken: Exception | None = None
    silent: bool = False
    """Never schedules anything."""
    hold_from: int = 1
    """Tokens after which `hold` stops a sample."""
    unscheduled: asyncio.Event | None = None
    """If set, nothing is scheduled until it is set."""
    loading: asyncio.Event | None = None
    """If set, vectors come only once it is set."""
    whole: bool = False
    """Whether rows leave it as they are, whatever form is asked for."""
    prepare_error: str = ""
    """Why it cannot build the tables of plans."""
    prepared: dict[str, int] = field(default_factory=dict)
    prepared_releases: int = 0
    """Calls of `release_prepared`."""
    unused: int = 0
    """The number of parts in which the workers release unused tables."""
    """Effort that is left of preparations that it holds."""
    calls: list[tuple[str, int]] = field(default_factory=list)
    """What each call for a preparation built of it."""
    update_error: Exception | None = None
    updates: list[tuple[str, tuple[Act, ...], int]] = field(default_factory=list)
    update_calls: list[list[SteeringUpdate]] = field(default_factory=list)
    """Updates of the steering, by the call that brought them."""
    gain_messages: list[list[GainsUpdate]] = field(default_factory=list)
    """Gains, by the message that brought them."""
    capture_update_error: str = ""
    capture_updates: list[dict[str, CapturesUpdate | None]] = field(default_factory=list)
    """Every change of what is captured that was asked for."""
    changes: dict[str, CapturesUpdate] = field(default_factory=dict)
    """Those that wait for a sample's next step."""
    plans: dict[str, Plan] = field(default_factory=dict)
    """Plans of the samples that it runs."""
    positions: dict[str, int] = field(default_factory=dict)
    """The next position of each of them."""
    lens_calls: list[int] = field(default_factory=list)
    """The number of rows of each call of `lens`."""
    direction_calls: list[list[int]] = field(default_factory=list)
    vectors: dict[bytes, Vector] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    closed: bool = False
    deliver: Callable[[Event], None] = print
    lost: Callable[[str], None] = print
    dead: bool = False
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Tasks of the samples that it runs, by the ids of their plans."""

    def tokenizer(self) -> Tokenizer | None:
        return self.text

    def start(self, deliver: Callable[[Event], None], lost: Callable[[str], None]) -> None:
        self.deliver, self.lost = deliver, lost

    async def add_request(
        self, job: Job, receive: Callable[[Delta], None], fail: Callable[[Exception], None]
    ) -> None:
        plan_id = job.plan.request_id
        self.tasks[plan_id] = task = asyncio.create_task(self._run(Start(job, receive, fail)))
        task.add_done_callback(lambda _: self.tasks.pop(plan_id, None))

    async def add_requests(self, starts: Sequence[Start]) -> None:
        for start in starts:
            await self.add_request(*start)

    async def abort(self, plan_ids: Sequence[str]) -> None:
        running = [self.tasks[plan_id] for plan_id in plan_ids if plan_id in self.tasks]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _run(self, start: Start) -> None:
        try:
            async with aclosing(self.generate(start.job)) as deltas:
                async for delta in deltas:
                    start.receive(delta)
        except Exception as error:
            start.fail(error)

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        """The script of a sample."""
        self.jobs.append(job)
        if self.broken is not None:
            raise self.broken
        plan_id = job.plan.request_id
        length = len(job.prompt)
        computed = 0
        finished = False
        try:
            if self.silent:
                await asyncio.Event().wait()
            if self.unscheduled is not None:
                await self.unscheduled.wait()
            if job.has_plan:
                self.plans[plan_id] = job.plan
                self.deliver(Installed(plan_id, self.install_error))
            token = job.prompt[-1]
            for step in range(job.sampling.max_tokens + self.overrun):
                end = length + step
                job = self._with_capture_updates(job, computed)
                self._capture(job, computed, end)
                self._signal(job, computed, end)
                computed = self.positions[plan_id] = end
                token = (token + 1) % VOCABULARY
                if step < job.sampling.max_tokens:
                    last = step == job.sampling.max_tokens - 1
                    yield self._delta(job, token, first=step == 0, last=last)
                if self.hold is not None and step + 1 >= self.hold_from:
                    await self.hold.wait()
                if self.dead:
                    raise EngineLost("the engine died")
            finished = True
        finally:
            if not finished:
                self.aborted.append(plan_id)
            change = self.changes.pop(plan_id, None)
            if change is not None:
                self.deliver(Attached(plan_id, change[0], OPEN_END, ""))
            held = plan_id in self.plans
            plan = self.plans.pop(plan_id, job.plan)
            self.positions.pop(plan_id, None)
            if held and computed:
                self._release(replace(job, plan=plan), computed)

    async def set_gains(self, updates: Sequence[GainsUpdate]) -> None:
        self.gain_messages.append(list(updates))
        await asyncio.sleep(0)
        if self.update_error is not None:
            raise self.update_error
        for name, change, not_before, _ in updates:
            if name in self.plans:
                first = max(self.positions.get(name, 0), not_before)
                self.deliver(Gained(name, change, first))

    async def update_captures(self, changes: Mapping[str, CapturesUpdate | None]) -> None:
        self.capture_updates.append(dict(changes))
        for plan_id, change in changes.items():
            self.changes.pop(plan_id, None)
            if change is not None:
                self.changes[plan_id] = change

    def _with_capture_updates(self, job: Job, computed: int) -> Job:
        """A sample before a step: what is captured of it may have been changed."""
        plan_id = job.plan.request_id
        change = self.changes.pop(plan_id, None)
        if change is None:
            return job
        if plan_id not in self.plans:
            self.plans[plan_id] = job.plan
            self.deliver(Installed(plan_id, ""))
        number, captures, not_before = change
        computed = max(computed, not_before)
        if self.capture_update_error:
            self.deliver(Attached(plan_id, number, computed, self.capture_update_error))
            return job
        self.deliver(Attached(plan_id, number, computed, ""))
        plan = update_captures(self.plans[plan_id], tuple(captures), computed)
        self.plans[plan_id] = plan
        return replace(job, plan=plan)

    async def prepare(self, name: str, plan: Plan | None, plan_cost: int) -> tuple[bool, str]:
        if plan is not None:
            self.prepared[name] = plan.plan_cost
        self.calls.append((name, min(plan_cost, self.prepared[name])))
        self.prepared[name] -= plan_cost
        await asyncio.sleep(0)
        return self.prepared[name] <= 0, self.prepare_error

    async def release_prepared(self, names: Sequence[str]) -> bool:
        self.prepared_releases += 1
        await asyncio.sleep(0)
        for name in names:
            self.prepared.pop(name, None)
        self.unused = max(0, self.unused - 1)
        return self.unused > 0

    async def update_steering(
        self, updates: Sequence[SteeringUpdate]
    ) -> list[list[int | None] | Defect]:
        self.update_calls.append(list(updates))
        await asyncio.sleep(0)
        return [self._update(one) for one in updates]

    def _update(self, update: SteeringUpdate) -> list[int | None] | Defect:
        if isinstance(self.update_error, Defect):
            return self.update_error
        if self.update_error is not None:
            raise self.update_error
        return [self._put(name, update.plan, update.not_before) for name in update.plan_ids]

    def _put(self, plan_id: str, plan: Plan, not_before: int) -> int | None:
        acts = plan.acts
        self.updates.append((plan_id, acts, not_before))
        if plan_id not in self.plans:
            return None
        first = max(self.positions.get(plan_id, 0), not_before)
        if not plan.gained:
            self.plans[plan_id] = update_steering(self.plans[plan_id], acts, first)
        return first

    def _delta(self, job: Job, token: int, *, first: bool, last: bool) -> Delta:
        steered = any(act.acts for act in job.plan.acts)

        def reading(token_id: int, wanted: int) -> generation_pb2.TokenLogprobs:
            entries = [
                generation_pb2.TokenLogprob(token_id=one, logprob=logprob, rank=rank)
                for rank, (one, logprob) in enumerate(
                    distribution(token_id, steered=steered).items(), start=1
                )
            ]
            return generation_pb2.TokenLogprobs(token=entries[0], alternatives=entries[:wanted])

        logprobs, prompt_logprobs = job.sampling.logprobs, job.sampling.prompt_logprobs
        wants_prompt = prompt_logprobs is not None and job.sample == 0 and first
        return Delta(
            token_ids=(token,),
            text=chr(token),
            logprobs=[reading(token, logprobs)] if logprobs is not None else (),
            prompt_logprobs=(
                [reading(t, prompt_logprobs) for t in job.prompt[1:]] if wants_prompt else None
            ),
            cached_tokens=self.cached if first else 0,
            ending=Ending.LENGTH if last else None,
        )

    def _capture(self, job: Job, start: int, end: int) -> None:
        for capture in job.plan.captures:
            kept = [
                p for p in positions_of(capture.spans, start, end) if p not in self.lost_positions
            ]
            form = None if self.whole or not self._knows(capture.encoding) else capture.encoding
            key = RAW_KEY if form is None else form.key
            stream = tuple(site for site in capture.sites if site < ROUTERS)
            alone = tuple((site,) for site in capture.sites if site >= ROUTERS)
            for sites in (stream, *alone) if kept else ():
                width = self.sites.experts.get(sites[0] - ROUTERS, WIDTH) if sites else 0
                rows = [np.stack([row(site, p)[:width] for p in kept]) for site in sites]
                data = rows if form is None else [self._formed(form, one) for one in rows]
                at = np.array(kept, dtype=np.int32)
                if sites:
                    self.deliver(Rows(job.plan.request_id, sites, at, np.stack(data), key))

    def _signal(self, job: Job, start: int, end: int) -> None:
        rows = self.signals(job.plan, start, end)
        if rows is not None:
            self.deliver(rows)

    def signals(self, plan: Plan, start: int, end: int) -> SignalRows | None:
        """The signals of positions of a sample, if it has any."""
        table = plan.packed_acts.table
        if table is None or not plan.signals.any or start == end:
            return None
        values = [
            [
                self._read(plan, column, position) for column in range(plan.signals.readings)
            ] + [
                self.openness(gate, position) for gate in range(len(table.gates))
            ]
            for position in range(start, end)
        ]  # fmt: skip
        lost = not self.lost_signals.isdisjoint(range(start, end))
        return SignalRows(
            (plan.request_id,),
            (start,),
            (end - start,),
            None if lost else np.array(values, np.float32).reshape(end - start, -1),
            plan.signals.readings,
        )

    def _read(self, plan: Plan, column: int, position: int) -> float:
        """The number of a column, or NaN where no act reads it."""
        for act in plan.acts:
            if act.reading is not None and positions_of(act.spans, position, position + 1):
                first = act.reading.column
                if first <= column < first + len(act.rows):
                    return reading(column, position)
        return math.nan

    def _knows(self, form: RowEncoding | None) -> bool:
        directions = None if form is None else form.directions
        return directions is None or all(one in self.vectors for one in directions.vectors)

    def _formed(self, form: RowEncoding, rows: np.ndarray) -> np.ndarray:
        """Rows as the device makes them."""
        if form.directions is not None:
            pairs = zip(form.directions.vectors, form.directions.rows, strict=True)
            rows = rows @ np.stack([self._direction(*pair) for pair in pairs]).T
        if form.codec is Codec.CAST:
            kind = FloatType(form.dtype)
            made = converted(rows, row_type=FloatType.FLOAT32, wanted=kind)
            return np.frombuffer(made.tobytes(), np.uint8).reshape(len(rows), -1)
        return Form(_ENCODINGS[form.codec], form.kept, form.seed).codes(rows)

    def _direction(self, digest: bytes, at: int) -> np.ndarray:
        vector = self.vectors[digest]
        return np.frombuffer(vector.float32_bytes(), "<f4").reshape(vector.rows, -1)[at]

    def _doses(self, job: Job, computed: int) -> list[Dose]:
        """What the acts did to the tokens up to `computed`, each the successor of the last."""
        tokens = [*job.prompt]
        while len(tokens) < computed:
            tokens.append((tokens[-1] + 1) % VOCABULARY)
        doses = []
        for index, act in enumerate(job.plan.acts):
            rows = sum(touches(act, p, tokens[p]) for p in range(self.cached, computed))
            for site, vector_rows in act.rows if rows else ():
                change = PULLED
                if act.kind is Kind.ADD:
                    change = abs(act.scale) * self.vectors[act.vectors[0]].norms[vector_rows[0]]
                elif act.kind is Kind.NORM_ADD:
                    change = abs(act.scale) * STREAM_NORM
                relative = change / STREAM_NORM
                doses.append(Dose(index, site, rows, rows * change, rows * relative, relative))
        return doses

    def _release(self, job: Job, computed: int) -> None:
        plan = job.plan
        lost = [
            p for capture in plan.captures for _ in capture.sites
            for p in positions_of(capture.spans, 0, computed) if p in self.lost_positions
        ]  # fmt: skip
        self.deliver(
            Released(
                request_id=plan.request_id,
                doses=tuple(self._doses(job, computed)) if self.measured else (),
                measured=self.measured,
                captured={},
                lost_rows=len(lost),
                preemptions=0,
                computed=(self.cached, computed),
                recomputed=self.recomputed,
            )
        )

    async def load_vectors(self, vectors: Sequence[Vector]) -> None:
        if self.loading is not None:
            await self.loading.wait()
        self.loaded += [vector.digest.hex() for vector in vectors]
        self.vectors |= {vector.digest: vector for vector in vectors}

    async def drop_vectors(self, digests: Sequence[bytes]) -> None:
        self.dropped += [digest.hex() for digest in digests]

    async def lens(
        self,
        rows: np.ndarray,
        top_k: int,
        token_ids: Sequence[int],
        reference: np.ndarray | None = None,
    ) -> LensReading:
        """As a model without weights in its norm, whose scale is `SCALE` for every row."""
        self.lens_calls.append(len(rows))
        await asyncio.sleep(0)
        logits = SCALE * (rows.astype(np.float64) @ UNEMBEDDING.T) + OFFSETS
        normalizers = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
        logprobs = logits - normalizers[:, None]
        divergences = np.empty(0)
        if reference is not None:
            others = SCALE * (reference.astype(np.float64) @ UNEMBEDDING.T) + OFFSETS
            others -= np.logaddexp.reduce(others, axis=1, keepdims=True)
            divergences = (np.exp(others) * (others - logprobs)).sum(1)
        top = np.argsort(-logprobs, axis=1, kind="stable")[:, :top_k]
        wanted = logprobs[:, list(token_ids)]
        return LensReading(
            top_ids=top.astype(np.int32),
            top_logprobs=np.take_along_axis(logprobs, top, 1).astype(np.float32),
            logprobs=wanted.astype(np.float32),
            ranks=(1 + (logprobs[:, None] > wanted[:, :, None]).sum(-1)).astype(np.int32),
            log_normalizers=normalizers.astype(np.float32),
            divergences=np.asarray(divergences, np.float32),
            scales=np.full(len(rows), SCALE, np.float32),
        )

    def text_of(self, token_id: int) -> str:
        return chr(token_id) if self.text is not None else ""

    async def directions(self, token_ids: Sequence[int]) -> TokenDirections:
        self.direction_calls.append(list(token_ids))
        await asyncio.sleep(0)
        return TokenDirections(UNEMBEDDING[list(token_ids)], OFFSETS[list(token_ids)])

    async def worker_stats(self) -> WorkerStats:
        return WorkerStats(steps={"plain": 3, "active": 2}, captured_rows=5)

    def queue_stats(self) -> QueueStats:
        return QueueStats(
            running=1, waiting=2, prefix_queried_token_count=30, prefix_hit_token_count=10
        )

    async def close(self) -> None:
        self.closed = True

    def die(self) -> None:
        """Loses the engine."""
        self.dead = True
        if self.hold is not None:
            self.hold.set()
        self.lost("the engine died")


@dataclass
class Paced(ScriptedBackend):
    """An engine that lets others run after each token."""

    pause: float = 0.0
    """Seconds that it lets them run."""

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        async with aclosing(super().generate(job)) as deltas:
            async for delta in deltas:
                yield delta
                await asyncio.sleep(self.pause)
