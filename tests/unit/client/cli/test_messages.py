"""What the command line says where something is wrongly typed, not there, or not ready."""

import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf import text_format
from grpc_health.v1.health_pb2 import HealthCheckResponse

import rheostat
from rheostat._cli import _child, main
from rheostat._cli._common import CommandError
from rheostat._cli._words import error_text
from rheostat._connection import readiness
from rheostat._event_streams.reconnect import ReconnectPolicy
from rheostat._subscriptions.state import RESUME_ADVICE
from rheostat_wire.v1 import engine_service_pb2, generation_service_pb2
from rheostat_wire.v1 import steering_service_pb2 as pb

PLAIN = [
    text_format.Parse(text, generation_service_pb2.GenerateResponse())
    for text in (
        "started {}",
        'tokens { token_ids: 1 text: " ok" }',
        "finished { reason: FINISH_REASON_LENGTH }",
        'receipt { request_id: "r1" }',
    )
]
LOADING = HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
SERVING = HealthCheckResponse(status=HealthCheckResponse.SERVING)


def digest(first: str) -> bytes:
    return bytes.fromhex(first.ljust(64, "0"))


STORED = pb.ListVectorsResponse()
for first, name in (
    ("abcdef0123", "joy"),
    ("abcdef0124", ""),
    ("12345678aa", "feedface"),
    ("feedface00", "sad"),
    ("feedface00", "grim"),
):
    STORED.vectors.add(
        digest=digest(first), name=name, dtype="DTYPE_FLOAT32", shape=[1, 2],
        sites={"points": ["POINT_RESID_POST"], "list": {"layers": [3]}},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("joy", "abcdef0123"),
        ("abcdef0123", "abcdef0123"),
        ("ABCDEF0124", "abcdef0124"),
        (digest("abcdef0124").hex(), "abcdef0124"),
        ("feedface", "12345678aa"),
        ("feedface0", "feedface00"),
    ],
)
def test_a_vector_is_named_by_the_beginning_of_its_digest_too(server, typed, meant):
    server.on("ListVectors", STORED)
    server.on("Generate", PLAIN)
    line = ["generate", "x", "--target", server.target, "--steer", f"{typed}:2"]
    assert main(line) == 0
    (done,) = server.asked[-1].steering.interventions
    assert (done.add.vector.digest, done.add.scale) == (digest(meant), 2)
    assert list(done.sites.list.layers) == [3]
    assert main([*line, "--points", "resid_mid", "--layers", "1"]) == 0
    (done,) = server.asked[-1].steering.interventions
    assert done.add.vector.digest == digest(meant)
    assert list(done.sites.list.layers) == [1]


@pytest.mark.parametrize(("action", "ending"), [("get", ".npy"), ("export", ".npz")])
def test_a_vector_is_fetched_by_the_beginning_of_its_digest(server, tmp_path, action, ending):
    glad = rheostat.inline([1.0, 2.0])
    info = pb.VectorInfo(digest=bytes.fromhex(glad.digest), dtype="DTYPE_FLOAT32", shape=[1, 2])
    chunk = pb.GetVectorResponse(chunk=glad.values.tobytes())
    server.on("GetVector", [pb.GetVectorResponse(info=info), chunk])
    listed = pb.ListVectorsResponse(vectors=[*STORED.vectors, info])
    listed.vectors[-1].name = "glad"
    listed.vectors[-1].sites.CopyFrom(STORED.vectors[0].sites)
    server.on("ListVectors", listed)
    path = tmp_path / f"x{ending}"
    line = ["vectors", action, glad.digest[:8], str(path), "--target", server.target]
    assert main(line) == 0
    assert server.asked[-1] == pb.GetVectorRequest(digest=info.digest)
    if action == "export":
        found = rheostat.load_vector(path)
        assert (found.name, found.points, found.layers) == ("glad", ("resid_post",), (3,))


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ("abcdef01", 2, "2 digests begin with abcdef01: give more digits"),
        (
            "99999999",
            1,
            "no vector is named '99999999' or has a digest that begins with it "
            "[REASON_VECTOR_NOT_FOUND]; rheostat vectors list --all shows what is stored",
        ),
        (
            "abcdef0",
            1,
            "no vector is named 'abcdef0' [REASON_NAME_NOT_FOUND]; "
            "rheostat vectors list shows what is stored",
        ),
    ],
)
def test_a_digest_s_beginning_that_says_too_little_or_nothing_is_refused(
    server, capsys, typed, code, said
):
    server.on("ListVectors", STORED)
    assert main(["generate", "x", "--target", server.target, "--steer", typed]) == code
    assert capsys.readouterr() == ("", f"rheostat: {said}\n")


