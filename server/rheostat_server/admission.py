"""Admission: from a GenerateRequest to integers, or a refusal that names the field.

Whatever a client can send is settled here, so that nothing of it can fail in the engine. Generate
and Explain share this path.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rheostat._proto.v1 import generation_service_pb2
from rheostat_engine import MAX_EFFORT, Addition, Capture, ModelSites, Plan, Spans
from rheostat_server import checks
from rheostat_server.capture_specs import ResolvedCapture, engine_captures, resolve_captures
from rheostat_server.errors import InvalidValue, LoraNotFound, NotSupported, Resource
from rheostat_server.limits import LABELS, REQUEST_RANGES
from rheostat_server.model_info import ModelInfo
from rheostat_server.offload import offload
from rheostat_server.prompts import Prompts, PromptTokens
from rheostat_server.sampling import SamplingSettings, resolve_sampling
from rheostat_server.selection import SelectionContext, needs_text
from rheostat_server.steering import DraftAdd, ResolvedAdd, draft_steering, resolve_steering
from rheostat_server.vectors import Vector, VectorStore

GenerateRequest = generation_service_pb2.GenerateRequest

_SPAN_BYTES = 1024
"""What `offload` counts for a span of a plan: it is looked at for every other intervention."""

_LOOKS = 1_000_000
"""Most times that a plan may ask whether an intervention holds a piece of positions: a second."""


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


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that can run."""

    request_id: str
    """Given or made."""
    prompt: PromptTokens
    """The prompt."""
    context: SelectionContext
    """What its selectors were resolved against."""
    sampling: SamplingSettings
    """How to sample."""
    additions: tuple[ResolvedAdd, ...]
    """One per intervention, in order."""
    captures: tuple[ResolvedCapture, ...]
    """One per capture, in order."""
    plan: Plan
    """What the engine has to do to every sample, under the request's own id."""
    return_prompt_token_ids: bool
    """Whether Started holds the prompt's tokens."""

    @property
    def prompt_len(self) -> int:
        """P."""
        return len(self.prompt.token_ids)

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """Every vector that the engine needs, each once."""
        needed = {
            add.vector.digest: add.vector for add in self.additions if add.addition() is not None
        }
        return tuple(needed.values())


async def admit(request: GenerateRequest, desk: Desk) -> Admitted:
    """Checks a request.

    Raises:
        RheostatError: it cannot run; the error says why, and which field is concerned.
    """
    request_id = request.request_id
    if request_id:
        checks.matches(request_id, checks.REQUEST_ID, "request_id")
    _refuse_unserved(request)
    _check_labels(request.labels)
    _check_ranges(request)
    prompt = await desk.prompts.resolve(request, with_text=_looks_for_text(request))
    sampling = resolve_sampling(
        request.sampling,
        prompt_len=len(prompt.token_ids),
        prompt_field=prompt.source,
        model=desk.info,
        has_tokenizer=desk.prompts.has_tokenizer,
    )
    context = SelectionContext(prompt, sampling.max_tokens, desk.info.vocabulary)
    drafts, captures = await offload(
        request.ByteSize() + 4 * len(prompt.token_ids), _draft, request, desk.sites, context
    )
    request_id = request_id or uuid.uuid4().hex
    additions = resolve_steering(drafts, desk.store, desk.sites)
    return Admitted(
        request_id=request_id,
        prompt=prompt,
        context=context,
        sampling=sampling,
        additions=additions,
        captures=captures,
        plan=await _plan(request_id, additions, captures),
        return_prompt_token_ids=request.return_prompt_token_ids,
    )


def _draft(
    request: GenerateRequest, sites: ModelSites, context: SelectionContext
) -> tuple[list[DraftAdd], tuple[ResolvedCapture, ...]]:
    return (
        draft_steering(request.steering, sites, context),
        resolve_captures(request.captures, sites, context),
    )


async def _plan(
    request_id: str, adds: Sequence[ResolvedAdd], captures: Sequence[ResolvedCapture]
) -> Plan:
    plan = Plan(
        request_id=request_id,
        additions=tuple(
            addition for addition in (add.addition() for add in adds) if addition is not None
        ),
        captures=engine_captures(captures),
    )
    spans = sum(map(len, (*_held(plan.additions), *_held(plan.captures))))
    if not await offload(spans * _SPAN_BYTES, _affordable, plan):
        raise InvalidValue(
            "the selectors cut the request into too many different combinations of interventions, "
            "captures and sites; use fewer",
            field="steering",
        )
    return plan


def _affordable(plan: Plan) -> bool:
    """Whether the engine takes a plan; what would take long to find out is not affordable."""
    for held in (_held(plan.additions), _held(plan.captures)):
        edges = {edge for spans in held for span in spans for edge in span}
        if len(edges) * len(held) > _LOOKS:
            return False
    return plan.effort() <= MAX_EFFORT


def _held(parts: Sequence[Addition | Capture]) -> list[Spans]:
    return [part.spans for part in parts]


def _looks_for_text(request: GenerateRequest) -> bool:
    selectors = [i.where for i in request.steering.interventions]
    selectors += [c.where for c in request.captures]
    return any(needs_text(selector) for selector in selectors)


def _refuse_unserved(request: GenerateRequest) -> None:
    if request.patches:
        raise NotSupported(
            "patches are not served yet; steer with a difference of rows", field="patches"
        )
    if request.rules:
        raise NotSupported("rules are not served yet; send the request without", field="rules")
    if request.with_baseline:
        raise NotSupported(
            "baselines are not served yet; send the request a second time without steering",
            field="with_baseline",
        )
    if request.lora:
        raise LoraNotFound(
            "no adapters are loaded", field="lora", resource=Resource("lora", request.lora)
        )


def _check_ranges(request: GenerateRequest) -> None:
    selectors = [
        (f"steering.interventions[{index}].where", intervention.where)
        for index, intervention in enumerate(request.steering.interventions)
    ]
    selectors += [
        (f"captures[{index}].where", capture.where)
        for index, capture in enumerate(request.captures)
    ]
    total = 0
    for path, selector in selectors:
        total += len(selector.include) + len(selector.exclude)
        checks.at_most(total, REQUEST_RANGES, path, "ranges in the request")


def _check_labels(labels: Mapping[str, str]) -> None:
    checks.at_most(len(labels), LABELS, "labels", "labels")
    for key, value in labels.items():
        if not 1 <= len(key.encode()) <= 63:
            raise InvalidValue("a label's key has 1 to 63 bytes", field="labels")
        if len(value.encode()) > 255:
            raise InvalidValue("a label's value has at most 255 bytes", field=f"labels[{key}]")
