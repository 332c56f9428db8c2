"""What a subscription asks of the server while its events are read."""

from rheostat._event_streams import state as module
from rheostat._subscriptions.payloads import Payloads
from rheostat._subscriptions.state import SubscriptionState
from rheostat_wire.v1 import capture_service_pb2

Response = capture_service_pb2.SubscribeResponse


def opened(events: int) -> SubscriptionState:
    """A subscription that has received the ends of so many requests."""
    request = capture_service_pb2.SubscribeOpen()
    state = SubscriptionState(request, None, 1 << 20, "auto", Payloads(False, views=False))
    state.opening_request()
    state.add(Response(opened={"subscription_id": "s1", "next_sequence": 1}))
    for number in range(1, events + 1):
        state.add(Response(sequence=number, end_of_request={"request_id": f"r{number}"}))
    return state


def acks(state: SubscriptionState) -> list[int]:
    return [one.ack.sequence for one in state.due_requests() if one.HasField("ack")]


def read(state: SubscriptionState, events: int) -> list[int]:
    """Reads events; returns the acknowledgements that were sent meanwhile."""
    sent = []
    for _ in range(events):
        assert state.pop() is not None
        sent += acks(state)
    return sent


def test_the_end_of_a_request_is_acknowledged_at_once() -> None:
    state = opened(1)
    assert read(state, 1) == []
    assert state.pop() is None
    assert acks(state) == [1]


def test_ends_of_requests_are_acknowledged_together_while_further_events_wait(monkeypatch) -> None:
    """The server reads messages one at a time, and rows wait for credit meanwhile."""
    monkeypatch.setattr(module, "_ACK_SECONDS", 60.0)
    state = opened(200)
    assert read(state, 200) == [64, 128, 192, 199]
    assert state.pop() is None
    assert acks(state) == [200]
