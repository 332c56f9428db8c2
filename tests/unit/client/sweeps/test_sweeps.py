"""Sweeps of both clients: the request, the result, and broken calls."""

import dataclasses
import warnings
from datetime import UTC, datetime

import grpc
import numpy as np
import pytest

import rheostat
from rheostat import aio
from rheostat._client import engine as sync_engine
from rheostat._sweeps.result import Noise
from rheostat_wire.v1 import (
    gate_pb2,
    generation_service_pb2,
    replace_pb2,
    sweep_pb2,
    sweep_service_pb2,
    types_pb2,
    vector_pb2,
)

from ..conftest import Refusal
from ..sweep_messages import cell, started, summary, texts

Code = grpc.StatusCode
PAIR = rheostat.Pair([1, 2, 3], corrupt=[1, 9, 3], answer=[7], foil=[8])


def sweep(client, *arguments: object, **options: object) -> rheostat.SweepResult:
    result = client.run(lambda engine: engine.sweep(*arguments, **options))
    assert isinstance(result, rheostat.SweepResult)
    return result


@pytest.fixture
def scripted(server):
    server.on("Tokenize", texts)
    cells = [cell(0, -2.0, below_noise=True), cell(1, -1.5), cell(2, -2.5, top_token_id=7)]
    rest = [cell(3, -1.0), cell(4, -2.0), cell(5)]
    rest[-1].cell.error.code = 9
    rest[-1].cell.error.message = "no partner"
    server.on("Sweep", [started(), *cells, *rest, summary()])
    return server


def asked(server) -> sweep_service_pb2.SweepRequest:
    *_, request = [one for one in server.asked if isinstance(one, sweep_service_pb2.SweepRequest)]
    return request


def test_a_result_has_the_grid_and_its_axes(scripted, client) -> None:
    told: list[tuple[int, int]] = []
    seen: list[rheostat.Cell] = []
    got = sweep(
        client, PAIR, grades="logprob", progress=lambda *n: told.append(n), on_cell=seen.append
    )
    nan = np.nan
    np.testing.assert_equal(got.array(), [[-2.0, -1.5, -2.5], [-1.0, -2.0, nan]])
    assert got.sites == (("resid_post", 0), ("resid_post", 1))
    assert (got.columns, got.tokens) == (("0", "1", "2"), ("a", "b", "c"))
    assert got.labels == ["0 'a'", "1 'b'", "2 'c'"]
    assert got.skipped == {5: "no partner"}
    # Cell 4 came before baselines that widened the noise.
    assert got.significant.tolist() == [[False, True, True], [True, False, False]]
    assert got.top_token_ids.tolist() == [[0, 0, 7], [0, 0, -1]]
    assert got.noise == (Noise(-2.0, 0.1, 0.2, 8),)
    assert (got.clean, got.corrupt, got.computed_token_count) == ((-1.0,), (-2.0,), 99)
    assert [one.value for one in got.top(3)] == [-1.0, -1.5, -2.5]
    assert told[0] == (0, 6)
    assert told[-1] == (6, 6)
    assert [one.index for one in seen] == [0, 1, 2, 3, 4]
    assert repr(got) == "SweepResult(logprob: 5 of 2 x 3 cells, 1 pair, 1 skipped)"
    assert "resid_post[1] at 0 'a'" in str(got)
    assert str(got).splitlines()[1] == "1 cell skipped: no partner"
    assert "resid_post" in got._repr_html_()


