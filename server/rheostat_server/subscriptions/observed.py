"""Which requests a subscription observes, and what it captures of them.

Everything that is the same for all requests is computed once, when the subscription is opened. The
rest is computed while another client's request is admitted, and delays that request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rheostat_engine.cached_property import cached_property
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.limits import OBSERVER_SPANS
from rheostat_server.selectors.prepared_selection import PreparedSelector
from rheostat_server.selectors.selection import EVERYTHING, Selection, SelectionContext
from rheostat_wire.v1 import capture_pb2, capture_service_pb2

_CAPTURE_COST = 8
"""Cost of a capture without its sites and ranges. Each of these costs 1, about a microsecond."""

_LENGTHS = 64
"""Lengths of prompt and answer for which the captures of a subscription are kept."""


@dataclass(frozen=True, slots=True)
class ObservedRequests:
    """Which requests a subscription observes."""

    ids: frozenset[str] | None = None
    """Only requests with these ids; None: all ids."""
    labels: Mapping[str, str] | None = None
    """Only requests with all of these labels; None: all labels."""

    def hold(self, request_id: str, labels: Mapping[str, str]) -> bool:
        """Whether a request is among them."""
        if self.ids is not None:
            return request_id in self.ids
        wanted = self.labels or {}
        return all(labels.get(key) == value for key, value in wanted.items())

    def __str__(self) -> str:
        """As "every request", "requests with the labels {'team': 'red'}", "3 listed requests"."""
        if self.ids is not None:
            return f"{len(self.ids)} listed requests"
        return f"requests with the labels {dict(self.labels)}" if self.labels else "every request"


def observed_requests(filter: capture_service_pb2.RequestFilter) -> ObservedRequests:
    """The requests of a filter that was checked."""
    kind = filter.WhichOneof("kind")
    if kind == "requests":
        return ObservedRequests(ids=frozenset(filter.requests.request_ids))
    return ObservedRequests(labels=dict(filter.labels.labels))


@dataclass(frozen=True)
class ObservedCaptures:
    """The captures of a subscription, with everything that is the same for all requests."""

    templates: tuple[ResolvedCapture, ...] = ()
    """Every capture, as if it selected every token."""
    selectors: tuple[PreparedSelector | None, ...] = ()
    """The selector of each capture; None: every token. Equal selectors are the same object."""
    cost: int = 0
    """The cost for each observed request; see `OBSERVERS_COST`."""

    def most_spans(self, prompt_len: int) -> int:
        """The most spans that the captures can have in a request with a prompt of this length."""
        different = {id(selector): selector for selector in self.selectors if selector is not None}
        return 1 + sum(selector.most_spans(prompt_len) for selector in different.values())

    def resolve(self, context: SelectionContext) -> tuple[ResolvedCapture, ...]:
        """The captures in a request. Positions that the prompt does not have are not captured.

        Raises:
            TooFragmented: together they have more than `OBSERVER_SPANS` spans.
        """
        if self._reads_tokens:
            return self._resolve(context)
        lengths = context.prompt_len, context.row_end
        captures = self._by_lengths.get(lengths)
        if captures is None:
            captures = self._resolve(context)
            if len(self._by_lengths) == _LENGTHS:
                self._by_lengths.clear()
            self._by_lengths[lengths] = captures
        return captures

    @cached_property
    def _reads_tokens(self) -> bool:
        return any(selector is not None and selector.reads_tokens for selector in self.selectors)

    @cached_property
    def _by_lengths(self) -> dict[tuple[int, int], tuple[ResolvedCapture, ...]]:
        """The captures in requests with prompts and answers of some lengths.

        Selectors of positions depend on nothing else. Requests with the same captures share a plan.
        """
        return {}

    def _resolve(self, context: SelectionContext) -> tuple[ResolvedCapture, ...]:
        lenient = context.lenient_copy
        left = OBSERVER_SPANS
        selections: dict[PreparedSelector | None, Selection] = {None: EVERYTHING}
        for selector in self.selectors:
            if selector is not None and selector not in selections:
                selections[selector] = selection = selector.resolve(lenient, left)
                left -= selection.span_count
        return tuple(
            template.with_selection(selections[selector])
            for template, selector in zip(self.templates, self.selectors, strict=True)
        )


def observed_captures(
    specs: Sequence[capture_pb2.CaptureSpec], resolved: Sequence[ResolvedCapture]
) -> ObservedCaptures:
    """The captures of a subscription.

    Args:
        specs: the messages.
        resolved: the same captures, resolved for a typical request.
    """
    prepared: dict[bytes, PreparedSelector] = {}
    selectors = []
    cost = 0
    for spec, capture in zip(specs, resolved, strict=True):
        cost += _CAPTURE_COST + len(capture.sites)
        selector = None
        if spec.HasField("where"):
            cost += len(spec.where.include) + len(spec.where.exclude)
            key = spec.where.SerializeToString(deterministic=True)
            selector = prepared.get(key) or prepared.setdefault(key, PreparedSelector(spec.where))
        selectors.append(selector)
    templates = tuple(capture.with_selection(EVERYTHING) for capture in resolved)
    for template in templates:
        _ = template.indices, template.site_forms.alike  # computed here, not while a request waits
    return ObservedCaptures(templates, tuple(selectors), cost)
