"""Admission: from a GenerateRequest to integers, or a refusal that names the field.

Whatever a client can send is settled here, so that nothing of it can fail in the engine. Generate
and Explain share this path.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from rheostat_engine import ModelSites, Plan
from rheostat_server import checks, directions
from rheostat_server.baseline import Baseline, compared_logprobs
from rheostat_server.capture.specs import (
    ResolvedCapture,
    Target,
    direction_vectors,
    find_all_directions,
    project_all,
    resolve_captures,
)
from rheostat_server.errors import LoraNotFound, NotSupported, QueueFull, Resource
from rheostat_server.global_steering import GlobalSteering
from rheostat_server.limits import (
    ID_BYTES,
    LARGE_REQUEST_BYTES,
    LARGE_REQUESTS,
    QUEUED_PROMPT_TOKENS,
    WAITING_REQUESTS,
)
from rheostat_server.model_info import ModelInfo
from rheostat_server.offload import offload
from rheostat_server.planning import check_ranges, compile_plan, observe
from rheostat_server.prompts import Prompts, PromptTokens
from rheostat_server.runs.checks import check_runs
from rheostat_server.runs.store import Runs
from rheostat_server.sampling import SamplingSettings, resolve_sampling
from rheostat_server.selection import SelectionContext, needs_text, selector_work
from rheostat_server.sinks import Sinks
from rheostat_server.steering import (
    Draft,
    Intervention,
    check_sums,
    check_vectors,
    draft_steering,
    look_up,
    refuse_probes_and_rules,
    sums_work,
)
from rheostat_server.subscriptions.registry import Subscriptions
from rheostat_server.subscriptions.wishes import Wish, merged, wishes, wishes_work
from rheostat_server.tensors import FloatType
from rheostat_server.vectors import Vector, VectorStore
from rheostat_wire.v1 import (
    capture_pb2,
    generation_service_pb2,
    receipt_pb2,
    steering_pb2,
)

GenerateRequest = generation_service_pb2.GenerateRequest

_RETRY = 1.0
"""Seconds after which a request that found the queue full may come again."""


@dataclass(frozen=True, slots=True)
class Desk:
    """What requests are checked against."""

    info: ModelInfo
    """The model."""
    sites: ModelSites
    """Its sites."""
    prompts: Prompts
    """Its tokenizer."""
    store: VectorStore
    """The stored vectors."""
    server_wide: GlobalSteering = field(default_factory=GlobalSteering)
    """The server-wide steering that holds."""
    subscriptions: Subscriptions | None = None
    """Those that are open. None: nobody observes what is admitted."""
    sinks: Sinks | None = None
    """Where rows can be kept. None: nowhere."""
    spools: bool = False
    """Whether rows can wait on disk."""
    runs: Runs | None = None
    """Where runs are stored. None: nowhere."""
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LARGE_REQUESTS))
    """Held while a large request is checked."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that can run."""

    request_id: str
    """Given or made."""
    labels: Mapping[str, str]
    """By which it can be found."""
    prompt: PromptTokens
    """The prompt."""
    context: SelectionContext
    """What its selectors were resolved against."""
    sampling: SamplingSettings
    """How to sample."""
    interventions: tuple[Intervention, ...]
    """The server-wide ones, then the request's, in order."""
    captures: tuple[ResolvedCapture, ...]
    """One per capture, in order."""
    wishes: tuple[Wish, ...]
    """What subscriptions want of it."""
    plan: Plan
    """What the engine has to do to every sample, under the request's own id."""
    unobserved: Plan
    """A plan with only those captures that the request asks for itself."""
    vectors: tuple[Vector, ...]
    """Every vector that it needs, each once; those of observers come without it."""
    lora: str
    """Adapter; empty: none."""
    server_wide: GlobalSteering
    """The server-wide steering that it runs under."""
    return_prompt_token_ids: bool
    """Whether Started holds the prompt's tokens."""
    waits: bool
    """Whether it waits while others hold what it needs."""
    baseline: Baseline | None
    """What runs beside it for comparison, if asked for."""

    @property
    def prompt_len(self) -> int:
        """P."""
        return len(self.prompt.token_ids)

    @property
    def inline_captures(self) -> dict[capture_pb2.Overload.ValueType, dict[int, ResolvedCapture]]:
        """Those whose rows go into the response, by their policy and place in the request."""
        found: dict[capture_pb2.Overload.ValueType, dict[int, ResolvedCapture]] = {}
        for index, one in enumerate(self.captures):
            if one.target is Target.INLINE:
                found.setdefault(one.overload, {})[index] = one
        return found


