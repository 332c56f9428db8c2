"""Messages of one type, wherever they stand in a message."""

from rheostat_wire.nested_messages import nested_messages
from rheostat_wire.v1 import steering_pb2, vector_pb2


def test_messages_are_found_at_any_depth_in_their_order() -> None:
    first, second = (vector_pb2.VectorRef(name=name) for name in ("a", "b"))
    steering = steering_pb2.Steering(
        interventions=[
            {"add": {"vector": {"name": "a"}, "scale": 1.0}},
            {"add": {"vector": {"name": "b"}}},
        ]
    )
    found = [*nested_messages(steering, vector_pb2.VectorRef)]
    assert found == [first, second]
    found[1].name = "c"  # they are parts of the message, not copies
    assert steering.interventions[1].add.vector.name == "c"
    assert [*nested_messages(first, vector_pb2.VectorRef)] == [first]
    assert not [*nested_messages(first, steering_pb2.Steering)]
