"""Conditions that the server fitted, over both clients."""

import shlex

import pytest
from google.protobuf import text_format

import rheostat
from rheostat import ConditionFit, Point, Site
from rheostat._cli import _parser, main
from rheostat_wire.v1 import gate_pb2, vector_pb2
from rheostat_wire.v1 import steering_service_pb2 as pb

POST = Point.RESID_POST
ANSWER = text_format.Parse(
    r"""fits {
          site { point: POINT_RESID_POST layer: 1 } pool: POOL_LAST
          made: FIT_DIRECTION_DIFFERENCE_OF_MEANS normalise: NORMALISE_UNIT
          threshold: 0.5 f1: 1 margin: 2.5 held_out_f1: 0.75 held_out_accuracy: 0.875
        }
        fits {
          site { point: POINT_RESID_POST layer: 2 } pool: POOL_MEAN
          vector_index: 1 normalise: NORMALISE_COSINE
          threshold: -0.25 below: true f1: 0.875 margin: -1 held_out_f1: 1 held_out_accuracy: 1
        }
        best: 1
        probe {
          name: "fitted" sites { points: POINT_RESID_POST list { layers: 2 } }
          read {
            vector {
              digest: "0123456789abcdef0123456789abcdef" row_layers { layers: 1 layers: 2 }
            }
            normalise: NORMALISE_COSINE
          }
          where { include { phase: PHASE_PROMPT } }
        }
        condition { probe_name: "fitted" pool: POOL_MEAN after_prompt: true below: -0.25 }
        digest: "0123456789abcdef0123456789abcdef" """,
    pb.FittedConditions(),
)
DIGEST = b"0123456789abcdef" * 2
FITS = (
    ConditionFit(
        Site(POST, 1), "last", "difference_of_means", "unit", 0.5, False, 1, 2.5, 0.75, 0.875
    ),
    ConditionFit(Site(POST, 2), "mean", 1, "cosine", -0.25, True, 0.875, -1, 1, 1),
)
TABLE = """\
site           pool  direction            read    holds    F1     held out  margin
resid_post[2]  mean  b                    cosine  < -0.25  0.875  1.000     -1.00   best
resid_post[1]  last  difference_of_means  unit    > 0.5    1.000  0.750     2.50"""


def test_a_fit_sends_the_grid_and_reads_a_ready_condition(client, server):
    events = [
        pb.FitConditionsResponse(progress=pb.DeriveProgress(total_prompt_count=3)),
        pb.FitConditionsResponse(fitted=ANSWER),
    ]
    server.on("FitConditions", events)
    seen: list[tuple[int, int]] = []
    found = client.run(
        lambda engine: engine.conditions.fit(
            ["bad", [5, 6]],
            [[{"role": "user", "content": "good"}]],
            points="resid_post",
            layers=[1, 2],
            where=rheostat.positions(-1),
            pools=["mean"],
            directions=["principal_component"],
            vectors=[rheostat.named("a"), rheostat.named("b")],
            normalises=["cosine"],
            name="refuse/when",
            lora="french",
            progress=lambda done, total: seen.append((done, total)),
        )
    )
    assert server.asked == [
        text_format.Parse(
            """positive { text: "bad" } positive { token_ids { ids: 5 ids: 6 } }
               negative { chat { messages { role: "user" content: "good" } } }
               sites { points: POINT_RESID_POST list { layers: 1 layers: 2 } }
               where { include { positions { start: -1 } } }
               pools: POOL_MEAN directions: FIT_DIRECTION_PRINCIPAL_COMPONENT
               vectors { name: "a" } vectors { name: "b" } normalises: NORMALISE_COSINE
               name: "refuse/when" lora_name: "french" """,
            pb.FitConditionsRequest(),
        )
    ]
    assert seen == [(0, 3)]
    assert (found.fits, found.best) == (FITS, FITS[1])
    assert found.tells_apart
    assert [vector.name for vector in found.vectors] == ["a", "b"]
    assert str(found) == TABLE
    condition = found.condition
    assert (condition.low, condition.high, condition.pool) == (None, -0.25, "mean")
    assert condition.after_prompt
    assert found.vector.digest == DIGEST.hex()
    assert found.vector.name == "refuse/when"
    message = found.probe.to_wire("probe")
    assert message.read.vector.digest == DIGEST
    assert list(message.read.vector.row_layers.layers) == [1, 2]
    assert message.read.normalise == ANSWER.probe.read.normalise
    assert message.where == ANSWER.probe.where
    wire = condition.to_wire("condition")
    assert (wire.below, wire.pool) == (-0.25, gate_pb2.POOL_MEAN)


