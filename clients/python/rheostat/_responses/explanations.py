"""Answers about a request that is not run: what it would do, and how its prompt reads in tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rheostat._notebook import table
from rheostat._points import Site, knows_point, read_site
from rheostat._positions import read_ranges, show_ranges, unknown_sites_text
from rheostat._responses.receipts import Reference, read_reference
from rheostat_wire.v1 import generation_service_pb2, types_pb2


@dataclass(frozen=True)
class Selection:
    """A selector, resolved against the prompt and max_tokens."""

    positions: tuple[range, ...]
    """Positions known in advance, ascending."""
    token_ids: tuple[int, ...] = ()
    """Generated tokens with these ids are selected too."""
    excluded_token_ids: tuple[int, ...] = ()
    """Generated tokens with these ids are not selected."""

    def __str__(self) -> str:
        """As "positions 0-4, 7, generated tokens 13 but not 42"."""
        text = f"positions {show_ranges(self.positions)}"
        if self.token_ids:
            text += f", generated tokens {', '.join(map(str, self.token_ids))}"
        if self.excluded_token_ids:
            text += f" but not {', '.join(map(str, self.excluded_token_ids))}"
        return text


@dataclass(frozen=True)
class ResolvedIntervention:
    """One intervention, resolved."""

    origin: str
    """Where it comes from: "global", "request", "rule"."""
    index: int
    """Index in the list there."""
    op: str
    """What it does: "add", "norm_add", "ablate", "clamp", "scale", "replace"."""
    sites: tuple[Site, ...]
    """Where, by layer, then point."""
    selection: Selection
    """On which tokens."""
    digests: tuple[str, ...]
    """Digests of its vectors, hex."""
    doses: Mapping[Site, float]
    """By site, the norm of what is added: of "add" in the units of the stream, of "norm_add" in
    norms of the stream. Empty for other ops, whose dose depends on the stream."""
    rule_name: str = ""
    """The rule, where ``origin`` is "rule"."""
    unknown_sites: int = 0
    """Further sites, at points of a newer server that this client cannot name."""


@dataclass(frozen=True)
class ResolvedCapture:
    """A capture, resolved."""

    index: int
    """Index in the request's captures."""
    sites: tuple[Site, ...]
    """Where, by layer, then point."""
    selection: Selection
    """Which tokens."""
    payload_bytes: int
    """Bytes of payload, if every token known in advance is computed."""
    unknown_sites: int = 0
    """Further sites, at points of a newer server that this client cannot name."""


@dataclass(frozen=True)
class CacheKey:
    """What enters the prefix cache's keys from a position on."""

    position: int
    """First position."""
    digest: str
    """Digest of all that touches this position and those before it, hex."""
    private: bool
    """Whether a nonce replaces the digest, so that no request shares it."""


@dataclass(frozen=True)
class Explanation:
    """What a request would do."""

    prompt_token_ids: tuple[int, ...]
    """The prompt's tokens."""
    interventions: tuple[ResolvedIntervention, ...]
    """In the order in which they act."""
    captures: tuple[ResolvedCapture, ...]
    """In the request's order."""
    cache_keys: tuple[CacheKey, ...]
    """Empty: the engine's own keys throughout."""
    new_bank_row_count: int
    """Bank rows that it needs beyond those that equal configurations hold."""
    global_version: int
    """Version of the server-wide steering that it would run under."""

    def __str__(self) -> str:
        """One line per fact."""
        return "\n".join(["the request would", *(f"  {k}: {v}" for k, v in _rows(self))])

    def _repr_html_(self) -> str:
        return table(("explanation", ""), _rows(self))


