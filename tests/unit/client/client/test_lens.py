"""The logit lens, attributions and directions of tokens, over both clients."""

from datetime import UTC, datetime

import numpy as np
import pytest
from google.protobuf import text_format

import rheostat
from rheostat import Point, Site
from rheostat_wire.v1 import lens_service_pb2 as pb
from rheostat_wire.v1 import tensor_pb2, types_pb2, vector_pb2

KINDS = {"<i4": tensor_pb2.DTYPE_INT32, "<f4": tensor_pb2.DTYPE_FLOAT32, "<f8": 5}
STARTED = pb.LensResponse(
    started=text_format.Parse(
        """sites { point: POINT_RESID_POST layer: 0 } sites { point: POINT_RESID_POST layer: 2 }
           positions { start: 1 count: 1 } positions { start: 3 count: 1 }
           prompt_token_ids { ids: [5, 6, 7, 8] } prompt_texts: ["a", "b", "c", "d"]
           texts: ["nine"]""",
        pb.LensStarted(),
    )
)


def tensor(values: object, kind: str = "<f4") -> tensor_pb2.Tensor:
    array = np.array(values, kind)
    dtype = tensor_pb2.DTYPE_FLOAT64 if kind == "<f8" else KINDS[kind]
    return tensor_pb2.Tensor(
        dtype=dtype,
        shape=array.shape,
        encoding=tensor_pb2.ENCODING_RAW,
        inline=array.tobytes(),
    )


def part(first: int, count: int) -> pb.LensResponse:
    """Rows whose numbers begin with their index."""
    rows = np.arange(first, first + count)
    return pb.LensResponse(
        rows=pb.LensRows(
            first_row=first,
            row_count=count,
            top_token_ids=tensor([[10 + i, 9] for i in rows], "<i4"),
            top_logprobs=tensor([[-0.5 - i, -5.0] for i in rows]),
            logprobs=tensor([[-5.0] for i in rows]),
            ranks=tensor([[2] for i in rows], "<i4"),
            log_normalizers=tensor([float(i) for i in rows]),
            top_texts=[text for i in rows for text in (f"t{i}", "nine")],
        )
    )


def test_parts_are_joined_by_site_and_position(client, server):
    server.on("Lens", [STARTED, part(0, 3), part(3, 1)])
    read = client.run(
        lambda e: e.lens("a", layers=[0, 2], where=rheostat.positions(1, 3), top_k=2, tokens=[9])
    )
    (asked,) = server.asked
    assert asked.prompt.text == "a"
    assert (asked.top_k, list(asked.token_ids)) == (2, [9])
    assert list(asked.sites.points) == [types_pb2.POINT_RESID_POST]
    assert (read.sites, read.positions) == (
        (Site(Point.RESID_POST, 0), Site(Point.RESID_POST, 2)),
        (1, 3),
    )
    assert read.top_token_ids.tolist() == [[[10, 9], [11, 9]], [[12, 9], [13, 9]]]
    assert read.logits[..., 0].tolist() == [[-5.0, -4.0], [-3.0, -2.0]]
    assert read.texts == {9: "nine", 10: "t0", 11: "t1", 12: "t2", 13: "t3"}
    assert read.at("resid_post", 2) == 1
    with pytest.raises(KeyError):
        read.at("resid_post", 1)
    assert read.rows()[:2] == [
        {
            "point": "resid_post",
            "layer": 0,
            "position": 1,
            "token_id": 9,
            "text": "nine",
            "logprob": -5.0,
            "rank": 2,
        },
        {
            "point": "resid_post",
            "layer": 0,
            "position": 1,
            "token_id": 10,
            "text": "t0",
            "logprob": -0.5,
            "rank": 1,
        },
    ]
    assert str(read).splitlines() == [
        "               b   d",
        "resid_post[0]  t0  t1",
        "resid_post[2]  t2  t3",
    ]
    assert repr(read) == "LensResult(resid_post 0, 2, 2 positions, top 2, 1 token)"


RUN = rheostat.RunInfo(
    "r", (), (), (5, 6), 0, datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC), {}
)


