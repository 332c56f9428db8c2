import base64
import inspect
import re
import string
import urllib.parse
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from rheostat_server import errors
from rheostat_server.errors.status import to_status
from rheostat_wire.v1 import errors_pb2

CONTRACT = Path(__file__).parents[4] / "proto" / "rheostat" / "v1" / "errors.proto"
LEAVES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.RheostatError)
    and kind is not errors.RheostatError
    and errors.RheostatError not in kind.__bases__
]

# errors.proto numbers the reasons in blocks, one block per status code.
BLOCKS = {
    range(1, 30): {grpc.StatusCode.INVALID_ARGUMENT},
    range(30, 40): {grpc.StatusCode.ALREADY_EXISTS},
    range(40, 60): {grpc.StatusCode.NOT_FOUND},
    range(60, 80): {grpc.StatusCode.FAILED_PRECONDITION},
    range(80, 100): {grpc.StatusCode.RESOURCE_EXHAUSTED},
    range(100, 101): {grpc.StatusCode.OUT_OF_RANGE},
    range(101, 102): {grpc.StatusCode.DATA_LOSS},
    range(102, 103): {grpc.StatusCode.ABORTED},
    range(104, 105): {grpc.StatusCode.DEADLINE_EXCEEDED},
    range(120, 140): {grpc.StatusCode.UNAVAILABLE},
    range(160, 161): {grpc.StatusCode.UNIMPLEMENTED},
    range(161, 162): {grpc.StatusCode.INTERNAL},
}


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_every_error_names_a_reason_of_the_contract_and_has_its_code(kind) -> None:
    number = errors_pb2.Reason.Value(kind.reason)
    (codes,) = [codes for block, codes in BLOCKS.items() if number in block]
    assert {grpc.StatusCode[kind.code]} == codes


def test_the_contract_says_of_a_reason_whether_it_is_sent() -> None:
    text = CONTRACT.read_text(encoding="utf-8")
    found = re.findall(r"((?:^ *//.*\n)+) *(REASON_\w+) = [1-9]\d*;", text, re.MULTILINE)
    unsent = {reason for comment, reason in found if "Not sent yet" in comment}
    assert {reason for _, reason in found} - unsent == {kind.reason for kind in LEAVES}


def test_no_two_errors_share_a_reason() -> None:
    assert len({kind.reason for kind in LEAVES}) == len(LEAVES)


def unpacked(status: status_pb2.Status) -> list[object]:
    kinds = {
        kind.DESCRIPTOR.full_name: kind
        for kind in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.BadRequest,
            error_details_pb2.PreconditionFailure,
            error_details_pb2.ResourceInfo,
            error_details_pb2.RetryInfo,
        )
    }
    found = []
    for detail in status.details:
        message = kinds[detail.type_url.rpartition("/")[2]]()
        detail.Unpack(message)
        found.append(message)
    return found


def test_a_wrong_field_is_named_in_a_bad_request() -> None:
    status = to_status(errors.UnknownLayer("no layer 9", field="a.b[2]", metadata={"layers": "4"}))
    assert (status.code, status.message) == (3, "no layer 9")
    assert unpacked(status) == [
        error_details_pb2.ErrorInfo(
            reason="REASON_UNKNOWN_LAYER", domain="rheostat.dev", metadata={"layers": "4"}
        ),
        error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(
                    field="a.b[2]", description="no layer 9", reason="REASON_UNKNOWN_LAYER"
                )
            ]
        ),
    ]


def test_a_missing_thing_is_named_in_a_resource_info() -> None:
    error = errors.NameNotFound("no joy", resource=errors.Resource("name", "joy"))
    assert unpacked(to_status(error))[1:] == [
        error_details_pb2.ResourceInfo(
            resource_type="name", resource_name="joy", description="no joy"
        )
    ]


def test_a_failed_precondition_says_what_fails() -> None:
    (failure,) = unpacked(to_status(errors.NotSupported("not yet", field="gate")))[2:]
    assert failure == error_details_pb2.PreconditionFailure(
        violations=[
            error_details_pb2.PreconditionFailure.Violation(
                type="REASON_NOT_SUPPORTED", subject="gate", description="not yet"
            )
        ]
    )


def test_waiting_is_advised_with_a_retry_info() -> None:
    (retry,) = unpacked(to_status(errors.BankFull("full", retry_after=1.5)))[1:]
    assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize("letter", ["x", "\n", "ä", "語", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_no_status_exceeds_what_grpc_takes_of_headers(kind, letter: str) -> None:
    long = letter * 10_000
    error = kind(
        long,
        field=long,
        metadata={f"{n}{long}": long for n in range(9)},
        resource=errors.Resource(long, long),
        retry_after=1.5,
    )
    status = to_status(error)
    escaped = urllib.parse.quote(status.message, safe=string.ascii_letters)
    trailers = {
        "grpc-status": str(status.code),
        "grpc-message": escaped,
        "grpc-status-details-bin": base64.b64encode(status.SerializeToString()).decode(),
        "content-type": "application/grpc",
    }
    assert sum(len(key) + len(value) + 32 for key, value in trailers.items()) < 8192
    assert status.message == letter * (512 // len(letter.encode()))


def test_a_short_text_is_not_cut() -> None:
    text = "ä" * 256
    assert to_status(errors.InvalidValue(text)).message == text


def test_a_status_may_be_changed_without_effect_on_later_ones() -> None:
    first = to_status(errors.RequestNotFound("it has ended", field="steer.request_id"))
    first.message = "another"
    del first.details[:]
    later = to_status(errors.RequestNotFound("it has ended", field="steer.request_id"))
    assert later.message == "it has ended"
    assert len(later.details) == 2
    assert to_status(errors.RequestNotFound("it has ended", field="stop")) != later
