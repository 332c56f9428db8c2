"""Requests in the background leave most steps to others."""

import pytest

from rheostat_server.requests.background_pace import BackgroundPace


@pytest.mark.parametrize(("took", "rest"), [(0.02, 0.02), (5.0, 0.1)])
def test_a_rest_is_as_long_as_the_request_before_it(took: float, rest: float) -> None:
    pace, clock = BackgroundPace(), [10.0]
    assert pace.allows(clock[0])
    with pace.running(lambda: clock[0]):
        assert not pace.allows(clock[0] + 1)
        clock[0] += took
    assert not pace.allows(clock[0] + 0.9 * rest)
    assert pace.allows(clock[0] + 1.1 * rest)


def test_none_starts_while_another_one_runs() -> None:
    pace = BackgroundPace()
    with pace.running(lambda: 0.0):
        with pace.running(lambda: 0.0):
            pass
        assert not pace.allows(1.0)
    assert pace.allows(1.0)
