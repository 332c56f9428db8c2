"""How large messages are cut into pieces, and what is left of those that are never complete."""

from hypothesis import given
from hypothesis import strategies as st

from rheostat_server.front_ends.call import Call
from rheostat_server.front_ends.large_messages import PIECE_BYTES, LargeMessages, ReceivedPieces
from rheostat_server.front_ends.records import CallBegin, First, Kind, Record

SIZES = st.sampled_from([0, 1, 100, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 200_000])


@given(st.lists(SIZES, max_size=5))
def test_pieces_are_no_longer_than_allowed_and_join_to_the_message(sizes: list[int]) -> None:
    parts = tuple(bytes([number]) * size for number, size in enumerate(sizes))
    messages, received = LargeMessages(), ReceivedPieces()
    messages.add(Record(Kind.MESSAGE, 7, parts))
    count = 0
    while (record := messages.next()).kind is Kind.PIECE:
        assert sum(map(len, record.body)) == PIECE_BYTES
        received.add(b"".join(record.body))
        count += 1
    assert sum(map(len, record.body)) <= PIECE_BYTES
    assert received.complete(b"".join(record.body)) == b"".join(parts)
    assert count == max(0, sum(sizes) - 1) // PIECE_BYTES
    assert not messages


def test_only_messages_are_cut() -> None:
    """The other end reads a status whole."""
    messages = LargeMessages()
    messages.add(Record(Kind.MESSAGE, 7, (bytes(PIECE_BYTES + 1),)))
    messages.add(Record(Kind.END, 7, (bytes(PIECE_BYTES + 1),)))
    kinds = [messages.next().kind for _ in range(3)]
    assert kinds == [Kind.PIECE, Kind.MESSAGE, Kind.END]
    assert not messages


def test_a_message_after_a_large_one_has_none_of_its_pieces() -> None:
    received = ReceivedPieces()
    received.add(b"first ")
    assert [received.complete(b"message"), received.complete(b"next")] == [
        b"first message",
        b"next",
    ]


async def test_a_call_that_ends_keeps_no_pieces() -> None:
    ended = Call(lambda *record: None, CallBegin("/a/b", None, First.READING))
    disconnected = Call(lambda *record: None, CallBegin("/a/b", None, First.READING))
    for call in (ended, disconnected):
        call.receive(Kind.PIECE, b"piece")
    ended.abandon()
    ended.receive(Kind.PIECE, b"piece")
    disconnected.receive(Kind.DONE, b"")
    assert not ended._pieces._pieces
    assert not disconnected._pieces._pieces
