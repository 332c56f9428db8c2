"""Admission: compiles a GenerateRequest, or refuses it with an error that names the field.

Everything that a client can send is checked here, so that it cannot fail in the engine. Generate
and Explain share this path.
"""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rheostat_engine import Kind, ModelSites
from rheostat_engine.immutable import immutable
from rheostat_server import validation
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.admission.baseline import Baseline, compared_logprobs
from rheostat_server.admission.compiled_requests import (
    CheckedParts,
    CompiledRequest,
    CompiledRequests,
    KeptRequest,
    Parts,
    counts_of,
    gateless_key,
    key_of,
    may_select,
    parts_of,
    with_other_gates,
)
from rheostat_server.admission.estimates import estimate_observers, estimate_watches
from rheostat_server.admission.global_steering import GlobalSteering, ServerWide
from rheostat_server.admission.planning import check_ranges, compile_plan, observe
from rheostat_server.capture.specs import (
    ResolvedCapture,
    Target,
    check_runs,
    direction_vectors,
    resolve_captures,
)
from rheostat_server.config import ModelInfo
from rheostat_server.engine.sampling import resolve_sampling
from rheostat_server.errors import InvalidValue, LoraNotFound, NonFinite, NotSupported, Resource
from rheostat_server.limits import (
    HOLD_BACK,
    ID_BYTES,
    LARGE_REQUEST_BYTES,
    LARGE_REQUESTS,
    OFFLOAD_BYTES,
)
from rheostat_server.monitors.parts import (
    SteeredRequest,
    WatchPart,
    refuse_unwatched,
    signals_wait,
    watch_parts,
)
from rheostat_server.monitors.registry import Watches
from rheostat_server.monitors.watch import Watch
from rheostat_server.prompts.prompts import Prompts, PromptTokens
from rheostat_server.runs.store import RunStore
from rheostat_server.selectors.selection import SelectionContext, needs_text
from rheostat_server.sinks.registry import Sinks
from rheostat_server.steering.controlled import (
    ControlledBy,
    Controllers,
    check_controlled,
    control,
)
from rheostat_server.steering.estimates import estimate_captures, estimate_parts
from rheostat_server.steering.gates import refuse_unused_probes
from rheostat_server.steering.interventions import (
    Intervention,
    check_sums,
    resolve_steering,
)
from rheostat_server.steering.probes import Probe, resolve_probes
from rheostat_server.steering.rules import (
    Rule,
    check_rule_count,
    refuse_gained_sums,
    resolve_rule_steering,
    resolve_rules,
    signal_plan,
    with_rule_gains,
)
from rheostat_server.subscriptions.observer_captures import (
    ObserverCapture,
    merged,
    observer_captures,
)
from rheostat_server.subscriptions.registry import Subscriptions
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_server.tasks.offload import offload_plan
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Lookups, VectorStore, VectorView
from rheostat_server.vectors.token_directions import with_directions
from rheostat_wire.v1 import (
    capture_pb2,
    gate_pb2,
    generation_service_pb2,
    receipt_pb2,
    steering_pb2,
)

GenerateRequest = generation_service_pb2.GenerateRequest


@dataclass(frozen=True, slots=True)
class AdmissionContext:
    """Everything that requests are checked against."""

    info: ModelInfo
    """The model."""
    sites: ModelSites
    """Its sites."""
    prompts: Prompts
    """Its tokenizer."""
    store: VectorStore
    """The stored vectors."""
    server_wide: GlobalSteering = field(default_factory=GlobalSteering)
    """The current server-wide steering."""
    subscriptions: Subscriptions | None = None
    """The open subscriptions. None: requests are not observed."""
    watches: Watches | None = None
    """The open watches. None: requests are not watched."""
    sinks: Sinks = field(default_factory=lambda: Sinks([]))
    """The sinks that captures may name."""
    spools: bool = False
    """Whether rows can wait on disk."""
    runs: RunStore = field(default_factory=lambda: RunStore(0))
    """The stored runs."""
    compiled: CompiledRequests | None = None
    """Compiled requests. None: each request is compiled."""
    controllers: Controllers = field(default_factory=lambda: Controllers(()))
    """The controllers that requests may use."""
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LARGE_REQUESTS))
    """Held while a large request is checked."""


