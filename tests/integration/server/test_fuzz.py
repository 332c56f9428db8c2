"""Hostile calls on a real server: typed errors only, the engine lives, nothing is left."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

import rheostat
from rheostat_bench.calls import Call
from rheostat_wire.v1 import generation_service_pb2

from ...effort import FACTOR, at_length
from .conftest import Server, assert_empty
from .hostile import GENERATE, NAMES, SHARES, Attempt, attempts

pytestmark = pytest.mark.integration

ATTEMPTS = 2_000 * FACTOR
AT_ONCE = 24
PATIENCE = 100
"""Seconds after which a call counts as hanging; the server lets a request wait for at most 30."""
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,  # by ourselves
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ALREADY_EXISTS,
}
"""What a call may end with: never INTERNAL, UNKNOWN or UNAVAILABLE."""
PYTHON = re.compile(r"Traceback|<class|object at 0x|\b[A-Z]\w+Error\b|rheostat_\w+\.\w+")
OPTIONS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 3}


class End(NamedTuple):
    """How a call ended."""

    method: str
    code: grpc.StatusCode
    details: str
    typed: bool
    """Whether an ErrorInfo of ours came with it."""
    last: bytes
    """The last answer."""
    reason: str = ""
    """Of the ErrorInfo."""


def end_of(channel: grpc.Channel, attempt: Attempt) -> End:
    """Makes a call, and says how it ended."""
    path = f"/rheostat.v1.{attempt.method}"
    last = b""
    client_streams, server_streams = Call(attempt.method, ()).streams
    try:
        if not server_streams and client_streams:
            last = channel.stream_unary(path)(_spaced(attempt), timeout=PATIENCE)
        elif not server_streams:
            last = channel.unary_unary(path)(attempt.messages[0], timeout=PATIENCE)
        else:
            if client_streams:
                call = channel.stream_stream(path)(_spaced(attempt), timeout=PATIENCE)
            else:
                call = channel.unary_stream(path)(attempt.messages[0], timeout=PATIENCE)
            for answer in call:
                last = answer
                if attempt.vanishes:
                    call.cancel()
    except grpc.RpcError as error:
        ours = attempt.vanishes and error.code() is grpc.StatusCode.CANCELLED
        packed = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
        reason = _reason(packed)
        typed = ours or bool(reason)
        return End(attempt.method, error.code(), error.details() or "", typed, last, reason)
    return End(attempt.method, grpc.StatusCode.OK, "", True, last)


def _spaced(attempt: Attempt) -> Iterator[bytes]:
    for message in attempt.messages:
        yield message
        time.sleep(attempt.pause)


def _reason(packed: bytes) -> str:
    """The reason of an ErrorInfo of ours; empty if there is none."""
    info = error_details_pb2.ErrorInfo()
    try:
        details = status_pb2.Status.FromString(packed).details
    except DecodeError:
        return ""
    ours = bool(details) and details[0].Unpack(info) and info.domain == "rheostat.dev"
    return info.reason if ours else ""


@at_length
def test_hostile_calls_end_with_typed_errors_and_leave_nothing(
    server: Server, engine: rheostat.Engine
) -> None:
    prompt = "The Eiffel Tower is in the city of"
    before = engine.generate(prompt, **OPTIONS)
    logged = server.log.stat().st_size
    with grpc.insecure_channel(server.target) as channel, ThreadPoolExecutor(AT_ONCE) as pool:
        ends = list(pool.map(partial(end_of, channel), attempts(0, ATTEMPTS)))
    engine.steering.set_global(None)
    assert len(ends) == ATTEMPTS
    wrong = [end for end in ends if end.code not in EXPECTED or not end.typed]
    assert not wrong, wrong[:9]
    telling = [end for end in ends if PYTHON.search(end.details)]
    assert not telling, telling[:9]
    log = server.log.read_bytes()[logged:].decode(errors="replace")
    assert "Traceback" not in log
    assert "incident" not in log
    for end in ends:
        if end.method == GENERATE and end.code is grpc.StatusCode.OK:
            assert generation_service_pb2.GenerateResponse.FromString(end.last).HasField("receipt")
    count = Counter(end.method for end in ends if end.code is grpc.StatusCode.OK)
    assert all(count[method] > 0.05 * ATTEMPTS * SHARES[method] / 100 for method in SHARES), count
    refused = Counter(end.method for end in ends if end.code is grpc.StatusCode.INVALID_ARGUMENT)
    assert all(refused[method] for method in SHARES), refused
    assert_empty(engine)
    after = engine.generate(prompt, **OPTIONS)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    left = {one.vector.name for one in engine.vectors.list("fuzz/")}
    for name in left.intersection(NAMES):
        engine.vectors.delete(name)
