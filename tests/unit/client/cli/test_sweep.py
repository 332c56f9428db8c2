"""``rheostat sweep``: what it asks for, the grid that it shows, and the files that it writes."""

import io
import json
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest

import rheostat
from rheostat._cli import _grid, _progress, main
from rheostat._cli._progress import Phase
from rheostat._sweeps.result import Noise
from rheostat_wire.v1 import sweep_pb2, sweep_service_pb2, types_pb2

from ..sweep_messages import cell, started, summary, texts

LINE = ["sweep", "clean", "--answer", " Paris"]


@pytest.fixture
def scripted(server):
    server.on("Tokenize", texts)
    cells = [cell(0, -2.0, below_noise=True), cell(1, -1.5), cell(2, -2.5)]
    rest = [cell(3, -1.0), cell(4, -2.25), cell(5)]
    rest[-1].cell.error.code = 9
    rest[-1].cell.error.message = "position 2 has no partner"
    server.on("Sweep", [started(), *cells, *rest, summary()])
    return server


def asked(server) -> sweep_service_pb2.SweepRequest:
    *_, request = [one for one in server.asked if isinstance(one, sweep_service_pb2.SweepRequest)]
    return request


def run(server, *line: str) -> int:
    return main([*LINE, *line, "--target", server.target])


def test_the_grid_is_printed_with_the_last_layer_at_the_top(scripted, capsys):
    assert run(scripted, "--corrupt", "corrupt", "--grade", "logprob") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[:9] == [
        "logprob",
        "   0 'a'  1 'b'  2 'c'",
        "1  -1.00  -2.25      -",
        "0      ~  -1.50  -2.50",
        "~: within the noise of repeated runs",
        "-: skipped; the reasons follow",
        "SweepResult(logprob: 5 of 2 x 3 cells, 1 pair, 1 skipped)",
        "1 cell skipped: position 2 has no partner",
        "logprob of the clean prompts -1.000, of the corrupt ones -2.000",
    ]
    assert "   -1.000  resid_post[1] at 0 'a'" in out
    assert err == "sweeping ...\n"


def test_a_number_that_rounds_to_zero_has_no_sign(scripted, capsys):
    cells = [cell(index, -0.001) for index in range(6)]
    scripted.on("Sweep", [started(), *cells, summary()])
    assert run(scripted, "--corrupt", "corrupt", "--grade", "logprob") == 0
    assert capsys.readouterr().out.splitlines()[2] == "1   0.00   0.00   0.00"


def test_every_flag_reaches_the_server(scripted, capsys):
    line = ["--corrupt", "corrupt", "--answer", "Rome", "--foil", "no", "--points"]
    line += ["attn_out,mlp_out", "--layers", "1-3", "--positions", "0,3-5,-2--1", "--window", "3"]
    line += ["--direction", "noise", "--zoom", "4,2", "--lora", "ada", "--keep-runs", "60"]
    answer = summary(2)
    answer.summary.run_ids.extend(["x", "y"])
    scripted.on("Sweep", [started(0), answer])
    grades = ["--grade", "rank", "--grade", "recovered logit_difference"]
    assert run(scripted, *line, *grades) == 0
    request = asked(scripted)
    (pair,) = request.pairs
    assert (pair.prompt.text, pair.corrupt.text) == ("clean", "corrupt")
    assert len(pair.answer.alternatives) == 2
    assert [list(one.ids) for one in pair.foil.alternatives] == [[ord("n"), ord("o")]]
    assert list(request.sites.points) == [types_pb2.POINT_ATTN_OUT, types_pb2.POINT_MLP_OUT]
    assert list(request.sites.list.layers) == [1, 2, 3]
    windows = [one.positions for one in request.where.include]
    assert [(one.start, one.HasField("end") and one.end) for one in windows] == [
        (0, 1),
        (3, 6),
        (-2, False),
    ]
    assert request.layer_window == 3
    assert request.direction == sweep_pb2.SWEEP_DIRECTION_NOISE
    assert (request.zoom.layer_stride, request.zoom.column_stride) == (4, 2)
    assert (request.lora_name, request.keep_runs.seconds) == ("ada", 60)
    assert [one.recovered for one in request.grades] == [False, True]
    assert capsys.readouterr().out.splitlines()[-1] == "kept runs: x y"


