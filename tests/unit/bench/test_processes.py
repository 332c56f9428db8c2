"""Processes of a benchmark: what they are told comes back, whatever comes of it."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import pytest

from rheostat_bench.processes import Ended, Worker, together


@pytest.fixture
def worker() -> Iterator[Worker[int]]:
    """A process whose state is 0."""
    with Worker(partial(nullcontext, 0)) as one:
        yield one


def test_orders_are_carried_out_on_the_state(worker: Worker[int]) -> None:
    assert worker.do(partial(asyncio.to_thread, pow, 2)) == 1
    assert (
        worker.do(partial(asyncio.to_thread, "{0} {1}".format, "the state is")) == "the state is 0"
    )


def test_what_an_order_raises_is_raised_here_and_the_process_goes_on(worker: Worker[int]) -> None:
    with pytest.raises(ZeroDivisionError):
        worker.do(partial(asyncio.to_thread, divmod, 1))
    assert worker.do(partial(asyncio.sleep, result=1)) == 1


def test_a_process_that_ends_is_not_waited_for(worker: Worker[int]) -> None:
    with pytest.raises(Ended):
        worker.do(partial(asyncio.to_thread, os._exit))


def test_answers_come_in_the_order_of_the_processes() -> None:
    with Worker(partial(nullcontext, 0.3)) as slow, Worker(partial(nullcontext, 0.0)) as fast:
        orders = [partial(asyncio.sleep, result=name) for name in ("slow", "fast")]
        assert together([slow, fast], orders) == ["slow", "fast"]
