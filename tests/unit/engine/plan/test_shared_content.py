"""Content is counted once, whether large plans, small plans or both use it."""

from collections import Counter
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine.plan import shared_content
from rheostat_engine.plan.needs import SHARED, Needs, needs_of
from rheostat_engine.plan.shared_content import SharedContent

CONTENT = [(SHARED[n % len(SHARED)], n, 1 + n % 3) for n in range(9)]
PLANS = st.lists(st.sets(st.sampled_from(CONTENT)), min_size=1, max_size=6)
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30)


def total(contents: set[tuple[str, int, int]]) -> dict[str, int]:
    amounts = dict.fromkeys(SHARED, 0)
    for resource, _, weight in contents:
        amounts[resource] += weight
    return amounts


@given(PLANS, STEPS, st.integers(0, 9))
def test_amounts_are_those_of_all_distinct_content_in_use(
    plans: list[set[tuple[str, int, int]]], steps: list[tuple[bool, int]], small: int
) -> None:
    needs: list[Needs] = [needs_of(iter(plan)) for plan in plans]
    users = Counter[int]()
    with patch.object(shared_content, "_SMALL", small):
        shared = SharedContent()
        for comes, number in steps:
            number %= len(plans)
            if comes:
                before = dict(shared.used)
                added = shared.added_by(needs[number])
                shared.acquire(needs[number])
                users[number] += 1
                assert shared.used == {name: before[name] + added.get(name, 0) for name in SHARED}
            elif users[number]:
                shared.release(needs[number])
                users[number] -= 1
            in_use = set[tuple[str, int, int]]().union(
                *(plans[one] for one, count in users.items() if count)
            )
            assert shared.used == total(in_use)
