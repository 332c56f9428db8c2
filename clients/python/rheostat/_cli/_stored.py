"""Stored vectors on the command line: by name, by digest, or by the first digits of a digest.

If a text is a name and also the beginning of a digest, the name counts.
"""

from __future__ import annotations

import re
from dataclasses import replace

from rheostat._cli._common import CommandError, warn
from rheostat._client.engine import Engine
from rheostat._errors import NotFound
from rheostat._fields import did_you_mean
from rheostat._steering.vectors import Vector

_LEAST_DIGITS, _ALL_DIGITS = 8, 64
_DIGITS = re.compile(f"[0-9a-fA-F]{{{_LEAST_DIGITS},{_ALL_DIGITS}}}")
_SHOWN_DIGITS = 12


def looks_like_digest(text: str) -> bool:
    """Whether ``text`` may be a digest or its first digits."""
    return _DIGITS.fullmatch(text) is not None


def stored(engine: Engine, text: str) -> Vector:
    """The stored vector, without its numbers.

    Raises NotFound if there is none, and CommandError if several digests match.
    """
    if not looks_like_digest(text):
        for info in engine.vectors.list(text):
            if info.vector.name == text:
                return info.vector
        hint = did_you_mean(text, digests_by_name(engine, ""))
        raise NotFound(f"no vector is named {text!r}{hint}", reason="REASON_NAME_NOT_FOUND")
    listed = [info.vector for info in engine.vectors.list()]
    matches = [vector for vector in listed if vector.name == text] or [
        vector for vector in listed if (vector.digest or "").startswith(text.lower())
    ]
    digests = {vector.digest for vector in matches}
    if not matches:
        raise NotFound(
            f"no vector is named {text!r} or has a digest that begins with it",
            reason="REASON_VECTOR_NOT_FOUND",
        )
    if len(digests) > 1:
        raise CommandError(f"{len(digests)} digests begin with {text}: give more digits", 2)
    return matches[0]


def fetched(engine: Engine, text: str) -> Vector:
    """The stored vector with its numbers. Raises as `stored`."""
    if not looks_like_digest(text):
        return engine.vectors.get(text)
    if len(text) == _ALL_DIGITS:
        return engine.vectors.get(digest=text)
    listed = stored(engine, text)
    return replace(
        engine.vectors.get(digest=listed.digest),
        name=listed.name,
        points=listed.points,
        layers=listed.layers,
        description=listed.description,
    )


def digests_by_name(engine: Engine, prefix: str) -> dict[str, str]:
    """The digest of each name that begins with ``prefix``."""
    return {
        info.vector.name: info.vector.digest
        for info in engine.vectors.list(prefix)
        if info.vector.name and info.vector.digest
    }


def warn_if_moved(before: dict[str, str], vector: Vector) -> None:
    """Warn if, in ``before`` (from `digests_by_name`), the name belonged to another vector."""
    digest = before.get(vector.name or "")
    if digest not in (None, vector.digest):
        warn(f"the name {vector.name} moved here from {digest}")


def short_digest(vector: Vector) -> str:
    """The first digits of the digest, which `stored` accepts."""
    return (vector.digest or "")[:_SHOWN_DIGITS]
