"""What the examples compute, apart from any server."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from rheostat_wire.v1 import capture_service_pb2

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.append(str(EXAMPLES))  # as Python has it that runs one of them


def _example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dose_response, live_probe = _example("dose_response"), _example("live_probe")
hold_set_point, tone_guard = _example("hold_set_point"), _example("tone_guard")


@pytest.mark.parametrize(
    ("texts", "share"),
    [
        ([" lovely and bleak!", " the the"], 0.5),
        ([" joy, joy and joy", " hope", " rainy"], 0.8),
        ([" grim..."], 0.0),
        ([" the the", ""], math.nan),
        ([], math.nan),
    ],
)
def test_the_joyful_share_is_not_a_number_where_no_word_has_a_tone(texts, share):
    found = dose_response.joyful_share(texts)
    assert found == pytest.approx(share, nan_ok=True)


@pytest.mark.parametrize(
    ("texts", "counts"),
    [
        ([" lovely and bleak! I cried, and we danced."], (2, 4, 1, 2)),
        ([" bleak", " grim and warm"], (2, 3, 0, 1)),
        ([" the the"], (0, 0, 0, 0)),
    ],
)
def test_words_after_the_first_gloomy_word_of_a_text_are_counted_apart(texts, counts):
    assert tone_guard.tally(texts) == counts


@pytest.mark.parametrize("set_point", [-3.0, 0.0, 4.0])
def test_the_controller_holds_the_mean_of_noisy_readings(set_point):
    rng = np.random.default_rng(0)
    controller = hold_set_point.Controller(set_point)
    waiting, readings = [0.0, 0.0, 0.0], []
    for noise in rng.normal(1, 2, size=1000):
        readings.append(noise + 9 * waiting.pop(0))
        waiting.append(controller.next(readings[-1]))
    assert np.mean(readings[200:]) == pytest.approx(set_point, abs=0.2)


def test_the_controller_recovers_from_its_limits_at_once():
    controller = hold_set_point.Controller(1.0, memory=0.0)
    for _ in range(1000):
        assert controller.next(-100.0) <= controller.most
    outputs = [controller.next(9.0) for _ in range(20)]
    assert outputs[-1] < 0


def test_a_probe_tells_what_it_was_trained_to_tell_and_ignores_the_rest():
    rng = np.random.default_rng(0)
    tones = np.where(rng.random(200) < 0.5, -1.0, 1.0)
    rows = rng.normal(size=(200, 16)).astype(np.float32)
    rows[:, 3] += 3 * tones
    probe = live_probe.fit(rows[:100], tones[:100])
    assert (np.sign(live_probe.score(rows[100:], probe)) == tones[100:]).mean() > 0.95
    assert np.abs(probe[:16]).argmax() == 3


def test_the_probe_is_tested_on_words_that_it_never_saw():
    known = live_probe.sentences()
    words = [
        {text.split()[-1] for text, (_, kept) in known.items() if kept == side}
        for side in (True, False)
    ]
    assert not words[0] & words[1]
    assert len(words[0]) == 2 * live_probe.UNSEEN


def test_the_live_probe_says_how_to_start_a_server_with_its_sink(server, monkeypatch, capsys):
    other = capture_service_pb2.Sink(name="other", plugin_name="logging")
    server.on("ListSinks", capture_service_pb2.ListSinksResponse(sinks=[other]))
    line = ["live_probe.py", "--target", server.target, "--root", "/tmp/rows"]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as ended:
        live_probe.main()
    assert ended.value.code == 2
    assert "rheostat serve demo --sink disk=filesystem:root=/tmp/rows" in capsys.readouterr().err
