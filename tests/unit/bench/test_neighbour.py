"""What a neighbour heard, in numbers."""

from rheostat_bench.neighbour import Heard


def test_a_neighbour_that_got_nothing_but_errors_waited_for_no_token() -> None:
    """So it goes beside a server that has died, which the benchmark must be able to report."""
    heard = Heard(1.0, (), (), 0, 0, 0, 0, {"UNAVAILABLE": 9}, ())
    assert heard.longest == 0.0