@pytest.mark.parametrize(
    ("name", "probe_name"),
    [("gloom", "gloom"), ("refuse/when", None), (None, None)],
)
def test_the_probe_has_the_name_of_the_fit_if_it_can(client, server, name, probe_name):
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=fitted("held_out_f1: 1"))])
    found = client.run(
        lambda engine: engine.conditions.fit(
            ["bad"], ["good"], points="resid_post", layers=2, name=name
        )
    )
    assert found.condition.probe.given_name == probe_name
    assert found.vector.name == name
    assert found.condition.to_wire("condition").probe_name == found.probe.name


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"pools": ["max", "nonsense"]}, "pools[1]"),
        ({"directions": ["nonsense"]}, "directions[0]"),
        ({"normalises": ["nonsense"]}, "normalises[0]"),
        ({"rows": ["each", "nonsense"]}, "rows[1]"),
        ({"vectors": ["joy"]}, "vectors[0]"),
        ({"positive": "bad"}, "positive"),
    ],
)
def test_what_is_no_grid_is_refused_before_it_is_sent(client, server, fields, path):
    given = {"positive": ["a"], "negative": ["b"], "points": "resid_post", "layers": 1, **fields}
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.conditions.fit(**given))
    assert raised.value.path == path
    assert server.asked == []


def test_a_fit_without_an_end_is_an_error(client, server):
    server.on("FitConditions", [])
    with pytest.raises(rheostat.ServerError, match="ended a fit without its conditions"):
        client.run(
            lambda engine: engine.conditions.fit(["a"], ["b"], points="resid_post", layers=1)
        )


@pytest.mark.parametrize(
    ("held_out", "tells_apart", "warned"),
    [
        ("", None, ""),
        ("held_out_f1: 0.6666667 held_out_accuracy: 0.5", False, "judges 50 % of the held-out"),
        ("held_out_f1: 0.4 held_out_accuracy: 0.4", False, "judges 40 % of the held-out"),
        ("held_out_f1: 0.7 held_out_accuracy: 0.5", False, "judges 50 % of the held-out"),
        ("held_out_f1: 0.6 held_out_accuracy: 0.6", True, ""),
    ],
)
def test_a_fit_warns_if_the_sets_cannot_be_told_apart(
    client, server, caplog, held_out, tells_apart, warned
):
    answer = fitted(f"f1: 1 margin: 2.5 {held_out}")
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=answer)])
    found = client.run(
        lambda engine: engine.conditions.fit(
            ["a", "b"], ["a", "b"], points="resid_post", layers=[1, 2]
        )
    )
    assert found.tells_apart is tells_apart
    assert warned in caplog.text
    assert bool(warned) == ("does not tell the two sets apart" in caplog.text)


def test_a_condition_that_always_holds_tells_nothing_apart(client, server, caplog):
    answer = fitted("f1: 0.6666667 margin: -1 held_out_f1: 0.857 held_out_accuracy: 0.75")
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=answer)])
    found = client.run(
        lambda engine: engine.conditions.fit(
            ["a", "b"], ["a", "b"], points="resid_post", layers=[1, 2]
        )
    )
    assert found.tells_apart is False
    assert "its F1 of 0.667 is not above that of one that always holds, 0.667" in caplog.text