def test_every_option_reaches_the_server(scripted, client) -> None:
    pair = rheostat.Pair(
        "clean",
        corrupt="corrupt",
        answer=[" Paris", [4, 5]],
        foil="no",
        groups={"last": rheostat.positions(-1), "all": "prompt"},
        label="fact",
    )
    scripted.on("Sweep", [started(0, ("last", "all")), summary(2)])
    got = sweep(
        client,
        pair,
        points=["attn_out", "mlp_out"],
        layers=range(1, 4),
        grades=["recovered logit_difference", "rank"],
        window=3,
        direction="noise",
        alpha=0.5,
        align="affixes",
        zoom={"layer_stride": 2, "column_stride": 1},
        baselines=9,
        concurrency=4,
        priority="normal",
        keep_runs=60,
    )
    request = asked(scripted)
    (sent,) = request.pairs
    assert (sent.prompt.text, sent.corrupt.text, sent.label) == ("clean", "corrupt", "fact")
    assert [list(one.ids) for one in sent.answer.alternatives] == [
        [ord(c) for c in " Paris"],
        [4, 5],
    ]
    assert [list(one.ids) for one in sent.foil.alternatives] == [[ord("n"), ord("o")]]
    assert list(request.group_labels) == ["last", "all"]
    assert sent.groups[0].include[0].positions.start == -1
    assert sent.groups[1].include[0].phase == types_pb2.PHASE_PROMPT
    assert [one.recovered for one in request.grades] == [True, False]
    assert request.grades[1].token.metric == sweep_pb2.METRIC_RANK
    assert (request.layer_window, request.alpha, request.baseline_count) == (3, 0.5, 9)
    assert request.direction == sweep_pb2.SWEEP_DIRECTION_NOISE
    assert request.alignment == replace_pb2.ALIGNMENT_AFFIXES
    assert (request.zoom.layer_stride, request.zoom.column_stride) == (2, 1)
    assert request.max_concurrent_cells == 4
    assert request.priority == sweep_pb2.SWEEP_PRIORITY_NORMAL
    assert request.keep_runs.seconds == 60
    assert (got.grades, got.tokens) == (("recovered logit_difference", "rank"), ())
    answers = [
        one
        for one in scripted.asked
        if isinstance(one, generation_service_pb2.TokenizeRequest) and one.text
    ]
    assert [one.text for one in answers] == [" Paris", "no"]
    assert not any(one.add_special_tokens for one in answers)


@pytest.mark.parametrize(
    ("pairs", "metric"),
    [
        ([PAIR], "logit_difference"),
        ([PAIR, PAIR], "logit_difference"),
        ([dataclasses.replace(PAIR, foil=None)], "logprob"),
    ],
)
def test_the_default_grade_uses_a_foil_that_is_given(scripted, client, pairs, metric) -> None:
    got = sweep(client, pairs)
    (grade,) = asked(scripted).grades
    assert grade.token.metric == sweep_pb2.Metric.Value(f"METRIC_{metric.upper()}")
    assert got.grades == (metric,)


def test_a_foil_that_only_some_pairs_have_needs_a_named_grade(scripted, client) -> None:
    pairs = [PAIR, dataclasses.replace(PAIR, foil=None)]
    with pytest.raises(rheostat.InvalidRequest, match="1 of 2 pairs have a foil: give each") as e:
        sweep(client, pairs)
    assert e.value.path == "pairs[1].foil"
    assert sweep(client, pairs, grades="logprob").grades == ("logprob",)


@pytest.mark.parametrize(
    ("corrupt", "field"),
    [
        (rheostat.Zeros(), "zeros"),
        (rheostat.run_mean("r"), "mean"),
        (rheostat.from_run("r"), "run_id"),
        ([1, 2], "corrupt"),
        ([{"role": "user", "content": "hi"}], "corrupt"),
    ],
)
def test_every_corruption(scripted, client, corrupt, field) -> None:
    sweep(client, rheostat.Pair("clean", corrupt=corrupt, answer=[1]))
    assert asked(scripted).pairs[0].WhichOneof("corruption") == field


def test_noise_on_the_clean_prompt(scripted, client) -> None:
    noisy = rheostat.NoisyPrompt(
        rheostat.Noise(embedding_std=3, seed=5), where=rheostat.positions(1), count=4
    )
    sweep(client, rheostat.Pair("clean", corrupt=noisy, answer=[1]))
    sent = asked(scripted).pairs[0].noise
    assert (sent.noise.seed, sent.noise.embedding_std, sent.noise_count) == (5, 3.0, 4)
    assert list(sent.sites.points) == [types_pb2.POINT_RESID_PRE]
    assert list(sent.sites.list.layers) == [0]
    assert sent.where.include[0].positions.start == 1


def test_a_broken_call_is_taken_up(server, client, monkeypatch) -> None:
    for module in (sync_engine, aio):
        monkeypatch.setattr(module, "RESUME_AFTER", 0.01)
    gone = Refusal(Code.UNAVAILABLE, "the front end died")
    server.on("Tokenize", texts)
    server.on(
        "Sweep",
        [started(), cell(0, 1.0), cell(4, 2.0), gone],
        [started(4), gone],
        [started(4), cell(1, 3.0), cell(2, 4.0), cell(3, 5.0), cell(5, 6.0), summary()],
    )
    got = sweep(client, PAIR)
    assert got.array().tolist() == [[1.0, 3.0, 4.0], [5.0, 2.0, 6.0]]
    assert [(one.start, one.count) for one in asked(server).done] == [(0, 1), (4, 1)]


