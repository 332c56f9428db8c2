"""Resolves selectors against a prompt: to positions, and to conditions on generated tokens.

A selection is the union of the includes without the excludes; without a selector, every token. It
depends on positions and tokens alone, never on the schedule. The prompt's tokens are known, so
conditions are needed for generated positions only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rheostat_engine import OPEN_END, Spans, TokenCondition
from rheostat_engine.cached_property import cached_property
from rheostat_server import validation
from rheostat_server.config import ModelInfo
from rheostat_server.errors import (
    EmptySelector,
    InvalidPosition,
    InvalidValue,
    MissingField,
    NotSupported,
    SpanAmbiguous,
    SpanNotFound,
)
from rheostat_server.limits import RANGE_TOKEN_IDS, RANGES, SPAN_BYTES, SPAN_SEARCH
from rheostat_server.prompts.prompts import PromptTokens
from rheostat_server.selectors.prompt_index import PromptIndex, SearchTooLong
from rheostat_server.selectors.spans import Edges, clipped, edges, joined, subtracted, united
from rheostat_server.validation import counted, field_path
from rheostat_wire.v1 import capture_pb2, gate_pb2, selector_pb2, steering_pb2, types_pb2

_SHOWN_TEXT = 40
"""Characters of a span's text that an error shows."""

_TYPICAL_PROMPT = 4096
"""The most tokens of the prompt of `typical_context`."""


@dataclass(frozen=True)
class SelectionContext:
    """The request for which a selector is resolved."""

    prompt: PromptTokens
    """With text and offsets, if a selector looks for text."""
    max_tokens: int
    vocabulary: int
    """Number of token ids."""
    lenient: bool = False
    """Whether the selector applies to all prompts, like those of server-wide steering. A window
    outside the prompt then selects nothing, and spans of text are refused."""

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt.token_ids)

    @property
    def row_end(self) -> int:
        """One past the last position that can have a row. The last generated token has no row."""
        return self.prompt_len + self.max_tokens - 1

    @cached_property
    def index(self) -> PromptIndex:
        """The index of the prompt."""
        return PromptIndex(self.prompt, self.vocabulary)

    @cached_property
    def lenient_copy(self) -> "SelectionContext":
        """The same with `lenient` set.

        Subscriptions, watches and server-wide steering select in the same prompt, and share its
        index. The cells of a sweep share a context, too.
        """
        return replace(self, lenient=True)


@dataclass(frozen=True)
class Selection:
    """The selected tokens of a request."""

    spans: Spans
    """Positions that are selected with any token."""
    conditions: tuple[TokenCondition, ...] = ()
    """Other generated positions that are selected depending on their token. They do not overlap."""

    @property
    def span_count(self) -> int:
        """Number of spans."""
        return len(self.spans) + sum(len(condition.spans) for condition in self.conditions)

    def before(self, end: int) -> "Selection":
        """The selected positions below `end`, whatever token they have. None is conditional."""
        spans = [(first, min(last, end)) for first, last in self.spans if first < end]
        return Selection(tuple(spans))

    @cached_property
    def reach(self) -> Spans:
        """Every position that may be selected."""
        return joined(
            self.spans, [span for condition in self.conditions for span in condition.spans]
        )

    @cached_property
    def edges(self) -> Edges:
        """The edges of `reach`."""
        return edges(self.reach)

    @cached_property
    def known(self) -> Spans:
        """Positions that are selected unless they have an excluded token."""
        excluding = [condition.spans for condition in self.conditions if not condition.among]
        return joined(self.spans, [span for spans in excluding for span in spans])

    @cached_property
    def _token_sets(self) -> tuple[frozenset[int], ...]:
        return tuple(frozenset(condition.tokens) for condition in self.conditions)

    def selected(self, prompt_len: int, generated: Sequence[int], start: int, end: int) -> Spans:
        """The selected positions of [start, end).

        `generated` are the tokens from position `prompt_len` on. Positions after them are selected
        if that does not depend on the token.
        """
        if not self.conditions:
            return clipped(self.spans, start, end)
        conditional = []
        known = prompt_len + len(generated)
        for condition, ids in zip(self.conditions, self._token_sets, strict=True):
            conditional += [
                (position, position + 1)
                for a, b in clipped(condition.spans, start, min(end, known))
                for position in range(a, b)
                if (generated[position - prompt_len] in ids) == condition.among
            ]
        return joined(clipped(self.spans, start, end), conditional)