async def admit(
    request: GenerateRequest, admission: AdmissionContext, *, changeable: bool = False
) -> AdmittedRequest:
    """Admits a request, on a thread if that takes long.

    Few large requests are admitted at a time; see `LARGE_REQUESTS`.

    Args:
        request: the message.
        admission: everything that it is checked against.
        changeable: whether its steering may change while it runs. The cache blocks of its generated
            tokens are then not shared with other requests.

    Raises:
        RheostatError: it cannot run. The error names the reason and the field.
    """

    async def attempt() -> AdmittedRequest:
        size = request.ByteSize()
        if size <= LARGE_REQUEST_BYTES:
            return await _admit(request, size, admission, changeable=changeable)
        async with admission.large:
            return await _admit(request, size, admission, changeable=changeable)

    return await with_directions(admission.store.directions, request, attempt)


async def _admit(
    request: GenerateRequest, size: int, admission: AdmissionContext, *, changeable: bool
) -> AdmittedRequest:
    selects = may_select(request)
    compiled = admission.compiled
    # A large request may have any number of parts.
    keeps = selects and compiled is not None and size <= LARGE_REQUEST_BYTES
    parts = parts_of(request) if keeps else None
    checked = None if compiled is None or parts is None else compiled.checked(parts)
    unchecked = selects and checked is None
    _check_head(request, admission, check_selectors=unchecked)
    controlled = check_controlled(request, admission.controllers, in_session=changeable)
    with_text = unchecked and await offload_plan(
        size, any_needs_text, steerings_of(request), request.captures, request.probes
    )
    prompt = await admission.prompts.resolve(request, with_text=with_text)
    request_id = request.request_id or next(_NEW_IDS)
    observers: Sequence[Subscription] = ()
    if admission.subscriptions is not None and len(admission.subscriptions):
        observers = admission.subscriptions.selecting(request_id, request.labels)
    watches: Sequence[Watch] = ()
    if admission.watches is not None and admission.watches.any:
        watches = admission.watches.selecting(request_id, request.labels)
    length = len(prompt.token_ids)
    if checked is not None:
        work = checked.work
    else:
        work = _parts_work(request, length, admission) if selects else 0
    work += estimate_observers(observers, length) + admission.server_wide.work.at(length)
    work += estimate_watches(watches)
    candidate = _Candidate(
        request, request_id, prompt, changeable, watches, work, controlled, parts, checked
    )
    if work <= OFFLOAD_BYTES:
        # The plan of a controlled request is its own, so that it is not compiled for others too.
        known = admission.compiled if controlled is None else None
        admitted = admit_now(candidate, observers, admission, known)
        if unchecked and not with_text and parts is not None:
            _note_checked(request, parts, admission)
        return admitted
    # The cache of compiled requests is used on the event loop alone.
    return await offload_plan(
        work, admit_now, candidate, observers, admission, compiled_before=None
    )


def _new_ids() -> Iterator[str]:
    """Ids that nobody can guess, 64 for each call of the kernel."""
    while True:
        digits = secrets.token_hex(16 * 64)
        for first in range(0, len(digits), 32):
            yield digits[first : first + 32]


_NEW_IDS = _new_ids()


@immutable()
class _Candidate:
    """A request whose prompt is known."""

    request: GenerateRequest
    request_id: str
    """Given or made."""
    prompt: PromptTokens
    changeable: bool
    """Whether its steering may change while it runs."""
    watches: Sequence[Watch]
    """The watches that select it."""
    work: int
    """Bytes that `offload` counts for its admission, and for each later pass over its plan."""
    controlled: ControlledBy | None
    """Its controller."""
    parts: Parts | None
    """Its serialized parts; None if they are not kept."""
    checked: CheckedParts | None
    """The results of earlier checks of equal parts; None if there were none."""