def test_cells_that_came_are_named_in_runs(server, client, monkeypatch) -> None:
    for module in (sync_engine, aio):
        monkeypatch.setattr(module, "RESUME_AFTER", 0.01)
    gone = Refusal(Code.UNAVAILABLE, "the front end died")
    server.on("Tokenize", texts)
    first = [started(), cell(4, 2.0), cell(1, 3.0), cell(0, 1.0), cell(2, 4.0), gone]
    server.on("Sweep", first, [started(2), cell(3, 5.0), cell(5, 6.0), summary()])
    sweep(client, PAIR)
    assert [(one.start, one.count) for one in asked(server).done] == [(0, 3), (4, 1)]


@pytest.mark.parametrize("what", ["rows", "columns", "pairs"])
def test_a_server_with_another_model_takes_no_sweep_up(server, client, monkeypatch, what) -> None:
    for module in (sync_engine, aio):
        monkeypatch.setattr(module, "RESUME_AFTER", 0.01)
    gone = Refusal(Code.UNAVAILABLE, "the server ended")
    other = started(5)
    del getattr(other.started, what)[-1]
    server.on("Tokenize", texts)
    server.on("Sweep", [started(), cell(0, 1.0), gone], [other, cell(1, 3.0), summary()])
    with pytest.raises(rheostat.ServerError, match="other rows, columns or tokens"):
        sweep(client, PAIR)


def test_groups_with_numbers_for_names_are_no_positions(server, client) -> None:
    server.on("Tokenize", texts)
    server.on("Sweep", [started(), *(cell(i, 1.0) for i in range(6)), summary()])
    everywhere = {str(number): rheostat.positions(0) for number in range(3)}
    got = sweep(client, dataclasses.replace(PAIR, groups=everywhere))
    assert (got.columns, got.tokens) == (("0", "1", "2"), ())


def test_a_call_that_breaks_again_and_again_fails(server, client, monkeypatch) -> None:
    for module in (sync_engine, aio):
        monkeypatch.setattr(module, "RESUME_AFTER", 0.01)
    server.on("Sweep", [started(), Refusal(Code.UNAVAILABLE, "the front end died")])
    with pytest.raises(rheostat.Unavailable):
        sweep(client, PAIR)
    count = sum(isinstance(one, sweep_service_pb2.SweepRequest) for one in server.asked)
    assert count == 1 + sync_engine.RESUMPTIONS


def test_pair_values(server, client) -> None:
    server.on("Tokenize", texts)
    cells = [cell(0, 1.0, 2.0, pair_values=[1.0, 2.0])]
    server.on("Sweep", [started(1), *cells, summary(2)])
    got = sweep(client, PAIR, grades=["logprob", "rank"], pair_values=True)
    assert got.pair_values.shape == (1, 2, 2, 3)
    assert got.pair_values[0, :, 0, 0].tolist() == [1.0, 2.0]


def test_a_saved_result_is_loaded_as_it_was(scripted, client, tmp_path) -> None:
    got = sweep(client, PAIR)
    got.save(tmp_path / "it.npz")
    again = rheostat.SweepResult.load(tmp_path / "it.npz")
    assert (str(again), again.sites, again.skipped) == (str(got), got.sites, got.skipped)
    assert (again.pairs, again.noise, again.clean) == (got.pairs, got.noise, got.clean)
    np.testing.assert_equal(again.array(), got.array())
    (tmp_path / "not.npz").write_bytes(b"nothing")
    (tmp_path / "m1.py").write_text("import rheostat")
    np.savez(tmp_path / "other.npz", a=1)
    np.save(tmp_path / "array.npy", 1)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "it.npz").read_bytes()[:200])
    for name in ("not.npz", "m1.py", "other.npz", "array.npy", "cut.npz"):
        with pytest.raises(rheostat.InvalidRequest) as raised:
            rheostat.SweepResult.load(tmp_path / name)
        assert raised.value.message == (
            f"{tmp_path / name} is no saved sweep: SweepResult.save writes one"
        )