@pytest.mark.parametrize("run", ["r", RUN])
def test_a_lens_of_a_run_names_its_rows(client, server, run):
    started = pb.LensResponse(started=STARTED.started)
    del started.started.prompt_token_ids.ids[2:]
    del started.started.prompt_texts[2:]
    server.on("Lens", [started, part(0, 4)])
    read = client.run(lambda e: e.lens(run=run, top_k=2, tokens=[9]))
    client.run(lambda e: e.lens(run=run, points="mlp_out", layers=3, positions=-1, tokens=[9]))
    whole, last = server.asked
    assert whole == pb.LensRequest(run_id="r", top_k=2, token_ids=[9])
    assert list(last.sites.points) == [types_pb2.POINT_MLP_OUT]
    assert list(last.positions.positions) == [-1]
    assert str(read).splitlines()[0].split() == ["b", "[3]"]  # position 3 was generated


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "run": "r"}, "prompt"),
        ({"run": "r", "layers": 3}, "sites.points"),
        ({"run": "a b"}, "run_id"),
        ({"run": "r", "positions": [1.5]}, "positions"),
    ],
)
def test_what_is_no_lens_is_refused_before_it_is_sent(client, server, arguments, field):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda e: e.lens(**arguments))
    assert (raised.value.path, server.asked) == (field, [])


def test_a_lens_that_ends_early_is_no_result(client, server):
    server.on("Lens", [STARTED, part(0, 3)])
    with pytest.raises(rheostat.ServerError, match="without all its rows"):
        client.run(lambda e: e.lens("a", tokens=[9]))


def test_a_logit_comes_with_its_parts(client, server):
    answer = pb.AttributeResponse(
        contributions=tensor([0.5, -2.0, 1.0], "<f8"),
        bias=0.25,
        logit=-0.2,
        remainder=0.05,
        scale=2.0,
    )
    for point, layer in (
        (types_pb2.POINT_RESID_PRE, 0),
        (types_pb2.POINT_ATTN_OUT, 0),
        (types_pb2.POINT_MLP_OUT, 0),
    ):
        answer.sites.add(point=point, layer=layer)
    server.on("Attribute", answer)
    made = client.run(lambda e: e.attribute([1, 2], 7, minus=8))
    (asked,) = server.asked
    assert (asked.direction.token_id, asked.direction.minus_token_id) == (7, 8)
    assert made["attn_out", 0] == -2.0
    assert made.top(1) == [(Site(Point.ATTN_OUT, 0), -2.0)]
    with pytest.raises(KeyError):
        made["mlp_out", 1]
    assert str(made).splitlines() == [
        "attn_out[0]      -2.0000",
        "mlp_out[0]       +1.0000",
        "resid_pre[0]     +0.5000",
        "everything else  +0.3000",
        "sum              -0.2000",
    ]


def test_a_direction_of_a_token_is_a_vector():
    direction = rheostat.token_direction(7, minus=8, points="resid_post", layers=[1])
    ref = vector_pb2.VectorRef(
        token_direction=vector_pb2.TokenDirection(token_id=7, minus_token_id=8)
    )
    assert direction.to_wire() == ref
    assert repr(direction) == "Vector(token 7 - token 8, resid_post, layers 1)"
    steering = 2.0 * direction
    assert steering.to_wire("p").add.vector == ref
    capture = rheostat.Capture("resid_post", 1, projection=rheostat.token_direction(7))
    (readout,) = capture.to_wire().projection.readouts.readouts
    assert readout.vector.token_direction == vector_pb2.TokenDirection(token_id=7)


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.lens("a", tokens=[" Paris"]),
        lambda e: e.attribute("a", " Paris"),
        lambda e: e.generate("a", stop_token_ids=["x"]),
    ],
)
def test_a_text_for_a_token_is_refused_with_the_call_that_makes_ids_of_it(client, server, call):
    with pytest.raises(rheostat.InvalidRequest, match=r"engine\.tokenize\(text, special_tokens"):
        client.run(call)
    assert server.asked == []


@pytest.mark.parametrize(("token", "minus"), [(-1, None), (1.5, None), (1, 2**32)])
def test_what_is_no_token_is_refused_before_it_is_sent(token, minus):
    with pytest.raises(rheostat.InvalidRequest):
        rheostat.token_direction(token, minus=minus)