def admit_now(
    candidate: _Candidate,
    observers: Sequence[Subscription],
    admission: AdmissionContext,
    compiled_before: CompiledRequests | None,
) -> AdmittedRequest:
    """Admits a request. This takes long for a large request; see `admit`.

    Args:
        candidate: the request.
        observers: the subscriptions that observe it.
        admission: what it is checked against.
        compiled_before: compiled requests that may be used again; None on a thread.

    Raises:
        RheostatError: it cannot run.
    """
    request, prompt = candidate.request, candidate.prompt
    sampling = resolve_sampling(
        request.sampling,
        prompt_len=len(prompt.token_ids),
        prompt_field=prompt.source,
        model=admission.info,
        has_tokenizer=admission.prompts.has_tokenizer,
    )
    context = SelectionContext(prompt, sampling.max_tokens, admission.info.vocabulary)
    key, gateless, known = None, None, None
    if compiled_before is not None:
        key = key_of(
            request,
            context,
            admission.server_wide,
            candidate.watches,
            candidate.parts,
            candidate.checked,
        )
        if key is not None:
            kept = compiled_before.find(key)
            if kept is not None:
                known = kept.compiled
            else:
                gateless = gateless_key(request, key, admission.server_wide)
            template = None if gateless is None else compiled_before.template(gateless)
            if template is not None:
                known = with_other_gates(template, request.steering, context, admission.sites)
                if known is not None:
                    compiled_before.add(key, None, template._replace(compiled=known))
    if known is None:
        lookups = Lookups(admission.store.view())
        columns = admission.server_wide.columns
        probes = resolve_probes(request.probes, admission.sites, context, lookups, columns)
        own = resolve_steering(
            request.steering,
            admission.sites,
            context,
            lookups,
            receipt_pb2.ORIGIN_REQUEST,
            admission.runs,
            probes,
        )
        rules = resolve_rules(request.rules, probes, context)
        own = with_rule_gains(own, request.rules, rules, probes, admission.sites, context)
        beside = resolve_rule_steering(
            request.rules, rules, probes, admission.sites, context, lookups, admission.runs
        )
        if candidate.controlled is None:
            used = [intervention.gate for intervention in (*own, *beside)]
            used += [rule.gate for rule in rules]
            refuse_unused_probes(probes, used)
        captures = _resolve_captures(request, context, sampling.samples, lookups, admission)
    else:
        captures = known.captures
    wanted: tuple[ObserverCapture, ...] = ()
    if observers or any(capture.target is Target.SUBSCRIPTION for capture in captures):
        wanted = merged([*_directed(captures, admission), *observer_captures(observers, context)])
    compiled = known
    if compiled is None:
        here = admission.server_wide.resolve(context)
        refuse_gained_sums((*here.interventions, *own))
        own = admission.server_wide.with_gains(own, here, context)
        parts: tuple[WatchPart, ...] = ()
        gained = own
        if candidate.watches:
            first = columns + sum(len(probe.sites) for probe in probes.values())
            steered = SteeredRequest(
                here.interventions,
                own,
                beside,
                rules,
                admission.sites,
                context,
                candidate.controlled is not None,
            )
            parts, gained = watch_parts(candidate.watches, steered, first)
            refuse_unwatched(parts, with_baseline=request.with_baseline)
        compiling = partial(
            _compile,
            probes=tuple(probes.values()),
            rules=rules,
            captures=captures,
            admission=admission,
            here=here,
            held_back=request.hold_back > 0,
        )
        try:
            compiled = compiling((*gained, *beside), watches=parts)
        except (InvalidValue, NonFinite) as error:
            if not any(part.probes for part in parts):
                raise
            # A watch neither refuses nor breaks a request, unless it must be able to stop it.
            parts = tuple([part.without(error.message) for part in parts])
            refuse_unwatched(parts, with_baseline=request.with_baseline)
            compiled = compiling((*own, *beside), watches=parts)
        if compiled_before is not None and key is not None:
            compiled_before.add(key, gateless, KeptRequest(compiled, lookups, probes))
    plan, wanted = observe(compiled.plan, captures, wanted, compiled.observed)
    baseline = None
    if request.with_baseline:
        without = compile_plan(
            candidate.request_id, compiled.server_wide, captures, compiled.server_wide_probes
        )
        compared = compared_logprobs(sampling, admission.info.logprobs)
        watched = without.plan.with_captures_of(plan)
        baseline = Baseline(watched, compared, admission.info.model_tokens)
    plan = plan.for_request(candidate.request_id, plan.epoch)
    unobserved, controlled = compiled.plan, candidate.controlled
    if controlled is not None:
        interventions = (*compiled.server_wide, *compiled.own)
        read = tuple(probes.values())
        unobserved = control(unobserved, controlled.name, interventions, read, context)
        plan = replace(plan, control=unobserved.control, private_from=context.prompt_len)
    if candidate.changeable or any(part.steers for part in compiled.watch_parts):
        plan = replace(plan, private_from=context.prompt_len)
    return AdmittedRequest(
        request_id=candidate.request_id,
        labels=dict(request.labels),
        prompt=prompt,
        context=context,
        sampling=sampling,
        interventions=(*compiled.server_wide, *compiled.own),
        captures=captures,
        observer_captures=wanted,
        plan=plan,
        unobserved=unobserved,
        lora=request.lora_name,
        vectors=compiled.vectors,
        server_wide=admission.server_wide,
        return_prompt_token_ids=request.return_prompt_token_ids,
        waits=_waits(request),
        baseline=baseline,
        work=candidate.work,
        read_count=compiled.read_count,
        signals=compiled.signals,
        rule_names=tuple([rule.name for rule in request.rules]),
        hold_back=request.hold_back,
        watch_parts=compiled.watch_parts,
        unwatched=admission.watches is None,
        controlled=controlled,
        in_session=candidate.changeable,
    )


