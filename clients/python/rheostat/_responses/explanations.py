"""Answers about a request that does not run: its resolved interventions, captures and tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rheostat._fields import counted, same_fields
from rheostat._notebook import table
from rheostat._points import Site, knows_point, read_site
from rheostat._positions import read_ranges, show_ranges, unknown_sites_text
from rheostat._responses.receipts import Reference, ReplaceSource, read_reference, read_source
from rheostat_wire.v1 import generation_service_pb2, types_pb2

_SHOWN = 16
"""Tokens of a text that are printed."""


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
    """Its source: "global", "request", "rule"."""
    index: int
    """Index in the list of that source."""
    op: str
    """"add", "norm_add", "ablate", "clamp", "scale" or "replace"."""
    sites: tuple[Site, ...]
    """By layer, then point."""
    selection: Selection
    digests: tuple[str, ...]
    """Digests of its vectors, hex."""
    doses: Mapping[Site, float]
    """Norm of the added vector by site: for "add" in the units of the stream, for "norm_add"
    relative to the norm of the stream. Empty for other ops, whose dose depends on the stream."""
    rule_name: str = ""
    """The rule, if ``origin`` is "rule", or "global" and a rule of the server's policy steers."""
    source: ReplaceSource | None = None
    """The rows that would be put in, if ``op`` is "replace"."""
    unknown_sites: int = 0
    """Number of further sites, at points that only newer clients know."""
    gate_probes: tuple[str, ...] = ()
    """The names of the probes of its gate; empty if it has none."""


@dataclass(frozen=True)
class ResolvedCapture:
    """A capture, resolved."""

    index: int
    """Index in the request's captures."""
    sites: tuple[Site, ...]
    """By layer, then point."""
    selection: Selection
    payload_bytes: int
    """Bytes of payload, if every token known in advance is computed."""
    unknown_sites: int = 0
    """Number of further sites, at points that only newer clients know."""


@dataclass(frozen=True)
class CacheKey:
    """An extra part of the keys in the prefix cache, from a position on."""

    position: int
    digest: str
    """Digest of all interventions that affect this position or an earlier one, hex."""
    private: bool
    """Whether a nonce replaces the digest, so that no other request shares the cache."""


@dataclass(frozen=True)
class Explanation:
    """The effect that a request would have."""

    prompt_token_ids: tuple[int, ...]
    interventions: tuple[ResolvedIntervention, ...]
    """In the order in which they act."""
    captures: tuple[ResolvedCapture, ...]
    cache_keys: tuple[CacheKey, ...]
    """Empty: the engine's own keys throughout."""
    new_bank_row_count: int
    """Bank rows that it needs beyond those that it shares with running requests."""
    global_version: int
    """Version of the server-wide steering that would apply."""

    def __str__(self) -> str:
        return "\n".join(["the request would", *(f"  {k}: {v}" for k, v in _rows(self))])

    def _repr_html_(self) -> str:
        return table(("explanation", ""), _rows(self))


def _rows(explanation: Explanation) -> list[tuple[str, str]]:
    rows = [("prompt", counted(len(explanation.prompt_token_ids), "token"))]
    for resolved in explanation.interventions:
        unit = " of the stream" if resolved.op == "norm_add" else ""
        sites = [
            f"{site} (dose {resolved.doses[site]:.3g}{unit})"
            if site in resolved.doses
            else str(site)
            for site in resolved.sites
        ]
        sites_text = ", ".join([*sites, *unknown_sites_text(resolved.unknown_sites)])
        reference = Reference(**same_fields(Reference, resolved), gate_probes=resolved.gate_probes)
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
    if explanation.global_version and any(
        intervention.origin == "global" for intervention in explanation.interventions
    ):
        rows.append(("server-wide steering", f"version {explanation.global_version}"))
    return rows


def read_explanation(message: generation_service_pb2.ExplainResponse) -> Explanation:
    return Explanation(
        prompt_token_ids=tuple(message.prompt_token_ids.ids),
        interventions=tuple(
            _read_intervention(intervention) for intervention in message.interventions
        ),
        captures=tuple(
            ResolvedCapture(
                capture.capture_index,
                _known_sites(capture.sites),
                _read_selection(capture.selection),
                capture.payload_bytes,
                len(capture.sites) - len(_known_sites(capture.sites)),
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
        **same_fields(ResolvedIntervention, reference),
        gate_probes=reference.gate_probes,
        sites=_known_sites(message.sites),
        unknown_sites=len(message.sites) - len(_known_sites(message.sites)),
        selection=_read_selection(message.selection),
        digests=tuple(digest.hex() for digest in message.digests),
        source=read_source(message),
        doses={
            read_site(dose.site): dose.norm
            for dose in message.doses
            if knows_point(dose.site.point)
        },
    )


def _known_sites(sites: Iterable[types_pb2.Site]) -> tuple[Site, ...]:
    return tuple(read_site(site) for site in sites if knows_point(site.point))


def _read_selection(message: generation_service_pb2.ResolvedSelection) -> Selection:
    return Selection(
        read_ranges(message.positions), tuple(message.token_ids), tuple(message.excluded_token_ids)
    )


class TextSpan(NamedTuple):
    """Code points ``start <= i < end`` of a text."""

    start: int
    end: int


@dataclass(frozen=True, repr=False)
class Tokenized:
    """Tokens and their places in the text. ``print`` shows the first of them."""

    token_ids: tuple[int, ...]
    text: str
    """The text: as given, rendered by the chat template, or decoded from ids."""
    offsets: tuple[TextSpan, ...]
    """One per token; empty for special tokens that have no place in the text."""

    @property
    def pieces(self) -> tuple[str, ...]:
        """The text of each token."""
        return tuple(self.text[span.start : span.end] for span in self.offsets)

    def __repr__(self) -> str:
        count = len(self.token_ids)
        shown = [
            f"{token_id} {self.text[span.start : span.end]!r}"
            for token_id, span in zip(self.token_ids[:_SHOWN], self.offsets, strict=False)
        ]
        shown += [f"and {count - _SHOWN} more"] if count > _SHOWN else []
        head = counted(count, "token")
        return f"Tokenized({head}{': ' if shown else ''}{', '.join(shown)})"


def read_tokenized(message: generation_service_pb2.TokenizeResponse) -> Tokenized:
    return Tokenized(
        tuple(message.token_ids.ids),
        message.text,
        tuple(map(TextSpan, message.starts, message.ends)),
    )
