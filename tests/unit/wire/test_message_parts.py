"""Messages in wire format."""

from hypothesis import given
from hypothesis import strategies as st

from rheostat_wire.message_parts import MessageParts, field_head, number_field
from rheostat_wire.v1 import capture_pb2, receipt_pb2, tensor_pb2


@given(st.binary(max_size=300), st.lists(st.integers(0, 5), max_size=3))
def test_a_payload_in_nested_messages_is_read_as_protobuf_wrote_it(payload, shape) -> None:
    tensor = tensor_pb2.Tensor(shape=shape, dtype=tensor_pb2.DTYPE_FLOAT32)
    head = tensor.SerializeToString() + field_head(tensor.INLINE_FIELD_NUMBER, len(payload))
    parts = MessageParts((head, payload))
    read = tensor_pb2.Tensor.FromString(parts.joined())
    tensor.inline = payload
    assert read == tensor
    captured = capture_pb2.Captured
    assert captured.FromString(parts.as_field(captured.TENSOR_FIELD_NUMBER).joined()) == captured(
        tensor=tensor
    )


def test_long_contents_and_large_numbers_have_longer_heads() -> None:
    assert field_head(1, 0x7F) == b"\x0a\x7f"
    assert field_head(1, 0x80) == b"\x0a\x80\x01"
    assert field_head(16, 300) == b"\x82\x01\xac\x02"


@given(st.integers(0, 2**64 - 1))
def test_a_number_is_read_as_protobuf_wrote_it(value) -> None:
    site = receipt_pb2.AppliedSite
    field = number_field(site.ROW_COUNT_FIELD_NUMBER, value)
    assert field == site(row_count=value).SerializeToString()
