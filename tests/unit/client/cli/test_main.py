"""The command line: what it asks for, what it prints, and how it fails."""

import argparse
import io
import os
import signal
import subprocess
import sys
import threading
import types
from importlib.machinery import ModuleSpec

import grpc
import numpy as np
import pytest
from google.protobuf import text_format

from rheostat._cli import _child, _progress, info, main
from rheostat._cli._common import CommandError, layers, points
from rheostat._cli._progress import Phase
from rheostat._cli._signals import exiting_on_signals
from rheostat_server.config import ServerConfig
from rheostat_wire.v1 import (
    engine_service_pb2,
    generation_service_pb2,
    steering_service_pb2,
)


def generation(
    *texts: str, finished: str = "reason: FINISH_REASON_LENGTH"
) -> list[generation_service_pb2.GenerateResponse]:
    lines = [f'tokens {{ token_ids: 1 text: "{text}" }}' for text in texts]
    lines += [f"finished {{ {finished} }}", 'receipt { request_id: "r1" }']
    return [
        text_format.Parse(line, generation_service_pb2.GenerateResponse())
        for line in ["started {}", *lines]
    ]


JOY = steering_service_pb2.ListVectorsResponse()
text_format.Parse(
    """name: "joy" dtype: DTYPE_FLOAT32 shape: 1 shape: 8 description: "bright"
       sites { points: POINT_RESID_POST range { start: 2 stop: 6 } }""",
    JOY.vectors.add(digest=b"\xab" * 32),
)
text_format.Parse("dtype: DTYPE_FLOAT16 shape: 2 shape: 8", JOY.vectors.add(digest=b"\xcd" * 32))


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def number(request):
    """A signal that ends a process, also if the tests run under nohup."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_a_command_that_is_terminated_ends_its_streams(number, monkeypatch):
    ended = []

    def run(args):
        try:
            os.kill(os.getpid(), number)
        finally:
            ended.append(True)

    monkeypatch.setattr(info, "run", run)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as left:
        main(["info"])
    assert left.value.code == 128 + number
    assert ended == [True]
    assert signal.getsignal(number) == before


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exiting_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("all", "all"), ("3", [3]), ("2-5", [2, 3, 4, 5]), ("0, 4,7-8", [0, 4, 7, 8])],
)
def test_layers_are_read_as_people_write_them(text, expected):
    assert layers(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "a", "1-", "1,,2", "0-99999999999", "0-999,1-26"])
def test_layers_that_cannot_be_read_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        layers(text)


@pytest.mark.parametrize(
    ("finished", "said"),
    [
        ('reason: FINISH_REASON_WATCH watch_label: "gloomy"', "a watch ended the text: gloomy"),
        ("reason: FINISH_REASON_WATCH", "a watch ended the text"),
        (
            'reason: FINISH_REASON_RULE rule_name: "grim" rule_label: "too grim" policy_version: 2',
            "the rule grim of the server ended the text: too grim",
        ),
    ],
)
def test_a_text_that_others_ended_is_reported(finished, said, server, capsys):
    server.on("Generate", generation(" it", finished=finished))
    assert main(["generate", "My day", "--target", server.target]) == 0
    assert capsys.readouterr() == (" it\n", f"rheostat: {said}\n")


def test_points_are_read_as_people_write_them():
    assert points("resid_pre, mlp_out") == ["resid_pre", "mlp_out"]


def test_generate_prints_the_text_alone(server, capsys):
    server.on("Generate", generation(" it", " was"))
    assert main(["generate", "My day", "--target", server.target]) == 0
    assert capsys.readouterr() == (" it was\n", "")
    assert server.asked == [
        text_format.Parse(
            'text: "My day" sampling { max_tokens: 128 } return_prompt_token_ids: true',
            generation_service_pb2.GenerateRequest(),
        )
    ]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second in the C locale
def test_a_prompt_on_stdin_that_is_not_utf_8_is_a_wrong_command_line(
    server, capsys, monkeypatch, errors
):
    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", typed)
    assert main(["generate", "-", "--target", server.target]) == 2
    message = "rheostat: the prompt on stdin is not UTF-8: it has the byte 0xe9\n"
    assert (capsys.readouterr(), server.asked) == (("", message), [])


def test_generate_gives_its_request_labels(server, capsys):
    server.on("Generate", generation(" ok"))
    line = ["generate", "x", "--target", server.target]
    assert main([*line, "--label", "team=red", "--label", "run=a=b"]) == 0
    assert dict(server.asked[0].labels) == {"team": "red", "run": "a=b"}
    with pytest.raises(SystemExit):
        main([*line, "--label", "red"])
    assert "'red' is not KEY=VALUE" in capsys.readouterr().err


def test_generate_steers_where_the_name_says_and_tells_what_was_done(server, capsys):
    server.on("ListVectors", JOY)
    server.on("Generate", generation(" ok"))
    code = main(
        ["generate", "x", "--target", server.target, "--steer", "joy:4", "--max-tokens", "2",
         "--temperature", "0", "--seed", "7"]
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert (code, out) == (0, " ok\n")
    assert err.splitlines()[0] == "receipt of r1"
    assert server.asked[1] == text_format.Parse(
        r"""text: "x" sampling { max_tokens: 2 temperature: 0 seed: 7 }
            steering { interventions {
              sites { points: POINT_RESID_POST range { start: 2 stop: 6 } }
              add { vector { digest: "%s" } scale: 4 }
            } }
            return_prompt_token_ids: true"""
        % (r"\xab" * 32),
        generation_service_pb2.GenerateRequest(),
    )


def test_generate_steers_where_it_is_told(server):
    server.on("ListVectors", JOY)
    server.on("Generate", generation(" ok"))
    line = ["generate", "x", "--target", server.target, "--steer", "joy"]
    assert main([*line, "--points", "resid_mid", "--layers", "0-1"]) == 0
    (done,) = server.asked[-1].steering.interventions
    assert done.sites == text_format.Parse(
        "points: POINT_RESID_MID list { layers: 0 layers: 1 }", type(done.sites)()
    )
    assert (done.add.vector.digest, done.add.scale) == (b"\xab" * 32, 1)


def test_a_name_that_is_not_stored_fails_in_one_line(server, capsys):
    server.on("ListVectors", JOY)
    assert main(["generate", "x", "--target", server.target, "--steer", "jo"]) == 1
    assert capsys.readouterr() == (
        "",
        "rheostat: no vector is named 'jo': did you mean 'joy'? [REASON_NAME_NOT_FOUND]; "
        "rheostat vectors list shows what is stored\n",
    )


def test_vectors_go_from_file_to_server_and_back(server, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    array = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    np.save("tone.npy", array)
    server.on("PutVector", steering_service_pb2.PutVectorResponse())
    server.on("ListVectors", steering_service_pb2.ListVectorsResponse())
    server.on("GetModel", engine_service_pb2.GetModelResponse(model_name="demo", layer_count=8))
    line = ["vectors", "put", "tone.npy", "--points", "resid_mid", "--layers", "4,6"]
    assert main([*line, "--name", "my/tone", "--target", server.target]) == 0
    header = server.asked[2].header
    digest = header.digest.hex()
    assert (header.name, list(header.sites.list.layers)) == ("my/tone", [4, 6])
    assert capsys.readouterr() == (f"{digest}  my/tone\n", "storing my/tone ...\n")

    stored = steering_service_pb2.VectorInfo(
        digest=header.digest, name="my/tone", dtype="DTYPE_FLOAT32", shape=[2, 2]
    )
    parts = [
        steering_service_pb2.GetVectorResponse(info=stored),
        steering_service_pb2.GetVectorResponse(chunk=array.tobytes()),
    ]
    server.on("GetVector", parts)
    (tmp_path / "tone.npy").unlink()
    assert main(["vectors", "get", "my/tone", "--target", server.target]) == 0
    assert capsys.readouterr().out == "tone.npy  float32 [2, 2]\n"
    assert np.array_equal(np.load("tone.npy"), array)
    assert main(["vectors", "get", digest, "b.npy", "--target", server.target]) == 0
    assert server.asked[-1] == steering_service_pb2.GetVectorRequest(digest=header.digest)
    assert main(["vectors", "get", digest, "bare", "--target", server.target]) == 0
    assert np.array_equal(np.load("bare"), array)
    assert capsys.readouterr().out.endswith("bare  float32 [2, 2]\n")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("x.npy", b"", "it is not a .npy file"),
        ("x.txt", b"I am glad.", "it is not a .npy file"),
        ("x.npy", b"\x80\x04.", "it is not a .npy file"),
        ("x.gguf", b"GGUF", "it is not a .npy file; rheostat vectors import reads it"),
        ("x.npy", None, "No such file or directory"),
    ],
)
def test_a_file_that_is_no_array_is_a_wrong_command_line(name, content, why, tmp_path, capsys):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(["vectors", "put", str(path)]) == 2
    assert capsys.readouterr() == ("", f"rheostat: cannot read {path}: {why}\n")


def test_a_file_of_prompts_that_is_absent_is_a_wrong_command_line(tmp_path, capsys):
    line = ["vectors", "derive", "--points", "resid_post", "--layers", "3", "--negative", "x"]
    path = tmp_path / "x.txt"
    assert main([*line, "--positive", str(path)]) == 2
    error = f"rheostat: cannot read {path}: No such file or directory\n"
    assert capsys.readouterr() == ("", error)


def test_info_prints_model_and_counters(server, capsys):
    server.on("GetModel", engine_service_pb2.GetModelResponse(model_name="demo", layer_count=3))
    server.on("GetStats", engine_service_pb2.GetStatsResponse(bank_row_count=8, leaked_count=1))
    assert main(["info", "--target", server.target]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "demo"
    assert lines[-1] == (
        "  now: 0 running, 0 waiting, 0 completed, 0 failed, 0 of 8 bank rows, 0 vectors, "
        "up 0 s, 1 LEAKED"
    )


def test_a_server_that_is_not_there_fails_in_one_line(server, capsys):
    server.stop()
    assert main(["generate", "x", "--target", server.target]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err == (
        f"rheostat: no server answers at {server.target}: nothing listens there; "
        "start one with rheostat serve MODEL, or name one with --target\n"
    )


def test_a_server_that_refuses_is_told_from_one_that_is_not_there(server, capsys, refusal):
    draining = refusal.of(grpc.StatusCode.UNAVAILABLE, "shutting down", "REASON_DRAINING")
    server.on("Generate", draining)
    assert main(["generate", "x", "--target", server.target]) == 1
    assert capsys.readouterr().err == ("rheostat: shutting down [REASON_DRAINING]\n")


def test_what_the_server_refuses_is_told_in_one_line(server, capsys, refusal):
    code = grpc.StatusCode.FAILED_PRECONDITION
    server.on("Generate", refusal.of(code, "no resid_mid\nhere", "REASON_SITE_NOT_SERVED"))
    assert main(["generate", "x", "--target", server.target]) == 1
    assert capsys.readouterr().err == ("rheostat: no resid_mid here [REASON_SITE_NOT_SERVED]\n")


def test_a_wrong_request_exits_as_a_wrong_command_line_does(server, capsys):
    assert main(["generate", "", "--target", server.target]) == 2
    assert capsys.readouterr().err == ("rheostat: the prompt is empty [REASON_MISSING_FIELD]\n")
    with pytest.raises(SystemExit) as raised:
        main(["generate"])
    assert raised.value.code == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            ["generate", "x", "--steer", "joy", "--points", "resid_post", "--layers", "9" * 11],
            "no model has a layer 99999999999 (at layers) [REASON_UNKNOWN_LAYER]",
        ),
        (
            ["global", "clear", "--expected-version", "9" * 23],
            "a version is 0 to 18446744073709551615, not",
        ),
        (["generate", "\udcff"], "a prompt has half a character at 0, U+DCFF"),
        (
            ["vectors", "put", "x.npy", "--description", "\udcff"],
            "a description has half a character at 0, U+DCFF",
        ),
    ],
)
def test_what_no_request_can_hold_is_a_wrong_command_line(
    server, capsys, tmp_path, monkeypatch, line, said
):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.ones(2))
    server.on("ListVectors", JOY)
    server.on("GetModel", engine_service_pb2.GetModelResponse(model_name="demo", layer_count=8))
    assert main([*line, "--target", server.target]) == 2
    out, err = capsys.readouterr()
    reading = (engine_service_pb2.GetModelRequest, steering_service_pb2.ListVectorsRequest)
    assert out == ""
    assert [one for one in server.asked if not isinstance(one, reading)] == []
    assert err.splitlines()[-1].startswith(f"rheostat: {said}")


def test_serve_sets_what_is_named_and_exits_as_the_server_does(monkeypatch):
    seen = []
    serve = types.ModuleType("rheostat_server.serve")
    serve.run = lambda config: seen.append(config) or 3
    for module in (serve, types.ModuleType("vllm")):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert main(["serve", "demo"]) == 3
    line = "serve some/model --host 0.0.0.0 --port 0 --dtype float32 --max-model-len 512"
    line += " --max-num-seqs 8 --max-num-batched-tokens 64 --enforce-eager --seed 3"
    line += " --gpu-memory-utilization 0.5 --tensor-parallel-size 2 --load-format dummy"
    line += " --distributed-executor-backend mp --max-cudagraph-capture-size 16"
    line += " --bank-mib 4 --capture-mib 8 --staging-mib 9 --vector-store-mib 16 --runs-mib 5"
    line += " --vector-dir vectors --enable-log-requests"
    assert main(line.split()) == 3
    assert seen == [
        ServerConfig(model="demo"),
        ServerConfig(
            model="some/model",
            host="0.0.0.0",
            port=0,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            enforce_eager=True,
            seed=3,
            gpu_memory_utilization=0.5,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            max_cudagraph_capture_size=16,
            load_format="dummy",
            bank_bytes=4 * 2**20,
            capture_bytes=8 * 2**20,
            staging_bytes=9 * 2**20,
            vector_store_bytes=16 * 2**20,
            runs_bytes=5 * 2**20,
            vector_dir="vectors",
            enable_log_requests=True,
        ),
    ]


@pytest.mark.parametrize("missing", ["rheostat_server", "vllm"])
@pytest.mark.parametrize(
    ("line", "task"),
    [
        (["serve", "demo"], "serving"),
        (["demo"], "the demo, unless --target names a server,"),
    ],
)
def test_what_needs_the_server_says_at_once_what_to_install(
    monkeypatch, capsys, missing, line, task
):
    for name in ("rheostat_server", "vllm"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, None if name == missing else module)
    assert main(line) == 1
    assert capsys.readouterr() == (
        "",
        f"rheostat: {task} needs the server (no module named {missing}): "
        "in a checkout, run make setup (CPU) or pip install '.[cuda]' (GPU)\n",
    )


def test_without_a_terminal_progress_is_one_line_per_phase():
    log = io.StringIO()
    with Phase("loading", log) as phase:
        phase.note("half of it")
    assert log.getvalue() == "loading ...\n"


def test_a_long_phase_gives_signs_of_life_without_a_terminal(monkeypatch):
    monkeypatch.setattr(_progress, "_LOGGED", 0.01)

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            if "half" in text:
                seen.set()
            return super().write(text)

    seen, log = threading.Event(), Log()
    with Phase("loading", log) as phase:
        phase.note("half of it")
        assert seen.wait(10)
    assert "loading: 0 s, half of it\n" in log.getvalue()


def test_on_a_terminal_progress_ends_with_what_became_of_it():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    log = Terminal()
    with pytest.raises(CommandError), Phase("loading", log):
        raise CommandError("no")
    assert log.getvalue().endswith("\r\x1b[Kloading: failed after 0 s\n")


def test_a_demo_server_that_ends_early_tells_why(monkeypatch):
    def popen(_command, *, stdout, **options):
        program = "print('loading'); print('rheostat: the port is in use'); print('bye')"
        return subprocess_popen([sys.executable, "-c", program], stdout=stdout, **options)

    subprocess_popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(CommandError) as raised, _child.demo_server():
        pytest.fail("no server is there")
    assert str(raised.value) == "the server ended: the port is in use"


def test_a_demo_that_is_terminated_takes_its_server_with_it(monkeypatch, number):
    children = []

    def popen(_command, **options):
        program = "import time; time.sleep(60)"
        children.append(subprocess_popen([sys.executable, "-c", program], **options))
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        return children[0]

    subprocess_popen, before = subprocess.Popen, signal.getsignal(number)
    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(SystemExit) as raised, exiting_on_signals(), _child.demo_server():
        pytest.fail("no server is there")
    assert raised.value.code == 128 + number
    assert children[0].poll() == -signal.SIGTERM
    assert signal.getsignal(number) == before


def test_a_starting_server_shows_its_own_messages_alone(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("WARNING 11-22 [__init__.py:1] Triton is not installed\n")
    assert _child.progress_in(log) == ""
    with log.open("a") as lines:
        own = "2026-11-22 19:00:00,123 INFO rheostat_server"
        print(f"{own}.serve: listening on 127.0.0.1:1, loading demo", file=lines)
        print(f"{own}.warm_up: running 8 requests before serving", file=lines)
        print("(EngineCore pid=7) ERROR 11-22 [core.py:2] no tcmalloc", file=lines)
    assert _child.progress_in(log) == "running 8 requests before serving"
    with log.open("a") as lines:
        print(f"{own}.vllm_engine: {'a word, ' * 20}", file=lines)
    assert _child.progress_in(log) == "a word, " * 6 + "a word, ..."


def test_something_else_at_the_target_is_no_rheostat_server(server, tmp_path, capsys, refusal):
    server.on("Check", refusal(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
    assert main(["demo", "--target", server.target, "--out", str(tmp_path / "demo.png")]) == 1
    assert "no Rheostat server listens there, or an older one" in capsys.readouterr().err


def test_output_that_nobody_reads_any_more_ends_quietly(server):
    server.on("Generate", generation(" it" * 30_000, " was"))
    command = [sys.executable, "-m", "rheostat", "generate", "x", "--target", server.target]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    assert (child.stderr.read(), child.wait(30)) == (b"", 141)
    child.stderr.close()


@pytest.mark.parametrize("port", ["-1", "65536", "http", "٣"])
def test_a_port_that_cannot_be_is_refused(capsys, port):
    with pytest.raises(SystemExit) as raised:
        main(["serve", "demo", f"--port={port}"])
    assert raised.value.code == 2
    message = f"rheostat serve: --port: a port is a number from 0 to 65535, not {port!r}\n"
    assert capsys.readouterr().err.startswith(message)


def test_a_target_without_a_port_is_wrongly_asked(capsys):
    message = "target needs a port, e.g. localhost:50051; 'localhost' has none"
    assert main(["info", "--target", "localhost"]) == 2
    assert capsys.readouterr().err == f"rheostat: {message} [REASON_INVALID_VALUE]\n"
