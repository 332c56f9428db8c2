"""An engine whose answers follow from the rows that are replaced, and requests of sweeps."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import grpc
import numpy as np

from rheostat_engine import Kind, Point, Rows, Site
from rheostat_server.engine.backend import Delta, Job, QueueStats
from rheostat_wire.v1 import (
    gate_pb2,
    generation_pb2,
    selector_pb2,
    sweep_pb2,
    sweep_service_pb2,
    types_pb2,
    vector_pb2,
)

from ..conftest import rest
from ..fakes import (
    INFO,
    WIDTH,
    ScriptedBackend,
    positions_of,
)
from ..messages import site_set, tensor
from ..uploads import Refusal, refusal_of

Code = grpc.StatusCode
pb = sweep_service_pb2
POST = types_pb2.POINT_RESID_POST
CLEAN, CORRUPT = (5, 6, 7, 8), (5, 9, 7, 8)
RIGHT, WRONG = 3, 4
WEIGHTS = [0.5, *[0.0] * (WIDTH - 1)]


@dataclass
class PatchedBackend(ScriptedBackend):
    """Its rows hold the token's id until they are replaced, and its answers follow from the rows.

    The log-probability of a token is `score / (1 + token) - 10`. The score of a prompt is the sum
    of its ids. A replaced row counts by what it holds, divided by one more than its site's index.
    """

    info: object = field(default_factory=lambda: replace(INFO, running_samples=16))
    room: asyncio.Event | None = None
    """If set, no question is answered before."""
    waiting: int = 0
    """Requests that wait in vLLM's scheduler."""
    running: int = 0
    """Requests of others that run there."""
    asked: list[Job] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    def queue_stats(self) -> QueueStats:
        return QueueStats(running=self.running, waiting=self.waiting)

    def _capture(self, job: Job, start: int, end: int) -> None:
        for capture in job.plan.captures:
            kept = positions_of(capture.spans, start, end)
            values = self.values(job)
            for site in capture.sites if kept else ():
                rows = np.array([[values[p]] * WIDTH for p in kept], np.float32)
                self.deliver(
                    Rows(job.plan.request_id, (site,), np.array(kept, np.int32), rows[None])
                )

    def values(self, job: Job) -> list[float]:
        values = [float(token) for token in job.prompt]
        for number, act in enumerate(job.plan.acts):
            assert act.kind in (Kind.REPLACE, Kind.ADD_LAST)
            vector = self.vectors[act.vectors[0]]
            rows = np.frombuffer(vector.data, np.float32).reshape(vector.rows, vector.width)
            for site, (row, *_) in act.rows:
                for position in positions_of(act.spans, *limits(job, number)):
                    change = float(rows[row, 0])
                    change -= values[position] if act.kind is Kind.REPLACE else 0.0
                    values[position] += change * act.scale / (1 + site)
        return values

    def score(self, job: Job) -> float:
        return sum(self.values(job))

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        only = job.sampling.only_token
        if only is None:
            async for delta in super().generate(job):
                yield delta
            return
        self.asked.append(job)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.room is not None:
                await self.room.wait()
            await asyncio.sleep(0)
            token = generation_pb2.TokenLogprob(
                token_id=only, logprob=self.score(job) / (1 + only) - 10, rank=7 + only
            )
            top = generation_pb2.TokenLogprob(token_id=1, logprob=-0.5, rank=1)
            async for delta in super().generate(job):
                reading = generation_pb2.TokenLogprobs(token=token, alternatives=[top])
                yield delta._replace(token_ids=(only,), logprobs=[reading])
        finally:
            self.at_once -= 1


def limits(job: Job, number: int) -> tuple[int, int]:
    """The positions to which an act of a job's plan is limited: the first, and the end."""
    window = job.plan.window
    if window is None or number < window.first_act:
        return 0, len(job.prompt)
    return window.start, min(window.end, len(job.prompt))


def prompt(*ids: int) -> types_pb2.Prompt:
    return types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=ids))


def answer(*alternatives: tuple[int, ...]) -> sweep_pb2.Answer:
    return sweep_pb2.Answer(alternatives=[types_pb2.TokenIds(ids=ids) for ids in alternatives])


def pair(**fields: object) -> sweep_pb2.SweepPair:
    given: dict[str, object] = {
        "prompt": prompt(*CLEAN),
        "answer": answer((RIGHT,)),
        "foil": answer((WRONG,)),
        **fields,
    }
    if not {"corrupt", "zeros", "mean", "run_id", "noise"} & given.keys():
        given["corrupt"] = prompt(*CORRUPT)
    return sweep_pb2.SweepPair(**given)


def grade(name: str = "LOGPROB", *, recovered: bool = False) -> sweep_pb2.Grade:
    token = sweep_pb2.TokenGrade(metric=sweep_pb2.Metric.Value(f"METRIC_{name}"))
    return sweep_pb2.Grade(token=token, recovered=recovered)


def probe(
    *,
    vector: list[float] | None = WEIGHTS,
    sites: types_pb2.SiteSet | None = site_set(POST, layers=[1]),  # noqa: B008  # never changed
    where: selector_pb2.Selector | None = None,
    pool: int | None = None,
    rows: int | None = None,
    recovered: bool = False,
    **settings: object,
) -> sweep_pb2.Grade:
    read = vector_pb2.Readout(**settings)
    if vector is not None:
        read.vector.CopyFrom(tensor(np.array([vector])))
    message = gate_pb2.Probe(name="p", sites=sites, read=read, where=where, rows=rows)
    return sweep_pb2.Grade(
        probe=sweep_pb2.ProbeGrade(probe=message, pool=pool), recovered=recovered
    )


def order(*pairs: sweep_pb2.SweepPair, **fields: object) -> sweep_service_pb2.SweepRequest:
    """One pair, every layer of resid_post, every position, graded by log-probability."""
    given = {"sites": site_set(POST), "grades": [grade()], **fields}
    return pb.SweepRequest(pairs=pairs or [pair()], **given)


async def swept(running, request: sweep_service_pb2.SweepRequest):
    """The cells by index, and the summary."""
    _, *events, last = await rest(running.client.sweep.Sweep(request))
    cells = {event.cell.index: event.cell for event in events if event.HasField("cell")}
    return cells, last.summary


def grid(summary: sweep_pb2.SweepSummary, number: int = 0) -> np.ndarray:
    tensor = summary.grades[number].values
    return np.frombuffer(tensor.inline, "<f8").reshape(tuple(tensor.shape))


def logprob(score: float, token: int = RIGHT) -> float:
    return score / (1 + token) - 10


def site(layer: int) -> int:
    return Site(Point.RESID_POST, layer).index


async def refused(running, request: sweep_service_pb2.SweepRequest) -> Refusal:
    return await refusal_of(rest(running.client.sweep.Sweep(request)))
