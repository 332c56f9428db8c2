"""Selectors resolved against a prompt: positions, and conditions on the tokens that are generated.

Invariant: what is selected depends on positions and tokens alone, never on schedule. Includes
unite, excludes subtract and win, an absent selector is every token. The prompt's tokens are known,
so only generated positions are ever conditional.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rheostat._proto.v1 import selector_pb2, types_pb2
from rheostat_engine import OPEN_END, Condition, Spans
from rheostat_server import checks
from rheostat_server.checks import join
from rheostat_server.errors import (
    EmptySelector,
    InvalidPosition,
    InvalidValue,
    MissingField,
    NotSupported,
    SpanAmbiguous,
    SpanNotFound,
)
from rheostat_server.limits import RANGE_TOKEN_IDS, RANGES, SPAN_BYTES
from rheostat_server.prompts import PromptTokens


@dataclass(frozen=True)
class SelectionContext:
    """What a selector is resolved against."""

    prompt: PromptTokens
    """The prompt; with text and offsets if a span is to be resolved."""
    max_tokens: int
    """Tokens that may be generated."""
    vocabulary: int
    """Number of token ids."""
    server_wide: bool = False
    """Whether it is server-wide steering's: windows that the prompt does not have select nothing,
    and there are no spans of text."""

    @property
    def prompt_len(self) -> int:
        """P."""
        return len(self.prompt.token_ids)

    @property
    def row_end(self) -> int:
        """One past the last position that can have a row: the last sampled token has none."""
        return self.prompt_len + self.max_tokens - 1

    @cached_property
    def positions_by_token(self) -> dict[int, list[int]]:
        """Where each token id stands in the prompt."""
        found: dict[int, list[int]] = {}
        for position, token in enumerate(self.prompt.token_ids):
            found.setdefault(token, []).append(position)
        return found


def united(spans: Iterable[tuple[int, int]]) -> Spans:
    """The union: ascending, disjoint, not touching. Empty spans vanish."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def subtracted(spans: Spans, holes: Spans) -> Spans:
    """The spans less the holes; both as `united` gives them."""
    left: list[tuple[int, int]] = []
    next_hole = 0
    for start, end in spans:
        while next_hole < len(holes) and holes[next_hole][1] <= start:
            next_hole += 1
        at, hole = start, next_hole
        while hole < len(holes) and holes[hole][0] < end:
            if at < holes[hole][0]:
                left.append((at, holes[hole][0]))
            at = holes[hole][1]
            hole += 1
        if at < end:
            left.append((at, end))
    return tuple(left)


def clipped(spans: Spans, start: int, end: int) -> Spans:
    """The part of the spans in [start, end)."""
    pairs = ((max(a, start), min(b, end)) for a, b in spans)
    return tuple((a, b) for a, b in pairs if a < b)


@dataclass(frozen=True)
class Selection:
    """Which tokens of a request are selected."""

    spans: Spans
    """Positions, whatever their token."""
    conditions: tuple[Condition, ...] = ()
    """Further generated positions, selected only under some tokens; apart from all others."""

    @property
    def reach(self) -> Spans:
        """Every position that may be selected."""
        return united((*self.spans, *(span for one in self.conditions for span in one.spans)))

    @property
    def known(self) -> Spans:
        """Positions that are selected unless a token forbids it."""
        barred = (one.spans for one in self.conditions if not one.among)
        return united((*self.spans, *(span for spans in barred for span in spans)))

    @cached_property
    def _token_sets(self) -> tuple[frozenset[int], ...]:
        return tuple(frozenset(one.tokens) for one in self.conditions)

    def held(self, prompt_len: int, generated: Sequence[int], start: int, end: int) -> Spans:
        """The selected positions of [start, end).

        Args:
            prompt_len: P.
            generated: the tokens from position P on. Positions beyond them are selected if that
                does not depend on the token.
            start: first position.
            end: one past the last.
        """
        found = list(clipped(self.spans, start, end))
        known = prompt_len + len(generated)
        for one, ids in zip(self.conditions, self._token_sets, strict=True):
            found += [
                (position, position + 1)
                for a, b in clipped(one.spans, start, min(end, known))
                for position in range(a, b)
                if (generated[position - prompt_len] in ids) == one.among
            ]
        return united(found)


EVERYTHING = Selection(((0, OPEN_END),))
"""Every token."""


def resolve_selector(
    selector: selector_pb2.Selector, context: SelectionContext, path: str
) -> Selection:
    """The tokens of a selector that is present.

    Raises:
        InvalidArgument: a range is malformed, empty or not in the prompt.
        NotSupported: where the prompt's tokens stand in its text is not known.
    """
    if not selector.include and not selector.exclude:
        raise EmptySelector("a selector needs at least one range", field=path)
    include_path, exclude_path = join(path, "include"), join(path, "exclude")
    checks.at_most(len(selector.include), RANGES, include_path, "ranges")
    checks.at_most(len(selector.exclude), RANGES, exclude_path, "ranges")
    include = _Union(EVERYTHING.spans, frozenset())
    if selector.include:
        include = _unite(selector.include, context, include_path)
    exclude = _unite(selector.exclude, context, exclude_path)
    length = context.prompt_len
    allowed = subtracted(EVERYTHING.spans, exclude.spans)
    by_position = subtracted(include.spans, exclude.spans)
    generated = clipped(by_position, length, OPEN_END)
    by_token = subtracted(clipped(allowed, length, OPEN_END), generated)
    conditions = [
        Condition(spans, tuple(sorted(ids)), among)
        for spans, ids, among in (
            (generated, exclude.ids, False),
            (by_token, include.ids - exclude.ids, True),
        )
        if spans and ids
    ]
    spans = clipped(by_position, 0, length) if exclude.ids else by_position
    return Selection(spans, tuple(conditions))


