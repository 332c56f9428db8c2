"""Errors: every reason of the contract, with all that the server said about it."""

import re
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2

import rheostat
from rheostat_wire.v1 import engine_service_pb2, errors_pb2, generation_service_pb2

ERRORS_PROTO = Path(__file__).parents[3] / "proto" / "rheostat" / "v1" / "errors.proto"
CLASSES = {
    "INVALID_ARGUMENT": rheostat.InvalidRequest,
    "NOT_FOUND": rheostat.NotFound,
    "ALREADY_EXISTS": rheostat.AlreadyExists,
    "FAILED_PRECONDITION": rheostat.Refused,
    "RESOURCE_EXHAUSTED": rheostat.ResourceExhausted,
    "OUT_OF_RANGE": rheostat.OutOfRange,
    "DATA_LOSS": rheostat.DataLoss,
    "ABORTED": rheostat.Aborted,
    "CANCELLED": rheostat.Cancelled,
    "DEADLINE_EXCEEDED": rheostat.DeadlineExceeded,
    "UNAVAILABLE": rheostat.Unavailable,
    "UNAUTHENTICATED": rheostat.Unauthenticated,
    "PERMISSION_DENIED": rheostat.PermissionDenied,
    "UNIMPLEMENTED": rheostat.Unimplemented,
    "INTERNAL": rheostat.ServerError,
}


def documented_codes() -> dict[str, str]:
    """Reason to status code, from the comments of the contract."""
    block = re.compile(r"((?:^ *//.*\n)+) *(REASON_\w+) = \d+;", re.MULTILINE)
    found = block.findall(ERRORS_PROTO.read_text())
    return {
        reason: re.search(r"[A-Z]{2,}(_[A-Z]+)*", comment)[0]
        for comment, reason in found
        if reason != "REASON_UNSPECIFIED"
    }


def test_the_contract_gives_every_reason_one_code():
    assert set(documented_codes()) == set(errors_pb2.Reason.keys()) - {"REASON_UNSPECIFIED"}


@pytest.mark.parametrize(("reason", "code"), documented_codes().items())
def test_every_reason_raises_the_class_of_its_code(server, refusal, reason, code):
    server.on("Generate", refusal.of(grpc.StatusCode[code], "so it is", reason, layers="8"))
    with (
        rheostat.connect(server.target) as engine,
        pytest.raises(rheostat.RheostatError) as raised,
    ):
        engine.generate("x")
    error = raised.value
    assert (type(error), error.code.name) == (CLASSES[code], code)
    hint = {
        "REASON_WARMING_UP": " (engine.wait_until_ready() waits for it)",
        "REASON_NAME_NOT_FOUND": " (engine.vectors.list() shows what is stored)",
    }.get(reason, "")
    assert (error.reason, error.metadata) == (reason, {"layers": "8"})
    assert (error.message, error.details) == (f"so it is{hint}", "")


def test_all_details_are_kept(client, server, refusal):
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=500_000_000))
    fields = error_details_pb2.BadRequest()
    fields.field_violations.add(field="steering.interventions[2].where", description="is empty")
    fields.field_violations.add(field="captures[0].sites", description="has no layer")
    unmet = error_details_pb2.PreconditionFailure()
    unmet.violations.add(type="site", subject="resid_mid[3]", description="runs in parallel")
    thing = error_details_pb2.ResourceInfo(resource_type="vector", resource_name="joy")
    info = error_details_pb2.ErrorInfo(reason="REASON_INVALID_VALUE", domain="rheostat.dev")
    code = grpc.StatusCode.INVALID_ARGUMENT
    server.on("Tokenize", refusal(code, "wrong", info, fields, unmet, thing, retry))
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.tokenize("x"))
    error = raised.value
    assert error.path == "steering.interventions[2].where"
    assert error.violations == (
        rheostat.Violation("steering.interventions[2].where", "is empty"),
        rheostat.Violation("captures[0].sites", "has no layer"),
        rheostat.Violation("resid_mid[3]", "runs in parallel"),
    )
    assert error.resource == rheostat.Resource("vector", "joy")
    assert error.retry_after == 0.5
    assert str(error) == "wrong (at steering[2].where) [REASON_INVALID_VALUE]"