def _check_head(
    request: GenerateRequest, admission: AdmissionContext, *, check_selectors: bool
) -> None:
    """Checks the fields that depend neither on the prompt nor on vectors.

    `check_selectors`: false if it has no selectors, or equal ones were checked before.
    """
    if request.request_id:
        validation.matches(request.request_id, validation.REQUEST_ID, "request_id")
    check_rule_count(request.rules)
    if request.hold_back > HOLD_BACK:
        raise InvalidValue(f"must be 0 to {HOLD_BACK}", field="hold_back")
    if request.with_baseline and admission.server_wide.policy.rules:
        raise NotSupported(
            "the server's policy has rules, which do not read baselines: send the request without "
            "one",
            field="with_baseline",
        )
    if request.probes and admission.info.no_gates:
        raise NotSupported(admission.info.no_gates, field="probes")
    _check_lora(request.lora_name, admission.info.loras)
    validation.labels(request.labels, "labels")
    _waits(request)
    if check_selectors:
        check_ranges(request.steering, request.captures, request.probes, request.rules)


def steerings_of(request: GenerateRequest) -> list[steering_pb2.Steering]:
    """The steering of a request, and what its rules steer."""
    return [request.steering, *(rule.steer for rule in request.rules if rule.HasField("steer"))]


def _note_checked(request: GenerateRequest, parts: Parts, admission: AdmissionContext) -> None:
    """Keeps the results of the checks of an admitted request.

    Only if equal parts were admitted before: parts with a gate of their own may never recur.
    """
    compiled = admission.compiled
    if compiled is None or not compiled.seen_before(parts) or _compares_vectors(request):
        return
    counts = counts_of(request)
    if counts is not None:
        work = _parts_work(request, 0, admission)
        if work == _parts_work(request, 2, admission):  # it does not depend on the prompt
            compiled.add_checked(CheckedParts(parts, counts, work))


def _compares_vectors(request: GenerateRequest) -> bool:
    """Whether the work on a request depends on vectors, which may change; see `_parts_work`."""
    return any(
        len(intervention.ablate.directions) > 1
        for steering in steerings_of(request)
        for intervention in steering.interventions
    )


def _parts_work(request: GenerateRequest, length: int, admission: AdmissionContext) -> int:
    """Bytes that `offload` counts for what a request itself asks for.

    Args:
        request: the request.
        length: tokens of the prompt.
        admission: everything that it is checked against.
    """
    sites = admission.sites
    work = estimate_parts(request, length, sites, admission.store.view())
    return work + estimate_captures(request.captures, length, sites)


