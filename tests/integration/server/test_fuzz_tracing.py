"""Hostile sweeps, lenses, runs, replacements and gates on a real server: typed errors only."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import pytest

import rheostat
from rheostat_wire.v1 import generation_service_pb2, sweep_service_pb2

from ...effort import FACTOR, at_length
from .conftest import Server, assert_empty
from .hostile_tracing import (
    DELETE_RUN,
    GENERATE,
    GET_RUN,
    READ_RUN,
    RENEW_LEASE,
    SHARES,
    SWEEP,
    attempts,
)
from .test_fuzz import AT_ONCE, EXPECTED, OPTIONS, PYTHON, end_of

pytestmark = pytest.mark.integration

ATTEMPTS = 400 * FACTOR


@at_length
def test_hostile_tracing_ends_with_typed_errors_and_leaves_nothing(
    server: Server, engine: rheostat.Engine
) -> None:
    prompt = "The Eiffel Tower is in the city of"
    before = engine.generate(prompt, **OPTIONS)
    logged = server.log.stat().st_size
    with grpc.insecure_channel(server.target) as channel, ThreadPoolExecutor(AT_ONCE) as pool:
        ends = list(pool.map(partial(end_of, channel), attempts(0, ATTEMPTS)))
    wrong = [end for end in ends if end.code not in EXPECTED or not end.typed]
    assert not wrong, wrong[:9]
    telling = [end for end in ends if PYTHON.search(end.details)]
    assert not telling, telling[:9]
    log = server.log.read_bytes()[logged:].decode(errors="replace")
    assert "Traceback" not in log
    assert "incident" not in log
    assert_empty(engine)
    for run in engine.runs():
        engine.delete_run(run.id)
    assert engine.stats().run_bytes == 0
    after = engine.generate(prompt, **OPTIONS)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    for end in ends:
        if end.code is grpc.StatusCode.OK and end.method == GENERATE:
            assert generation_service_pb2.GenerateResponse.FromString(end.last).HasField("receipt")
        if end.code is grpc.StatusCode.OK and end.method == SWEEP:
            assert sweep_service_pb2.SweepResponse.FromString(end.last).HasField("summary")
    count = Counter(end.method for end in ends if end.code is grpc.StatusCode.OK)
    of_a_run = {READ_RUN, GET_RUN, RENEW_LEASE, DELETE_RUN}  # which there may not be
    assert SHARES.keys() - count.keys() <= of_a_run
    assert of_a_run & count.keys()
    refused = Counter(end.method for end in ends if end.code is grpc.StatusCode.INVALID_ARGUMENT)
    assert refused[GENERATE], refused
    assert refused[SWEEP], refused