@pytest.mark.parametrize(
    ("path", "argument"),
    [
        ("captures[1].kept", "capture[1].kept"),
        ("open.captures[0].sites.list.layers[0]", "capture[0].layers[0]"),
        ("open.filter.requests.request_ids[2]", "requests[2]"),
        ("open.filter.labels.labels", "labels"),
        ("open.credit_bytes", "credit"),
        ("open.buffer_bytes", "buffer_bytes"),
        ("sampling.seed", "seed"),
        ("captures[1].sink.sink_name", "capture[1].to"),
        ("captures[0].run.lease", "capture[0].to.lease"),
        ("chat.messages[1].content", "prompt[1].content"),
        ("token_ids.ids[4]", "prompt[4]"),
        ("token_ids[4]", "token_ids[4]"),
        ("header.description", "description"),
        ("layer_window", "window"),
        ("max_concurrent_cells", "concurrency"),
        ("lora_name", "lora"),
        ("sites.list.layers[2]", "layers[2]"),
        ("steering.interventions[1].sites.points[0]", "steering[1].points[0]"),
        ("grades[1].token.metric", "grades[1]"),
        ("grades[1].probe.probe.read.vector", "grades[1].vector"),
        ("grades[1].probe.pool", "grades[1].pool"),
        ("pairs[2].noise.noise_count", "pairs[2].corrupt.count"),
        ("pairs[2].noise.noise.std", "pairs[2].corrupt.noise.std"),
        ("pairs[0].run_id", "pairs[0].corrupt"),
        ("pairs[0].foil.alternatives[1].ids[3]", "pairs[0].foil[1][3]"),
        ("rules[0].conditions[1].combine_sites", "rules[0].conditions[1].combine"),
    ],
)
def test_what_the_server_says_reads_as_arguments(client, server, refusal, path, argument):
    fields = error_details_pb2.BadRequest()
    fields.field_violations.add(field=path, description="no OVERLOAD_DROP_OLDEST for ENCODING_RP8")
    said = fields.field_violations[0].description
    server.on("Tokenize", refusal(grpc.StatusCode.INVALID_ARGUMENT, said, fields))
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.tokenize("x"))
    told = f'no overload="drop_oldest" for encoding="rp8" (at {argument})'
    assert (str(raised.value), raised.value.path) == (told, path)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("use NORMALISE_UNIT", 'use normalise="unit"'),
        (
            "only ACTIVATION_JUMP_RELU has a threshold",
            'only activation="jump_relu" has a threshold',
        ),
        ("a sum (COMBINE_SUM) is any number", 'a sum (combine="sum") is any number'),
        ("POOL_MEAN is the mean", 'pool="mean" is the mean'),
        ("DERIVE_METHOD_PRINCIPAL_COMPONENT pairs them", 'method="principal_component" pairs them'),
        (
            "Name FIT_DIRECTION_DIFFERENCE_OF_MEANS alone",
            'Name directions="difference_of_means" alone',
        ),
    ],
)
def test_an_enum_in_an_error_reads_as_an_argument(client, server, refusal, said, told):
    server.on("Tokenize", refusal(grpc.StatusCode.INVALID_ARGUMENT, said))
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.tokenize("x"))
    assert raised.value.message == told


def test_a_grade_in_an_error_reads_as_its_word(client, server, refusal):
    said = "METRIC_LOGIT_DIFFERENCE of the clean prompt is 0"
    server.on("Tokenize", refusal(grpc.StatusCode.FAILED_PRECONDITION, said))
    with pytest.raises(rheostat.Refused) as raised:
        client.run(lambda engine: engine.tokenize("x"))
    assert raised.value.message == '"logit_difference" of the clean prompt is 0'


