"""A policy that is exported from one server and enforced by another from its first request on."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rheostat
from rheostat._cli import main

from .conftest import ONE_PROCESS, Server, serving

pytestmark = pytest.mark.integration

WIDTH = 128
PROMPT = "The weather was grey and Anna felt"
OPTIONS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def direction(seed: int) -> rheostat.Vector:
    vector = np.random.default_rng(seed).normal(size=(1, WIDTH)).astype(np.float32)
    return rheostat.inline(3 * vector / np.linalg.norm(vector))


@pytest.fixture
def cleared(engine: rheostat.Engine) -> Iterator[rheostat.Engine]:
    yield engine
    engine.steering.set_global(None)


def test_a_restarted_server_enforces_the_exported_policy_from_the_first_request_on(
    cleared: rheostat.Engine, server: Server, tmp_path: Path
) -> None:
    engine = cleared
    plain = engine.generate(PROMPT, **OPTIONS)
    push = direction(2).at(points="resid_post", layers=3)
    mood = rheostat.probe(direction(1), points="resid_post", layers=1, name="mood")
    seen = rheostat.Rule("seen", mood.above(-1e6), rheostat.Observe())
    engine.steering.set_global(push, rules=seen)
    before = engine.generate(PROMPT, **OPTIONS)
    path = tmp_path / "policy.json"
    assert main(["global", "export", str(path), "--target", server.target]) == 0
    version = before.receipt.global_version
    assert before.token_ids != plain.token_ids

    options = ["--policy", str(path), "--front-ends", "2", "--capture-mib", "16"]
    options += ["--distributed-executor-backend", ONE_PROCESS]
    with serving(tmp_path, *options) as other, rheostat.connect(other.target) as client:
        out = client.generate(PROMPT, **OPTIONS)
        assert out.token_ids == before.token_ids
        assert out.receipt.global_version == version
        assert out.receipt.interventions == before.receipt.interventions
        assert out.receipt.rules == before.receipt.rules
        assert client.steering.get_global().version == version
        assert client.steering.set_global(None, expected_version=version) == version + 1
        assert client.generate(PROMPT, **OPTIONS).token_ids == plain.token_ids
        log = other.log.read_text()
    put = log.index(f"version {version} of --policy {path} is in force")
    assert put < log.index("serving demo")
    assert f"version {version + 1} replaces version {version} of --policy {path}" in log
