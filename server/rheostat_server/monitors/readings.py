"""What a watch reads of each request, with everything that is the same for all requests.

A watch's probes are resolved while another client's request is admitted. So the client of a watch
must not be able to slow the admission of others: vectors and sites are looked up once, when the
watch is opened, and selectors are prepared. Results are kept by the length of prompt and answer.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from rheostat_server.limits import OBSERVER_SPANS
from rheostat_server.selectors.prepared_selection import PreparedSelector
from rheostat_server.selectors.selection import EVERYTHING, SelectionContext
from rheostat_server.selectors.sites import write_site
from rheostat_server.steering.gates import Probe
from rheostat_server.steering.rules import Rule, resolve_rules
from rheostat_server.vectors.store import Vector
from rheostat_wire.v1 import monitor_pb2

_LENGTHS = 64
"""Combinations of lengths and first columns for which the result is kept."""


class ResolvedReadings(NamedTuple):
    """What a watch reads of one request."""

    probes: tuple[Probe, ...]
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class WatchedReadings:
    """The probes and rules of a watch."""

    templates: tuple[Probe, ...]
    """Every probe, as if it selected every token and had the first columns."""
    selectors: tuple[PreparedSelector | None, ...]
    """The selector of each probe; None: every token."""
    rules: tuple[monitor_pb2.Rule, ...]
    table: monitor_pb2.SignalTable
    """What the columns are."""

    @property
    def columns(self) -> int:
        """The number of columns."""
        return len(self.table.columns)

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The vectors of the probes, each once."""
        return tuple(
            {template.vector.digest: template.vector for template in self.templates}.values()
        )

    def resolve(self, context: SelectionContext, first_column: int) -> ResolvedReadings:
        """The probes and rules in a request.

        Positions that the prompt does not have are not read.

        Args:
            context: the request.
            first_column: the column of the first reading.

        Raises:
            TooFragmented: a selection has too many spans.
        """
        if self.reads_tokens:
            return self._resolve(context, first_column)
        key = context.prompt_len, context.row_end, first_column
        resolved = self._resolved.get(key)
        if resolved is None:
            resolved = self._resolve(context, first_column)
            if len(self._resolved) == _LENGTHS:
                self._resolved.clear()
            self._resolved[key] = resolved
        return resolved

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether a selector depends on the tokens of the prompt."""
        return any(selector is not None and selector.reads_tokens for selector in self.selectors)

    @cached_property
    def _resolved(self) -> dict[tuple[int, int, int], ResolvedReadings]:
        return {}

    def _resolve(self, context: SelectionContext, first_column: int) -> ResolvedReadings:
        lenient = replace(context, lenient=True)
        probes: dict[str, Probe] = {}
        left = OBSERVER_SPANS
        for template, selector in zip(self.templates, self.selectors, strict=True):
            selection = EVERYTHING
            if selector is not None:
                selection = selector.resolve(lenient, left)
                left -= selection.span_count
            column = first_column + template.reading.column
            probes[template.name] = replace(
                template, selection=selection, reading=template.reading._replace(column=column)
            )
        rules = resolve_rules(self.rules, probes, context)
        return ResolvedReadings(tuple(probes.values()), rules)


def table_of(probes: Iterable[Probe]) -> monitor_pb2.SignalTable:
    """The table of the columns of some probes, in their order."""
    table = monitor_pb2.SignalTable()
    for probe in probes:
        for site in probe.sites:
            write_site(table.columns.add(probe_name=probe.name).site, site)
    return table