def test_an_error_without_details_is_mapped_by_its_code_alone(client, server, refusal):
    server.on("Tokenize", refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "too large"))
    with pytest.raises(rheostat.ResourceExhausted) as raised:
        client.run(lambda engine: engine.tokenize("x"))
    assert (raised.value.reason, raised.value.retry_after, raised.value.path) == ("", None, "")
    assert str(raised.value) == "too large"


def test_another_systems_reason_is_not_taken_for_ours(client, server, refusal):
    info = error_details_pb2.ErrorInfo(reason="REASON_QUOTA", domain="elsewhere")
    server.on("Tokenize", refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "no", info))
    with pytest.raises(rheostat.ResourceExhausted) as raised:
        client.run(lambda engine: engine.tokenize("x"))
    assert raised.value.reason == ""


def test_details_that_cannot_be_read_leave_the_code(client, server):
    def answer(_request, context):
        context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff"),))
        context.abort(grpc.StatusCode.NOT_FOUND, "gone")

    server.on("Tokenize", answer)
    with pytest.raises(rheostat.NotFound) as raised:
        client.run(lambda engine: engine.tokenize("x"))
    assert (raised.value.message, raised.value.reason) == ("gone", "")


def test_a_defect_without_a_known_code_is_a_server_error(client, server, refusal):
    server.on("Tokenize", refusal(grpc.StatusCode.UNKNOWN, "boom"))
    with pytest.raises(rheostat.ServerError):
        client.run(lambda engine: engine.tokenize("x"))


def test_no_server_at_the_target_is_unavailable(client, server):
    server.stop()
    with pytest.raises(rheostat.Unavailable) as raised:
        client.run(lambda engine: engine.generate("x"))
    error = raised.value
    assert str(error) == error.message
    assert error.message == (
        f"no server answers at {server.target}: nothing listens there; start one with rheostat "
        "serve MODEL, or connect to a running one"
    )
    assert "failed to connect" in error.details


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "failed to connect ... Failed to connect to remote host: Connection refused",
            "nothing listens there",
        ),
        (
            "DNS resolution failed for nowhere:1: Domain name not found",
            "its host name cannot be resolved",
        ),
        ("errors resolving x: address lookup failed", "its host name cannot be resolved"),
        ("connect: No route to host (113)", "its host cannot be reached"),
        ("Failed to connect to remote host: Network is unreachable", "its host cannot be reached"),
        (
            "failed to connect to all addresses; last error: Timeout occurred: FD Shutdown",
            "its host does not answer",
        ),
        ("recvmsg:Connection reset by peer (104)", "the connection was lost"),
        ("Stream removed (Socket closed)", "the connection was lost"),
        ("something new", "something new"),
    ],
)
def test_why_no_server_answers_is_said_in_words(client, server, refusal, said, cause):
    server.on("Generate", refusal(grpc.StatusCode.UNAVAILABLE, said))
    with pytest.raises(rheostat.Unavailable) as raised:
        client.run(lambda engine: engine.generate("x"))
    assert raised.value.message.startswith(f"no server answers at {server.target}: {cause}; ")
    assert raised.value.details == said


def test_another_server_or_an_older_one_does_not_know_a_call(client, server, refusal):
    said = "Method not found!"  # as gRPC says it
    server.on("Tokenize", refusal(grpc.StatusCode.UNIMPLEMENTED, said))
    with pytest.raises(rheostat.Unimplemented) as raised:
        client.run(lambda engine: engine.tokenize("x"))
    assert str(raised.value) == (
        f"{server.target} does not know this call: no Rheostat server listens there, or an older "
        "one, or a proxy does not pass it on"
    )
    assert raised.value.details == said


