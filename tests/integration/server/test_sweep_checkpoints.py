"""A client that is killed while it sweeps goes on in another process, and gets the same cells."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rheostat

from .conftest import Server

pytestmark = pytest.mark.integration

PAIR = {
    "prompt": "The Eiffel Tower is in the city of",
    "corrupt": "The Willis Tower is in the city of",
    "answer": " Paris",
    "foil": " Chicago",
}

PROGRAM = """
import os, signal, sys
import rheostat
target, path, killed_after, saved = sys.argv[1:]
cells = []

def on_cell(cell):
    cells.append(cell)
    if len(cells) == int(killed_after):
        os.kill(os.getpid(), signal.SIGKILL)

with rheostat.connect(target) as engine:
    pair = rheostat.Pair(**{pair})
    result = engine.sweep(pair, checkpoint=path, on_cell=on_cell, **{options})
result.save(saved)
print(len(cells))
"""


@pytest.mark.parametrize(
    "options",
    [
        {"points": ["resid_post", "mlp_out"], "grades": ["logit_difference", "probability"]},
        {"zoom": {"layer_stride": 2, "column_stride": 3, "layer_radius": 2, "peak_count": 2}},
    ],
    ids=["whole", "zoom"],
)
def test_a_client_that_was_killed_goes_on_in_another_process(
    server: Server, engine: rheostat.Engine, tmp_path: Path, options: dict[str, object]
) -> None:
    whole = engine.sweep(rheostat.Pair(**PAIR), **options)
    ran = int((~np.isnan(whole.array())).sum())
    program = PROGRAM.format(pair=PAIR, options=options)
    path, saved = tmp_path / "checkpoint", tmp_path / "result.npz"
    counts = []
    for killed_after in (5, ran - 8, 0):  # the second call of zoom ends in the fine phase
        line = [sys.executable, "-c", program, server.target, path, str(killed_after), saved]
        child = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
        assert child.returncode == (-signal.SIGKILL if killed_after else 0), child.stderr
        counts.append(killed_after or int(child.stdout))
    assert sum(counts) == ran
    result = rheostat.SweepResult.load(saved)
    assert (result.sites, result.labels) == (whole.sites, whole.labels)
    np.testing.assert_allclose(result.values, whole.values, atol=1e-3)
    np.testing.assert_array_equal(result.top_token_ids, whole.top_token_ids)
