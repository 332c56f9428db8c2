"""When memory is full, the largest holders give up bytes, the mildest consequence first."""

import random
from dataclasses import dataclass, field

import pytest

from rheostat_server.delivery.byte_budget import Budget, ByteCounter, Cost, Share

MIB = 1 << 20


@dataclass
class Waiting:
    """Waiting bytes, and the bytes that were given up."""

    share: Share
    cost: Cost = Cost.ROWS
    spilling: int = 0

    gave: list[int] = field(default_factory=list)
    why: str = ""

    def __post_init__(self) -> None:
        self.byte_counter = ByteCounter(self.share.byte_counter)
        self.share.add(self)

    @property
    def spilling_rows(self) -> int:
        return self.spilling

    @property
    def freeable(self) -> int:
        return self.byte_counter.bytes - self.spilling

    def put(self, size: int) -> None:
        self.byte_counter.add(size)
        self.share.check()

    def give_up(self, size: int, why: str) -> None:
        assert 0 < size <= self.freeable
        self.gave.append(size)
        self.why = why
        if self.cost is Cost.TIME:
            self.spilling += size
        else:
            self.byte_counter.add(-(self.freeable if self.cost is Cost.REQUEST else size))


def budget(limit: int = 16 * MIB, request: int = 100 * MIB) -> Budget:
    return Budget(limit, request, slack=MIB)


def test_one_request_has_one_limit_however_its_bytes_are_divided() -> None:
    share = budget(request=4 * MIB).share()
    some = [Waiting(share) for _ in range(3)]
    for _ in range(40):
        for one in some:
            one.put(MIB // 4)
            assert share.used <= 4 * MIB
    assert all(abs(one.freeable - 4 * MIB // 3) <= MIB // 2 for one in some)
    assert "--request-buffer-mib" in some[0].why


def test_what_is_cheap_gives_way_before_the_request_fails() -> None:
    share = budget(request=4 * MIB).share()
    fails, drops, spills = (Waiting(share, cost) for cost in (Cost.REQUEST, Cost.ROWS, Cost.TIME))
    for one in (fails, drops, spills):
        one.put(MIB)
    fails.put(2 * MIB)
    assert (spills.spilling, drops.gave, fails.gave) == (MIB, [], [])
    spills.byte_counter.add(-MIB)
    spills.spilling = 0
    fails.put(MIB)
    assert (drops.freeable, fails.freeable) == (0, 4 * MIB)
    fails.put(1)
    assert (fails.freeable, share.used) == (0, 0)


def test_the_largest_gives_way_for_all_together() -> None:
    whole = budget()
    large, *small = (Waiting(whole.share()) for _ in range(5))
    for one in small:
        one.put(2 * MIB)
    large.put(20 * MIB)
    assert [one.gave for one in small] == [[]] * 4
    assert whole.used == 15 * MIB
    assert "--buffers-mib" in large.why


def test_a_failing_one_spares_those_that_hold_less() -> None:
    whole = budget()
    fails, drops, small = (
        Waiting(whole.share(), cost) for cost in (Cost.REQUEST, Cost.ROWS, Cost.REQUEST)
    )
    small.put(MIB)
    drops.put(7 * MIB)
    fails.put(9 * MIB)
    assert (fails.freeable, drops.freeable, small.freeable) == (0, 7 * MIB, MIB)


@pytest.mark.parametrize("seed", range(20))
def test_who_holds_no_more_than_an_equal_share_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    whole = budget()
    some = [
        Waiting(whole.share(), rng.choice([Cost.ROWS, Cost.REQUEST]))
        for _ in range(rng.randrange(2, 40))
    ]
    equal = 15 * MIB // len(some)
    modest = set(rng.sample(range(len(some)), len(some) // 2))
    for _ in range(3000):
        number = rng.randrange(len(some))
        one = some[number]
        size = rng.randrange(1, MIB // 4)
        if number in modest:
            size = min(size, equal - one.freeable)
        if size:
            one.put(size)
        assert whole.used <= 16 * MIB
    assert all(some[number].gave == [] for number in modest)
    assert any(one.gave for one in some)


def test_what_is_on_its_way_to_a_disk_is_not_asked_for_again() -> None:
    whole = budget()
    spills, drops = (Waiting(whole.share(), cost) for cost in (Cost.TIME, Cost.ROWS))
    drops.put(MIB)
    spills.put(16 * MIB)
    assert spills.spilling == 2 * MIB
    drops.put(MIB)
    assert (len(spills.gave), drops.gave) == (1, [])
    assert whole.spilling > whole.slack
    assert spills.share.spills_too_much


def test_small_batches_weigh_more_than_their_rows() -> None:
    whole = budget(limit=MIB, request=MIB)
    share = whole.share()
    waiting = ByteCounter(share.byte_counter)
    for _ in range(1000):
        waiting.add(4, rows=1, batches=1)
    assert whole.used > 500_000
    assert 4000 < share.used <= whole.used


def test_a_request_that_has_ended_is_asked_for_nothing() -> None:
    whole = budget()
    gone, there = Waiting(whole.share()), Waiting(whole.share())
    gone.put(9 * MIB)
    gone.share.close()
    there.put(8 * MIB)
    assert (gone.gave, there.gave) == ([], [2 * MIB])


def test_tokens_that_come_while_rows_go_to_disk_look_through_no_other_request() -> None:
    """The test counts reads of `spilling` of other requests."""
    looks = 0

    class Counted(Waiting):
        @property
        def spilling(self) -> int:
            nonlocal looks
            looks += 1
            return self._spilling

        @spilling.setter
        def spilling(self, size: int) -> None:
            self._spilling = size

    whole = budget(limit=4 * MIB)
    others = [Counted(whole.share(), Cost.TIME) for _ in range(200)]
    for one in others:
        one.put(MIB // 32)
    assert whole.used > whole.limit  # the rest is on its way to a disk
    assert whole.spilling > 0
    share = whole.share()
    byte_counter, looks = ByteCounter(share.byte_counter), 0
    for _ in range(1000):
        byte_counter.add_tokens(1)
        share.check()
    assert looks <= 20 * len(others)  # not 1000 times


def test_rows_that_must_go_to_a_disk_count_as_freed_at_once() -> None:
    """A holder that is asked to give up memory looks at once whether disks have too much to do."""
    answers: list[bool] = []

    class Asking(Waiting):
        def give_up(self, size: int, why: str) -> None:
            super().give_up(size, why)
            answers.append(self.share.spills_too_much)

    whole = budget(limit=4 * MIB)
    large, other = Asking(whole.share(), Cost.TIME), Waiting(whole.share())
    large.put(3 * MIB)
    other.put(2 * MIB)
    assert large.spilling > whole.slack
    assert answers == [True]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_on_its_way_is_counted_exactly_whoever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    whole = budget(limit=2 * MIB, request=MIB)
    some = [Waiting(whole.share(), rng.choice([*Cost])) for _ in range(5)]
    for _ in range(400):
        one = rng.choice(some)
        match rng.randrange(6):
            case 0 if one.spilling:  # the disk has some of it
                done = rng.randrange(one.spilling + 1)
                one.spilling -= done
                one.byte_counter.add(-done)
            case 1:
                one.share.close()
                one.byte_counter.add(rng.randrange(99))  # which may come late
                some.remove(one)
                some.append(Waiting(whole.share(), rng.choice([*Cost])))
            case 2:
                ByteCounter(one.share.byte_counter).add_tokens(rng.randrange(1000))
                one.share.check()
            case _:
                one.put(rng.randrange(MIB // 4))
        assert whole.spilling == sum(other.spilling for other in some)
