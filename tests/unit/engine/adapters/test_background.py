"""Background requests begin in bursts beside others, by vLLM's scheduler and a scripted clock."""

import inspect
from collections.abc import Sequence
from statistics import median

import numpy as np
import pytest
from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from rheostat_engine.adapters.background import BackgroundPace

from .scripted_engine import DECODE, PROMPT, Engine

RELIES = "rheostat_engine.adapters.background relies on it"


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def test_vllm_puts_requests_into_its_queue_and_counts_them_as_before() -> None:
    source = inspect.getsource(Scheduler.add_request)
    assert source.count("self._enqueue_waiting_request(request)") == 1, RELIES
    assert "self.waiting" not in source, RELIES
    for counted in (Scheduler.get_num_unfinished_requests, Scheduler.make_stats):
        assert "self.get_request_counts()" in inspect.getsource(counted), RELIES
    assert "num_waiting - num_deferred" in inspect.getsource(Scheduler.make_stats), RELIES
    schedule = inspect.getsource(Scheduler.schedule)
    assert "if self.current_step < request.next_decode_eligible_step:" in schedule, RELIES
    assert schedule.count("self.current_step += 1") == 1, RELIES
    assert "self._preempt_request(" in schedule, RELIES
    preempt = inspect.getsource(Scheduler._preempt_request)
    assert "self.waiting.prepend_request(request)" in preempt, RELIES
    assert "preempted_req = self.running[-1]" in schedule, RELIES
    finish = inspect.getsource(Scheduler.finish_requests)
    assert "self.requests.get(req_id)" in finish, RELIES
    assert "self.deferred_waiting.difference_update(" in finish, RELIES
    assert "self._free_request(request" in finish, RELIES
    assert "self._free_request(request)" in inspect.getsource(Scheduler.update_from_output), RELIES


@pytest.mark.parametrize("after", [0.0, 9.0])
def test_beside_streams_few_steps_are_longer_however_many_requests_wait(
    config: VllmConfig, after: float
) -> None:
    engine = Engine(config, after=after)
    engine.add(32, background=False, tokens=780, length=8)
    engine.step()
    began = 0
    for _ in range(770):
        _, waiting = engine.scheduler.get_request_counts()
        engine.add(64 - waiting, background=True, tokens=1)
        began += sum(name.startswith("cell") for name in engine.step())
    times = engine.beside()[1:]
    assert median(times) == DECODE
    assert percentile(times, 0.99) == DECODE
    bursts = [cells for _, cells, _ in engine.steps if cells]
    # After the first steps, and then every 300 or 600 steps.
    assert bursts == [64] * (3 if not after else 2)
    assert began == sum(bursts)


def test_alone_requests_in_the_background_never_wait(config: VllmConfig) -> None:
    engine = Engine(config)
    for _ in range(5):
        engine.add(64, background=True, tokens=1)
        assert len(engine.step()) == 64
    engine.add(1, background=False, tokens=3)
    engine.add(64, background=True, tokens=1)
    assert len(engine.step()) == 1
    while engine.scheduler.running:
        engine.step()
    assert len(engine.step()) == 64
    assert not engine.scheduler.has_unfinished_requests()