EVERYTHING = Selection(((0, OPEN_END),))


def typical_context(info: ModelInfo) -> SelectionContext:
    """A context that stands for future requests, whose prompts are not known yet."""
    length = max(1, min(info.model_tokens // 2, _TYPICAL_PROMPT))
    prompt = PromptTokens((0,) * length, "token_ids", None, None)
    return SelectionContext(
        prompt, max(1, info.model_tokens - length), info.vocabulary, lenient=True
    )


def resolve_where(
    part: steering_pb2.Intervention | gate_pb2.Probe | capture_pb2.CaptureSpec,
    context: SelectionContext,
    path: str,
) -> Selection:
    """Resolves the selector of a part of a request. Without one, it selects every token.

    Raises:
        RheostatError: as `resolve_selector`.
    """
    if not part.HasField("where"):
        return EVERYTHING
    return resolve_selector(part.where, context, field_path(path, "where"))


def resolve_selector(
    selector: selector_pb2.Selector, context: SelectionContext, path: str
) -> Selection:
    """Resolves a selector.

    Raises:
        InvalidArgument: a range is malformed, empty or not in the prompt.
        NotSupported: the offsets of the prompt's tokens are not known.
    """
    if not selector.include and not selector.exclude:
        raise EmptySelector("a selector needs at least one range", field=path)
    include_path, exclude_path = field_path(path, "include"), field_path(path, "exclude")
    validation.check_count(len(selector.include), RANGES, include_path, "ranges")
    validation.check_count(len(selector.exclude), RANGES, exclude_path, "ranges")
    include = _Union(EVERYTHING.spans, frozenset())
    if selector.include:
        include = _unite(selector.include, context, include_path)
    exclude = _unite(selector.exclude, context, exclude_path)
    return combine(
        include.spans,
        exclude.spans,
        excluded_ids=tuple(sorted(exclude.ids)),
        included_ids=tuple(sorted(include.ids - exclude.ids)),
        prompt_len=context.prompt_len,
    )


def combine(
    include: Spans,
    exclude: Spans,
    *,
    excluded_ids: tuple[int, ...],
    included_ids: tuple[int, ...],
    prompt_len: int,
) -> Selection:
    """The tokens that are included and not excluded.

    `include` and `exclude` are positions, with the prompt's tokens that are selected by id. The ids
    are those of generated tokens, ascending.
    """
    if not (exclude or excluded_ids or included_ids):
        return Selection(include)
    allowed = subtracted(EVERYTHING.spans, exclude)
    by_position = subtracted(include, exclude)
    generated = clipped(by_position, prompt_len, OPEN_END)
    by_token = subtracted(clipped(allowed, prompt_len, OPEN_END), generated)
    conditions = [
        TokenCondition(spans, ids, among)
        for spans, ids, among in (
            (generated, excluded_ids, False),
            (by_token, included_ids, True),
        )
        if spans and ids
    ]
    spans = clipped(by_position, 0, prompt_len) if excluded_ids else by_position
    return Selection(spans, tuple(conditions))


def needs_text(selector: selector_pb2.Selector) -> bool:
    """Whether a selector looks for text."""
    ranges = (*selector.include, *selector.exclude)
    return any(token_range.WhichOneof("kind") == "text" for token_range in ranges)


class _Union(NamedTuple):
    """The union of ranges: positions, and ids of generated tokens."""

    spans: Spans
    ids: frozenset[int]


def _unite(ranges: Sequence[selector_pb2.Range], context: SelectionContext, path: str) -> _Union:
    token_ids: set[int] = set()
    spans = united(
        [
            span
            for index, token_range in enumerate(ranges)
            for span in _resolve_range(token_range, context, f"{path}[{index}]", token_ids)
        ]
    )
    if token_ids:
        spans = joined(context.index.tokens(token_ids), spans)
    return _Union(spans, frozenset(token_ids))


def _resolve_range(
    token_range: selector_pb2.Range, context: SelectionContext, path: str, token_ids: set[int]
) -> Iterator[tuple[int, int]]:
    """Yields the spans of a range. The ids of a range of ids are added to `token_ids` instead."""
    kind = validation.required(
        token_range.WhichOneof("kind"), path, "phase, positions, generated, token_ids and text"
    )
    field = field_path(path, kind)
    if kind == "phase":
        validation.known_enum(token_range.phase, types_pb2.Phase.values(), field)
        if token_range.phase == types_pb2.PHASE_PROMPT:
            yield (0, context.prompt_len)
        else:
            yield (context.prompt_len, OPEN_END)
    elif kind == "positions":
        yield _window(token_range.positions, context, field)
    elif kind == "generated":
        yield _generated(token_range.generated, context, field)
    elif kind == "token_ids":
        ids = token_range.token_ids.ids
        validation.check_count(len(ids), RANGE_TOKEN_IDS, field, "token ids")
        validation.token_ids(ids, context.vocabulary, field_path(field, "ids"))
        token_ids.update(ids)
    else:
        yield _span(token_range.text, context, field)


def _window(window: selector_pb2.Window, context: SelectionContext, path: str) -> tuple[int, int]:
    length = context.prompt_len
    start = window.start if window.HasField("start") else 0
    end = window.end if window.HasField("end") else length
    first = start + length if start < 0 else start
    past = end + length if end < 0 else end
    if 0 <= first < past and first < context.row_end:
        return first, past
    if context.lenient:
        return 0, 0
    if first < 0 or past < 0:
        name, value = ("start", start) if first < 0 else ("end", end)
        raise InvalidPosition(
            f"{value} is before a prompt of {counted(length, 'token')}",
            field=field_path(path, name),
        )
    if first >= past:
        raise InvalidPosition(
            f"positions {first} to {past} hold none; the prompt has {length} tokens", field=path
        )
    raise InvalidPosition(_never_an_input(first, context), field=path)


def _generated(
    window: selector_pb2.GeneratedWindow, context: SelectionContext, path: str
) -> tuple[int, int]:
    if window.HasField("end") and window.start >= window.end:
        raise InvalidPosition("the window of generated tokens is empty", field=path)
    start = min(context.prompt_len + window.start, OPEN_END)
    end = min(context.prompt_len + window.end, OPEN_END) if window.HasField("end") else OPEN_END
    if start >= context.row_end and not context.lenient:
        raise InvalidPosition(_never_an_input(start, context), field=path)
    return start, end


def _never_an_input(position: int, context: SelectionContext) -> str:
    return (
        f"position {position} is never an input: the prompt has {context.prompt_len} tokens and at "
        f"most {context.max_tokens} are generated, the last of which is none"
    )


def _span(span: selector_pb2.Span, context: SelectionContext, path: str) -> tuple[int, int]:
    if not span.text:
        raise MissingField("a text is required", field=field_path(path, "text"))
    if len(span.text.encode()) > SPAN_BYTES:
        raise InvalidValue(f"has more than {SPAN_BYTES} bytes", field=field_path(path, "text"))
    if context.lenient:
        raise InvalidValue(
            "a text can be found in the prompt of a request only; select token ids or positions",
            field=path,
        )
    index = context.index
    if not index.has_offsets:
        raise NotSupported(
            "the offsets of this prompt's tokens in its text are not known; select positions",
            field=path,
        )
    try:
        starts = index.occurrences(span.text)
    except SearchTooLong as error:
        raise InvalidValue(
            f"finding the texts of the request searches more than {SPAN_SEARCH} characters, where "
            "an occurrence counts as 128; use fewer texts, or select positions",
            field=path,
        ) from error
    wanted = span.occurrence if span.HasField("occurrence") else 0
    if wanted >= len(starts):
        raise SpanNotFound(_not_found(span.text, len(starts), wanted), field=path)
    if len(starts) > 1 and not span.HasField("occurrence"):
        raise SpanAmbiguous(
            f"the prompt holds the text {_quoted(span.text)} {len(starts)} times; choose an "
            f"occurrence, 0 to {len(starts) - 1}",
            field=path,
            metadata={"occurrences": str(len(starts))},
        )
    start = int(starts[wanted])
    tokens = index.tokens_of_text(start, start + len(span.text))
    if tokens is None:
        raise SpanNotFound("no token of the prompt holds a character of the text", field=path)
    return tokens


def _not_found(text: str, occurrences: int, wanted: int) -> str:
    if not occurrences:
        return f"the prompt does not hold the text {_quoted(text)}"
    if occurrences == 1:
        return f"the prompt holds the text {_quoted(text)} once; its occurrence is 0, not {wanted}"
    return (
        f"the prompt holds the text {_quoted(text)} {occurrences} times; occurrences are 0 to "
        f"{occurrences - 1}, not {wanted}"
    )


def _quoted(text: str) -> str:
    return f'"{text}"' if len(text) <= _SHOWN_TEXT else f'"{text[:_SHOWN_TEXT]}..."'
