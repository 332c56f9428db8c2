"""Slips in what a capture is given: what is said instead of an answer without rows."""

from pathlib import Path

import numpy as np
import pytest

import rheostat
from rheostat import Capture, Run, Sink

from ...server.fakes import WIDTH

TAKES = 'to= takes rheostat.Sink("name"), rheostat.Run("id"), a subscription or its id, not '


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (Run, "the class Run: call it, rheostat.Run(...)"),
        (Sink, "the class Sink: call it, rheostat.Sink(...)"),
        (str, "the class str"),
        (Path("rows"), type(Path()).__name__),
        (("disk", "probe"), "tuple"),
        ({"sink": "disk"}, "dict"),
        (["disk"], "list"),
        (True, "bool"),
        (rheostat.named("disk"), "Vector"),
    ],
    ids=str,
)
def test_rows_are_not_sent_to_what_is_no_target(target, kind):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        Capture("resid_post", to=target)
    assert (raised.value.path, raised.value.message) == ("captures.to", TAKES + kind)
    assert raised.value.reason == "REASON_INVALID_VALUE"


@pytest.mark.parametrize("options", ["npz", ["format"], None])
def test_options_of_a_sink_are_texts_by_texts(client, server, options):
    capture = Capture("resid_post", to=Sink("disk", options=options))
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.generate("x", capture=capture))
    assert raised.value.message == (
        f'options are a dict of strings, e.g. {{"format": "npz"}}, not {type(options).__name__}'
    )
    assert server.asked == []


def test_rows_of_more_layers_are_told_in_words_of_python(running):
    vectors = running.engine.vectors
    vectors.put(np.ones((2, WIDTH)), name="pair")
    steering = rheostat.named("pair", points="resid_post", layers=1)
    with pytest.raises(rheostat.RheostatError, match=r"stored with layers=") as raised:
        running.generate("a", steering=steering)
    assert "row_layers" not in str(raised.value)
    vectors.put(np.ones((2, WIDTH)), name="pair", points="resid_post", layers=[0, 1])
    assert running.generate("b", steering=steering).request_id == "b"
    known = vectors.get("pair").at(points="resid_post", layers=1)
    assert running.generate("c", steering=known).request_id == "c"
    elsewhere = rheostat.named("pair", points="resid_post", layers=2)
    with pytest.raises(rheostat.RheostatError, match="rows for layers 0-1, not for") as raised:
        running.generate("d", steering=elsewhere)
    assert "row_layers" not in str(raised.value)