def test_requests_that_wait_can_be_aborted_and_count_as_deferred(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add(4, background=False, tokens=400)
    engine.step()
    cells = engine.add(8, background=True, tokens=1)
    for _ in range(20):
        assert not engine.step()
    stats = engine.scheduler.make_stats()
    assert stats is not None
    assert (stats.num_waiting_reqs, stats.num_skipped_waiting_reqs) == (0, 8)
    engine.scheduler.finish_requests(cells[::2], RequestStatus.FINISHED_ABORTED)
    assert engine.scheduler.get_request_counts() == (4, 4)
    assert engine.scheduler.get_num_unfinished_requests() == 8
    began: list[str] = []
    for _ in range(300):
        began += engine.step()
    assert began == cells[1::2]


def test_what_a_burst_has_no_room_for_waits_for_the_next(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add(1, background=False, tokens=600)
    engine.step()
    cells = engine.add(100, background=True, tokens=1, length=50)  # a step computes 2048 tokens
    began: list[list[str]] = []
    for _ in range(350):
        began.append(engine.step())
    first, second = filter(None, began)
    assert len(first) == 41
    assert first + second == cells[: len(first + second)]


def test_a_neighbours_prompt_never_waits_behind_the_background(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add(1, background=False, tokens=400)
    engine.step()
    engine.add(64, background=True, tokens=1)
    engine.step()
    (name,) = engine.add(1, background=False, tokens=2)
    assert engine.step() == [name]


def test_a_prompt_in_the_background_pauses_while_prompts_of_others_are_computed(
    config: VllmConfig,
) -> None:
    engine = Engine(config)
    engine.scheduler.max_num_scheduled_tokens = 64
    (cell,) = engine.add(1, background=True, tokens=1, length=450)
    engine.step()
    assert engine.computed == {cell: 64}
    first, second = engine.add(2, background=False, tokens=40, length=100)
    computed = []
    for _ in range(6):
        engine.step()
        computed.append(engine.computed)
    assert computed[:2] == [{first: 64}, {first: 36, second: 28}]
    assert computed[2:4] == [{first: 1, second: 63}, {first: 1, second: 9, cell: 54}]
    assert computed[4:] == 2 * [{first: 1, second: 1, cell: 62}]


def test_a_prompt_in_the_background_goes_on_where_others_cannot_begin(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.scheduler.max_num_scheduled_tokens = 64
    (cell,) = engine.add(1, background=True, tokens=1, length=450)
    engine.step()
    engine.scheduler.max_num_active_reqs = 1
    (other,) = engine.add(1, background=False, tokens=40)
    steps = 1
    while cell in engine.scheduler.requests:
        engine.step()
        steps += 1
    assert steps <= 2 * (450 // 64 + 1), "every other step at least"
    assert engine.step() == [other]


def test_a_prompt_in_the_background_pauses_for_a_limited_time(config: VllmConfig) -> None:
    engine = Engine(config, decode=50.0)
    engine.scheduler.max_num_scheduled_tokens = 64
    (cell,) = engine.add(1, background=True, tokens=1, length=450)
    engine.step()
    while cell in engine.scheduler.requests:
        engine.add(1, background=False, tokens=1, length=64)
        engine.step()
        assert engine.clock < 6_000
    assert engine.clock > 5_000


def test_later_requests_in_the_background_make_no_prompt_pause_longer(config: VllmConfig) -> None:
    engine = Engine(config, decode=50.0)
    engine.scheduler.max_num_scheduled_tokens = 64
    (cell,) = engine.add(1, background=True, tokens=1, length=450)
    engine.step()
    later: list[str] = []
    while cell in engine.scheduler.requests:
        if engine.number % 40 == 0:  # a client that goes away after a few seconds, again and again
            engine.scheduler.finish_requests(later, RequestStatus.FINISHED_ABORTED)
            later = engine.add(1, background=True, tokens=1)
        engine.add(1, background=False, tokens=1, length=64)
        engine.step()
        assert engine.clock < 6_000
    assert engine.clock > 5_000


def preempt_all(engine: Engine) -> None:
    """Preempts all running requests, as vLLM does when it lacks memory."""
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.parametrize("tokens", [1, 40], ids=["in its prompt", "in its answer"])
def test_a_preempted_request_in_the_background_begins_again_with_the_next_burst(
    config: VllmConfig, tokens: int
) -> None:
    engine = Engine(config)
    engine.scheduler.max_num_scheduled_tokens = 64
    length = 450 if tokens == 1 else 110
    (cell,) = engine.add(1, background=True, tokens=tokens, length=length)
    for _ in range(1 if tokens == 1 else 20):
        engine.step()
    preempt_all(engine)
    (other,) = engine.add(1, background=False, tokens=400, length=8)
    (later,) = engine.add(1, background=True, tokens=1, length=8)
    began: list[str] = []
    while not began:
        engine.step()
        began = [name for name in engine.computed if name != other]
        assert engine.scheduler.get_num_unfinished_requests() == 3
    assert 32 <= len(engine.beside()) <= 310, "as any burst"
    assert began == [cell], "it has no room for the later one"
    while cell in engine.scheduler.requests:
        engine.step()
    assert engine.scheduler.requests[later].num_computed_tokens == 0


def test_a_preempted_request_in_the_background_waits_for_a_limited_time(
    config: VllmConfig,
) -> None:
    engine = Engine(config, decode=50.0)
    engine.scheduler.max_num_scheduled_tokens = 64
    (cell,) = engine.add(1, background=True, tokens=1, length=450)
    engine.step()
    preempt_all(engine)
    for _ in range(40):  # the queue never becomes shorter
        engine.add(1, background=False, tokens=1, length=64)
    while cell in engine.scheduler.requests:
        engine.add(1, background=False, tokens=1, length=64)
        engine.step()
        assert engine.clock < 7_000
    assert engine.clock > 5_000


def preemptions(engine: Engine, names: Sequence[str]) -> int:
    requests = engine.scheduler.requests
    return sum(requests[name].num_preemptions for name in names if name in requests)


def test_where_memory_is_short_only_the_background_is_preempted(config: VllmConfig) -> None:
    """The background requests have computed their prompts, and began before the others."""
    engine = Engine(config, blocks=41)
    cells = engine.add(4, background=True, tokens=300, length=100)
    engine.step()
    others = engine.add(8, background=False, tokens=120, length=20)
    for _ in range(100):
        engine.step()
        assert preemptions(engine, others) == 0
    assert preemptions(engine, cells) >= 2
    assert all(engine.scheduler.requests[name].num_output_tokens >= 99 for name in others)


def test_preempted_requests_in_the_background_lengthen_few_steps(config: VllmConfig) -> None:
    engine = Engine(config, blocks=41)
    cells = engine.add(4, background=True, tokens=600, length=100)
    engine.step()
    longer = 0
    for _ in range(1400):
        others = [name for name in engine.scheduler.requests if name not in cells]
        for _ in range(8 - len(others)):
            tokens = 60 + engine.number * 7 % 50
            others += engine.add(1, background=False, tokens=tokens, length=20)
        assert preemptions(engine, others) == 0
        engine.step()
        longer += any(engine.computed.get(name, 0) > 1 for name in cells)
    assert preemptions(engine, cells) >= len(cells) - 1
    assert longer <= 1400 / 100, "about as many as bursts lengthen"


def test_the_background_ends_although_others_take_all_memory(config: VllmConfig) -> None:
    engine = Engine(config, decode=50.0, blocks=33)
    engine.scheduler.max_num_scheduled_tokens = 64
    cells = engine.add(3, background=True, tokens=1, length=450)
    engine.step()
    asked: dict[str, float] = {}
    preempted = 0
    while left := [name for name in cells if name in engine.scheduler.requests]:
        for _ in range(16 + len(left) - len(engine.scheduler.requests)):
            tokens = 60 + engine.number % 50
            (name,) = engine.add(1, background=False, tokens=tokens, length=20)
            asked[name] = engine.clock
        for name in engine.step():
            assert engine.clock - asked.pop(name, engine.clock) < 5_000
        preempted = max(preempted, preemptions(engine, cells))
        assert engine.clock < 200_000
    assert preempted


def test_others_begin_although_the_background_finds_no_memory(config: VllmConfig) -> None:
    engine = Engine(config, decode=50.0, blocks=21)
    engine.add(1, background=False, tokens=400, length=110)
    engine.step()
    (cell,) = engine.add(1, background=True, tokens=1, length=500)
    waits: list[float] = []
    while cell in engine.scheduler.requests:
        (name,) = engine.add(1, background=False, tokens=1, length=8)
        asked = engine.clock
        while name not in engine.step():
            assert engine.clock < 60_000
        if engine.clock - asked > 3 * engine.decode:
            waits.append(engine.clock - asked)
    *earlier, last = waits
    assert waits == sorted(waits)
    assert earlier
    assert sum(earlier) <= 0.1 * (engine.clock - last)


@pytest.mark.parametrize(("decode", "each"), [(200.0, 1.0), (5.0, 60.0), (300.0, 120.0)])
def test_bursts_come_in_time_and_take_a_tenth_of_it(
    config: VllmConfig, decode: float, each: float
) -> None:
    engine = Engine(config, decode=decode, each=each)
    engine.add(8, background=False, tokens=480, length=8)
    engine.step()
    began = [engine.clock]
    burst = PROMPT + 16 * each
    while engine.clock < 60_000:
        _, waiting = engine.scheduler.get_request_counts()
        engine.add(16 - waiting, background=True, tokens=1)
        engine.add(8 - len(engine.scheduler.running), background=False, tokens=480, length=8)
        start = engine.clock
        if any(name.startswith("cell") for name in engine.step()):
            began.append(start)
            assert engine.steps[-1][1] == 16
    gaps = np.diff(began) / 1e3
    bound = max(5.0, 9 * (decode + burst) / 1e3)
    assert len(gaps) > 2
    assert gaps.max() <= bound + 2 * (decode + burst) / 1e3
    assert burst * (len(gaps) - 1) <= 0.1 * (began[-1] - began[1])


def test_where_others_always_wait_some_of_the_background_begin_in_time(
    config: VllmConfig,
) -> None:
    engine = Engine(config)
    cells = engine.add(8, background=True, tokens=1)
    began: list[str] = []
    since = 0.0
    while len(began) < len(cells):
        running, waiting = engine.scheduler.get_request_counts()
        others = running + waiting - (len(cells) - len(began))
        for _ in range(max(0, 160 - others)):
            engine.add(1, background=False, tokens=40 + engine.number % 60, length=8)
        started = [name for name in engine.step() if name.startswith("cell")]
        if started:
            since = engine.clock
        began += started
        assert engine.clock - since < 5_100
    assert began == cells


def test_nothing_begins_before_the_usual_time_is_known() -> None:
    pace = BackgroundPace()
    for _ in range(31):
        assert not pace.allows()
        pace.add_step(0.005)
    pace.add_step(0.005)
    assert pace.allows()
    pace.begin(beside=True)
    for step in range(300):
        assert not pace.allows(), step
        pace.add_step(0.017 if step == 0 else 0.005)
    assert pace.allows()


def test_long_steps_of_others_hold_the_background_for_a_limited_number_of_steps() -> None:
    pace = BackgroundPace()
    for _ in range(64):
        pace.add_step(0.005)
    pace.begin(beside=True)
    for step in range(2400):
        assert not pace.allows(), step
        pace.add_step(0.017)
    assert pace.allows()


def test_a_burst_that_begins_before_a_step_is_known_counts_all_steps_as_longer() -> None:
    pace = BackgroundPace()
    assert not pace.overdue(4.9)
    assert pace.overdue(5.0)
    pace.begin(beside=True)
    pace.add_step(2.0)
    assert not pace.overdue(17.9)
    assert pace.overdue(18.0)


def test_steps_that_vary_by_themselves_hold_nothing_longer() -> None:
    pace = BackgroundPace()
    for step in range(64):
        pace.add_step(0.009 if step % 10 == 0 else 0.005)
    pace.begin(beside=True)
    for step in range(300):
        assert not pace.allows(), step
        pace.add_step(0.017 if step == 0 else 0.009 if step % 10 == 0 else 0.005)
    assert pace.allows()


def test_steps_that_were_long_when_nobody_else_ran_hold_nothing_longer() -> None:
    pace = BackgroundPace()
    for _ in range(64):
        pace.add_step(0.005)
    pace.begin(beside=False)
    for step in range(300):
        assert not pace.allows(), step
        pace.add_step(0.08 if step < 10 else 0.005)
    assert pace.allows()
