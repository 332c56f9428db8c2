"""Directions of tokens, as vectors that requests may refer to.

Why they are loaded on demand
    Requests are compiled in one synchronous pass, and the workers have the unembedding. So the
    first request that needs a direction fails to find it, asks the workers for all the directions
    that it names, and is compiled again. Other requests pay nothing.

Invariant: a direction that is kept never changes, because the model's weights do not.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message

from rheostat_server import validation
from rheostat_server.errors import InvalidValue, MissingField, NotSupported
from rheostat_server.limits import DIRECTIONS_PER_CALL, KEPT_TOKEN_DIRECTIONS, TOKEN_DIRECTIONS
from rheostat_server.validation import field_path
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.nested_messages import nested_messages
from rheostat_wire.v1 import vector_pb2

T = TypeVar("T")

Tokens: TypeAlias = tuple[int, ...]
"""A token, and the token whose direction is subtracted, if there is one."""

Compute: TypeAlias = Callable[[Sequence[int]], Awaitable[FloatArray]]
"""Computes directions [m, W] of tokens."""


class DirectionNotLoaded(NotSupported):
    """The workers have not yet been asked for a token's direction; see `with_directions`."""


class TokenDirections:
    """The directions that have been loaded. Changed on the event loop alone."""

    def __init__(self) -> None:
        """Without a model; see `connect`."""
        self._rows: OrderedDict[Tokens, FloatArray] = OrderedDict()
        self._vocabulary = 0
        self._compute: Compute | None = None

    def connect(self, vocabulary: int, compute: Compute) -> None:
        """Takes directions of a model with so many tokens."""
        self._vocabulary = vocabulary
        self._compute = compute

    def find(self, direction: vector_pb2.TokenDirection, path: str) -> FloatArray:
        """A loaded direction, [W]. May be called from any thread.

        Raises:
            InvalidArgument: there is no such direction.
            DirectionNotLoaded: it is not loaded.
        """
        row = self._rows.get(checked_tokens(direction, self._vocabulary, path))
        if row is None:
            raise DirectionNotLoaded("directions of tokens are not served here", field=path)
        return row

    async def load(self, message: Message) -> None:
        """Loads every direction that a message names. Those of unknown tokens are left out.

        Raises:
            InvalidValue: there are too many.
            EngineLost: the engine is gone.
        """
        named = {_tokens(one) for one in nested_messages(message, vector_pb2.TokenDirection)}
        validation.check_count(len(named), TOKEN_DIRECTIONS, "", "directions of tokens")
        wanted = [
            tokens
            for tokens in sorted(named)
            if tokens not in self._rows and max(tokens) < self._vocabulary
        ]
        ids = sorted({token for tokens in wanted for token in tokens})
        rows: dict[int, FloatArray] = {}
        for first in range(0, len(ids) if self._compute is not None else 0, DIRECTIONS_PER_CALL):
            assert self._compute is not None
            part = ids[first : first + DIRECTIONS_PER_CALL]
            rows |= zip(part, await self._compute(part), strict=True)
        for tokens in wanted if rows else ():
            self._rows[tokens] = rows[tokens[0]] - (rows[tokens[1]] if len(tokens) > 1 else 0)
        for tokens in named & self._rows.keys():
            self._rows.move_to_end(tokens)
        while len(self._rows) > KEPT_TOKEN_DIRECTIONS:
            self._rows.popitem(last=False)


async def with_directions(
    directions: TokenDirections, message: Message, attempt: Callable[[], Awaitable[T]]
) -> T:
    """Does what a message asks for. If it needs directions of tokens, loads them and tries again.

    Raises:
        RheostatError: as `attempt`, or the engine is gone.
    """
    try:
        return await attempt()
    except DirectionNotLoaded:
        await directions.load(message)
    return await attempt()


def checked_tokens(
    direction: vector_pb2.TokenDirection | None, vocabulary: int, path: str
) -> Tokens:
    """The tokens of a direction.

    Raises:
        MissingField: there is no token.
        UnknownToken: a token is not below the vocabulary's size.
        InvalidValue: a token's own direction is subtracted from it.
    """
    if direction is None or not direction.HasField("token_id"):
        raise MissingField("a token is required", field=field_path(path, "token_id"))
    tokens = _tokens(direction)
    for token, name in zip(tokens, ("token_id", "minus_token_id"), strict=False):
        validation.token_id(token, vocabulary, field_path(path, name))
    if len(set(tokens)) < len(tokens):
        raise InvalidValue(
            "the token and the subtracted token are the same, so the direction is zero",
            field=field_path(path, "minus_token_id"),
        )
    return tokens


def _tokens(direction: vector_pb2.TokenDirection) -> Tokens:
    if direction.HasField("minus_token_id"):
        return direction.token_id, direction.minus_token_id
    return (direction.token_id,)
