"""Properties that are computed once, without making other threads wait."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rheostat_engine.cached_property import cached_property
from rheostat_engine.plan.plan import PackedActs


@dataclass(frozen=True)
class Counted:
    number: int

    @cached_property
    def doubled(self) -> int:
        """Twice the number."""
        computed.append(self.number)
        return 2 * self.number


computed: list[int] = []


def test_a_property_is_computed_once_for_each_object() -> None:
    computed.clear()
    first, second = Counted(1), Counted(2)
    assert [first.doubled, first.doubled, second.doubled, first.doubled] == [2, 2, 4, 2]
    assert computed == [1, 2]
    assert Counted.doubled.__doc__ == "Twice the number."
    assert first == Counted(1)


def test_no_plan_waits_for_the_needs_of_another() -> None:
    begun, end = threading.Event(), threading.Event()

    class Large(PackedActs):
        @property
        def table(self) -> None:  # type: ignore[override]  # is cached there
            begun.set()
            assert end.wait(30)

    large, small = Large(()), PackedActs(())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: large.needs)
        assert begun.wait(30)
        second = pool.submit(lambda: small.needs)
        assert not len(second.result(10).keys)
        assert not first.done()
        end.set()
        assert not len(first.result(30).keys)