@pytest.mark.parametrize(
    ("line", "field", "metric", "recovered"),
    [
        (["--corrupt", "x"], "corrupt", "LOGPROB", True),
        (["--corrupt", "x", "--foil", "y"], "corrupt", "LOGIT_DIFFERENCE", True),
        (["--from-run", "r"], "run_id", "LOGPROB", True),
        (["--noise-on", "ea"], "noise", "LOGPROB", True),
        (["--zeros"], "zeros", "LOGPROB", False),
        (["--run-mean", "r", "--foil", "y"], "mean", "LOGIT_DIFFERENCE", False),
    ],
)
def test_the_grade_goes_with_what_is_put_in(scripted, line, field, metric, recovered):
    assert run(scripted, *line) == 0
    request = asked(scripted)
    assert request.pairs[0].WhichOneof("corruption") == field
    (grade,) = request.grades
    assert grade.token.metric == sweep_pb2.Metric.Value(f"METRIC_{metric}")
    assert grade.recovered is recovered


@pytest.mark.parametrize(
    ("line", "scale", "seed", "count"),
    [
        ([], ("embedding_std", 3.0), 0, 10),
        (["--embedding-std", "2", "--noise-seed", "7"], ("embedding_std", 2.0), 7, 10),
        (["--std", "0.5", "--noise-count", "4"], ("std", 0.5), 0, 4),
    ],
)
def test_noise_on_a_text(scripted, line, scale, seed, count):
    assert run(scripted, "--noise-on", "ea", *line) == 0
    sent = asked(scripted).pairs[0].noise
    name, number = scale
    assert sent.noise.HasField(name)
    assert (getattr(sent.noise, name), sent.noise.seed) == (number, seed)
    assert sent.noise_count == count
    assert sent.where.include[0].text.text == "ea"
    assert list(sent.sites.points) == [types_pb2.POINT_RESID_PRE]


