"""Estimates the work of parts of a request from their messages, before anything is compiled.

The estimate decides whether the work is done on the event loop or on a thread; see `offload`. On
the thread, it decides the order; see `Planner`. It is an upper bound, so that no client can send a
request that is underestimated.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rheostat_engine import ModelSites
from rheostat_server.limits import DIRECTIONS, OFFLOAD_BYTES, REPLACED_ROWS
from rheostat_server.vectors.store import VectorView
from rheostat_wire.v1 import (
    capture_pb2,
    gate_pb2,
    generation_service_pb2,
    selector_pb2,
    steering_pb2,
    steering_service_pb2,
    types_pb2,
    vector_pb2,
)

SITE_BYTES = 96
"""Bytes that are counted for a site of an intervention or a capture."""

SPAN_BYTES = 1024
"""Bytes that are counted for a span of positions, which is compared with every intervention."""

_DIRECTION_BYTES = 256
"""Bytes that are counted for a direction of a projection at a site."""

_ELEMENT_BYTES = 4
"""Bytes that are counted for an element of a row that replaces another."""

_TOKEN_BYTES = 4
"""Bytes that are counted for a token of the prompt that a range may name."""


class PromptWork(NamedTuple):
    """An upper bound of the work on parts that every request gets, for any length of the prompt.

    Estimating the largest policy takes 30 ms, so it is not done for each request. An estimate grows
    with the prompt by a fixed amount for every two tokens, until it reaches limits of its parts. So
    the estimates of two prompts bound all others.
    """

    fixed: int = 0
    """Bytes for an empty prompt."""
    per_pair: int = 0
    """Further bytes for every two tokens of the prompt."""

    @classmethod
    def of(cls, estimate: Callable[[int], int]) -> "PromptWork":
        """The bound for parts whose estimate is a function of the prompt's length."""
        fixed = estimate(0)
        return cls(fixed, estimate(2) - fixed)

    def at(self, prompt_len: int) -> int:
        """Bytes for a prompt of this length."""
        return self.fixed + (prompt_len + 1) // 2 * self.per_pair


def estimate_parts(
    message: generation_service_pb2.GenerateRequest | steering_service_pb2.Policy,
    prompt_len: int,
    model: ModelSites,
    vectors: VectorView,
) -> int:
    """Bytes that `offload` counts for the steering, probes and rules of a request or a policy."""
    work = sum(rule.ByteSize() for rule in message.rules)
    for steering in (message.steering, *(rule.steer for rule in message.rules)):
        work += estimate_steering(steering, prompt_len, model, vectors)
    return work + estimate_probes(message.probes, prompt_len, model)


def estimate_steering(
    steering: steering_pb2.Steering,
    prompt_len: int,
    model: ModelSites,
    vectors: VectorView,
) -> int:
    """Bytes that `offload` counts for resolving and compiling a steering."""
    work = steering.ByteSize()
    for intervention in steering.interventions:
        work += SITE_BYTES * _site_count(intervention.sites, model)
        work += _estimate_selector(intervention.where, prompt_len)
        if intervention.HasField("replace"):
            work += _estimate_replaced(intervention, prompt_len, model)
        directions = intervention.ablate.directions
        if 1 < len(directions) <= DIRECTIONS:  # with more it is refused, and may have very many
            # `check_directions` compares these rows.
            work += sum(_size(ref, vectors) for ref in directions)
    return work


def _estimate_replaced(
    intervention: steering_pb2.Intervention, prompt_len: int, model: ModelSites
) -> int:
    """Bytes that are counted for the rows of a Replace."""
    replace, sites = intervention.replace, _site_count(intervention.sites, model)
    if replace.HasField("run") or replace.HasField("mean") or replace.HasField("noise"):
        # Never on the event loop: a run may be longer than the prompt, and so may the answer whose
        # rows are replaced.
        return OFFLOAD_BYTES + 1 + SITE_BYTES * min(REPLACED_ROWS, sites * prompt_len)
    rows = min(REPLACED_ROWS, sites * prompt_len) if replace.HasField("rows") else sites
    return rows * (SITE_BYTES + _ELEMENT_BYTES * model.width)


def estimate_captures(
    captures: Sequence[capture_pb2.CaptureSpec], prompt_len: int, model: ModelSites
) -> int:
    """Bytes that `offload` counts for resolving and compiling captures."""
    work = 0
    for capture in captures:
        sites = _site_count(capture.sites, model)
        work += capture.ByteSize() + SITE_BYTES * sites
        work += _estimate_selector(capture.where, prompt_len)
        work += _DIRECTION_BYTES * len(capture.projection.readouts.readouts) * sites
    return work


def estimate_probes(probes: Sequence[gate_pb2.Probe], prompt_len: int, model: ModelSites) -> int:
    """Bytes that `offload` counts for resolving and compiling probes."""
    work = 0
    for probe in probes:
        work += probe.ByteSize() + SITE_BYTES * _site_count(probe.sites, model)
        work += _estimate_selector(probe.where, prompt_len)
    return work


def _site_count(sites: types_pb2.SiteSet, model: ModelSites) -> int:
    """The most sites that a set can name without being refused."""
    layers = len(sites.list.layers) if sites.HasField("list") else model.num_layers
    return len(sites.points) * layers


def _estimate_selector(selector: selector_pb2.Selector, prompt_len: int) -> int:
    """Bytes that are counted for a selector. Without ranges it selects every token: one span."""
    ranges = len(selector.include) + len(selector.exclude)
    work = SPAN_BYTES * (ranges + 1)
    if work > OFFLOAD_BYTES:
        return work
    for side in (selector.include, selector.exclude):
        reading = sum(
            token_range.HasField("token_ids") or token_range.HasField("text")
            for token_range in side
        )
        if reading:
            # Every other token may be selected.
            work += reading * _TOKEN_BYTES * prompt_len + SPAN_BYTES * (prompt_len // 2)
    return work


def _size(ref: vector_pb2.VectorRef, vectors: VectorView) -> int:
    """Bytes of the elements of a vector; 0 if it is not known."""
    if ref.HasField("inline"):
        return len(ref.inline.inline)
    return vectors.size(ref.name if ref.HasField("name") else ref.digest)
