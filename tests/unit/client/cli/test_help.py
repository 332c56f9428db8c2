"""How the command line explains itself: help, slips, listings for people and for programs."""

import io
import json
import subprocess
import sys
import time

import pytest
from google.protobuf import text_format

import rheostat
from rheostat._cli import _parser, main
from rheostat._selectors import selector_of, to_wire
from rheostat_wire.v1 import (
    engine_service_pb2,
    generation_service_pb2,
    run_service_pb2,
    selector_pb2,
)
from rheostat_wire.v1 import steering_service_pb2 as pb

COMMANDS = (
    ["serve"], ["generate"], ["vectors"], ["runs"], ["global"], ["subscribe"], ["info"], ["demo"],
    ["sweep"], ["watch"], ["conditions"], ["conditions", "fit"],
    ["vectors", "list"], ["vectors", "put"], ["vectors", "get"], ["vectors", "import"],
    ["vectors", "export"], ["vectors", "delete"], ["vectors", "derive"],
    ["runs", "list"], ["runs", "get"], ["runs", "put"], ["runs", "delete"],
    ["global", "set"], ["global", "get"], ["global", "export"], ["global", "clear"],
)  # fmt: skip


def exits(capsys, *line: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as raised:
        main(line)
    return (raised.value.code, *capsys.readouterr())


@pytest.mark.parametrize("line", [[], ["vectors"], ["conditions"], ["runs"], ["global"]])
def test_a_command_without_an_action_prints_its_help(capsys, line):
    assert main(line) == 0
    out, err = capsys.readouterr()
    assert out.startswith(" ".join(["usage: rheostat", *line]))
    assert err == ""


@pytest.mark.parametrize("line", COMMANDS, ids=" ".join)
def test_every_command_is_described_and_shows_an_example_that_it_takes(capsys, line):
    code, out, _ = exits(capsys, *line, "--help")
    assert code == 0
    _, _, rest = out.partition("\n\n")
    description = rest.partition("\n\n")[0]
    assert description.endswith("."), description
    assert "  rheostat " + " ".join(line) in rest


def test_the_help_of_the_whole_names_the_guide(capsys):
    _, out, _ = exits(capsys, "--help")
    assert "docs/client.md" in out
    assert '  rheostat generate "My day was"' in out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["genrate", "x"], "there is no command 'genrate': did you mean 'generate'?"),
        (["frobnicate"], "there is no command 'frobnicate'; there are serve, generate, "),
        (["vectors", "lst"], "there is no action 'lst': did you mean 'list'?"),
        (["generate", "x", "--max-tokns", "3"], "no --max-tokns: did you mean '--max-tokens'?"),
        (["generate", "x", "--frob"], "there is no --frob"),
        (["generate", "x", "--max-tok", "4"], "no --max-tok: did you mean '--max-tokens'?"),
        (["serve", "demo", "--max-num-seq", "4"],
         "no --max-num-seq: did you mean '--max-num-seqs'?"),
        (["vectors", "get", "joy", "a.npy", "b"], "too many arguments: b"),
        (["generate", "The", "weather", "is"],
         "too many arguments: weather is; put a prompt of several words in quotes"),
        (["generate", "x", "--steer", "tone", "0.5"],
         "too many arguments: 0.5; a scale is joined to its vector by a colon, as in "
         "--steer joy:0.5"),
        (["generate", "--steer", "tone", "0.5", "x"],
         "too many arguments: x; a scale is joined to its vector by a colon"),
        (["serve", "--model", "demo"], "the model comes without a flag: rheostat serve demo"),
        (["serve", "--model=demo"], "the model comes without a flag: rheostat serve demo"),
        (["serve", "--model"], "the model comes without a flag: rheostat serve MODEL"),
        (["watch"], "are required: --probe, and one of --request, --label, --every"),
        (["subscribe"], "are required: --points, and one of --request, "),
        (["generate"], "the following arguments are required: PROMPT"),
        (["subscribe", "--every", "--points", "p", "--overload", "fial"],
         "--overload cannot be 'fial': did you mean 'fail'?"),
    ],
)  # fmt: skip
def test_a_slip_is_answered_in_two_lines(capsys, line, said):
    code, out, err = exits(capsys, *line)
    lines = err.splitlines()
    assert (code, out, len(lines)) == (2, "", 2)
    assert said in lines[0]
    assert lines[1].startswith("  see rheostat")
    assert lines[1].endswith(" --help")


@pytest.mark.parametrize(
    "line", [["subscribe", "--every"], ["watch", "--request", "r"], ["watch", "--request=r"]]
)
def test_a_flag_that_was_given_is_not_asked_for(capsys, line):
    _, _, err = exits(capsys, *line)
    assert "are required: --p" in err
    assert "one of" not in err


LISTED = pb.ListVectorsResponse()
text_format.Parse(
    """name: "joy" dtype: DTYPE_FLOAT32 shape: 1 shape: 8 description: "bright" request_count: 2
       sites { points: POINT_RESID_POST range { start: 2 stop: 6 } }
       store_time { seconds: 1767225600 }""",
    LISTED.vectors.add(digest=b"\xab" * 32),
)
text_format.Parse("dtype: DTYPE_FLOAT16 shape: 2 shape: 8", LISTED.vectors.add(digest=b"\xcd" * 32))


def test_vectors_are_listed_below_a_head(server, capsys):
    server.on("ListVectors", LISTED)
    assert main(["vectors", "list", "--all", "--target", server.target]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "DIGEST        NAME  TYPE     SHAPE   SITES           DESCRIPTION",
        "abababababab  joy   float32  [1, 8]  resid_post 2-5  bright",
        "cdcdcdcdcdcd  -     float16  [2, 8]  -",
    ]
    server.on("ListVectors", pb.ListVectorsResponse())
    assert main(["vectors", "list", "--target", server.target]) == 0
    assert capsys.readouterr() == ("", "rheostat: no vectors are stored\n")


