"""The bodies of the records that the server and a front end exchange."""

from hypothesis import given
from hypothesis import strategies as st

from rheostat_server.front_ends.records import (
    CallBegin,
    First,
    call_body,
    count_body,
    read_call_body,
    read_count_body,
    read_seconds_body,
    seconds_body,
)

METHODS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(
    METHODS,
    st.none() | st.floats(0, 1e9),
    st.sampled_from([First.UNREAD, First.READING]),
    st.sampled_from(["", "ipv4:127.0.0.1:50000"]),
)
def test_a_call_begins_with_its_method_deadline_and_connection(
    method, remaining, first, connection
) -> None:
    begin = CallBegin(method, remaining, first, connection=connection)
    assert read_call_body(call_body(begin)) == begin


@given(METHODS, st.binary())
def test_a_call_may_begin_with_its_first_message(method: str, message: bytes) -> None:
    begin = CallBegin(method, 1.5, First.HERE, message)
    assert read_call_body(call_body(begin)) == begin


def test_a_deadline_that_has_passed_is_zero() -> None:
    assert read_call_body(call_body(CallBegin("/a/b", -0.5))).remaining == 0.0


@given(st.integers(0, (1 << 32) - 1))
def test_the_number_of_written_messages_is_kept(count: int) -> None:
    assert read_count_body(count_body(count)) == count


@given(st.floats(0, 1e9))
def test_the_seconds_of_a_stop_are_kept(seconds: float) -> None:
    assert read_seconds_body(seconds_body(seconds)) == seconds