def test_a_picture_is_drawn(scripted, client, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    figure = sweep(client, PAIR).heatmap(tmp_path / "it.png")
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")  # so a notebook shows it without pyplot
    (axes, _) = figure.axes
    assert axes.get_xlabel() == "replaced position\nhatched: 1 cell skipped: no partner"
    (hatched,) = axes.collections
    assert hatched.get_hatch()
    (cell,) = hatched.get_paths()
    assert cell.get_extents().bounds == (1.5, 0.5, 1.0, 1.0)  # row 1, column 2


def test_records(scripted, client) -> None:
    first, *others = sweep(client, PAIR, grades="logprob").records()
    assert first == {
        "point": "resid_post",
        "layer": 0,
        "column": "0 'a'",
        "logprob": -2.0,
        "logprob standard error": 0.5,
        "top_token_id": 0,
        "below_noise": True,
    }
    assert len(others) == 4


def test_probes_and_divergence_reach_the_server(scripted, client) -> None:
    vector = rheostat.inline([[1.0, 2.0], [3.0, 4.0]], layers=[3, 5])
    probe = rheostat.ProbeGrade(
        "gloom",
        vector,
        "attn_out",
        5,
        where=rheostat.positions(-1),
        pool="max",
        bias=-0.5,
        normalise="unit",
        activation="jump_relu",
        theta=2.0,
        recovered=True,
    )
    cells = [cell(index, -2.0, -1.0) for index in range(6)]
    scripted.on("Sweep", [started(), *cells, summary(2)])
    got = sweep(client, rheostat.Pair([1], corrupt=[2]), grades=["recovered kl", probe])
    kl, sent = asked(scripted).grades
    assert (kl.token.metric, kl.recovered) == (sweep_pb2.METRIC_KL, True)
    assert (sent.recovered, sent.probe.pool) == (True, gate_pb2.POOL_MAX)
    read = sent.probe.probe.read
    assert (read.bias, read.theta, sent.probe.probe.name) == (-0.5, 2.0, "gloom")
    assert read.normalise == vector_pb2.NORMALISE_UNIT
    assert read.activation == vector_pb2.ACTIVATION_JUMP_RELU
    assert list(read.vector.row_layers.layers) == [3, 5]
    assert list(sent.probe.probe.sites.list.layers) == [5]
    assert sent.probe.probe.where.include[0].positions.start == -1
    assert not asked(scripted).pairs[0].answer.alternatives
    assert got.grades == ("recovered kl", "recovered gloom")
    assert got.array("recovered gloom")[0, 0] == -1.0


def probe(**fields: object) -> rheostat.ProbeGrade:
    given = {
        "name": "p",
        "vector": rheostat.named("v"),
        "point": "resid_post",
        "layer": 1,
        **fields,
    }
    return rheostat.ProbeGrade(**given)


def stored_run(run_id: str) -> rheostat.RunInfo:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    return rheostat.RunInfo(run_id, (), (), (1, 2), 0, moment, moment, {})


WRONG = {
    "no pair": (lambda c: sweep(c, []), "pairs"),
    "no Pair": (lambda c: sweep(c, ["a prompt"]), "pairs[0]"),
    "a class": (
        lambda c: sweep(c, rheostat.Pair("a", corrupt=rheostat.Zeros, answer=[1])),
        "Zeros is a class: use Zeros()",
    ),
    "noise without tokens": (
        lambda c: sweep(c, rheostat.Pair("a", corrupt=rheostat.Noise(std=1), answer=[1])),
        "say which tokens get the noise: rheostat.NoisyPrompt(rheostat.Noise(std=1), "
        'where=rheostat.span("the subject")); std is absolute, and causal traces use '
        "embedding_std=3 (at pairs[0].corrupt)",
    ),
    "a number for noise": (
        lambda c: sweep(
            c, rheostat.Pair("a", corrupt=rheostat.NoisyPrompt(3, "prompt"), answer=[1])
        ),
        "noise is a rheostat.Noise, as rheostat.Noise(embedding_std=3), not 3",
    ),
    "a replacement for a prompt": (
        lambda c: sweep(
            c, rheostat.Pair("a", corrupt=rheostat.replace(rheostat.Zeros()), answer=[1])
        ),
        "rheostat.Zeros(), rheostat.run_mean(run) or rheostat.from_run(run), not ",
    ),
    "no answer": (lambda c: sweep(c, rheostat.Pair("a", corrupt="b", answer="")), "answer"),
    "odd answer": (lambda c: sweep(c, rheostat.Pair("a", corrupt="b", answer=7)), "answer"),
    "a run instead of from_run": (
        lambda c: sweep(c, rheostat.Pair("a", corrupt=stored_run("r"), answer=[1])),
        "corrupt",
    ),
    "empty prompt": (lambda c: sweep(c, rheostat.Pair("", corrupt="b", answer=[1])), "prompt"),
    "odd grade": (lambda c: sweep(c, PAIR, grades="logits"), "grades[0]"),
    "no grade": (lambda c: sweep(c, PAIR, grades=[]), "grades"),
    "same grade twice": (lambda c: sweep(c, PAIR, grades=["rank", "rank"]), "grades[1]"),
    "probe without vector": (
        lambda c: sweep(c, PAIR, grades=["rank", probe(vector=[1.0])]),
        "grades[1].vector",
    ),
    "probe with dose": (
        lambda c: sweep(c, PAIR, grades=probe(vector=2 * rheostat.named("v"))),
        "grades[0].vector",
    ),
    "probe with odd pool": (lambda c: sweep(c, PAIR, grades=probe(pool="sum")), "grades[0].pool"),
    "probe with endless bias": (
        lambda c: sweep(c, PAIR, grades=probe(bias=float("inf"))),
        "grades[0].bias",
    ),
    "odd direction": (
        lambda c: sweep(c, PAIR, direction="up"),
        "direction is 'denoise' or 'noise', not 'up'",
    ),
    "odd priority": (
        lambda c: sweep(c, PAIR, priority="low"),
        "priority is 'background' or 'normal', not 'low'",
    ),
    "odd pair_values": (
        lambda c: sweep(c, PAIR, pair_values="no"),
        "pair_values is True or False, not 'no'",
    ),
    "probe that is oddly recovered": (
        lambda c: sweep(c, PAIR, grades=probe(recovered="no")),
        "recovered is True or False, not 'no' (at grades[0].recovered)",
    ),
    "odd zoom": (lambda c: sweep(c, PAIR, zoom={"stride": 1}), "zoom"),
    "half a run": (
        lambda c: sweep(c, rheostat.Pair("a", corrupt=rheostat.from_run("r", [1]), answer=[1])),
        "corrupt",
    ),
    "other groups": (
        lambda c: sweep(
            c,
            [
                rheostat.Pair("a", corrupt="b", answer=[1], groups={"x": "prompt"}),
                rheostat.Pair("a", corrupt="b", answer=[1]),
            ],
        ),
        "groups",
    ),
    "a foil that is the answer": (
        lambda c: sweep(
            c,
            rheostat.Pair("a", corrupt="b", answer=[1], foil=[1]),
            grades=["rank", "logit_difference"],
        ),
        "pairs[0].foil",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_name_their_field(server, client, name) -> None:
    call, field = WRONG[name]
    with pytest.raises(rheostat.InvalidRequest) as caught:
        call(client)
    assert field in str(caught.value)
    assert not any(isinstance(one, sweep_service_pb2.SweepRequest) for one in server.asked)


@pytest.mark.parametrize("name", ["z", "hook_z", "blocks.3.attn.hook_q", "heads", "pattern"])
def test_heads_are_refused_by_name_with_what_to_do_instead(server, client, name) -> None:
    with pytest.raises(rheostat.InvalidRequest, match=r"heads are not served.*Take attn_out") as e:
        sweep(client, PAIR, points=["resid_post", name])
    assert (e.value.reason, e.value.path) == ("REASON_NOT_SUPPORTED", "sites.points")
    assert not any(isinstance(one, sweep_service_pb2.SweepRequest) for one in server.asked)


def test_an_image_is_no_content_of_a_message(server, client) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    seen = [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]
    for pair in (
        rheostat.Pair(seen, corrupt=[1], answer=[7]),
        rheostat.Pair([1], corrupt=seen, answer=[7]),
    ):
        with pytest.raises(rheostat.InvalidRequest, match="images and other media are not served"):
            sweep(client, pair)
    assert not any(isinstance(one, sweep_service_pb2.SweepRequest) for one in server.asked)


def test_an_unknown_option_is_a_type_error(client) -> None:
    with pytest.raises(TypeError, match="window"):
        sweep(client, PAIR, windows=3)


@pytest.mark.parametrize(
    ("prompt", "answer", "foil", "named"),
    [
        ("the city of", "Paris", None, ["Paris"]),
        ("the city of", [" Paris", "Lyon"], "Rome", ["Lyon", "Rome"]),
        ("the city of", " Paris", [[5, 6], " Rome"], []),
        ("the city of ", "Paris", None, []),
        ("2 + 2 =", "4", None, []),
        ("首都は", "パリ", None, []),
        ([1, 2], "Paris", None, []),
    ],
)
def test_a_pair_warns_of_answers_that_continue_the_last_word(prompt, answer, foil, named) -> None:
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        rheostat.Pair(prompt, rheostat.Zeros(), answer, foil)
    assert [str(one.message).split("'")[1] for one in noted] == named
    assert {one.filename for one in noted} <= {__file__}
