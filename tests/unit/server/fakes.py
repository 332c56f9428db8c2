"""A scripted engine behind the server's `Backend`, and a tokenizer of one token per character."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rheostat._proto.v1 import (
    capture_pb2,
    generation_pb2,
    generation_service_pb2,
    selector_pb2,
    steering_pb2,
    types_pb2,
)
from rheostat_engine import Event, Installed, ModelSites, Point, Released, Rows, Spans
from rheostat_server.errors import EngineLost
from rheostat_server.host import Delta, Ending, Job, QueueStats, WorkerStats
from rheostat_server.model_info import ModelInfo
from rheostat_server.tokenizer import ChatTemplateError, Encoded, Tokenizer
from rheostat_server.vectors import Vector

WIDTH = 4
LAYERS = 3
VOCABULARY = 128
BOS = 1

SITES = ModelSites(
    architecture="ToyForCausalLM",
    num_layers=LAYERS,
    width=WIDTH,
    dtype="float32",
    runner="V1",
    refused={},
    bank_rows=8,
    slots=8,
    capture_rows=1000,
    world_size=1,
)
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
    tensor_parallel=1,
    pipeline_parallel=1,
    vllm_version="0.32.0",
    torch_version="2.13.0",
)


class CharTokenizer:
    """Each character of 7-bit ASCII is its own token; BOS stands before a text."""

    has_chat_template = True

    def encode(self, text: str, *, special: bool) -> Encoded:
        ids = [ord(char) for char in text]
        offsets = [(i, i + 1) for i in range(len(text))]
        if special:
            return Encoded((BOS, *ids), ((0, 0), *offsets))
        return Encoded(tuple(ids), tuple(offsets))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("" if token == BOS else chr(token) for token in token_ids)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> str:
        if any(message["role"] == "nobody" for message in messages):
            raise ChatTemplateError("nobody speaks")
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        lines += [f"{name}={value}" for name, value in variables.items()]
        return "\n".join(lines) + ("\n>" if add_generation_prompt else "")


def row(site: int, position: int) -> np.ndarray:
    """The row that the scripted engine captures: [WIDTH]."""
    return np.arange(WIDTH, dtype=np.float32) + 100 * site + 1000 * position


def positions_of(spans: Spans, start: int, end: int) -> list[int]:
    return [p for p in range(start, end) if any(a <= p < b for a, b in spans)]


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
    overrun: int = 0
    """Steps that run beyond the last token before the engine notices."""
    recomputed: int = 0
    """Tokens that every sample computes again."""
    broken: Exception | None = None
    silent: bool = False
    """Never schedules anything."""
    jobs: list[Job] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    closed: bool = False
    deliver: Callable[[Event], None] = print
    lost: Callable[[str], None] = print
    dead: bool = False

    def tokenizer(self) -> Tokenizer | None:
        return self.text

    def start(self, deliver: Callable[[Event], None], lost: Callable[[str], None]) -> None:
        self.deliver, self.lost = deliver, lost

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        self.jobs.append(job)
        if self.broken is not None:
            raise self.broken
        length = len(job.prompt)
        computed = 0
        finished = False
        try:
            if self.silent:
                await asyncio.Event().wait()
            if job.has_plan:
                self.deliver(Installed(job.plan.request_id, self.install_error))
            token = job.prompt[-1]
            for step in range(job.sampling.max_tokens + self.overrun):
                end = length + step
                self._capture(job, computed, end)
                computed = end
                token = (token + 1) % VOCABULARY
                if step < job.sampling.max_tokens:
                    last = step == job.sampling.max_tokens - 1
                    yield self._delta(job, token, first=step == 0, last=last)
                if self.hold is not None:
                    await self.hold.wait()
                if self.dead:
                    raise EngineLost("the engine died")
            finished = True
        finally:
            if not finished:
                self.aborted.append(job.plan.request_id)
            if job.has_plan and computed:
                self._release(job, computed)

    def _delta(self, job: Job, token: int, *, first: bool, last: bool) -> Delta:
        def reading(token_id: int) -> generation_pb2.TokenLogprobs:
            entry = generation_pb2.TokenLogprob(token_id=token_id, logprob=-0.5, rank=1)
            return generation_pb2.TokenLogprobs(token=entry)

        wants_prompt = job.sampling.prompt_logprobs is not None and job.sample == 0 and first
        return Delta(
            token_ids=(token,),
            text=chr(token),
            logprobs=[reading(token)] if job.sampling.logprobs is not None else (),
            prompt_logprobs=[reading(t) for t in job.prompt[1:]] if wants_prompt else None,
            ending=Ending.LENGTH if last else None,
        )

    def _capture(self, job: Job, start: int, end: int) -> None:
        for capture in job.plan.captures:
            kept = [
                p for p in positions_of(capture.spans, start, end) if p not in self.lost_positions
            ]
            for site in capture.sites if kept else ():
                data = np.stack([row(site, p) for p in kept])
                positions = np.array(kept, dtype=np.int32)
                self.deliver(Rows(job.plan.request_id, site, positions, data))

    def _release(self, job: Job, computed: int) -> None:
        plan = job.plan
        lost = [
            p for capture in plan.captures for _ in capture.sites
            for p in positions_of(capture.spans, 0, computed) if p in self.lost_positions
        ]  # fmt: skip
        self.deliver(
            Released(
                request_id=plan.request_id,
                tokens_added=tuple(len(positions_of(a.spans, 0, computed)) for a in plan.additions),
                captured={},
                lost_rows=len(lost),
                preemptions=0,
                computed=(0, computed),
                recomputed=self.recomputed,
            )
        )

    async def load_vectors(self, vectors: Sequence[Vector]) -> None:
        self.loaded += [vector.digest.hex() for vector in vectors]

    async def drop_vectors(self, digests: Sequence[bytes]) -> None:
        self.dropped += [digest.hex() for digest in digests]

    async def worker_stats(self) -> WorkerStats:
        return WorkerStats(steps={"plain": 3, "active": 2}, captured_rows=5)

    def queue_stats(self) -> QueueStats:
        return QueueStats(running=1, waiting=2, prefix_queried_tokens=30, prefix_hit_tokens=10)

    async def close(self) -> None:
        self.closed = True

    def die(self) -> None:
        """Loses the engine."""
        self.dead = True
        if self.hold is not None:
            self.hold.set()
        self.lost("the engine died")


# Short names for messages.


def site_set(*points: int, layers: Sequence[int] | None = None) -> types_pb2.SiteSet:
    if layers is None:
        return types_pb2.SiteSet(points=points, all=types_pb2.AllLayers())
    return types_pb2.SiteSet(points=points, list=types_pb2.LayerList(layers=layers))


def tensor(values: np.ndarray, **fields: object) -> steering_pb2.VectorRef:
    from rheostat._proto.v1 import tensor_pb2

    message = tensor_pb2.Tensor(
        dtype=tensor_pb2.DTYPE_FLOAT32,
        shape=values.shape,
        encoding=tensor_pb2.ENCODING_RAW,
        inline=values.astype("<f4").tobytes(),
    )
    message.MergeFrom(tensor_pb2.Tensor(**fields))
    return steering_pb2.VectorRef(inline=message)


ONES = np.ones((1, WIDTH), dtype=np.float32)


def add(
    vector: steering_pb2.VectorRef | None = None,
    *,
    sites: types_pb2.SiteSet | None = None,
    scale: float | None = None,
    where: selector_pb2.Selector | None = None,
) -> steering_pb2.Intervention:
    return steering_pb2.Intervention(
        sites=sites or site_set(types_pb2.POINT_RESID_POST, layers=[1]),
        where=where,
        add=steering_pb2.Add(vector=vector or tensor(ONES), scale=scale),
    )


def capture(sites: types_pb2.SiteSet | None = None, **fields: object) -> capture_pb2.CaptureSpec:
    fields = {"inline": capture_pb2.InlineTarget(), **fields}
    return capture_pb2.CaptureSpec(
        sites=sites or site_set(types_pb2.POINT_RESID_POST, layers=[0]), **fields
    )


def request(**fields: object) -> generation_service_pb2.GenerateRequest:
    """Three prompt tokens, two generated ones, unless `fields` say otherwise."""
    if not {"text", "token_ids", "chat"} & fields.keys():
        fields["token_ids"] = types_pb2.TokenIds(ids=[10, 11, 12])
    fields.setdefault("sampling", generation_pb2.Sampling(max_tokens=2))
    interventions = fields.pop("steer", None)
    if interventions is not None:
        fields["steering"] = steering_pb2.Steering(interventions=interventions)
    return generation_service_pb2.GenerateRequest(**fields)


def selector(*include: selector_pb2.Range, exclude: Sequence[selector_pb2.Range] = ()):
    return selector_pb2.Selector(include=include, exclude=exclude)


def window(start: int | None = None, end: int | None = None) -> selector_pb2.Range:
    return selector_pb2.Range(positions=selector_pb2.Window(start=start, end=end))


PROMPT = selector_pb2.Range(phase=types_pb2.PHASE_PROMPT)
GENERATED = selector_pb2.Range(phase=types_pb2.PHASE_GENERATED)


def token_range(*ids: int) -> selector_pb2.Range:
    return selector_pb2.Range(token_ids=types_pb2.TokenIds(ids=ids))


def span(text: str, occurrence: int | None = None) -> selector_pb2.Range:
    return selector_pb2.Range(text=selector_pb2.Span(text=text, occurrence=occurrence))
