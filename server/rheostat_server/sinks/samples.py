"""Synthetic requests and rows, for the conformance suite and the benchmark."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rheostat_engine import Point, Site
from rheostat_server.sinks.protocol import (
    CaptureAbout,
    Encoding,
    Layout,
    RequestAbout,
    RowBlock,
    Target,
)
from rheostat_server.sinks.tables import NUMPY
from rheostat_server.tensors import FloatType
from rheostat_wire.dtypes import StoredArray

SITES = (Site(Point.RESID_POST, 0), Site(Point.RESID_PRE, 1), Site(Point.MLP_OUT, 3))
"""Sites of synthetic captures."""

CAPTURES = (
    CaptureAbout(0, SITES, FloatType.FLOAT32, 8),
    CaptureAbout(1, SITES[:2], FloatType.BFLOAT16, 8),
    CaptureAbout(2, SITES[2:], FloatType.FLOAT16, 8),
    CaptureAbout(4, SITES[:1], FloatType.FLOAT32, 8, Encoding.FULL8),
    CaptureAbout(5, SITES[:1], FloatType.BFLOAT16, 8, Encoding.RP8, kept=3, seed=7),
    CaptureAbout(6, SITES, FloatType.FLOAT32, 8, Encoding.TOPK8, kept=2),
)
"""One capture of every kind."""


def request(
    request_id: str,
    layout: Layout | None,
    captures: Sequence[CaptureAbout] = CAPTURES,
    *,
    sink: str = "sink",
    tag: str = "default",
    options: Mapping[str, str] | None = None,
) -> RequestAbout:
    """A request with one target."""
    return RequestAbout(
        request_id=request_id,
        target=Target(sink, tag, layout, options or {}),
        captures=tuple(captures),
        model="made-up",
        prompt_token_ids=(5, 6, 7),
        labels={"set": "made up"},
        started_at=1.75e9,
    )


def blocks(about: RequestAbout, seed: int = 0, positions: int = 5) -> Iterator[RowBlock]:
    """Rows of every capture for two samples and a baseline: a prompt, then single positions.

    Their bits are random, so they include infinities and NaN.
    """
    random = np.random.default_rng(seed)
    for sample, baseline in ((0, False), (1, False), (0, True)):
        for capture in about.captures:
            first = 0
            for count in (positions, 1, 1):
                yield block(capture, random, sample, first, count, baseline=baseline)
                first += count


def block(
    capture: CaptureAbout,
    random: np.random.Generator,
    sample: int,
    first: int,
    count: int,
    *,
    baseline: bool = False,
) -> RowBlock:
    """Rows at `count` positions from `first`."""
    return RowBlock(
        capture.capture_index,
        sample,
        capture.sites,
        np.arange(first, first + count, dtype=np.int32),
        random.integers(0, 1 << 31, count, dtype=np.int32),
        {
            part.name: _bits(random, (len(capture.sites), count, *part.shape), NUMPY[part.dtype])
            for part in capture.parts
        },
        baseline,
    )


def _bits(
    random: np.random.Generator, shape: tuple[int, ...], kind: np.dtype[np.generic]
) -> StoredArray:
    size = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer(random.bytes(size), kind).reshape(shape)