def _rows(explanation: Explanation) -> list[tuple[str, str]]:
    rows = [("prompt", f"{len(explanation.prompt_token_ids)} tokens")]
    for resolved in explanation.interventions:
        unit = " of the stream" if resolved.op == "norm_add" else ""
        sites = [
            f"{site} (dose {resolved.doses[site]:.3g}{unit})"
            if site in resolved.doses
            else str(site)
            for site in resolved.sites
        ]
        sites_text = ", ".join([*sites, *unknown_sites_text(resolved.unknown_sites)])
        reference = Reference(resolved.origin, resolved.index, resolved.op, resolved.rule_name)
        rows.append((str(reference), f"{sites_text}; {resolved.selection}"))
    for capture in explanation.captures:
        sites_text = ", ".join(
            [*map(str, capture.sites), *unknown_sites_text(capture.unknown_sites)]
        )
        rows.append(
            (
                f"capture {capture.index}",
                f"{sites_text}; {capture.selection}; {capture.payload_bytes} bytes",
            )
        )
    for key in explanation.cache_keys:
        key_text = "private" if key.private else key.digest[:12]
        rows.append((f"cache key from position {key.position}", key_text))
    rows.append(("bank rows", f"{explanation.new_bank_row_count} new"))
    if explanation.global_version:
        rows.append(("server-wide steering", f"version {explanation.global_version}"))
    return rows


def read_explanation(message: generation_service_pb2.ExplainResponse) -> Explanation:
    """The explanation of a wire message."""
    return Explanation(
        prompt_token_ids=tuple(message.prompt_token_ids.ids),
        interventions=tuple(
            _read_intervention(intervention) for intervention in message.interventions
        ),
        captures=tuple(
            ResolvedCapture(
                capture.capture_index,
                _known(capture.sites),
                _read_selection(capture.selection),
                capture.payload_bytes,
                len(capture.sites) - len(_known(capture.sites)),
            )
            for capture in message.captures
        ),
        cache_keys=tuple(
            CacheKey(key.position, key.digest.hex(), key.private) for key in message.cache_keys
        ),
        new_bank_row_count=message.new_bank_row_count,
        global_version=message.global_version,
    )


def _read_intervention(
    message: generation_service_pb2.ResolvedIntervention,
) -> ResolvedIntervention:
    reference = read_reference(message.intervention)
    return ResolvedIntervention(
        origin=reference.origin,
        index=reference.index,
        op=reference.op,
        rule_name=reference.rule_name,
        sites=_known(message.sites),
        unknown_sites=len(message.sites) - len(_known(message.sites)),
        selection=_read_selection(message.selection),
        digests=tuple(digest.hex() for digest in message.digests),
        doses={
            read_site(dose.site): dose.norm
            for dose in message.doses
            if knows_point(dose.site.point)
        },
    )


def _known(sites: Iterable[types_pb2.Site]) -> tuple[Site, ...]:
    """Those that this client can name."""
    return tuple(read_site(site) for site in sites if knows_point(site.point))


def _read_selection(message: generation_service_pb2.ResolvedSelection) -> Selection:
    return Selection(
        read_ranges(message.positions), tuple(message.token_ids), tuple(message.excluded_token_ids)
    )


class TextSpan(NamedTuple):
    """Code points ``start <= i < end`` of a text."""

    start: int
    """First."""
    end: int
    """One past the last."""


@dataclass(frozen=True)
class Tokenized:
    """Tokens and where they stand in the text."""

    token_ids: tuple[int, ...]
    """The ids."""
    text: str
    """The text that was tokenised: as given, rendered, or decoded."""
    offsets: tuple[TextSpan, ...]
    """One per token; empty for special tokens that have no place in the text."""

    @property
    def pieces(self) -> tuple[str, ...]:
        """The text of each token."""
        return tuple(self.text[span.start : span.end] for span in self.offsets)


def read_tokenized(message: generation_service_pb2.TokenizeResponse) -> Tokenized:
    """The tokens of a wire message."""
    return Tokenized(
        tuple(message.token_ids.ids),
        message.text,
        tuple(map(TextSpan, message.starts, message.ends)),
    )
