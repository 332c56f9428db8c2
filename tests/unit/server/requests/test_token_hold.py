"""Tokens are released once their signals have come, and nothing of a withheld token is."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_server.engine.backend import Delta, Ending, StoppedBy
from rheostat_server.requests.delta_weight import weight
from rheostat_server.requests.token_hold import TokenHold
from rheostat_wire.v1 import generation_pb2

P = 3
BY = StoppedBy("grim", "why")


class Held:
    """A hold, and what it has released."""

    def __init__(self, *, watched: bool = True, hold_back: int = 0) -> None:
        self.bytes = 0
        self.deltas: list[Delta] = []
        self.hold = TokenHold(P, watched=watched, hold_back=hold_back, count=self._count)

    def _count(self, size: int) -> None:
        self.bytes += size

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def ending(self) -> Ending | None:
        return self.deltas[-1].ending if self.deltas else None

    def add(self, *tokens: int, ending: Ending | None = None) -> None:
        text = "".join(map(str, tokens))
        self.deltas += self.hold.add(Delta(tokens, text, ending=ending))

    def known(self, end: int) -> None:
        self.deltas += self.hold.advance(end)

    def stop(self, row: int, *, drop_sampled: bool = True) -> None:
        self.deltas += self.hold.stop(row, BY, drop_sampled=drop_sampled)
        self.known(row + 1)


def test_a_token_waits_for_the_row_that_it_was_sampled_from() -> None:
    held = Held()
    held.add(10)
    held.known(P - 1)
    assert held.tokens == []
    assert held.bytes == weight(Delta((10,), "10"))
    held.known(P)
    assert held.tokens == [10]
    assert held.bytes == 0
    held.known(P + 1)
    held.add(11)
    assert held.tokens == [10, 11]


def test_a_stop_waits_for_the_token_that_was_the_input_of_its_row() -> None:
    held = Held()
    held.known(P)
    held.stop(P)  # the row of token 0, which has not come yet
    assert held.ending is None
    held.add(10)
    assert (held.tokens, held.ending) == ([10], Ending.RULE)
    assert held.deltas[-1].stop == BY
    held.add(11)
    assert held.tokens == [10]
    assert held.hold.ended


def test_a_sample_that_ended_before_the_row_ends_as_it_does() -> None:
    held = Held()
    held.known(P + 1)
    held.stop(P + 1)  # beyond the last token
    held.add(10)
    held.add(11, ending=Ending.LENGTH)
    assert (held.tokens, held.ending) == ([10, 11], Ending.LENGTH)


def test_the_sampled_token_may_be_kept() -> None:
    held = Held()
    held.add(10)
    held.add(11, ending=Ending.STOP)
    held.add(12)
    held.stop(P, drop_sampled=False)
    assert (held.tokens, held.ending) == ([10, 11], Ending.RULE)
    assert [delta.ending for delta in held.deltas] == [None, None, Ending.RULE]


def test_a_delta_of_several_tokens_is_cut_without_its_text() -> None:
    logprobs = [generation_pb2.TokenLogprobs() for _ in range(3)]
    held = Held()
    held.deltas += held.hold.add(Delta((10, 11, 12), "abc", logprobs, cached_tokens=2))
    held.stop(P + 1)
    assert held.tokens == [10, 11]
    cut = held.deltas[0]
    assert (cut.text, len(cut.logprobs), cut.cached_tokens) == ("", 2, 2)


def test_log_probabilities_of_the_prompt_outlive_its_first_token() -> None:
    held = Held()
    prompt = [generation_pb2.TokenLogprobs()]
    held.deltas += held.hold.add(Delta((10,), "a", prompt_logprobs=prompt))
    held.stop(1)
    first, last = held.deltas
    assert (first.token_ids, first.text, first.prompt_logprobs) == ((), "", prompt)
    assert last.ending is Ending.RULE


def test_the_newest_tokens_are_held_back_until_the_end() -> None:
    held = Held(watched=False, hold_back=2)
    for token in range(10, 15):
        held.add(token)
    assert held.tokens == [10, 11, 12]
    held.add(15, ending=Ending.LENGTH)
    assert held.tokens == [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("known", [P, P + 1])
def test_tokens_whose_signals_never_come_are_stuck(known: int) -> None:
    held = Held()
    held.add(10)
    held.add(11, ending=Ending.LENGTH)
    held.known(known)
    held.hold.no_more_signals()
    assert held.hold.stuck is (known == P)


@pytest.mark.parametrize("watched", [False, True])
def test_tokens_that_are_held_back_are_not_stuck(watched: bool) -> None:
    held = Held(watched=watched, hold_back=2)
    held.add(10)
    held.known(P + 1)
    held.hold.no_more_signals()
    assert not held.hold.stuck  # the engine may still send the end
    held.add(11, ending=Ending.LENGTH)
    assert not held.hold.stuck
    assert held.tokens == [10, 11]


def interleaved(draw: st.DrawFn, tokens: int, rows: int) -> Iterator[str]:
    while tokens or rows:
        take = draw(st.sampled_from(["token"] * bool(tokens) + ["row"] * bool(rows)))
        tokens, rows = tokens - (take == "token"), rows - (take == "row")
        yield take


@st.composite
def orders(draw: st.DrawFn, tokens: int, rows: int) -> list[str]:
    return list(interleaved(draw, tokens, rows))


@given(
    data=st.data(),
    count=st.integers(1, 6),
    hold_back=st.integers(0, 3),
    row=st.none() | st.integers(0, 9),
    drop_sampled=st.booleans(),
)
def test_whatever_the_order_the_same_tokens_are_released(
    data: st.DataObject, count: int, hold_back: int, row: int | None, drop_sampled: bool
) -> None:
    held = Held(hold_back=hold_back)
    token = known = 0
    for what in data.draw(orders(count, P + count)):
        if what == "token":
            held.add(token, ending=Ending.LENGTH if token == count - 1 else None)
            token += 1
        else:
            if known == row:
                held.stop(row, drop_sampled=drop_sampled)
            known += 1
            held.known(known)
    kept, ending = count, Ending.LENGTH
    if row is not None and row <= P + count - 2:
        kept = 0 if row < P else row - P + 1 + (not drop_sampled)
        ending = Ending.RULE
    assert held.tokens == list(range(kept))
    assert "".join(delta.text for delta in held.deltas) == "".join(map(str, range(kept)))
    assert held.ending is ending
    assert sum(delta.ending is not None for delta in held.deltas) == 1
    assert held.bytes == 0
    assert not held.hold.stuck