def test_the_result_goes_to_files(scripted, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    png, document, saved = (tmp_path / name for name in ("a.png", "a.json", "a.npz"))
    line = ["--corrupt", "x", "--grade", "logprob"]
    line += ["--png", str(png), "--json", str(document), "--save", str(saved)]
    assert run(scripted, *line) == 0
    wrote = [f"wrote {path}" for path in (png, document, saved)]
    assert capsys.readouterr().out.splitlines()[-3:] == wrote
    assert png.read_bytes().startswith(b"\x89PNG")
    result = rheostat.SweepResult.load(saved)
    found = json.loads(document.read_text())
    (grade,) = found["grades"]
    assert (grade["grade"], grade["values"]) == ("logprob", [[-2, -1.5, -2.5], [-1, -2.25, None]])
    assert (grade["clean"], grade["noise"]["runs"]) == (-1.0, 8)
    np.testing.assert_equal(np.array(grade["values"], float), result.array())
    assert found["sites"][1] == {"point": "resid_post", "layer": 1}
    assert (found["columns"], found["tokens"]) == (["0", "1", "2"], ["a", "b", "c"])
    assert found["skipped"] == {"5": "position 2 has no partner"}
    assert found["pairs"][0]["corrupt_token_ids"] == [1, 9, 3]
    scripted.asked.clear()
    assert run(scripted, "--corrupt", "x", "--save", str(saved)) == 2
    assert "exists already; --force replaces it" in capsys.readouterr().err
    assert scripted.asked == []


def test_a_result_is_printed_even_if_it_cannot_be_written(scripted, tmp_path, capsys, monkeypatch):
    def full(_: object, path: Path) -> None:
        path.write_text("part")
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(rheostat.SweepResult, "save", full)
    file = tmp_path / "a.npz"
    file.write_text("mine")
    assert run(scripted, "--corrupt", "x", "--save", str(file), "--force") == 1
    out, err = capsys.readouterr()
    assert "SweepResult(recovered logprob" in out
    assert err.splitlines()[-1] == f"rheostat: cannot write {file}: No space left on device"
    assert (file.read_text(), [*tmp_path.iterdir()]) == ("mine", [file])


WRONG = [
    ([], "one of the arguments --corrupt --noise-on --zeros --run-mean --from-run is required"),
    (["--corrupt", "x", "--zeros"], "--zeros: not allowed with argument --corrupt"),
    (["--zeros", "--std", "1"], "--std is for --noise-on"),
    (["--zeros", "--noise-seed", "1"], "--noise-seed is for --noise-on"),
    (["--noise-on", "x", "--std", "1", "--embedding-std", "1"], "give --std or --embedding-std"),
    (["--noise-on", "x", "--std", "0"], "std is above 0, not 0"),
    (["--zeros", "--grade", "logit_difference"], "--grade logit_difference needs --foil"),
    (["--zeros", "--grade", "logits"], "a grade is one of logprob, "),
    (["--zeros", "--positions", "a"], "positions are 3, -1, 2-5 or 0,3-5,-1, not 'a'"),
    (["--zeros", "--positions", "5-3"], "5-3 counts down: write 3-5"),
    (["--zeros", "--positions", "-3--1"], "--positions needs a value; write --positions=VALUE"),
    (["--zeros", "--zoom", "0"], "'0' is not N or N,M, each at least 1"),
    (["--zeros", "--direction", "nose"], "--direction cannot be 'nose': did you mean 'noise'?"),
    (["--zeros", "--png", "x.jpg"], "x.jpg does not end in .png"),
    (["--zeros", "--save", "x.npy"], "x.npy does not end in .npz"),
    (["--zeros", "--json", "/absent/x"], "/absent/x cannot be written: there is no folder"),
    (["--run-mean", "a b"], "'a b' is no run's id"),
    (["--zeros", "--answer", ""], "an answer has at least one token"),
    (["--zeros", "--keep-runs", "0"], "a lease lasts 1 to 86400 seconds"),
    (["--zeros", "--window", "-1"], "window is 0 to 4294967295, not -1"),
]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            "Paris",
            "rheostat: warning: the answer 'Paris' has no leading space, so it is graded as the "
            "rest of the prompt's last word: write ' Paris' for a new word\n",
        ),
        (" Paris", ""),
        ("!", ""),
    ],
)
def test_an_answer_without_its_space_is_reported(answer, said, scripted, capsys):
    line = ["sweep", "the city of", "--corrupt", "x", "--target", scripted.target]
    assert main([*line, "--answer", answer]) == 0
    assert capsys.readouterr().err.replace("sweeping ...\n", "") == said


def test_a_divergence_needs_no_answer(scripted, capsys):
    line = ["sweep", "clean", "--corrupt", "x", "--target", scripted.target]
    assert main([*line, "--grade", "kl"]) == 0
    assert asked(scripted).grades[0].token.metric == sweep_pb2.METRIC_KL
    for more in ([], ["--grade", "kl", "--grade", "rank"]):
        assert main([*line, *more]) == 2
        error = "rheostat: --answer is required, except with --grade kl"
        assert capsys.readouterr().err.splitlines()[-1] == error


@pytest.mark.parametrize(("line", "said"), WRONG)
def test_a_wrong_line_exits_with_2(server, capsys, line, said):
    server.on("Tokenize", texts)
    try:
        code = run(server, *line)
    except SystemExit as raised:
        code = raised.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in err
    assert not any(isinstance(one, sweep_service_pb2.SweepRequest) for one in server.asked)


