"""The interface between the server and an engine. It does not depend on vLLM.

`VllmBackend` implements `Backend` in a server. Tests use a scripted engine.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rheostat_engine import Capture, Event, GainsUpdate, ModelSites, Plan
from rheostat_engine.immutable import immutable
from rheostat_server.config import ModelInfo
from rheostat_server.engine.pace import Pace
from rheostat_server.engine.sampling import SamplingSettings
from rheostat_server.errors import Defect
from rheostat_server.prompts.tokenizer import Tokenizer
from rheostat_server.vectors.store import Vector
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import generation_pb2


class Ending(Enum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "abort"
    WATCH = "watch"
    """A watch stopped it. The server decides that, not the engine."""
    RULE = "rule"
    """A rule stopped it. The server decides that, not the engine."""


class StoppedBy(NamedTuple):
    """What stopped a sample: a rule, or a watch."""

    rule_name: str
    """Empty: a message of a watch's client."""
    label: str
    watch: str = ""
    """The id of the watch; empty: a rule of the request or of the policy."""
    policy: int = 0
    """The version of the policy whose rule it is; 0: none."""

    @property
    def ending(self) -> Ending:
        """How the sample ends."""
        return Ending.WATCH if self.watch else Ending.RULE


class Delta(NamedTuple):
    """Tokens that one or several steps added to a sample."""

    token_ids: tuple[int, ...] = ()
    """New tokens."""
    text: str = ""
    """New text. It may lag behind the tokens, because a character may need several of them."""
    logprobs: Sequence[generation_pb2.TokenLogprobs] = ()
    """If asked for, one per new token."""
    prompt_logprobs: Sequence[generation_pb2.TokenLogprobs] | None = None
    """If asked for, once: one per prompt token but the first."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    ending: Ending | None = None
    """Set with the last delta."""
    stop: int | str | StoppedBy | None = None
    """The stop text, token or rule that ended it; None for the model's end token."""


@immutable()
class Job:
    """One sample for the engine."""

    plan: Plan
    """Its plan, whose id names the job."""
    prompt: tuple[int, ...]
    """Token ids."""
    sampling: SamplingSettings
    """Settings of the whole request."""
    sample: int
    """The sample's index in the request."""
    lora: str = ""
    """Adapter; empty: none."""
    background: bool = False
    """Whether the engine may let it wait while it runs others."""
    pace: Pace | None = field(default=None, compare=False)
    """Lets its tokens wait for later ones. None: each is received at once."""

    @property
    def has_plan(self) -> bool:
        """Whether the plan is not empty, so that the engine sends events."""
        plan = self.plan
        return bool(plan.acts or plan.captures) or plan.private_from is not None


class ControllerStats(NamedTuple):
    """Counts of a controller, and times of its calls in seconds."""

    calls: int
    overruns: int
    p50: float
    p99: float
    longest: float
    disabled: str
    """Why it is disabled; empty: it is not."""


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Counts of the workers."""

    bank_rows_used: int = 0
    slots_used: int = 0
    unused_tables: bool = False
    """Whether some rows and slots belong to tables that no request uses any more."""
    requests: int = 0
    captured_rows: int = 0
    lost_rows: int = 0
    left_bytes: int = 0
    """Bytes of captured rows that left the device."""
    plain_rows: int = 0
    """Rows that left unencoded, because the workers could not encode them."""
    ring_bytes: int = 0
    """Device memory of the ring."""
    encode_bytes: int = 0
    """Device memory of projection matrices and directions, and of scratch buffers."""
    staging_bytes: int = 0
    """Host memory of all workers in which captured rows wait for the server."""
    steps: Mapping[str, int] = field(default_factory=dict)
    controllers: Mapping[str, ControllerStats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Counts of vLLM's scheduler and prefix cache."""

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    """Requests that wait although there is room, such as those in the background."""
    prefix_queried_token_count: int = 0
    prefix_hit_token_count: int = 0


class LensReading(NamedTuple):
    """What the final norm and the unembedding make of rows."""

    top_ids: npt.NDArray[np.int32]
    """[n, k]: the likeliest tokens, best first."""
    top_logprobs: FloatArray
    """[n, k]."""
    logprobs: FloatArray
    """[n, m]: of the tokens that were asked for."""
    ranks: npt.NDArray[np.int32]
    """[n, m]: 1 plus the number of likelier tokens."""
    log_normalizers: FloatArray
    """[n]: a logit is the log-probability plus this."""
    divergences: FloatArray
    """[n]: KL(reference || row); empty without a reference."""
    scales: FloatArray
    """[n]: by how much the final norm multiplied each row."""


class TokenDirections(NamedTuple):
    """Directions of tokens: a logit is scale * (x . direction) + offset."""

    rows: FloatArray
    """[m, W]."""
    offsets: FloatArray
    """[m]."""


class CapturesUpdate(NamedTuple):
    """New captures of a sample from its next step on."""

    number: int
    """The number of the change, among the sample's changes."""
    captures: Sequence[Capture]
    """All captures from then on."""
    not_before: int = 0
    """The position before which nothing changes."""


class SteeringUpdate(NamedTuple):
    """New acts of running samples."""

    plan: Plan
    """A packed plan with the acts; their vectors are loaded."""
    plan_ids: Sequence[str]
    """The ids of the samples' plans."""
    not_before: int
    """The position before which nothing changes."""


