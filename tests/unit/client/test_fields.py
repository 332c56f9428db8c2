"""Values that no field of the wire can hold, over both clients: what is said instead of sending."""

import numpy as np
import pytest

import rheostat
from rheostat import Capture

JOY = rheostat.named("joy", points="resid_post", layers=2)
HALF = "caf\udce9"
HALF_SAID = (
    "has half a character at 3, U+DCE9, which UTF-8 cannot encode: remove it, or decode the bytes "
    "with their own encoding"
)


def generate(**options: object):
    return lambda engine: engine.generate("x", **options)


def capture_at(make):
    return lambda engine: engine.generate("x", capture=Capture("resid_post", 1, make()))


@pytest.mark.parametrize(
    ("use", "path", "said"),
    [
        (
            lambda engine: engine.generate("x", capture=Capture("resid_post", 2**40)),
            "sites.layers",
            "no model has a layer 1099511627776",
        ),
        (
            lambda engine: engine.generate("x", steering=JOY.at(layers=range(2**70))),
            "sites.layers",
            f"no model has a layer {2**70 - 1}",
        ),
        (
            lambda engine: engine.generate("x", capture=Capture(3, 2)),
            "sites.points",
            "unknown point 3; there are",
        ),
        (
            capture_at(lambda: rheostat.positions(2**40)),
            "where",
            "a position is -2147483648 to 2147483646, not 1099511627776",
        ),
        (
            capture_at(lambda: rheostat.positions(1.5)),
            "where",
            "a position is a whole number, not 1.5",
        ),
        (
            capture_at(lambda: rheostat.window(0, 2**40)),
            "where",
            "a position is -2147483648 to 2147483647, not 1099511627776",
        ),
        (
            capture_at(lambda: rheostat.generated(2**40)),
            "where",
            "a generated token is 0 to 4294967295, not 1099511627776",
        ),
        (
            capture_at(lambda: rheostat.token_ids(-1)),
            "where",
            "a token id is 0 to 4294967295, not -1",
        ),
        (
            capture_at(lambda: rheostat.span("a", -1)),
            "where",
            "an occurrence is 0 to 4294967295, not -1",
        ),
        (capture_at(lambda: rheostat.span(HALF)), "where", f"the span's text {HALF_SAID}"),
        (
            generate(stop_token_ids=[5, -1]),
            "sampling.stop_token_ids[1]",
            "a token id is 0 to 4294967295, not -1",
        ),
        (generate(stop=["a", 1]), "sampling.stop[1]", "a stop text is a text, not int"),
        (generate(stop=HALF), "sampling.stop[0]", f"a stop text {HALF_SAID}"),
        (generate(lora=3), "lora", "an adapter's name is a text, not int"),
        (generate(request_id=3), "request_id", "a request id is 1 to 128 of"),
        (
            generate(capture="resid_post"),
            "captures[0]",
            'capture takes captures, not a name: use rheostat.Capture("resid_post", layers=...)',
        ),
        (
            generate(capture=[("resid_post", 3)]),
            "captures[0]",
            'capture takes captures, not tuple: use rheostat.Capture("resid_post", 3)',
        ),
        (
            generate(capture=("resid_post", range(3))),
            "captures[0]",
            'capture takes captures, not tuple: use rheostat.Capture("resid_post", range(0, 3))',
        ),
        (
            generate(capture=("resid_post", "resid_mid")),
            "captures[0]",
            'capture takes captures, not a name: use rheostat.Capture("resid_post", layers=...)',
        ),
        (
            generate(capture=3),
            "captures[0]",
            'capture takes captures, not int: use rheostat.Capture("resid_post", layers=...)',
        ),
        (
            capture_at(lambda: -1),
            "where",
            'tokens are "prompt", "generated", "all" or a selector, not -1: '
            "write rheostat.positions(-1)",
        ),
        (lambda engine: engine.generate(HALF), "prompt", f"a prompt {HALF_SAID}"),
        (
            lambda engine: engine.generate(b"abc"),
            "prompt",
            "a prompt is text, token ids or messages, not bytes",
        ),
        (
            lambda engine: engine.tokenize(None),
            "prompt",
            "a prompt is text, token ids or messages, not NoneType",
        ),
        (
            lambda engine: engine.generate([{"role": "user", "content": HALF}]),
            "chat.messages[0].content",
            f"a content {HALF_SAID}",
        ),
        (
            lambda engine: engine.vectors.put(np.ones(2), description=HALF),
            "description",
            f"a description {HALF_SAID}",
        ),
        (
            lambda engine: engine.vectors.put([[1.0], [1.0, 2.0]]),
            "vector",
            "no numbers can be read from it: ",
        ),
        (lambda engine: engine.vectors.list(HALF), "name_prefix", f"a prefix {HALF_SAID}"),
        (lambda engine: engine.vectors.delete(3), "name", "3 is no name: 1 to 128 of"),
        (
            lambda engine: engine.vectors.get("joy", digest="ab" * 32),
            "digest",
            "give the vector's name or its digest, not both",
        ),
        (
            lambda engine: engine.vectors.get(),
            "name",
            "give the vector's name or its digest",
        ),
        (
            lambda engine: engine.steering.set_global(None, 2**70),
            "expected_version",
            f"a version is 0 to {2**64 - 1}, not {2**70}",
        ),
        (
            lambda engine: engine.steering.set_global(rheostat.named(HALF)),
            "vector.name",
            "'caf\\udce9' is no name: 1 to 128 of",
        ),
        (
            lambda engine: engine.vectors.derive(
                ["a", HALF], ["b"], points="resid_post", layers="all"
            ),
            "positive[1]",
            f"a prompt {HALF_SAID}",
        ),
    ],
)
def test_what_no_field_can_hold_is_refused_before_it_is_sent(client, server, use, path, said):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(use)
    assert (raised.value.path, raised.value.message[: len(said)]) == (path, said)
    assert server.asked == []


@pytest.mark.parametrize(
    "use",
    [
        generate(ignore_eos="no"),
        generate(steering=JOY.when(rheostat.gate(rheostat.probe(JOY).above(1), invert="no"))),
        lambda engine: engine.subscribe(every="no", capture=Capture("resid_post")),
        generate(with_baseline=[1]),
        generate(stop=5),
        generate(steering=rheostat.Add(None)),
        lambda engine: engine.steering.set_global(None, expected_version="3"),
        lambda engine: engine.vectors.put(np.ones(2), progress=None, description=3),
    ],
)
def test_values_of_the_wrong_kind_are_refused_as_every_other_mistake_is(client, server, use):
    with pytest.raises(rheostat.InvalidRequest):
        client.run(use)
    assert server.asked == []


def test_a_session_is_told_as_much_by_what_steers_it(server):
    with rheostat.connect(server.target) as engine, engine.session("x") as session:
        with pytest.raises(rheostat.InvalidRequest, match="an op takes vectors, not NoneType"):
            session.steer(rheostat.Ablate((None,), 1.0).at(points="resid_post", layers=1))
        session.cancel()
