"""What the schemas promise of all their messages."""

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from rheostat_wire.v1 import (
    capture_service_pb2,
    engine_service_pb2,
    errors_pb2,
    generation_service_pb2,
    lens_service_pb2,
    monitor_service_pb2,
    run_service_pb2,
    steering_service_pb2,
    sweep_service_pb2,
    types_pb2,
)

SERVICES = (
    capture_service_pb2,
    engine_service_pb2,
    errors_pb2,
    generation_service_pb2,
    lens_service_pb2,
    monitor_service_pb2,
    sweep_service_pb2,
    run_service_pb2,
    steering_service_pb2,
)


def files() -> dict[str, FileDescriptor]:
    """The files of the contract, by name."""
    found: dict[str, FileDescriptor] = {}
    waiting = [module.DESCRIPTOR for module in SERVICES]
    while waiting:
        file = waiting.pop()
        if file.package == "rheostat.v1" and file.name not in found:
            found[file.name] = file
            waiting += file.dependencies
    return found


def messages() -> Iterator[Descriptor]:
    for file in files().values():
        yield from file.message_types_by_name.values()


FIELDS = [field for message in messages() for field in message.fields]


def test_the_points_inside_attention_and_the_mlp_have_their_numbers_to_come() -> None:
    assert not set(types_pb2.Point.values()) & set(range(7, 32))


@pytest.mark.parametrize(
    "name", ["run", "sink", "subscription", "request", "lora", "watch", "rule"]
)
def test_an_id_or_a_name_says_that_it_is_one(name) -> None:
    text = FieldDescriptor.TYPE_STRING
    assert [one.full_name for one in FIELDS if one.name == name and one.type == text] == []


def test_points_in_time_end_in_time_and_spans_are_durations() -> None:
    for field in FIELDS:
        kind = field.message_type.full_name if field.message_type is not None else ""
        if kind == "google.protobuf.Timestamp":
            assert field.name.endswith("_time"), field.full_name
        else:
            assert not field.name.endswith(("_time", "_at", "_ms", "_seconds")), field.full_name
    assert "Lease" not in {message.name for message in messages()}


def test_counts_are_whole_numbers() -> None:
    for field in FIELDS:
        if field.name.endswith("_count"):
            assert field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64)


def test_every_enum_begins_with_a_value_that_is_refused() -> None:
    for file in files().values():
        for enum in file.enum_types_by_name.values():
            assert enum.values[0].name.endswith("_UNSPECIFIED")
            assert enum.values[0].number == 0
