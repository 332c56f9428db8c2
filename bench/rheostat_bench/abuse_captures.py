"""Hostile calls that capture: into answers, sinks, runs and subscriptions. See `scenarios`."""

import random
from typing import Any

from rheostat_bench.abuse import (
    GENERATE,
    POINTS,
    Target,
    count,
    every_other,
    prompt,
    sampling,
    sites,
)
from rheostat_bench.calls import Call
from rheostat_wire.v1 import (
    capture_pb2,
    capture_service_pb2,
    generation_service_pb2,
    selector_pb2,
    types_pb2,
)

SUBSCRIBE = "CaptureService/Subscribe"
_WINDOWS = 1023
"""Windows of one capture, below the contract's limit."""


def _request(
    rng: random.Random, target: Target, length: int, tokens: int, samples: int, *captures: Any
) -> generation_service_pb2.GenerateRequest:
    return generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, length),
        sampling=sampling(tokens, samples),
        captures=captures,
    )


def _inline(**fields: Any) -> capture_pb2.CaptureSpec:
    return capture_pb2.CaptureSpec(inline=capture_pb2.InlineTarget(), **fields)


def fragmented(target: Target, rng: random.Random, size: float) -> Call:
    """64 samples that capture all sites at every other token, cancelled after the first answers."""
    windows = count(size * rng.choice([1.0, 0.25, 0.0625]), 4 * _WINDOWS, 4)
    captures = [
        _inline(sites=sites(*POINTS), where=every_other(100 + 2 * first, min(_WINDOWS, left)))
        for first in range(0, windows, _WINDOWS)
        if (left := windows - first) > 0
    ]
    tokens = 110 + 2 * windows
    request = _request(rng, target, 3, tokens, count(size, 64), *captures)
    return Call(GENERATE, (request.SerializeToString(),), reads=2, holds=0.3)


def expensive_subscription(target: Target, rng: random.Random, size: float) -> Call:
    """A subscription to every request, whose selectors name millions of token ids."""
    ids = types_pb2.TokenIds(ids=[rng.randrange(5, 100)] * count(size, 4096))
    where = selector_pb2.Selector(include=[selector_pb2.Range(token_ids=ids)] * count(size, 1000))
    layer = target.layers // 2
    spec = capture_pb2.CaptureSpec(
        sites=sites(types_pb2.POINT_RESID_POST, layers=[layer]), where=where
    )
    return _subscription([spec] * 3, credit=1 << 20, holds=1.5 * size)


def fragmented_subscription(target: Target, rng: random.Random, size: float) -> Call:
    """A subscription to every other token of every request, at all sites."""
    windows = count(size * rng.choice([1.0, 0.1]), _WINDOWS)
    spec = capture_pb2.CaptureSpec(sites=sites(*POINTS), where=every_other(0, windows))
    return _subscription([spec] * 2, credit=64 << 20, holds=2.0 * size)


def late_observer(target: Target, rng: random.Random, size: float) -> Call:
    """A request that captures a long prompt, or an observer of other sites that joins it."""
    if rng.random() < 0.5:
        points = (types_pb2.POINT_ATTN_OUT, types_pb2.POINT_MLP_OUT)
        spec = capture_pb2.CaptureSpec(sites=sites(*points))
        return _subscription([spec], credit=64 << 20, holds=0.3)
    own = _inline(sites=sites(types_pb2.POINT_RESID_POST, types_pb2.POINT_RESID_MID))
    request = _request(rng, target, count(size, 1900, 8), 4, 1, own)
    return Call(GENERATE, (request.SerializeToString(),))