def test_a_sweep_without_contrast_fails_in_one_line(scripted, capsys, refusal):
    code = grpc.StatusCode.FAILED_PRECONDITION
    scripted.on("Sweep", refusal.of(code, "both prompts grade alike", "REASON_NO_CONTRAST"))
    assert run(scripted, "--corrupt", "x") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "rheostat: both prompts grade alike [REASON_NO_CONTRAST]"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_grid_is_replaced_while_cells_come(scripted, monkeypatch):
    monkeypatch.setattr(_progress, "_INTERVAL", 0.001)
    monkeypatch.setattr("rheostat._notebook._INTERVAL", 0.0)
    monkeypatch.setattr("rheostat._notebook._PAUSE", 0.0)
    shown: list[list[str]] = []
    real = Phase.show

    def show(self, lines):
        shown.append(lines)
        real(self, lines)

    monkeypatch.setattr(Phase, "show", show)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert run(scripted, "--corrupt", "x", "--grade", "logprob") == 0
    assert len(shown) == 8  # the empty grid, six cells, and the whole
    assert shown[0] == ["1 ······", "0 ······", "  0"]
    plain = [line.replace("\x1b[34m", "").replace("\x1b[0m", "") for line in shown[-1]]
    assert plain[0] == "1 ██\x1b[31m░░--"
    assert sys.stderr.getvalue().endswith("sweeping: done after 0 s\n")


def test_shown_lines_are_replaced_and_removed_at_the_end():
    log = Terminal()
    with Phase("sweeping", log) as phase:
        phase.show(["one", "two"])
        phase._write("x")
        phase._write("y")
    assert "one\ntwo\nx\x1b[2F\x1b[Jone\ntwo\ny" in log.getvalue()
    assert log.getvalue().endswith("\x1b[2F\x1b[Jsweeping: done after 0 s\n")


def grid(rows: int, columns: int, **strong: float) -> rheostat.SweepResult:
    """A result of zeros but for cells ``r1c2=...``."""
    values = np.zeros((1, rows, columns))
    for name, value in strong.items():
        row, column = name[1:].split("c")
        values[0, int(row), int(column)] = value
    point = rheostat.Point.RESID_POST
    return rheostat.SweepResult(
        grades=("logprob",),
        sites=tuple(rheostat.Site(point, layer) for layer in range(rows)),
        columns=tuple(map(str, range(columns))),
        tokens=(),
        values=values,
        standard_errors=np.zeros_like(values),
        pair_values=np.zeros((0, *values.shape)),
        top_token_ids=np.zeros((rows, columns), np.int64),
        below_noise=np.zeros((rows, columns), np.bool_),
        skipped={},
        pairs=(),
        clean=(0.0,),
        corrupt=(0.0,),
        noise=(Noise(0.0, 0.0, 0.0, 8),),
    )


@pytest.mark.parametrize(
    ("rows", "columns", "width", "height"),
    [
        (2, 3, 80, 24),
        (36, 9, 80, 24),
        (80, 500, 60, 20),
        (3, 100, 12, 2),
        (1, 1, 1, 1),
        (0, 0, 9, 9),
    ],
)
def test_a_grid_of_any_size_fits_the_terminal(rows, columns, width, height):
    lines = _grid.shaded(grid(rows, columns), width, height)
    assert len(lines) <= max(height, 2)
    margin = len(str(max(rows - 1, 0))) + 1
    assert max(map(len, lines)) <= max(width, margin + 1)


def test_a_character_of_a_large_grid_is_the_largest_effect_of_its_cells():
    lines = _grid.shaded(grid(40, 4, r39c1=-2.0, r0c3=1.0), 80, 11)
    assert len(lines) == 11
    assert lines[0] == "36   \x1b[31m██\x1b[0m    "
    assert lines[-2] == " 0       \x1b[34m▒▒\x1b[0m"