async def admit(request: GenerateRequest, desk: Desk, *, changeable: bool = False) -> Admitted:
    """Checks a request. Large requests wait for each other; see `LARGE_REQUESTS`.

    Args:
        request: as it came.
        desk: what it is checked against.
        changeable: whether its steering may change while it runs: what it generates is then shared
            with no other request.

    Raises:
        RheostatError: it cannot run; the error says why, and which field is concerned.
    """
    size = request.ByteSize()
    async with desk.large if size > LARGE_REQUEST_BYTES else nullcontext():
        return await _admit(request, size, desk, changeable=changeable)


async def _admit(request: GenerateRequest, size: int, desk: Desk, *, changeable: bool) -> Admitted:
    request_id = request.request_id
    if request_id:
        checks.matches(request_id, checks.REQUEST_ID, "request_id")
    refuse_probes_and_rules(request, "")
    _check_lora(request.lora_name, desk.info.loras)
    checks.labels(request.labels, "labels")
    waits = _waits(request)
    check_ranges(request.steering, request.captures)
    with_text = await offload(size, _any_needs_text, request.steering, request.captures)
    prompt = await desk.prompts.resolve(request, with_text=with_text)
    sampling = resolve_sampling(
        request.sampling,
        prompt_len=len(prompt.token_ids),
        prompt_field=prompt.source,
        model=desk.info,
        has_tokenizer=desk.prompts.has_tokenizer,
    )
    context = SelectionContext(prompt, sampling.max_tokens, desk.info.vocabulary)
    own = await resolve_steering(request.steering, desk, context, receipt_pb2.ORIGIN_REQUEST)
    work = size + selector_work([spec.where for spec in request.captures], context)
    drafted = await offload(
        work,
        resolve_captures,
        request.captures,
        desk.sites,
        context,
        desk.sinks,
        spools=desk.spools,
    )
    check_runs(drafted, desk.runs, samples=sampling.samples, prompt_len=context.prompt_len)
    directions_of = find_all_directions(drafted, desk.store, desk.sites)
    work = sum(one.projecting for one in drafted)
    captures = await offload(work, project_all, drafted, directions_of, desk.sites)
    request_id = request_id or uuid.uuid4().hex
    observers = await _observers(request, request_id, desk, context)
    wanted = merged([*_directed(captures, desk), *observers])
    server_wide = await resolve_global(desk, context)
    interventions = (*server_wide, *own)
    kind = FloatType(desk.sites.dtype)
    await offload(sums_work(interventions), check_sums, interventions, kind)
    compiled = await compile_plan(request_id, interventions, captures)
    plan, wanted = await observe(compiled.plan, captures, wanted)
    vectors = {vector.digest: vector for vector in compiled.vectors}
    baseline = None
    if request.with_baseline:
        without = await compile_plan(request_id, server_wide, captures)
        compared = compared_logprobs(sampling, desk.info.logprobs)
        watched = without.plan.with_captures_of(plan)
        baseline = Baseline(watched, compared, desk.info.model_tokens)
    return Admitted(
        request_id=request_id,
        labels=dict(request.labels),
        prompt=prompt,
        context=context,
        sampling=sampling,
        interventions=interventions,
        captures=captures,
        wishes=wanted,
        plan=replace(plan, private_from=context.prompt_len if changeable else None),
        unobserved=compiled.plan,
        lora=request.lora_name,
        vectors=tuple((vectors | direction_vectors(captures)).values()),
        server_wide=desk.server_wide,
        return_prompt_token_ids=request.return_prompt_token_ids,
        waits=waits,
        baseline=baseline,
    )


def check_queue(
    admitted: Admitted, running_samples: int, *, samples: int, prompt_tokens: int
) -> None:
    """Checks that a request may run or wait beside those that do.

    Args:
        admitted: the request.
        running_samples: samples that the engine runs at once.
        samples: samples of the other requests.
        prompt_tokens: prompt tokens of the other requests, with one prompt for each sample.

    Raises:
        QueueFull: it may not.
    """
    if samples >= running_samples + WAITING_REQUESTS:
        raise QueueFull(
            f"{samples} samples run or wait already; try again later", retry_after=_RETRY
        )
    own = admitted.prompt_len * admitted.sampling.samples
    if samples and prompt_tokens + own > QUEUED_PROMPT_TOKENS:
        raise QueueFull(
            f"the prompts that run or wait have {prompt_tokens} tokens, with one prompt for each "
            f"sample; at most {QUEUED_PROMPT_TOKENS} are allowed",
            retry_after=_RETRY,
        )


