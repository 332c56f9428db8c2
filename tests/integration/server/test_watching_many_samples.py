"""A watch of more than 64 samples gets the readings of several steps together."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import rheostat

from .conftest import serving
from .test_gates import EVERY_LAYER, MOOD, PROMPT, probe
from .test_watching import RED, Watcher

pytestmark = pytest.mark.integration

REQUESTS, SAMPLES = 8, 10


def test_readings_of_many_samples_come_together_and_none_is_missing(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "--max-num-seqs", "96") as server,
        rheostat.connect(server.target) as engine,
    ):

        def ask(number: int) -> rheostat.Generation:
            return engine.generate(
                PROMPT,
                labels=RED,
                n=SAMPLES,
                seed=number,
                temperature=1.0,
                ignore_eos=True,
                max_tokens=16 + 3 * number,
                capture=EVERY_LAYER,
            )

        with (
            Watcher(engine, probes=probe(layers="all", name="mood")) as watcher,
            ThreadPoolExecutor(REQUESTS) as threads,
        ):
            outs = list(threads.map(ask, range(REQUESTS)))
            for out in outs:
                watcher.ended(out.request_id)
    for number, out in enumerate(outs):
        end = len(out.prompt_token_ids) + 16 + 3 * number - 1
        ended = watcher.table.ended[out.request_id]
        assert (ended.position_count, ended.dropped_position_count) == (SAMPLES * end, 0)
        for index, sample in enumerate(out.samples):
            readings = watcher.table[out.request_id, index]
            assert readings.positions.tolist() == list(range(end))
            for layer in range(6):
                rows = sample.activations["resid_post", layer] @ MOOD[0]
                np.testing.assert_allclose(readings["mood"][:, layer], rows, atol=1e-3, rtol=0)
    decoded = [
        event.row_counts.tolist()
        for event in watcher.of(rheostat.WatchedSignals)
        if event.first_positions.min() > 0
    ]
    together = [counts for counts in decoded if set(counts) == {4}]
    assert max(map(len, together)) > 64
    assert all(set(counts) == {1} for counts in decoded if len(counts) <= 64)
