"""Vectors derived by the server, over both clients and from the command line."""

import math
import threading
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import text_format

import rheostat
from rheostat import Derivation, DerivedRow, Point, Site
from rheostat._cli import main
from rheostat_wire.v1 import steering_service_pb2 as pb

ANSWER = text_format.Parse(
    r"""vectors {
          point: POINT_RESID_POST digest: "\001" name: "joy/resid_post"
          rows { layer: 1 norm: 2 stream_norm: 8 explained: 0.5 separation: 3.5 }
          rows { layer: 2 norm: 4 stream_norm: 16 explained: 0.25 separation: 5.25 }
        }
        vectors {
          point: POINT_RESID_PRE digest: "\002" name: "joy/resid_pre"
          rows { layer: 1 norm: 0 stream_norm: 8 explained: 0 }
          rows { layer: 2 norm: 2 stream_norm: 8 explained: 0.5 separation: 5.25 }
        }""",
    pb.DerivedVectors(),
)
POST, PRE = Point.RESID_POST, Point.RESID_PRE
DERIVED = Derivation(
    (
        rheostat.Vector(
            "01", "joy/resid_post", None, "float32", (POST,), (1, 2), row_layers=(1, 2)
        ),
        rheostat.Vector("02", "joy/resid_pre", None, "float32", (PRE,), (1, 2), row_layers=(1, 2)),
    ),
    (
        DerivedRow(Site(POST, 1), 2, 8, 0.5, 3.5),
        DerivedRow(Site(POST, 2), 4, 16, 0.25, 5.25),
        DerivedRow(Site(PRE, 1), 0, 8, 0, None),
        DerivedRow(Site(PRE, 2), 2, 8, 0.5, 5.25),
    ),
)
TABLE = """\
site           norm  stream  explained  separation
resid_post[1]     2       8      50.0%        3.50
resid_post[2]     4      16      25.0%        5.25  best
resid_pre[1]      0       8       0.0%           -
resid_pre[2]      2       8      50.0%        5.25"""


def wire(text: str) -> pb.DeriveVectorsRequest:
    return text_format.Parse(text, pb.DeriveVectorsRequest())


def one(separation: float | None) -> Derivation:
    return Derivation((DERIVED.vectors[0],), (DerivedRow(Site(POST, 1), 2, 8, 1, separation),))


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.generate("a", steering=one(1.0)),
        lambda engine: engine.generate("a", steering=[one(1.0)]),
        lambda engine: engine.vectors.put(one(1.0), name="joy"),
        lambda _: rheostat.save_vector("joy.npz", one(1.0)),
        lambda _: rheostat.ablate(one(1.0)),
        lambda _: rheostat.probe(one(1.0)),
    ],
)
def test_a_derivation_passed_instead_of_its_vector_is_refused(client, server, use):
    with pytest.raises(rheostat.InvalidRequest, match="a Derivation is not a vector"):
        client.run(use)
    assert server.asked == []


def test_derive_sends_two_sets_and_reads_a_vector_per_point(client, server):
    server.on("DeriveVectors", [pb.DeriveVectorsResponse(derived=ANSWER)])
    found = client.run(
        lambda engine: engine.vectors.derive(
            ["I am glad", [5, 6]],
            [[{"role": "user", "content": "sad"}], (7,)],
            points=["post_block", "resid_pre"],
            layers=[2, 1],
            where=rheostat.span("am") | rheostat.positions(-1),
            method="principal_component",
            name="joy",
            description="glad",
            lora="french",
        )
    )
    assert server.asked == [
        wire(
            """positive { text: "I am glad" } positive { token_ids { ids: 5 ids: 6 } }
               negative { chat { messages { role: "user" content: "sad" } } }
               negative { token_ids { ids: 7 } }
               sites { points: POINT_RESID_POST points: POINT_RESID_PRE
                       list { layers: 1 layers: 2 } }
               where { include { text { text: "am" } } include { positions { start: -1 } } }
               method: DERIVE_METHOD_PRINCIPAL_COMPONENT
               name: "joy" description: "glad" lora_name: "french" """
        )
    ]
    assert found == DERIVED