async def resolve_update(
    steering: steering_pb2.Steering, desk: Desk, context: SelectionContext
) -> tuple[Intervention, ...]:
    """Interventions that a running request gets in place of its own.

    Raises:
        InvalidArgument, FailedPrecondition, NotFound, MessageTooLarge: one cannot be.
    """
    if context.prompt.text is None and await offload(
        steering.ByteSize(), _any_needs_text, steering, ()
    ):
        context = replace(context, prompt=await desk.prompts.read(context.prompt))
    return await resolve_steering(steering, desk, context, receipt_pb2.ORIGIN_UPDATE)


async def resolve_steering(
    steering: steering_pb2.Steering,
    desk: Desk,
    context: SelectionContext,
    origin: receipt_pb2.Origin.ValueType,
) -> tuple[Intervention, ...]:
    """Interventions of a request, each checked by itself; see `check_sums` and `compile_plan`.

    The context has the prompt's text if a selector looks for text.

    Raises:
        InvalidArgument, FailedPrecondition, NotFound, MessageTooLarge: one cannot be.
    """
    selectors = [one.where for one in steering.interventions]
    size = steering.ByteSize() + selector_work(selectors, context)
    drafts: list[Draft] = await offload(size, draft_steering, steering, desk.sites, context)
    found = look_up(drafts, desk.store, desk.sites, origin)
    await offload(directions.work([one.op for one in found]), check_vectors, drafts, found)
    return found


async def resolve_global(desk: Desk, context: SelectionContext) -> tuple[Intervention, ...]:
    """The server-wide interventions in a request."""
    if not desk.server_wide.ops:
        return ()
    steering = desk.server_wide.steering
    size = steering.ByteSize()
    size += selector_work([one.where for one in steering.interventions], context)
    return await offload(size, desk.server_wide.resolve, context)


def _directed(captures: Sequence[ResolvedCapture], desk: Desk) -> list[Wish]:
    """What a request sends to subscriptions, each of which must be open.

    Rows go out under numbers after those of the subscription's own captures.
    """
    by_name: dict[str, dict[int, ResolvedCapture]] = {}
    for index, capture in enumerate(captures):
        if capture.target is Target.SUBSCRIPTION:
            by_name.setdefault(capture.subscription, {})[index] = capture
    wishes = []
    for name, wanted in by_name.items():
        path = f"captures[{min(wanted)}].subscription_id"
        if desk.subscriptions is None:
            raise NotSupported("nobody can subscribe to this request", field=path)
        found = desk.subscriptions.named(name, path)
        after = len(found.captures.templates)
        sent = {after + i: one for i, one in wanted.items()}
        wishes.append(Wish(found, sent, frozenset(sent)))
    return wishes


async def _observers(
    request: GenerateRequest, request_id: str, desk: Desk, context: SelectionContext
) -> list[Wish]:
    """What subscriptions want of a request that does not know of them."""
    if desk.subscriptions is None or not len(desk.subscriptions):
        return []
    observers = desk.subscriptions.selecting(request_id, request.labels)
    return await offload(wishes_work(observers, context), wishes, observers, context)


def _any_needs_text(
    steering: steering_pb2.Steering, captures: Sequence[capture_pb2.CaptureSpec]
) -> bool:
    """Whether a selector looks for text."""
    selectors = [one.where for one in steering.interventions]
    selectors += [one.where for one in captures]
    return any(map(needs_text, selectors))


def _check_lora(name: str, known: Sequence[str]) -> None:
    checks.text_bytes(name, ID_BYTES, "lora_name")
    if name and name not in known:
        raise LoraNotFound(
            f"there is no adapter {name!r}: the server has {', '.join(known) or 'none'}",
            field="lora_name",
            resource=Resource("lora", name),
        )


def _waits(request: GenerateRequest) -> bool:
    if not request.HasField("when_full"):
        return True
    checks.known_enum(request.when_full, generation_service_pb2.WhenFull.values(), "when_full")
    return request.when_full == generation_service_pb2.WHEN_FULL_WAIT
