"""Controllers over gRPC, against hooks in Hugging Face's model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import rheostat

from ..controller_plugins import Hold
from ..engine.reference import Change, HfReference
from .conftest import Server, watched
from .test_gates import MOOD, PROMPT, probe, site
from .test_signals import read_by_hooks, tokens_of

pytestmark = pytest.mark.integration

ACT, READ = 1, 4
"""Layers: at resid_post of the first it is pushed, at that of the second it is read."""
PROBE = probe(layers=READ)
OPTIONS = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}


@pytest.fixture
def controlled(tight_server: Server) -> Iterator[rheostat.Engine]:
    """A client of the server with controllers."""
    yield from watched(tight_server)


def push() -> rheostat.Intervention:
    """Pushes generated tokens along what is read later."""
    return rheostat.inline(MOOD).at(points="resid_post", layers=ACT, where="generated")


def hold(engine: rheostat.Engine, **options: object) -> rheostat.Generation:
    return engine.generate(
        PROMPT, steering=push(), probes=PROBE, **{"controller": "hold", **OPTIONS, **options}
    )


def check(out: rheostat.Generation, reference: HfReference) -> None:
    """Recomputes the loop: the reading of p alone decides the gain of p + 1."""
    tokens, length = tokens_of(out), len(out.prompt_token_ids)
    integral, gains, along = 0.0, [], torch.from_numpy(MOOD[0])
    sent = np.asarray(out.signals[PROBE], np.float64).reshape(-1)
    for reading in sent[length - 1 :]:
        error = Hold.set_point - reading
        integral += error
        gains.append(Hold.law(error, integral))
    assert len(set(np.round(gains, 2))) > len(gains) // 2
    strengths = torch.tensor(gains[:-1], dtype=torch.float32)[:, None]
    found: list[np.ndarray] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(x.double().numpy() @ MOOD[0].astype(np.float64))
        return x

    changes = [
        Change(site(ACT), lambda x: x + strengths * along, range(length, len(tokens))),
        Change(site(READ), note, range(len(tokens))),
    ]
    run = reference.run(tokens, changes)
    np.testing.assert_allclose(sent, found[-1], rtol=0, atol=5e-3)
    assert run.logprobs[length - 1 :].argmax(-1).tolist() == list(out.token_ids)
    (applied,) = out.receipt.interventions
    assert applied.last_gain is not None
    assert any(abs(applied.last_gain - gain) < 1e-2 for gain in gains[-2:])


def test_a_probe_is_held_at_a_set_point(
    controlled: rheostat.Engine, reference: HfReference
) -> None:
    assert controlled.model().controller_names == ("alsofails", "fails", "hold")
    assert "controllers" in controlled.model().features
    with ThreadPoolExecutor() as pool:
        outs = [pool.submit(hold, controlled, max_tokens=n) for n in (24, 17, 9)]
        plain = controlled.generate(PROMPT, probes=PROBE, **OPTIONS)
    for out in outs:
        check(out.result(), reference)
        assert out.result().receipt.controller == rheostat.ControllerReceipt("hold")
    free = read_by_hooks(reference, tokens_of(plain), READ)
    np.testing.assert_allclose(
        np.asarray(plain.signals[PROBE]).reshape(-1), free, rtol=0, atol=2e-3
    )
    (stats,) = [one for one in controlled.stats().controllers if one.controller_name == "hold"]
    assert stats.call_count >= 23  # the next step, which may not have come, decides about the last
    assert 0 < stats.p50 <= stats.p99 <= stats.longest
    assert stats.disabled_reason == ""


def test_a_controller_that_fails_ends_its_requests_alone(
    controlled: rheostat.Engine, reference: HfReference
) -> None:
    with ThreadPoolExecutor() as pool:
        neighbour = pool.submit(hold, controlled)
        with pytest.raises(rheostat.Refused, match="no more"):
            hold(controlled, controller="fails")
        check(neighbour.result(), reference)
    with pytest.raises(rheostat.Refused, match="no more") as refused:
        hold(controlled, controller="fails")
    assert refused.value.reason == "REASON_CONTROLLER_DISABLED"
    assert hold(controlled).receipt.controller == rheostat.ControllerReceipt("hold")


def test_a_request_may_go_on_with_the_last_gains(controlled: rheostat.Engine) -> None:
    out = hold(controlled, controller="alsofails", on_controller_disabled="continue")
    assert len(out.token_ids) == OPTIONS["max_tokens"]
    assert out.receipt.controller is not None
    assert "no more" in out.receipt.controller.disabled_reason
    # Of the five calls the first was about the prompt's last token.
    length = len(out.prompt_token_ids)
    assert out.receipt.controller.disabled_from == ((0, length + 4),)
    assert out.receipt.interventions[0].last_gain == 0.5
    with pytest.raises(rheostat.NotFound):
        hold(controlled, controller="nobody")