def test_a_single_pool_direction_normalisation_or_vector_needs_no_list(client, server):
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=fitted("f1: 1 margin: 2.5"))])
    client.run(
        lambda engine: engine.conditions.fit(
            ["a"],
            ["b"],
            points="resid_post",
            layers=1,
            pools="last",
            directions="difference_of_means",
            normalises="unit",
            vectors=rheostat.named("a"),
        )
    )
    (asked,) = server.asked
    assert list(asked.pools) == [gate_pb2.POOL_LAST]
    assert list(asked.directions) == [pb.FIT_DIRECTION_DIFFERENCE_OF_MEANS]
    assert list(asked.normalises) == [vector_pb2.NORMALISE_UNIT]
    assert [one.name for one in asked.vectors] == ["a"]


def test_a_result_in_place_of_its_vector_is_refused_with_what_to_pass(client, server):
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=fitted("f1: 1 margin: 2.5"))])
    fit = {"points": "resid_post", "layers": [1, 2]}
    found = client.run(lambda engine: engine.conditions.fit(["a"], ["b"], **fit))
    with pytest.raises(rheostat.InvalidRequest, match="ConditionFits is not a vector: pass its"):
        client.run(lambda engine: engine.conditions.fit(["a"], ["b"], vectors=found, **fit))


def test_a_given_vector_that_is_best_keeps_its_name(client, server):
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=ANSWER)])
    given = [rheostat.named("a"), rheostat.named("b")]
    found = client.run(
        lambda engine: engine.conditions.fit(
            ["a"], ["b"], points="resid_post", layers=[1, 2], vectors=given
        )
    )
    assert found.vector.name == "b"


def test_a_direction_that_was_not_given_is_an_error(client, server):
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=ANSWER)])
    with pytest.raises(rheostat.ServerError, match="a direction that was not given"):
        client.run(
            lambda engine: engine.conditions.fit(
                ["a"], ["b"], points="resid_post", layers=1, vectors=[rheostat.named("a")]
            )
        )


CAST = text_format.Parse(
    """fits {
         site { point: POINT_RESID_POST layer: 2 } pool: POOL_LAST rows: PROBE_ROWS_PROMPT_MEAN
         made: FIT_DIRECTION_PRINCIPAL_COMPONENT normalise: NORMALISE_PROJECTED_COSINE
         threshold: 0.5 f1: 1 margin: 1 held_out_f1: 1 held_out_accuracy: 1
       }
       probe {
         name: "fitted" sites { points: POINT_RESID_POST list { layers: 2 } }
         read {
           vector { digest: "0123456789abcdef0123456789abcdef" }
           normalise: NORMALISE_PROJECTED_COSINE
         }
         where { include { phase: PHASE_PROMPT } } rows: PROBE_ROWS_PROMPT_MEAN
       }
       condition { probe_name: "fitted" pool: POOL_LAST after_prompt: true above: 0.5 }
       digest: "0123456789abcdef0123456789abcdef" """,
    pb.FittedConditions(),
)
"""The answer with a condition of conditional activation steering."""
CAST_TABLE = """\
site           pool      direction            read              holds  F1     held out  margin
resid_post[2]  mean row  principal_component  projected_cosine  > 0.5  1.000  1.000     1.00    best
"""


def test_the_number_of_conditional_activation_steering_is_fitted(client, server):
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=CAST)])
    found = client.run(
        lambda engine: engine.conditions.fit(
            ["a", "b"],
            ["c", "d"],
            points="resid_post",
            layers=[1, 2],
            rows="prompt_mean",
            normalises="projected_cosine",
        )
    )
    (asked,) = server.asked
    assert list(asked.rows) == [gate_pb2.PROBE_ROWS_PROMPT_MEAN]
    assert list(asked.normalises) == [vector_pb2.NORMALISE_PROJECTED_COSINE]
    assert found.best == ConditionFit(
        Site(POST, 2),
        "last",
        "principal_component",
        "projected_cosine",
        0.5,
        False,
        1,
        1,
        1,
        1,
        rows="prompt_mean",
    )
    assert str(found) == CAST_TABLE.rstrip()
    message = found.probe.to_wire("probe")
    assert message.rows == gate_pb2.PROBE_ROWS_PROMPT_MEAN
    assert message.read.normalise == vector_pb2.NORMALISE_PROJECTED_COSINE
    assert message.where == CAST.probe.where
    condition = found.condition
    assert (condition.low, condition.pool, condition.after_prompt) == (0.5, "last", True)