def test_vectors_without_a_name_are_counted(server, capsys):
    server.on("ListVectors", LISTED)
    assert main(["vectors", "list", "--target", server.target]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["DIGEST", "abababababab"]
    assert err == "rheostat: 1 further vector without a name: --all lists all\n"
    server.on("ListVectors", pb.ListVectorsResponse(vectors=[LISTED.vectors[1]] * 2))
    assert main(["vectors", "list", "--target", server.target]) == 0
    said = "rheostat: 2 vectors without a name: --all lists all\n"
    assert capsys.readouterr() == ("", said)


def test_vectors_are_listed_as_json(server, capsys):
    server.on("ListVectors", LISTED)
    assert main(["vectors", "list", "--json", "--target", server.target]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "digest": "ab" * 32, "name": "joy", "dtype": "float32", "shape": [1, 8],
        "points": ["resid_post"], "layers": [2, 3, 4, 5], "description": "bright",
        "request_count": 2, "store_time": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    assert (second["name"], second["points"], second["layers"]) == (None, None, None)
    server.on("ListVectors", pb.ListVectorsResponse())
    assert main(["vectors", "list", "--json", "--target", server.target]) == 0
    assert capsys.readouterr() == ("[]\n", "")


def runs() -> run_service_pb2.ListRunsResponse:
    answer = run_service_pb2.ListRunsResponse()
    run = answer.runs.add()
    run.run_id = "clean"
    for layer in (2, 3):
        run.sites.add(point="POINT_RESID_POST", layer=layer)
    run.positions.add(start=0, count=8)
    run.prompt_token_ids.ids.extend([1, 5])
    run.labels["team"] = "red"
    run.lease_expire_time.FromSeconds(int(time.time()) + 100)
    return answer


def test_runs_are_listed_below_a_head(server, capsys):
    server.on("ListRuns", runs())
    assert main(["runs", "list", "--target", server.target]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "SITES", "POSITIONS", "BYTES", "LEASE", "LABELS"]
    assert line.startswith("clean  resid_post 2-3  0-7")
    assert line.endswith("team=red")
    server.on("ListRuns", run_service_pb2.ListRunsResponse())
    assert main(["runs", "list", "--target", server.target]) == 0
    assert capsys.readouterr() == ("", "rheostat: no runs are stored\n")


def test_runs_are_listed_as_json(server, capsys):
    server.on("ListRuns", runs())
    assert main(["runs", "list", "--json", "--target", server.target]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["id"] == "clean"
    assert run["sites"][0] == {"point": "resid_post", "layer": 2}
    assert run["positions"] == [{"start": 0, "stop": 8}]
    assert run["labels"] == {"team": "red"}


def test_info_and_the_server_wide_steering_are_there_as_json(server, capsys):
    server.on("GetModel", engine_service_pb2.GetModelResponse(model_name="demo", width=128))
    server.on("GetStats", engine_service_pb2.GetStatsResponse(leaked_count=1))
    assert main(["info", "--json", "--target", server.target]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"]["name"], found["model"]["width"]) == ("demo", 128)
    assert found["stats"]["leaked_count"] == 1
    server.on("GetGlobal", pb.GetGlobalResponse(version=3))
    assert main(["global", "get", "--json", "--target", server.target]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["interventions"]) == (3, [])


def test_what_is_deleted_is_said_in_a_sentence(server, capsys):
    server.on("DeleteName", pb.DeleteNameResponse(digest=b"\xab" * 32))
    assert main(["vectors", "delete", "joy", "--target", server.target]) == 0
    assert capsys.readouterr().out == f"deleted the name joy of {'ab' * 32}\n"


@pytest.mark.parametrize("count", [1, 40_000])
def test_a_reader_that_closes_the_pipe_ends_the_command_as_a_signal_would(server, count):
    listed = pb.ListVectorsResponse(vectors=[LISTED.vectors[0]] * min(count, 1000))
    server.on("ListVectors", listed)
    command = [sys.executable, "-m", "rheostat", "vectors", "list", "--target", server.target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        done.stdout.close()
        said = done.stderr.read()
    assert (done.returncode, said) == (141, b"")


def test_a_prompt_is_read_from_stdin(server, capsys, monkeypatch):
    events = ["started {}", "finished { reason: FINISH_REASON_LENGTH }", "receipt {}"]
    answer = generation_service_pb2.GenerateResponse
    server.on("Generate", [text_format.Parse(event, answer()) for event in events])
    monkeypatch.setattr(sys, "stdin", io.StringIO("My day\nwas\n"))
    assert main(["generate", "-", "--target", server.target]) == 0
    assert server.asked[0].text == "My day\nwas"


def test_the_version_of_the_command_is_the_packages(capsys):
    _, out, _ = exits(capsys, "--version")
    assert out == f"rheostat {rheostat.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "field"),
    [
        ("-1", "positions { start: -1 }"),
        ("0,5", "positions { start: 0 end: 1 } } include { positions { start: 5 end: 6 }"),
        ("prompt", "phase: PHASE_PROMPT"),
    ],
)
def test_subscribe_takes_positions_too(monkeypatch, typed, field):
    line = ["subscribe", "--every", "--points", "resid_post", f"--where={typed}"]
    args = _parser().parse_args(line)
    expected = text_format.Parse(f"include {{ {field} }}", selector_pb2.Selector())
    assert to_wire(selector_of(args.where)) == expected
