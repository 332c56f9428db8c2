"""The probes and rules of a watch, and their resolution in each request.

A watch's probes are resolved while another client's request is admitted, and must not slow this
down. So vectors and sites are looked up once, when the watch is opened, and selectors are prepared
then. Results are cached by the lengths of prompt and answer.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from rheostat_engine import ModelSites
from rheostat_engine.cached_property import cached_property
from rheostat_server.limits import OBSERVER_SPANS
from rheostat_server.selectors.prepared_selection import PreparedSelector
from rheostat_server.selectors.selection import EVERYTHING, Selection, SelectionContext
from rheostat_server.selectors.sites import write_site
from rheostat_server.steering.interventions import Intervention
from rheostat_server.steering.ops import ResolvedOp
from rheostat_server.steering.probes import Probe
from rheostat_server.steering.rules import Rule, resolve_rules, steered_by
from rheostat_server.vectors.store import Vector
from rheostat_wire.v1 import monitor_pb2, receipt_pb2

_LENGTHS = 64
"""Combinations of lengths and first columns for which the result is cached."""


class ResolvedReadings(NamedTuple):
    """The probes and rules of a watch in one request."""

    probes: tuple[Probe, ...]
    rules: tuple[Rule, ...]
    """Each with the id of the watch."""
    steered: tuple[Intervention, ...]
    """The interventions of the rules."""


class Steered(NamedTuple):
    """An intervention of a rule, the same in all requests."""

    op: ResolvedOp
    selector: PreparedSelector | None
    """None: every token."""


@dataclass(frozen=True)
class WatchedReadings:
    """The probes and rules of a watch."""

    templates: tuple[Probe, ...]
    """Every probe, as if it selected every token and there were no readings before."""
    selectors: tuple[PreparedSelector | None, ...]
    """The selector of each probe; None: every token."""
    rules: tuple[monitor_pb2.Rule, ...]
    steered: tuple[tuple[Steered, ...], ...]
    """The interventions of each rule."""
    table: monitor_pb2.SignalTable
    """The columns."""
    model: ModelSites
    """The model's sites."""

    @property
    def columns(self) -> int:
        """The number of columns."""
        return len(self.table.columns)

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The vectors of the probes and of the rules' interventions, each once."""
        vectors = [template.vector for template in self.templates]
        vectors += [v for parts in self.steered for part in parts for v in part.op.vectors]
        return tuple({vector.digest: vector for vector in vectors}.values())

    @property
    def gains(self) -> bool:
        """Whether a rule multiplies the steering of requests."""
        return any(rule.HasField("gain") for rule in self.rules)

    @property
    def steers(self) -> bool:
        """Whether a rule steers requests, or multiplies their steering."""
        return self.gains or any(self.steered)

    def resolve(self, context: SelectionContext, first_column: int, watch: str) -> ResolvedReadings:
        """The probes and rules in a request. Positions outside the prompt are not read.

        Args:
            context: the request.
            first_column: the column of the first reading.
            watch: the id of the watch, which is always the same.

        Raises:
            TooFragmented: a selection has too many spans.
        """
        if self.reads_tokens:
            return self._resolve(context, first_column, watch)
        key = context.prompt_len, context.row_end, first_column
        resolved = self._resolved.get(key)
        if resolved is None:
            resolved = self._resolve(context, first_column, watch)
            if len(self._resolved) == _LENGTHS:
                self._resolved.clear()
            self._resolved[key] = resolved
        return resolved

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether a selector depends on the tokens of the prompt."""
        selectors = [part.selector for parts in self.steered for part in parts]
        return any(
            selector is not None and selector.reads_tokens
            for selector in (*self.selectors, *selectors)
        )

    @cached_property
    def _resolved(self) -> dict[tuple[int, int, int], ResolvedReadings]:
        return {}

    def _resolve(
        self, context: SelectionContext, first_column: int, watch: str
    ) -> ResolvedReadings:
        lenient = context.lenient_copy
        left = OBSERVER_SPANS

        def selected(selector: PreparedSelector | None) -> Selection:
            nonlocal left
            if selector is None:
                return EVERYTHING
            selection = selector.resolve(lenient, left)
            left -= selection.span_count
            return selection

        probes: dict[str, Probe] = {}
        for template, selector in zip(self.templates, self.selectors, strict=True):
            column = first_column + template.reading.column
            selection = selected(selector)
            probes[template.name] = template.in_request(selection, context.prompt_len, column)
        rules = [rule._replace(watch=watch) for rule in resolve_rules(self.rules, probes, context)]
        steered: list[Intervention] = []
        for number, (rule, parts) in enumerate(zip(rules, self.steered, strict=True)):
            ops = [(part.op, selected(part.selector)) for part in parts]
            path, origin = f"rules[{number}]", receipt_pb2.ORIGIN_WATCH
            message = self.rules[number]
            found = steered_by(rule, message, path, ops, origin, probes, self.model, context)
            steered += [replace(intervention, watch_id=watch) for intervention in found]
        return ResolvedReadings(tuple(probes.values()), tuple(rules), tuple(steered))


def table_of(probes: Iterable[Probe]) -> monitor_pb2.SignalTable:
    """The table of the columns of some probes, in their order."""
    table = monitor_pb2.SignalTable()
    for probe in probes:
        for site in probe.sites:
            write_site(table.columns.add(probe_name=probe.name).site, site)
    return table