def needs_text(selector: selector_pb2.Selector) -> bool:
    """Whether a selector looks for text."""
    return any(r.WhichOneof("kind") == "text" for r in (*selector.include, *selector.exclude))


class _Union(NamedTuple):
    """What ranges name: positions, and ids of generated tokens."""

    spans: Spans
    ids: frozenset[int]


def _unite(ranges: Sequence[selector_pb2.Range], context: SelectionContext, path: str) -> _Union:
    seen: set[int] = set()
    spans = united(
        span
        for index, one in enumerate(ranges)
        for span in _resolve_range(one, context, f"{path}[{index}]", seen)
    )
    return _Union(spans, frozenset(seen))


def _resolve_range(
    one: selector_pb2.Range, context: SelectionContext, path: str, seen: set[int]
) -> Iterator[tuple[int, int]]:
    """The spans of a range; of token ids, which join `seen`, those of the prompt, and only once."""
    kind = checks.required(
        one.WhichOneof("kind"), path, "phase, positions, generated, token_ids and text"
    )
    field = join(path, kind)
    if kind == "phase":
        checks.known_enum(one.phase, types_pb2.Phase.values(), field)
        if one.phase == types_pb2.PHASE_PROMPT:
            yield (0, context.prompt_len)
        else:
            yield (context.prompt_len, OPEN_END)
    elif kind == "positions":
        yield _window(one.positions, context, field)
    elif kind == "generated":
        yield _generated(one.generated, context, field)
    elif kind == "token_ids":
        ids = one.token_ids.ids
        checks.at_most(len(ids), RANGE_TOKEN_IDS, field, "token ids")
        checks.token_ids(ids, context.vocabulary, join(field, "ids"))
        fresh = set(ids) - seen
        seen |= fresh
        for token in fresh:
            for position in context.positions_by_token.get(token, ()):
                yield (position, position + 1)
    else:
        yield _span(one.text, context, field)


def _window(window: selector_pb2.Window, context: SelectionContext, path: str) -> tuple[int, int]:
    length = context.prompt_len
    start = window.start if window.HasField("start") else 0
    end = window.end if window.HasField("end") else length
    problem = _no_window(start, end, context)
    if problem is None:
        return start + length if start < 0 else start, end + length if end < 0 else end
    if context.server_wide:
        return _NOTHING
    name, text = problem
    raise InvalidPosition(text, field=join(path, name) if name else path)


_NOTHING = (0, 0)


def _no_window(start: int, end: int, context: SelectionContext) -> tuple[str, str] | None:
    """The field concerned and why a window holds no row of the prompt; None if it holds some."""
    length = context.prompt_len
    for name, value in (("start", start), ("end", end)):
        if value < -length:
            return name, f"{value} lies before a prompt of {length} tokens"
    first = start + length if start < 0 else start
    past = end + length if end < 0 else end
    if first >= past:
        return "", f"positions {first} to {past} hold none; the prompt has {length} tokens"
    if first >= context.row_end:
        return "", (
            f"position {first} is never an input: the prompt has {length} tokens and at most "
            f"{context.max_tokens} are generated, the last of which is none"
        )
    return None


def _generated(
    window: selector_pb2.GeneratedWindow, context: SelectionContext, path: str
) -> tuple[int, int]:
    if window.HasField("end") and window.start >= window.end:
        raise InvalidPosition("the window of generated tokens is empty", field=path)
    start = min(context.prompt_len + window.start, OPEN_END)
    end = min(context.prompt_len + window.end, OPEN_END) if window.HasField("end") else OPEN_END
    if start >= end and not context.server_wide:
        raise InvalidPosition("no request has so many tokens", field=path)
    return start, end


def _span(span: selector_pb2.Span, context: SelectionContext, path: str) -> tuple[int, int]:
    if not span.text:
        raise MissingField("a text is required", field=join(path, "text"))
    if len(span.text.encode()) > SPAN_BYTES:
        raise InvalidValue(f"has more than {SPAN_BYTES} bytes", field=join(path, "text"))
    if context.server_wide:
        raise InvalidValue(
            "server-wide steering has no prompt to find a text in; select token ids or positions",
            field=path,
        )
    text, offsets = context.prompt.text, context.prompt.offsets
    if text is None or offsets is None:
        raise NotSupported(
            "where this prompt's tokens stand in its text is not known; select positions",
            field=path,
        )
    wanted = span.occurrence if span.HasField("occurrence") else 0
    count = text.count(span.text)
    if wanted >= count:
        raise SpanNotFound(f"the prompt holds the text {count} times", field=path)
    if count > 1 and not span.HasField("occurrence"):
        raise SpanAmbiguous(
            f"the prompt holds the text {count} times; choose an occurrence",
            field=path,
            metadata={"occurrences": str(count)},
        )
    start = text.find(span.text)
    for _ in range(wanted):
        start = text.find(span.text, start + len(span.text))
    end = start + len(span.text)
    held = [p for p, (a, b) in enumerate(offsets) if a < end and b > start and a < b]
    if not held:
        raise SpanNotFound("no token of the prompt holds a character of the text", field=path)
    return held[0], held[-1] + 1