class Start(NamedTuple):
    """A sample that an engine is to start, and the functions that get its output.

    The backend calls `receive` and `fail` on the running loop, and from nowhere else. It does not
    wait between them. Neither may raise an error or call `abort`.
    """

    job: Job
    """The sample."""
    receive: Callable[[Delta], None]
    """Is called with each delta, in order. The last delta has an ending."""
    fail: Callable[[Exception], None]
    """Is called in place of the last delta if the sample cannot go on. The engine may still run the
    sample. The error is `EngineLost` if the engine is gone."""


class Backend(Protocol):
    """An engine with a model in it, ready to generate."""

    @property
    def info(self) -> ModelInfo:
        """The model."""

    @property
    def sites(self) -> ModelSites:
        """Its sites, and the extension's limits."""

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if one is loaded."""

    def start(self, deliver: Callable[[Event], None], lost: Callable[[str], None]) -> None:
        """Delivers every event, and once the reason if the engine dies, on the running loop."""

    async def add_requests(self, starts: Sequence[Start]) -> None:
        """Starts samples of one request. Returns once they have been sent to the engine.

        Raises:
            EngineLost: the engine is gone.
            Exception: the engine refuses a sample. The samples before it may run.
        """

    async def abort(self, plan_ids: Sequence[str]) -> None:
        """Aborts samples. Returns once the engine has been notified.

        Ids of samples that have ended, or that were never added, are ignored. `receive` may be
        called once more, with the final delta.
        """

    async def prepare(self, name: str, plan: Plan | None, plan_cost: int) -> tuple[bool, str]:
        """Builds a part of a plan's tables between two steps.

        Args:
            name: the name of the preparation, for `release_prepared`.
            plan: the packed plan; None if an earlier call with this name passed it.
            plan_cost: the most that is built.

        Returns:
            Whether every worker has built everything, and the error of a worker that cannot.

        Raises:
            EngineLost: the engine is gone.
        """

    async def release_prepared(self, names: Sequence[str]) -> bool:
        """Releases preparations by name, and a part of the tables that no request uses.

        Returns:
            Whether the workers hold more tables that no request uses.

        Raises:
            EngineLost: the engine is gone.
        """

    async def update_steering(
        self, updates: Sequence[SteeringUpdate]
    ) -> Sequence[Sequence[int | None] | Defect]:
        """Replaces the acts of running samples, each from its next step on, in one call.

        Returns:
            For each update, the first position of each sample on which the acts apply; None for a
            sample that the engine does not run. A `Defect` if a worker could not install the acts.

        Raises:
            EngineLost: the engine is gone.
        """

    def set_gains(self, updates: Sequence[GainsUpdate]) -> Awaitable[None]:
        """Changes gains of samples, each from its next step on. Events report the positions.

        Await the result to know that the engine has stored the gains. Samples that have ended are
        ignored, and so are those whose acts have no gains; see `Plan.gained`.

        Raises:
            EngineLost: the engine is gone.
        """

    async def hold_samples(self, plan_ids: Sequence[str], *, held: bool) -> None:
        """Stops scheduling samples, from the next step on, or goes on with samples that were held.

        Returns once the engine will do so. Tokens of steps that run already still come. A held
        sample gives up its KV memory, and is computed again later. Samples that have ended are
        ignored.

        Raises:
            EngineLost: the engine is gone.
        """

    async def update_captures(self, changes: Mapping[str, CapturesUpdate | None]) -> None:
        """Changes the captures of samples, each from its next step on. Events report the positions.

        Args:
            changes: by the id of the sample's plan, which may be empty. None: no change waits any
                more.

        Raises:
            EngineLost: the engine is gone.
        """

    async def load_vectors(self, vectors: Sequence[Vector]) -> None:
        """Loads vectors into every worker.

        Raises:
            EngineLost: the engine is gone.
        """

    async def drop_vectors(self, digests: Sequence[bytes]) -> None:
        """Removes vectors from every worker.

        Raises:
            EngineLost: the engine is gone.
        """

    async def lens(
        self,
        rows: FloatArray,
        top_k: int,
        token_ids: Sequence[int],
        reference: FloatArray | None = None,
    ) -> LensReading:
        """Reads rows [n, W] of the stream with the final norm and the unembedding.

        A step waits for the call, so n times the vocabulary should be small. One call runs at a
        time.

        Args:
            rows: rows, each of float32.
            top_k: number of likeliest tokens of each row.
            token_ids: tokens whose log-probabilities and ranks are wanted.
            reference: [1, W] or [n, W], the row to whose distribution each row is compared.

        Raises:
            EngineLost: the engine is gone.
        """

    def text_of(self, token_id: int) -> str:
        """The text of a token; empty without a tokenizer. May be called on a thread."""

    async def directions(self, token_ids: Sequence[int]) -> TokenDirections:
        """Returns the directions of tokens.

        Raises:
            EngineLost: the engine is gone.
        """

    async def worker_stats(self) -> WorkerStats:
        """Returns the workers' counts.

        Raises:
            EngineLost: the engine is gone.
        """

    def queue_stats(self) -> QueueStats:
        """Returns the scheduler's counts."""

    async def close(self) -> None:
        """Ends the engine and its processes."""
