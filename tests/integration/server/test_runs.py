"""Runs on the real engine: what is stored is what an inline capture gets, and it can be deleted."""

import datetime
import time

import pytest

import rheostat

pytestmark = pytest.mark.integration

WIDTH, LAYERS = 128, 6
PROMPT = "The Eiffel Tower is in the city of"
OPTIONS = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def test_a_run_holds_the_sites_positions_and_bytes_of_an_inline_capture(
    engine: rheostat.Engine,
) -> None:
    before = engine.stats().run_bytes
    into = rheostat.Capture(["resid_post", "attn_out"], "all", to=rheostat.Run("clean", lease=90))
    beside = rheostat.Capture(["resid_post", "attn_out"], "all")
    out = engine.generate(
        PROMPT, capture=[into, beside], labels={"of": "runs"}, with_baseline=True, **OPTIONS
    )
    stored, inline = out.receipt.captures
    assert (stored.run_id, inline.run_id) == ("clean", "")
    assert stored.sites == inline.sites
    (run,) = [one for one in engine.runs() if one.id == "clean"]
    rows = out.activations["resid_post", 0]
    tokens = engine.tokenize(PROMPT).token_ids
    assert run.sites == tuple(site.site for site in inline.sites)
    assert len(run.sites) == 2 * LAYERS
    assert run.positions == (range(len(rows)),)
    assert len(rows) == len(tokens) + OPTIONS["max_tokens"] - 1
    assert run.prompt_token_ids == tuple(tokens)
    assert run.labels == {"of": "runs"}
    payload = len(run.sites) * len(rows) * WIDTH * 4
    assert payload <= run.size_bytes <= payload + 8192
    assert engine.stats().run_bytes == before + run.size_bytes
    assert run.lease_expire_time - run.create_time == pytest.approx(
        datetime.timedelta(seconds=90), abs=datetime.timedelta(milliseconds=1)
    )
    renewed = engine.renew_lease("clean", 3600)
    assert renewed.lease_expire_time > run.lease_expire_time
    with pytest.raises(rheostat.AlreadyExists) as raised:
        engine.generate(PROMPT, capture=into, **OPTIONS)
    assert raised.value.reason == "REASON_RUN_EXISTS"
    assert engine.delete_run("clean") == run.size_bytes
    assert engine.stats().run_bytes == before
    with pytest.raises(rheostat.NotFound):
        engine.delete_run("clean")


def test_a_request_that_goes_away_leaves_no_run(engine: rheostat.Engine) -> None:
    before = engine.stats().run_bytes
    capture = rheostat.Capture("resid_post", "all", to=rheostat.Run("gone"))
    options = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
    with engine.stream(PROMPT, capture=capture, **options) as stream:
        assert any(isinstance(event, rheostat.Tokens) for event in stream)
        assert engine.stats().run_bytes > before
    deadline = time.monotonic() + 30
    while engine.stats().run_bytes > before:
        assert time.monotonic() < deadline
    assert "gone" not in [run.id for run in engine.runs()]
    out = engine.generate(PROMPT, capture=capture, **OPTIONS)
    assert out.receipt.captures[0].run_id == "gone"
    assert engine.delete_run("gone") > 0