@pytest.mark.parametrize("name", [None, "joy"])
@pytest.mark.parametrize("layers", ["all", range(6), [0, 1, 2, 3, 4, 5]])
def test_a_derived_vector_gives_its_row_of_the_best_layer(client, server, layers, name):
    answer = pb.DerivedVectors()
    vector = answer.vectors.add(point="POINT_RESID_POST", digest=bytes(32), name=name or "")
    for layer in range(6):
        vector.rows.add(layer=layer, norm=1, stream_norm=8, separation=float(layer == 3))
    server.on("DeriveVectors", [pb.DeriveVectorsResponse(derived=answer)])
    derived = client.run(
        lambda engine: engine.vectors.derive(["a"], ["b"], points=POST, layers=layers, name=name)
    )
    best = derived.best.site.layer
    sent = (derived.vector.at(layers=best) * 0.5).to_wire("steering")
    assert list(sent.sites.list.layers) == [3]
    assert list(sent.add.vector.row_layers.layers) == [0, 1, 2, 3, 4, 5]
    everywhere = (derived.vector * 0.5).to_wire("steering")
    assert list(everywhere.add.vector.row_layers.layers) == [0, 1, 2, 3, 4, 5]


def test_the_one_row_of_a_derived_vector_may_act_elsewhere(client, server):
    answer = pb.DerivedVectors()
    vector = answer.vectors.add(point="POINT_RESID_POST", digest=bytes(32))
    vector.rows.add(layer=3, norm=1, stream_norm=8)
    server.on("DeriveVectors", [pb.DeriveVectorsResponse(derived=answer)])
    derived = client.run(lambda engine: engine.vectors.derive(["a"], ["b"], points=POST, layers=3))
    sent = derived.vector.at(layers=5).to_wire("steering")
    assert list(sent.sites.list.layers) == [5]
    assert not sent.add.vector.HasField("row_layers")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (None, ""),
        ("all", "where { include { phase: PHASE_PROMPT } }"),
        ("prompt", "where { include { phase: PHASE_PROMPT } }"),
        ("all" - rheostat.positions(0), "where { exclude { positions { start: 0 end: 1 } } }"),
    ],
)
def test_nothing_said_is_the_last_token_and_all_is_the_prompt(client, server, where, expected):
    server.on("DeriveVectors", [pb.DeriveVectorsResponse(derived=ANSWER)])
    client.run(
        lambda engine: engine.vectors.derive(
            ["a"], ["b"], points="resid_post", layers="all", where=where
        )
    )
    assert server.asked == [
        wire(
            """positive { text: "a" } negative { text: "b" }
               sites { points: POINT_RESID_POST all {} }
               method: DERIVE_METHOD_DIFFERENCE_OF_MEANS """
            + expected
        )
    ]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"positive": "one text"}, "positive"),
        ({"negative": 3}, "negative"),
        ({"positive": ["a", ""]}, "positive[1]"),
        ({"negative": [5, 6]}, "negative[0]"),
        ({"method": "median"}, "method"),
        ({"name": "no name"}, "name"),
        ({"where": "last"}, "where"),
        ({"points": "nowhere"}, "sites.points"),
        ({"layers": -1}, "sites.layers"),
    ],
)
def test_what_cannot_be_derived_is_refused_before_it_is_sent(client, server, change, path):
    given = {"positive": ["a"], "negative": ["b"], "points": "resid_post", "layers": 1, **change}
    positive, negative = given.pop("positive"), given.pop("negative")
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.vectors.derive(positive, negative, **given))
    assert (raised.value.path, server.asked) == (path, [])


def test_the_connections_timeout_does_not_end_a_derivation_but_its_own_does(server):
    remaining = []

    def answer(request: object, context: grpc.ServicerContext) -> Iterator[object]:
        remaining.append(context.time_remaining())
        yield pb.DeriveVectorsResponse(derived=ANSWER)

    server.on("DeriveVectors", answer)
    with rheostat.connect(server.target, timeout=5) as engine:
        for timeout in (None, 1000.0):
            engine.vectors.derive(["a"], ["b"], points=POST, layers=1, timeout=timeout)
    without, with_own = (math.inf if left is None else left for left in remaining)
    assert without > 1e6 > 2000 > with_own > 500


def test_a_derivation_is_a_table_and_knows_its_best_row_and_vectors():
    assert str(DERIVED) == TABLE
    assert DERIVED._repr_html_() == f'<pre style="white-space:pre-wrap">{TABLE}</pre>'
    assert DERIVED.best == DERIVED.rows[1]
    assert DERIVED["resid_pre"] == DERIVED.vectors[1]
    assert one(2.0).vector == DERIVED.vectors[0]
    with pytest.raises(KeyError):
        DERIVED["resid_mid"]
    with pytest.raises(rheostat.Refused, match="a vector per point"):
        assert DERIVED.vector


def test_the_best_row_may_have_a_separation_of_zero_or_below():
    assert one(0.0).best.separation == 0
    assert one(-0.5).best.separation == -0.5
    assert str(one(-0.5)).endswith("-0.50  best")


def test_without_a_separation_there_is_no_best_row():
    with pytest.raises(rheostat.Refused, match="two prompts"):
        assert one(None).best
    assert "best" not in str(one(None))