def test_a_call_that_was_dropped_before_it_began_says_so(client, server, refusal):
    server.on("Tokenize", refusal(grpc.StatusCode.CANCELLED, "CANCELLED"))  # as gRPC says it
    with pytest.raises(rheostat.Cancelled) as raised:
        client.run(lambda engine: engine.tokenize("x"))
    assert str(raised.value) == (
        f"{server.target} cancelled the call before it began: it ends, or thousands of calls "
        "began at the same time; send the request again"
    )
    assert raised.value.details == "CANCELLED"


@pytest.mark.parametrize("begun", [False, True])
def test_another_reason_to_be_cancelled_stays_as_it_is(client, server, refusal, begun):
    said = "CANCELLED" if begun else "Received RST_STREAM with error code 8"
    started = [generation_service_pb2.GenerateResponse(started={})] if begun else []
    server.on("Generate", [*started, refusal(grpc.StatusCode.CANCELLED, said)])
    with pytest.raises(rheostat.Cancelled) as raised:
        client.run(lambda engine: engine.generate("x"))
    assert str(raised.value) == said


def test_a_connection_that_ends_within_an_answer_is_lost(client, server, refusal):
    started = generation_service_pb2.GenerateResponse(started={})
    server.on("Generate", [started, refusal(grpc.StatusCode.UNAVAILABLE, "reset")])
    with pytest.raises(rheostat.Unavailable) as raised:
        client.run(lambda engine: engine.generate("x"))
    assert str(raised.value) == (
        f"the connection to {server.target} was lost before the answer had ended; send the request "
        "again once engine.wait_until_ready() has returned"
    )
    assert raised.value.details == "reset"


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "no answer within the timeout of 60 s"),
        (
            [generation_service_pb2.GenerateResponse(started={})],
            "the answer did not end within the timeout of 60 s",
        ),
    ],
)
def test_a_timeout_that_passes_is_named(client, server, refusal, events, message):
    passed = refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    server.on("Generate", [*events, passed])
    with pytest.raises(rheostat.DeadlineExceeded) as raised:
        client.run(lambda engine: engine.generate("x", timeout=60))
    assert (raised.value.message, raised.value.details) == (message, "Deadline Exceeded")


def test_a_timeout_that_passed_at_the_server_too_is_named_alike(client, server, refusal):
    info = error_details_pb2.ErrorInfo(reason="REASON_DEADLINE", domain="rheostat.dev")
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    server.on("Generate", refusal(code, "Stream removed (Deadline Exceeded)", info))
    with pytest.raises(rheostat.DeadlineExceeded) as raised:
        client.run(lambda engine: engine.generate("x", timeout=60))
    assert str(raised.value) == "no answer within the timeout of 60 s [REASON_DEADLINE]"


def test_the_clients_own_timeout_is_named_where_a_call_has_none(client, server, refusal):
    server.on("Tokenize", refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
    with pytest.raises(rheostat.DeadlineExceeded) as raised:
        client.run(lambda engine: engine.tokenize("x"))
    assert raised.value.message == "no answer within the timeout of 10 s"


def test_reading_the_model_is_tried_again_while_no_server_answers(client, server, refusal):
    unavailable = refusal(grpc.StatusCode.UNAVAILABLE, "warming up")
    server.on(
        "GetModel", unavailable, unavailable, engine_service_pb2.GetModelResponse(model_name="m")
    )
    assert client.run(lambda engine: engine.model()).name == "m"
    assert len(server.asked) == 3


def test_a_generation_is_never_tried_again(client, server, refusal):
    server.on("Generate", refusal(grpc.StatusCode.UNAVAILABLE, "draining"), [])
    with pytest.raises(rheostat.Unavailable):
        client.run(lambda engine: engine.generate("x"))
    assert len(server.asked) == 1


def test_every_error_class_is_public_and_has_its_own_code():
    classes = [
        thing
        for thing in vars(rheostat).values()
        if isinstance(thing, type) and issubclass(thing, rheostat.RheostatError)
    ]
    assert set(classes) == {rheostat.RheostatError, *CLASSES.values()}
    assert len({error.code for error in classes}) == len(classes)
