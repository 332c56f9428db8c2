"""Sweeps of a model that is split over two tensor-parallel processes."""

from collections.abc import Iterator

import numpy as np
import pytest

from rheostat_wire.v1 import gate_pb2, sweep_pb2, vector_pb2

from ..engine.reference import HfReference
from .conftest import Server, serving
from .test_sweeps import LAYERS, Services, assert_cells, connected, grade, sites, sweep

# Both tests use `tight_server`, so one worker of pytest-xdist runs them and starts `split` once.
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("tight_server")]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """The services of a server whose engine has two workers, each with a half of every layer."""
    folder = tmp_path_factory.mktemp("split")
    options = ["--tensor-parallel-size", "2", "--capture-mib", "16", "--front-ends", "0"]
    with serving(folder, *options) as server, connected(server) as found:
        yield found


def test_every_cell_of_a_split_model_is_what_hooks_give(
    split: Services, reference: HfReference
) -> None:
    assert_cells(split, reference, "DENOISE", "attn_out", 3)
    assert not split.run_ids()


def test_a_split_model_gives_the_sweep_of_the_whole_model(
    split: Services, tight_server: Server
) -> None:
    """At all points, and by grades that read rows of the workers."""
    reading = vector_pb2.Readout()
    reading.vector.token_direction.token_id = split.tokens(" Paris", special=False)[0]
    probe = gate_pb2.Probe(name="read", sites=sites("resid_post", layers=[4]), read=reading)
    grades = [
        grade("LOGIT_DIFFERENCE"),
        grade("KL"),
        sweep_pb2.Grade(probe=sweep_pb2.ProbeGrade(probe=probe)),
    ]
    every = sites("resid_post", "attn_out", "mlp_out", layers=[0, 2, LAYERS - 1])
    with connected(tight_server) as whole:
        one, other = (sweep(at, sites=every, grades=grades) for at in (split, whole))
    assert not one.summary.missing
    assert one.started.columns == other.started.columns
    for number in range(len(grades)):
        spread = np.ptp(other.grid(number))
        assert spread > 0.1, number
        np.testing.assert_allclose(one.grid(number), other.grid(number), rtol=0, atol=2e-3)