def _subscription(
    specs: list[capture_pb2.CaptureSpec],
    *,
    credit: int = 0,
    reads: int | None = 1,
    holds: float = 0.0,
    overload: capture_pb2.Overload.ValueType = capture_pb2.OVERLOAD_DROP_NEWEST,
    buffer_bytes: int | None = 1 << 20,
) -> Call:
    wish = capture_service_pb2.SubscribeOpen(
        filter=capture_service_pb2.RequestFilter(every=capture_service_pb2.EveryRequest()),
        captures=specs,
        overload=overload,
        credit_bytes=credit,
        buffer_bytes=buffer_bytes,
    )
    message = capture_service_pb2.SubscribeRequest(open=wish)
    # A client that half-closes ends its subscription.
    return Call(
        SUBSCRIBE, (message.SerializeToString(),), reads=reads, holds=holds, half_closes=False
    )


def unread_subscription(target: Target, rng: random.Random, size: float) -> Call:
    """A subscription to all rows of every request, of which nothing is read, or a busy request."""
    if rng.random() < 0.5:
        own = _inline(sites=sites(types_pb2.POINT_RESID_POST, layers=[0]))
        request = _request(rng, target, 200, count(size, 64), 4, own)
        return Call(GENERATE, (request.SerializeToString(),))
    spec = capture_pb2.CaptureSpec(sites=sites(*POINTS))
    overload = rng.choice(capture_pb2.Overload.values()[1:])
    share = None if rng.random() < 0.5 else count(size, 64 << 20, 1 << 16)
    return _subscription(
        [spec], credit=1 << 30, overload=overload, holds=2.0 * size, buffer_bytes=share
    )


def unread_rows(target: Target, rng: random.Random, size: float) -> Call:
    """A request whose rows come inline under every policy, and are not read."""
    policies = [
        capture_pb2.OVERLOAD_FAIL,
        capture_pb2.OVERLOAD_DROP_OLDEST,
        capture_pb2.OVERLOAD_DROP_NEWEST,
    ]
    if rng.random() < 0.3:
        policies = [capture_pb2.OVERLOAD_SPILL]
    captures = [_inline(sites=sites(*POINTS), overload=policy) for policy in policies]
    request = _request(rng, target, count(size, 1500, 8), count(size, 200), 1, *captures)
    return Call(GENERATE, (request.SerializeToString(),), reads=1, holds=4.0 * size)


def new_tag(target: Target, rng: random.Random, size: float) -> Call:
    """A request whose rows a sink keeps under a tag that nobody has used."""
    layout = rng.choice(capture_pb2.Layout.values()[1:])
    to = capture_pb2.SinkTarget(
        sink_name=target.sink, tag=f"tag-{rng.getrandbits(64)}", layout=layout
    )
    middle = sites(types_pb2.POINT_RESID_POST, layers=[target.layers // 2])
    request = _request(rng, target, 8, 2, 1, capture_pb2.CaptureSpec(sites=middle, sink=to))
    return Call(GENERATE, (request.SerializeToString(),))


def sink_collision(target: Target, rng: random.Random, size: float) -> Call:
    """A request that a sink refuses, because the sink has rows of that id under one of its tags."""
    middle = sites(types_pb2.POINT_RESID_POST, layers=[target.layers // 2])
    request_id = f"again-{rng.randrange(8)}"
    tags = rng.choice([["twice"], ["once", "twice"]])
    captures = [
        capture_pb2.CaptureSpec(
            sites=middle,
            sink=capture_pb2.SinkTarget(
                sink_name=target.sink, tag=f"{request_id}-{tag}", layout=capture_pb2.LAYOUT_PACKED
            ),
        )
        for tag in tags
    ]
    request = _request(rng, target, 8, 2, 1, *captures)
    request.request_id = request_id
    return Call(GENERATE, (request.SerializeToString(),))


def run(target: Target, rng: random.Random, size: float) -> Call:
    """A request whose rows become a run that stays on the server."""
    to = capture_pb2.RunTarget(run_id=f"run-{rng.getrandbits(64)}")
    to.lease.FromSeconds(1)
    spec = capture_pb2.CaptureSpec(sites=sites(*POINTS), run=to)
    request = _request(rng, target, count(size, 500, 8), 2, 1, spec)
    return Call(GENERATE, (request.SerializeToString(),))
