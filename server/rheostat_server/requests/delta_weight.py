"""The memory of deltas that wait, approximately."""

from collections.abc import Sequence

from rheostat_server.engine.backend import Delta
from rheostat_wire.v1 import generation_pb2

DELTA_BYTES = 256
"""Memory of a delta without its tokens; measured, as the next three constants."""

_TOKEN_BYTES = 40
"""Memory of a token id in a list."""

_READING_BYTES = 800
"""Memory of a token's log-probability, which is a message with its own arena."""

_ALTERNATIVE_BYTES = 112
"""Further memory of each alternative token."""


def weight(delta: Delta) -> int:
    """Bytes that a delta takes in memory, approximately."""
    size = DELTA_BYTES + _TOKEN_BYTES * len(delta.token_ids) + len(delta.text)
    if delta.logprobs:
        size += readings_weight(delta.logprobs)
    if delta.prompt_logprobs:
        size += readings_weight(delta.prompt_logprobs)
    return size


def readings_weight(readings: Sequence[generation_pb2.TokenLogprobs]) -> int:
    """Bytes that log-probabilities take in memory, approximately."""
    alternatives = sum(len(reading.alternatives) for reading in readings)
    return _READING_BYTES * len(readings) + _ALTERNATIVE_BYTES * alternatives