def test_the_command_derives_from_two_files_and_prints_the_table(server, tmp_path, capsys):
    server.on("DeriveVectors", [pb.DeriveVectorsResponse(derived=ANSWER)])
    server.on("ListVectors", pb.ListVectorsResponse())
    (tmp_path / "glad").write_text("I am glad\n\nHow nice: é\n", encoding="utf-8")
    (tmp_path / "sad").write_text("I am sad", encoding="utf-8")
    command = ["vectors", "derive", "--target", server.target, "--name", "joy"]
    command += ["--points", "resid_post,resid_pre", "--layers", "1-2"]
    files = ["--positive", str(tmp_path / "glad"), "--negative", str(tmp_path / "sad")]
    assert main([*command, *files]) == 0
    assert capsys.readouterr() == (
        f"{TABLE}\n"
        "-: not defined; it needs two prompts or more in each set, and sets that differ\n"
        "01  joy/resid_post\n02  joy/resid_pre\n",
        "running 2 + 1 prompts ...\n"
        "rheostat: the two sets do not differ at resid_pre 1: its rows are zero\n",
    )
    assert server.asked[1:] == [
        wire(
            """positive { text: "I am glad" } positive { text: "How nice: é" }
               negative { text: "I am sad" }
               sites { points: POINT_RESID_POST points: POINT_RESID_PRE
                       list { layers: 1 layers: 2 } }
               method: DERIVE_METHOD_DIFFERENCE_OF_MEANS name: "joy" """
        )
    ]


def test_the_command_tells_a_vector_of_zeros_and_a_name_that_moves(server, tmp_path, capsys):
    answer = pb.DerivedVectors()
    row = answer.vectors.add(point="POINT_RESID_POST", digest=b"\1" * 32, name="joy").rows.add()
    row.layer = 2
    server.on("DeriveVectors", [pb.DeriveVectorsResponse(derived=answer)])
    before = pb.ListVectorsResponse()
    before.vectors.add(digest=b"\2" * 32, name="joy", dtype="DTYPE_FLOAT32", shape=[1, 2])
    server.on("ListVectors", before)
    (tmp_path / "same").write_text("I am\nYou are")
    command = ["vectors", "derive", "--target", server.target, "--name", "joy"]
    command += ["--points", "resid_post", "--layers", "2"]
    files = ["--positive", str(tmp_path / "same"), "--negative", str(tmp_path / "same")]
    assert main([*command, *files]) == 0
    assert capsys.readouterr().err.splitlines()[1:] == [
        "rheostat: the two sets do not differ at resid_post 2: "
        "the vector is zero and steers nothing",
        f"rheostat: the name joy moved here from {'02' * 32}",
    ]


@pytest.mark.parametrize("content", [None, b"\n \n", b"\xff"])
def test_a_file_without_prompts_is_refused(server, tmp_path, capsys, content):
    path = tmp_path / "prompts"
    if content is not None:
        path.write_bytes(content)
    files = ["--positive", str(path), "--negative", str(path)]
    command = ["vectors", "derive", *files, "--points", "resid_post", "--layers", "all"]
    assert main([*command, "--target", server.target]) == 2
    assert str(path) in capsys.readouterr().err
    assert server.asked == []


def test_progress_is_told_while_prompts_run(client, server):
    counts = [pb.DeriveProgress(done_prompt_count=n, total_prompt_count=2) for n in (0, 2)]
    events = [*(pb.DeriveVectorsResponse(progress=one) for one in counts)]
    server.on("DeriveVectors", [*events, pb.DeriveVectorsResponse(derived=ANSWER)])
    told = []
    found = client.run(
        lambda engine: engine.vectors.derive(
            ["a"], ["b"], points=[POST, PRE], layers=[1, 2], progress=lambda *n: told.append(n)
        )
    )
    assert (found, told) == (DERIVED, [(0, 2), (2, 2)])


def test_what_progress_raises_ends_the_call_and_comes_out(client, server):
    gone = threading.Event()

    def serve(_request, context):
        context.add_callback(gone.set)
        yield pb.DeriveVectorsResponse(progress=pb.DeriveProgress(total_prompt_count=2))
        gone.wait(10)

    server.on("DeriveVectors", serve)

    def fail(_done: int, _total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client.run(
            lambda engine: engine.vectors.derive(["a"], ["b"], points=POST, layers=1, progress=fail)
        )
    assert gone.wait(10)


def test_a_derivation_that_ends_without_vectors_is_a_defect_of_the_server(client, server):
    server.on("DeriveVectors", [])
    with pytest.raises(rheostat.ServerError, match="without its vectors"):
        client.run(lambda engine: engine.vectors.derive(["a"], ["b"], points=POST, layers=1))