def test_pools_are_refused_for_the_mean_row_alone(client, server):
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=CAST)])

    def fit(**options):
        return client.run(
            lambda engine: engine.conditions.fit(
                ["a"], ["b"], points="resid_post", layers=1, **options
            )
        )

    with pytest.raises(rheostat.InvalidRequest, match="one reading of each prompt") as caught:
        fit(rows=["prompt_mean"], pools="mean")
    assert caught.value.path == "pools"
    assert not server.asked
    fit(rows="prompt_mean")
    fit(rows=("each", "prompt_mean"), pools="mean")
    assert [list(asked.pools) for asked in server.asked] == [
        [gate_pb2.POOL_LAST, gate_pb2.POOL_MEAN],
        [gate_pb2.POOL_MEAN],
    ]


@pytest.mark.parametrize(
    ("rows", "sent"),
    [
        ({}, []),
        ({"rows": "each"}, []),
        ({"rows": ["each"]}, []),
        (
            {"rows": ["prompt_mean", "each"]},
            [gate_pb2.PROBE_ROWS_PROMPT_MEAN, gate_pb2.PROBE_ROWS_EACH],
        ),
    ],
)
def test_rows_are_sent_only_if_they_are_not_the_default(client, server, rows, sent):
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=fitted("f1: 1 margin: 2.5"))])
    found = client.run(
        lambda engine: engine.conditions.fit(["a"], ["b"], points="resid_post", layers=1, **rows)
    )
    assert list(server.asked[0].rows) == sent
    assert (found.best.rows, found.probe.rows) == ("each", "each")


def fitted(fit: str) -> pb.FittedConditions:
    """The answer with one fit, of a direction that is made of the prompts."""
    answer = pb.FittedConditions()
    answer.CopyFrom(ANSWER)
    del answer.fits[:]
    text_format.Parse(
        f"""fits {{
              site {{ point: POINT_RESID_POST layer: 2 }} pool: POOL_LAST
              made: FIT_DIRECTION_DIFFERENCE_OF_MEANS normalise: NORMALISE_UNIT
              threshold: 0.1 {fit}
            }}
            best: 0""",
        made := pb.FittedConditions(),
    )
    answer.fits.extend(made.fits)
    answer.best = 0
    return answer


def stored(*names: str) -> pb.ListVectorsResponse:
    """A list of vectors with these names."""
    listed = pb.ListVectorsResponse()
    for name in names:
        text_format.Parse(
            """dtype: DTYPE_FLOAT32 shape: 2 shape: 8
               sites { points: POINT_RESID_POST range { start: 1 stop: 3 } }""",
            listed.vectors.add(digest=DIGEST, name=name),
        )
    return listed


def test_the_command_prints_the_table_and_the_vector(server, tmp_path, capsys):
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=ANSWER)])
    server.on("ListVectors", stored("a", "b"))
    for name in ("bad", "good"):
        (tmp_path / name).write_text(f"{name}\n\nmore\n")
    line = ["conditions", "fit", "--target", server.target, "--name", "gloom"]
    line += ["--positive", str(tmp_path / "bad"), "--negative", str(tmp_path / "good")]
    line += ["--vector", "a", "--vector", "b"]
    assert main([*line, "--points", "resid_post", "--layers", "1-2"]) == 0
    assert capsys.readouterr().out == (
        f"{TABLE}\n{DIGEST.hex()}  gloom\n"
        "to end requests for which the best condition holds:\n"
        f"  rheostat watch --every --target {server.target} --probe gloom --points resid_post "
        "--layers 2 --normalise cosine --pool mean --after-prompt --stop-below gloom:-0.25\n"
    )
    asked = server.asked[-1]
    assert [prompt.text for prompt in asked.positive] == ["bad", "more"]
    assert (asked.name, len(asked.vectors)) == ("gloom", 2)
    assert list(asked.pools) == [gate_pb2.POOL_LAST, gate_pb2.POOL_MEAN]
    assert list(asked.normalises) == [vector_pb2.NORMALISE_UNIT, vector_pb2.NORMALISE_COSINE]


