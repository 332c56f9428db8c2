"""Selectors of tokens: a union of included ranges minus a union of excluded ranges.

Excludes always win. So the union with a selector that excludes would silently remove tokens of the
other side. Such a union is refused, and a selector selects what its expression reads like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from rheostat._errors import Unimplemented, invalid
from rheostat._fields import token_id, utf8_text, whole_number
from rheostat._positions import ranges_of
from rheostat_wire.v1 import selector_pb2, types_pb2

_FIRST, _LAST = -(2**31), 2**31 - 1
"""The range of a position: int32."""

PhaseName: TypeAlias = Literal["prompt", "generated", "all"]
"""Short forms of selectors."""
_CALLS = {'"prompt"': "window()", '"generated"': "generated()"}
"""Calls that select the same as a word. In an expression, Python would apply | to two strings."""
_WORDS = {"last": -1, "first": 0}


class _Phase(NamedTuple):
    name: Literal["prompt", "generated"]

    def to_wire(self) -> selector_pb2.Range:
        prompt = self.name == "prompt"
        phase = types_pb2.PHASE_PROMPT if prompt else types_pb2.PHASE_GENERATED
        return selector_pb2.Range(phase=phase)

    def __str__(self) -> str:
        return f'"{self.name}"'


class _Window(NamedTuple):
    start: int | None
    end: int | None

    def to_wire(self) -> selector_pb2.Range:
        return selector_pb2.Range(positions=selector_pb2.Window(start=self.start, end=self.end))

    def __str__(self) -> str:
        if self.start is not None and self.end == _after(self.start):
            return f"positions({self.start})"
        return f"window({self.start}, {self.end})"


class _Generated(NamedTuple):
    start: int
    end: int | None

    def to_wire(self) -> selector_pb2.Range:
        return selector_pb2.Range(
            generated=selector_pb2.GeneratedWindow(start=self.start, end=self.end)
        )

    def __str__(self) -> str:
        return f"generated({self.start}, {self.end})"


class _TokenIds(NamedTuple):
    ids: tuple[int, ...]

    def to_wire(self) -> selector_pb2.Range:
        return selector_pb2.Range(token_ids=types_pb2.TokenIds(ids=self.ids))

    def __str__(self) -> str:
        return f"token_ids({', '.join(map(str, self.ids))})"


class _Span(NamedTuple):
    text: str
    occurrence: int | None

    def to_wire(self) -> selector_pb2.Range:
        return selector_pb2.Range(
            text=selector_pb2.Span(text=self.text, occurrence=self.occurrence)
        )

    def __str__(self) -> str:
        more = "" if self.occurrence is None else f", occurrence={self.occurrence}"
        return f"span({self.text!r}{more})"


_Range: TypeAlias = _Phase | _Window | _Generated | _TokenIds | _Span


@dataclass(frozen=True, repr=False)
class Selector:
    """A set of tokens: ``a | b`` is a union, ``a - b`` excludes.

    Either side may be one of the words "prompt", "generated" and "all".
    """

    include: tuple[_Range, ...] = ()
    """Ranges whose union is selected; empty: every token."""
    exclude: tuple[_Range, ...] = ()
    """Ranges that are not selected, even if `include` has them."""

    def __or__(self, other: Selector | PhaseName) -> Selector:
        """The union. Raises InvalidRequest if a side excludes: unite first, then exclude."""
        right = selector_of(other)
        if self.exclude or right.exclude:
            raise invalid("where", "unite first, then exclude: (a | b) - c")
        if not self.include or not right.include:
            return Selector()
        return Selector(self.include + right.include)

    def __ror__(self, other: PhaseName) -> Selector:
        return selector_of(other) | self

    def __sub__(self, other: Selector | PhaseName) -> Selector:
        """The difference. Raises InvalidRequest if ``other`` excludes."""
        right = selector_of(other)
        if right.exclude:
            raise invalid("where", "a selector that excludes cannot be excluded")
        if not right.include:
            raise invalid("where", "excluding all leaves no token", "REASON_EMPTY_SELECTOR")
        return Selector(self.include, self.exclude + right.include)

    def __rsub__(self, other: PhaseName) -> Selector:
        return selector_of(other) - self

    def __repr__(self) -> str:
        """An expression that selects the same tokens."""
        included = [str(token_range) for token_range in self.include] or ['"all"']
        parts = [*included, *(str(token_range) for token_range in self.exclude)]
        if parts[0].startswith('"') and len(parts) > 1:
            parts[1] = _CALLS.get(parts[1], parts[1])
        union = " | ".join(parts[: len(included)])
        if self.exclude and len(included) > 1:
            union = f"({union})"
        return " - ".join([union, *parts[len(included) :]])


SelectorLike: TypeAlias = Selector | PhaseName | None
"""A selector, its short form, or None for every token."""


def selector_of(where: SelectorLike) -> Selector:
    """The selector of a word; None and "all" are every token."""
    if isinstance(where, Selector):
        return where
    if where is None or where == "all":
        return Selector()
    if where == "prompt" or where == "generated":
        return Selector((_Phase(where),))
    raise invalid(
        "where",
        f'tokens are "prompt", "generated", "all" or a selector, not {where!r}{_advice(where)}',
    )


def _advice(where: object) -> str:
    """Advice for a wrong selector: the call that the caller probably means."""
    if isinstance(where, str):
        at = _WORDS.get(where.removesuffix("_token"))
        if at is None:
            return f': write rheostat.span("{where}") for the tokens of a text'
        return f": write rheostat.positions({at})"
    positions = where if isinstance(where, list | tuple) else [where]
    whole = bool(positions) and all(type(position) is int for position in positions)
    return f": write rheostat.positions({', '.join(map(str, positions))})" if whole else ""


def positions(*at: int) -> Selector:
    """Single positions, absolute from 0. Negative ones count back: -1 is the last prompt token."""
    _refuse_list("positions", at)
    numbers = sorted({_position(number, _LAST - 1) for number in at})
    if not numbers:
        raise invalid("where", "no position is given", "REASON_EMPTY_SELECTOR")
    from_end = [number for number in numbers if number < 0]
    runs = ranges_of(from_end) + ranges_of(numbers[len(from_end) :])
    return Selector(tuple(_Window(run.start, _after(run[-1])) for run in runs))


def _refuse_list(name: str, given: tuple[object, ...]) -> None:
    """Raise InvalidRequest if the numbers were passed as one list, tuple or range."""
    if len(given) == 1 and isinstance(given[0], list | tuple | range):
        raise invalid(
            "where", f"pass numbers, not a list: write rheostat.{name}(*{given[0]!r:.60})"
        )


def _position(number: int, most: int = _LAST) -> int:
    return whole_number(
        number, "where", "a position", least=_FIRST, most=most, reason="REASON_INVALID_POSITION"
    )


def _after(position: int) -> int | None:
    """The end of a window whose last position is ``position``; None is the end of the prompt."""
    return None if position == -1 else position + 1


def window(start: int | None = None, end: int | None = None) -> Selector:
    """Positions ``start <= p < end``, like a slice of the prompt.

    Negative numbers count from the end of the prompt. The default start is 0, the default end that
    of the prompt. A larger end includes generated tokens.
    """
    start = None if start is None else _position(start)
    end = None if end is None else _position(end)
    same_side = start is not None and end is not None and (start < 0) == (end < 0)
    if same_side and (start or 0) >= (end or 0):
        raise invalid("where", f"the window {start}:{end} is empty", "REASON_INVALID_POSITION")
    return Selector((_Window(start, end),))


def generated(start: int = 0, end: int | None = None) -> Selector:
    """Generated tokens ``start <= g < end``, counted from the first; without an end: all others."""
    start, end = _generated_at(start), None if end is None else _generated_at(end)
    if end is not None and end <= start:
        raise invalid(
            "where", f"the generated window {start}:{end} is empty", "REASON_INVALID_POSITION"
        )
    return Selector((_Generated(start, end),))


def _generated_at(number: int) -> int:
    return whole_number(number, "where", "a generated token", reason="REASON_INVALID_POSITION")


def token_ids(*ids: int) -> Selector:
    """Every token with one of these ids, in the prompt or generated."""
    if not ids:
        raise invalid("where", "no token id is given", "REASON_EMPTY_SELECTOR")
    _refuse_list("token_ids", ids)
    token_ids = (token_id(token, "where") for token in ids)
    return Selector((_TokenIds(tuple(token_ids)),))


def span(text: str, occurrence: int | None = None) -> Selector:
    """The prompt's tokens that spell ``text``.

    ``occurrence`` counts from 0; without it the text must occur exactly once.
    """
    if not text:
        raise invalid("where", "the span's text is empty", "REASON_MISSING_FIELD")
    if occurrence is not None:
        occurrence = whole_number(occurrence, "where", "an occurrence")
    return Selector((_Span(utf8_text(text, "where", "the span's text"), occurrence),))


def to_wire(selector: Selector) -> selector_pb2.Selector | None:
    """The message; None if every token is selected, because an absent selector means that."""
    if not selector.include and not selector.exclude:
        return None
    return selector_pb2.Selector(
        include=[token_range.to_wire() for token_range in selector.include],
        exclude=[token_range.to_wire() for token_range in selector.exclude],
    )


def prompt_tokens(where: SelectorLike) -> selector_pb2.Selector:
    """The message of a selector of prompt tokens, which is never absent: every token if "all"."""
    every = selector_pb2.Selector(include=[_Phase("prompt").to_wire()])
    return to_wire(selector_of(where)) or every


def from_wire(message: selector_pb2.Selector, path: str) -> Selector:
    """The selector of a message; an empty message selects every token.

    Raises Unimplemented, which names ``path``, for ranges that this client does not know.
    """
    return Selector(
        tuple(_read_range(token_range, path) for token_range in message.include),
        tuple(_read_range(token_range, path) for token_range in message.exclude),
    )


def _read_range(message: selector_pb2.Range, path: str) -> _Range:
    match message.WhichOneof("kind"):
        case "phase" if message.phase == types_pb2.PHASE_PROMPT:
            return _Phase("prompt")
        case "phase" if message.phase == types_pb2.PHASE_GENERATED:
            return _Phase("generated")
        case "positions":
            at = message.positions
            return _Window(
                at.start if at.HasField("start") else None, at.end if at.HasField("end") else None
            )
        case "generated":
            window = message.generated
            return _Generated(window.start, window.end if window.HasField("end") else None)
        case "token_ids":
            return _TokenIds(tuple(message.token_ids.ids))
        case "text":
            text = message.text
            return _Span(text.text, text.occurrence if text.HasField("occurrence") else None)
    raise Unimplemented(f"{path} of the server has a kind of range that this client does not know")
