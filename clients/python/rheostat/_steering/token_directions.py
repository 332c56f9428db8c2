"""The model's own directions of tokens, as vectors."""

from __future__ import annotations

from dataclasses import dataclass

from rheostat._fields import token_id as valid_token_id
from rheostat._points import LayersLike, PointsLike
from rheostat._steering.vectors import Vector, defaults
from rheostat_wire.v1 import vector_pb2


@dataclass(frozen=True, repr=False)
class TokenDirection(Vector):
    """The direction of a token's logit; made by `token_direction`. The server has its numbers."""

    token_id: int = 0
    minus: int | None = None
    """The token whose direction is subtracted."""

    @property
    def label(self) -> str:
        """A name for people."""
        return f"token {self.token_id}" + ("" if self.minus is None else f" - token {self.minus}")

    def to_wire(self) -> vector_pb2.VectorRef:
        """The reference to this vector in a request."""
        direction = token_direction_to_wire(self.token_id, self.minus, "vector")
        return vector_pb2.VectorRef(token_direction=direction)


def token_direction(
    token_id: int,
    *,
    minus: int | None = None,
    points: PointsLike | None = None,
    layers: LayersLike | None = None,
) -> TokenDirection:
    """The model's own direction of a token's logit, less that of ``minus``.

    It is the token's row of the unembedding, with the final norm's weight in it. A row x of the
    stream that the final norm multiplies by s adds ``s * x.d`` to the logit. So captures that are
    projected on it show where a logit comes from, and steering along it makes the token likelier.
    """
    token_direction_to_wire(token_id, minus, "vector")
    at_points, at_layers = defaults(points, layers)
    return TokenDirection(
        None, None, points=at_points, layers=at_layers, token_id=token_id, minus=minus
    )


def token_direction_to_wire(
    token_id: int, minus: int | None, path: str
) -> vector_pb2.TokenDirection:
    """The message. Raises InvalidRequest for numbers that are no token ids."""
    return vector_pb2.TokenDirection(
        token_id=valid_token_id(token_id, f"{path}.token_id"),
        minus_token_id=None if minus is None else valid_token_id(minus, f"{path}.minus_token_id"),
    )