def command(server, folder, *flags: str) -> list[str]:
    """A command line that fits two files of two prompts each."""
    for name in ("bad", "good"):
        (folder / name).write_text(f"{name}\nmore\n")
    line = ["conditions", "fit", "--target", server.target, "--points", "resid_post"]
    line += ["--positive", str(folder / "bad"), "--negative", str(folder / "good")]
    return [*line, "--layers", "1-2", *flags]


def test_the_command_tries_only_the_chosen_readings(server, tmp_path):
    answer = fitted("f1: 1 margin: 2.5")
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=answer)])
    assert main(command(server, tmp_path, "--normalise", "cosine", "--pool", "last")) == 0
    asked = server.asked[-1]
    assert list(asked.pools) == [gate_pb2.POOL_LAST]
    assert list(asked.normalises) == [vector_pb2.NORMALISE_COSINE]


def test_the_command_names_no_watch_if_the_sets_cannot_be_told_apart(server, tmp_path, capsys):
    answer = fitted("f1: 1 margin: 2.5 held_out_f1: 0.5 held_out_accuracy: 0.5")
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=answer)])
    assert main(command(server, tmp_path)) == 0
    printed = capsys.readouterr()
    assert "watch" not in printed.out
    assert (
        "rheostat: the best condition does not tell the two sets apart: it judges 50 % of the "
        "held-out prompts right, and one that always or never holds judges 50 %\n"
    ) in printed.err


def test_the_command_says_that_no_prompt_was_held_out(server, tmp_path, capsys):
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=fitted("f1: 1 margin: 1e9"))])
    assert main(command(server, tmp_path)) == 0
    out = capsys.readouterr().out
    assert "1.000  -         -       best\n" in out
    assert "\n-: unknown, because a set has one prompt, or all other prompts read alike\n" in out
    assert "rheostat watch" in out


def test_the_command_names_a_watch_that_uses_the_best_condition(server, tmp_path, capsys):
    answer = fitted("f1: 1 margin: 2.5")
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=answer)])
    assert main(command(server, tmp_path)) == 0
    *_, printed = capsys.readouterr().out.splitlines()
    assert printed == (
        f"  rheostat watch --every --target {server.target} --probe {DIGEST.hex()[:12]} "
        "--points resid_post --layers 2 --normalise unit --where -1 "
        f"--stop-above {DIGEST.hex()[:12]}:0.1"
    )
    read = _parser().parse_args(shlex.split(printed)[1:])
    assert (read.normalise, read.bounds[0].number) == ("unit", 0.1)


def test_the_command_fits_and_watches_the_mean_row(server, tmp_path, capsys):
    server.on("FitConditions", [pb.FitConditionsResponse(fitted=CAST)])
    flags = ["--rows", "prompt_mean", "--normalise", "projected_cosine"]
    assert main(command(server, tmp_path, *flags)) == 0
    asked = server.asked[-1]
    assert list(asked.rows) == [gate_pb2.PROBE_ROWS_PROMPT_MEAN]
    assert list(asked.normalises) == [vector_pb2.NORMALISE_PROJECTED_COSINE]
    out = capsys.readouterr().out
    assert CAST_TABLE in out
    printed = out.splitlines()[-1]
    assert printed == (
        f"  rheostat watch --every --target {server.target} --probe {DIGEST.hex()[:12]} "
        "--points resid_post --layers 2 --normalise projected_cosine --rows prompt_mean "
        f"--after-prompt --stop-above {DIGEST.hex()[:12]}:0.5"
    )
    read = _parser().parse_args(shlex.split(printed)[1:])
    assert (read.normalise, read.rows) == ("projected_cosine", "prompt_mean")


def test_the_command_refuses_a_pool_of_the_mean_row(server, tmp_path, capsys):
    with pytest.raises(SystemExit) as raised:
        main(command(server, tmp_path, "--rows", "prompt_mean", "--pool", "mean"))
    assert raised.value.code == 2
    assert "--rows prompt_mean has only one" in capsys.readouterr().err
    assert server.asked == []
