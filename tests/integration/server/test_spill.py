"""A reader that stands still, a small buffer and a disk: every row of the real engine comes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import rheostat
from rheostat import captures

from ..engine.reference import HfReference
from .test_subscriptions import (
    LAYERS,
    OPTIONS,
    POINTS,
    assert_huggingface,
    collected,
    everywhere,
    prompt,
    until_ended,
)

pytestmark = pytest.mark.integration

REQUESTS = 24
TOKENS = 12


def test_rows_wait_on_disk_for_a_reader_that_stands_still(
    engine: rheostat.Engine, spool: Path, sink_root: Path, reference: HfReference
) -> None:
    capture = rheostat.Capture(POINTS)
    request_message = {"overload": "spill", "buffer_bytes": 1 << 16, "credit": 1 << 20}
    sink = rheostat.Sink("disk", tag="spilled")
    dropped = engine.stats().dropped_row_count
    with engine.subscribe(every=True, capture=capture, **request_message) as subscription:

        def run(number: int) -> rheostat.Generation:
            to_sink = rheostat.Capture(POINTS, to=sink, overload="spill")
            return engine.generate(
                prompt(number, 20 + number),
                capture=to_sink,
                max_tokens=TOKENS,
                **OPTIONS,
            )

        with ThreadPoolExecutor(16) as pool:
            outs = list(pool.map(run, range(REQUESTS)))
        on_disk = engine.stats().spooled_row_count
        assert on_disk > 0
        assert sum(path.stat().st_size for path in spool.glob("*.spool")) > 0
        events = until_ended(subscription, REQUESTS)
        stats = engine.stats()
        assert (stats.spooled_row_count, stats.leaked_count) == (0, 0)
        assert stats.dropped_row_count == dropped
        assert list(spool.glob("*.spool")) == []
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    ends = [event for event in events if isinstance(event, rheostat.EndOfRequest)]
    assert {end.dropped_row_count for end in ends} == {0}
    rows = collected(events)
    sites = everywhere(POINTS, range(LAYERS))
    store = captures.open_captures(sink_root, tag="spilled")
    for out in outs:
        mine = rows[out.request_id]
        assert len(mine) == (len(out.prompt_token_ids) + TOKENS - 1) * len(sites)
        for point, layer in sites:
            found = store.rows_of(out.request_id, point, layer)
            ours = [mine[point, layer, position] for position in found.positions.tolist()]
            assert np.array_equal(found.values, np.stack(ours))
    for out in outs[:3]:
        assert_huggingface(rows[out.request_id], reference, out, sites, lambda p, t, n: True)