def _resolve_captures(
    request: GenerateRequest,
    context: SelectionContext,
    samples: int,
    vectors: VectorView,
    admission: AdmissionContext,
) -> tuple[ResolvedCapture, ...]:
    """The captures of a request, with the vectors that their rows are projected on."""
    if not request.captures:
        return ()
    captures = resolve_captures(
        request.captures,
        admission.sites,
        context,
        vectors,
        admission.sinks,
        spools=admission.spools,
    )
    check_runs(captures, admission.runs, samples=samples, prompt_len=context.prompt_len)
    return captures


def _compile(
    own: tuple[Intervention, ...],
    probes: tuple[Probe, ...],
    rules: tuple[Rule, ...],
    captures: tuple[ResolvedCapture, ...],
    admission: AdmissionContext,
    here: ServerWide,
    watches: tuple[WatchPart, ...],
    *,
    held_back: bool,
) -> CompiledRequest:
    """The plan of all that a request asks for, with the server-wide steering and its watches.

    `held_back`: whether its tokens are held back.
    """
    server_wide, always_read, policy_rules = here
    own = (*own, *(steering for part in watches for steering in part.steered))
    interventions = (*server_wide, *own)
    check_sums(interventions, FloatType(admission.sites.dtype))
    watched = tuple(probe for part in watches for probe in part.probes)
    rules = (*rules, *policy_rules, *(rule for part in watches for rule in part.rules))
    read = (*always_read, *probes, *watched)
    plan, vectors = compile_plan("", interventions, captures, read, rules)
    signals = signal_plan(plan, own, probes, rules)
    watches = tuple([part.with_gates_of(signals) for part in watches])
    if wait := signals_wait(signals, watches, held_back=held_back):
        plan = replace(plan, signals_wait=wait)
    read_count = sum(act.kind is Kind.READ for act in plan.acts) if read else 0
    needed = {vector.digest: vector for vector in vectors} | direction_vectors(captures)
    every = tuple(needed.values())
    return CompiledRequest(
        own, captures, server_wide, always_read, plan, every, signals, watches, read_count
    )


def _directed(
    captures: Sequence[ResolvedCapture], admission: AdmissionContext
) -> list[ObserverCapture]:
    """The captures that a request sends to subscriptions, each of which must be open.

    They are numbered after the subscription's own captures.
    """
    by_name: dict[str, dict[int, ResolvedCapture]] = {}
    for index, capture in enumerate(captures):
        if capture.target is Target.SUBSCRIPTION:
            by_name.setdefault(capture.subscription, {})[index] = capture
    observer_captures = []
    for name, wanted in by_name.items():
        path = f"captures[{min(wanted)}].subscription_id"
        if admission.subscriptions is None:
            raise NotSupported("nobody can subscribe to this request", field=path)
        subscription = admission.subscriptions.named(name, path)
        after = len(subscription.captures.templates)
        sent = {after + i: capture for i, capture in wanted.items()}
        observer_captures.append(ObserverCapture(subscription, sent, frozenset(sent)))
    return observer_captures


def any_needs_text(
    steerings: Sequence[steering_pb2.Steering],
    captures: Sequence[capture_pb2.CaptureSpec],
    probes: Sequence[gate_pb2.Probe],
) -> bool:
    """Whether a selector looks for text."""
    selectors = [
        intervention.where for steering in steerings for intervention in steering.interventions
    ]
    selectors += [capture.where for capture in captures]
    selectors += [probe.where for probe in probes]
    return any(map(needs_text, selectors))


def _check_lora(name: str, known: Sequence[str]) -> None:
    if not name:
        return
    validation.text_bytes(name, ID_BYTES, "lora_name")
    if name not in known:
        raise LoraNotFound(
            f"there is no adapter {name!r}: the server has {', '.join(known) or 'none'}",
            field="lora_name",
            resource=Resource("lora", name),
        )


def _waits(request: GenerateRequest) -> bool:
    if not request.HasField("when_full"):
        return True
    validation.known_enum(request.when_full, generation_service_pb2.WhenFull.values(), "when_full")
    return request.when_full == generation_service_pb2.WHEN_FULL_WAIT