def test_a_name_that_the_server_does_not_know_points_to_the_list(server, capsys, refusal):
    unknown = refusal.of(
        grpc.StatusCode.NOT_FOUND, 'no vector has the name "jooy"', "REASON_NAME_NOT_FOUND"
    )
    server.on("GetVector", [unknown])
    assert main(["vectors", "get", "jooy", "--target", server.target]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        'rheostat: no vector has the name "jooy" [REASON_NAME_NOT_FOUND]; '
        "rheostat vectors list shows what is stored"
    )


def test_a_server_that_loads_its_model_is_waited_for_with_wait(server, capsys, refusal):
    loading = refusal.of(
        grpc.StatusCode.UNAVAILABLE, "the model is being loaded", "REASON_WARMING_UP"
    )
    server.on("Generate", [loading])
    assert main(["generate", "x", "--target", server.target]) == 1
    assert capsys.readouterr().err == (
        "rheostat: the model is being loaded (--wait waits for it) [REASON_WARMING_UP]\n"
    )


def test_a_demo_without_its_server_says_how_to_start_one(server, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(readiness, "UNREACHABLE", 0.0)
    server.stop()
    assert main(["demo", "--target", server.target, "--out", str(tmp_path / "demo.png")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"rheostat: no server answers at {server.target}: nothing listens there; waited 0 s; "
        "start one with rheostat serve MODEL, or name one with --target"
    )


def test_a_demo_waits_until_its_server_is_ready_or_has_ended(server, monkeypatch):
    class Ended(Exception):
        pass

    checks = []

    def check():
        checks.append(len(server.asked))
        if len(checks) == 9:
            raise Ended

    monkeypatch.setattr(readiness, "POLL", 0.0)
    monkeypatch.setattr(_child, "_CHECK_EVERY", 0.0)
    server.on("Check", LOADING, LOADING, SERVING)
    _child._wait_until_ready(server.target, check)
    assert checks == [0, 1, 2], "the process is looked at between health checks"
    server.on("Check", LOADING)
    with pytest.raises(Ended):
        _child._wait_until_ready(server.target, check)
    monkeypatch.setattr(_child, "_STARTUP", 0.0)
    with pytest.raises(CommandError, match="was not ready after 0 s"):
        _child._wait_until_ready(server.target, lambda: None)


def test_wait_waits_until_the_server_is_ready(server, capsys, monkeypatch):
    monkeypatch.setattr(readiness, "POLL", 0.0)
    server.on("Check", LOADING, LOADING, SERVING)
    server.on("Generate", PLAIN)
    assert main(["generate", "x", "--target", server.target, "--wait"]) == 0
    assert capsys.readouterr() == (" ok\n", f"waiting for {server.target} ...\n")
    assert len(server.asked) == 4


def test_wait_ends_after_the_seconds_given(server, capsys):
    server.on("Check", LOADING)
    assert main(["info", "--target", server.target, "--wait", "0"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"rheostat: waited 0 s for the server at {server.target} to be ready; "
        "its health is NOT_SERVING"
    )


def test_wait_does_not_take_a_prompt_for_seconds(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["generate", "--wait", "My day was"])
    assert raised.value.code == 2
    assert capsys.readouterr().err.splitlines()[0] == (
        "rheostat generate: --wait: 'My day was' is no number of seconds; write --wait "
        "without one last"
    )


def test_the_environment_names_the_server_unless_the_command_does(server, capsys, monkeypatch):
    server.on("ListVectors", pb.ListVectorsResponse())
    monkeypatch.setenv("RHEOSTAT_TARGET", server.target)
    assert main(["vectors", "list"]) == 0
    assert main(["vectors", "list", "--target", "localhost:1"]) == 1
    assert "no server answers at localhost:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [["info"], ["generate", "x"], ["vectors", "list"], ["global", "get"]],
)
def test_every_command_that_asks_a_server_can_wait_for_it(server, line):
    server.on("Check", SERVING)
    server.on("GetModel", engine_service_pb2.GetModelResponse())
    server.on("GetStats", engine_service_pb2.GetStatsResponse())
    server.on("Generate", PLAIN)
    server.on("ListVectors", STORED)
    server.on("GetGlobal", pb.GetGlobalResponse())
    assert main([*line, "--target", server.target, "--wait=5"]) == 0


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (["generate", "x", "--temprature", "0"], "rheostat generate"),
        (["vectors", "put", "x.npy", "--nam", "a", "--layer"], "rheostat vectors put"),
        (["global", "clear", "--nope"], "rheostat global clear"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_help_of_its_command(capsys, line, command):
    with pytest.raises(SystemExit) as raised:
        main(line)
    assert raised.value.code == 2
    assert capsys.readouterr().err.endswith(f"\n  see {command} --help\n")


def test_layers_that_count_down_are_told(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "x", "--layers", "5-2"])
    message = "rheostat generate: --layers: 5-2 counts down: write 2-5\n"
    assert capsys.readouterr().err.startswith(message)


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert re.fullmatch(r"rheostat \S.*\n", capsys.readouterr().out)


STARTING = """
import os, signal, sys

class Interrupt:
    @staticmethod
    def find_spec(name, *_):
        if name == "rheostat._client.engine":
            os.kill(os.getpid(), signal.SIGINT)

%s
sys.meta_path.insert(0, Interrupt)
sys.argv = ["rheostat", "--version"]
from rheostat_command import main
sys.exit(main())
"""


@pytest.fixture
def interruptible():
    """A shell's background job ignores SIGINT, and so would the processes that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_the_command_starts_ends_it_quietly():
    done = subprocess.run([sys.executable, "-c", STARTING % ""], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_an_interrupt_that_is_ignored_stays_ignored():
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    done = subprocess.run([sys.executable, "-c", STARTING % ignore], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"rheostat ")


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_a_running_command_exits_with_130(server):
    ready = threading.Event()
    server.on("Check", lambda _request, _context: ready.set() or LOADING)
    program = "import sys; from rheostat_command import main; sys.exit(main())"
    line = ["info", "--target", server.target, "--wait"]
    child = subprocess.Popen([sys.executable, "-c", program, *line], stderr=subprocess.PIPE)
    assert ready.wait(30)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert (child.returncode, b"Traceback" in err) == (130, False)


def test_a_lost_subscription_does_not_advise_a_python_call():
    state = SimpleNamespace(
        id="s", kind="subscription", when_lost=RESUME_ADVICE, reconnect_timeout=-1.0
    )
    policy = ReconnectPolicy(state, "host:1")
    lost = rheostat.Unavailable("lost")
    policy.pause(lost)
    with pytest.raises(rheostat.Unavailable) as raised:
        policy.pause(lost)
    assert "engine.resume" in str(raised.value)
    assert error_text(raised.value) == "could not connect to host:1 within -1 s"


def test_the_layer_of_another_librarys_name_is_a_flag():
    with pytest.raises(rheostat.InvalidRequest) as raised:
        rheostat.Capture("blocks.3.hook_resid_post", 3)
    assert 'write "resid_post" with --layers 3' in error_text(raised.value)
