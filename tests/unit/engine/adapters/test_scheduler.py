"""Plans change vLLM's block hashes exactly where they should, and vLLM is where it was."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.config import SchedulerConfig
from vllm.utils.hashing import sha256
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.sched import async_scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from rheostat_engine import EXTRA_ARG, OPEN_END, Capture, Plan, TokenCondition
from rheostat_engine.adapters import request_plan
from rheostat_engine.adapters.scheduler import install_block_keys, site_scheduler
from rheostat_engine.plan import plan
from rheostat_engine.plan.plan import ReceivedPlan, read_plan
from rheostat_engine.plan.tables import SteeringTable
from rheostat_engine.plan.wire import steering_from

from ..strategies import EVERYWHERE, LIMIT, ablate, add, plans
from ..wires import block_keys

BLOCK = 4
PROMPT = [*range(100, 118)]
NAME = "generate_block_hash_extra_keys"
STOCK = getattr(kv_cache_utils, NAME)
RELIES = "rheostat_engine.adapters.scheduler relies on it"
HOOKED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def _as_it_was() -> Iterator[None]:
    kv_cache_utils.init_none_hash(sha256)
    yield
    for module in (kv_cache_utils, block_pool):
        setattr(module, NAME, STOCK)


@pytest.fixture
def _hooked(_as_it_was: None) -> None:
    install_block_keys()


def request(extra: object, *, request_id: str = "v", tokens: int = len(PROMPT)) -> Request:
    """vLLM's request, whose extra argument is `extra`."""
    return Request(
        request_id,
        PROMPT[:tokens],
        SamplingParams(max_tokens=99, extra_args={EXTRA_ARG: extra} if extra else None),
        None,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
    )


def hashes(plan: Plan | None, *, generated: int = 0, request_id: str = "v") -> list[bytes]:
    """The hashes of a request's blocks once it has generated some tokens."""
    made = request(None if plan is None else plan.to_wire(), request_id=request_id)
    for token in range(generated):
        made.append_output_token_ids(token)
    return list(made.block_hashes)


def differing(one: Sequence[bytes], other: Sequence[bytes]) -> list[bool]:
    """Block by block."""
    return [a != b for a, b in zip(one, other, strict=True)]


def test_the_function_stands_where_it_is_replaced() -> None:
    parameters = list(inspect.signature(STOCK).parameters)
    assert parameters == ["request", "start_token_idx", "end_token_idx", "start_mm_idx"], RELIES
    assert getattr(block_pool, NAME) is STOCK, RELIES
    assert STOCK.__module__ == kv_cache_utils.__name__, RELIES


def test_vllm_looks_the_function_up_for_every_block() -> None:
    for source in (kv_cache_utils.get_request_block_hasher, block_pool.BlockPool):
        assert f"= {NAME}(\n" in inspect.getsource(source), RELIES


@pytest.mark.usefixtures("_as_it_was")
def test_requests_have_room_for_what_is_kept_beside_them() -> None:
    made = request(None)
    assert vars(made)["request_id"] == "v", RELIES
    assert made.sampling_params == SamplingParams(max_tokens=99), RELIES


def test_vllm_makes_its_scheduler_of_the_class_that_its_configuration_names() -> None:
    source = inspect.getsource(EngineCore.__init__)
    assert "Scheduler = vllm_config.scheduler_config.get_scheduler_cls()" in source, RELIES
    assert "Scheduler(\n            vllm_config=vllm_config," in source, RELIES


@pytest.mark.usefixtures("_as_it_was")
def test_requests_without_a_plan_keep_vllms_hashes() -> None:
    stock = hashes(None, generated=9)
    install_block_keys()
    assert len(stock) == 6
    assert hashes(None, generated=9) == stock
    assert hashes(Plan("r", (), (Capture((1,), EVERYWHERE),)), generated=9) == stock
    assert hashes(Plan("r", (add(1, scale=0.0),), epoch=7), generated=9) == stock


@pytest.mark.usefixtures("_hooked")
def test_hashes_differ_from_the_first_touched_block_on() -> None:
    plain = hashes(None, generated=9)
    touched = {
        ((0, 1),): [True] * 6,
        ((7, 8),): [False, *[True] * 5],
        ((8, 9),): [False, False, *[True] * 4],
        ((18, OPEN_END),): [False] * 4 + [True] * 2,
        ((24, OPEN_END),): [False] * 6,
    }
    for where, expected in touched.items():
        found = hashes(Plan("r", (add(1, where=where),)), generated=9)
        assert differing(found, plain) == expected


@pytest.mark.usefixtures("_hooked")
def test_equal_acts_share_blocks_whatever_the_requests_are_called() -> None:
    plan = Plan("r", (add(1, where=((5, 20),)), ablate(2), add(3)))
    again = replace(plan, request_id="s", captures=(Capture((0,), EVERYWHERE),))
    assert hashes(plan, generated=9) == hashes(again, generated=9, request_id="w")
    other = replace(plan, acts=(plan.acts[0], plan.acts[2], plan.acts[1]))
    assert differing(hashes(plan), hashes(other)) == [True] * 4


@pytest.mark.usefixtures("_hooked")
def test_conditions_on_generated_tokens_leave_the_prompts_blocks_alone() -> None:
    act = add(1, where=(), conditions=(TokenCondition(((18, OPEN_END),), (3,), True),))
    found = differing(hashes(Plan("r", (act,)), generated=9), hashes(None, generated=9))
    assert found == [False] * 4 + [True] * 2


@pytest.mark.usefixtures("_hooked")
def test_private_blocks_are_found_by_their_own_request_alone() -> None:
    plan = Plan("r", private_from=18)
    mine = hashes(plan, generated=9)
    assert differing(mine, hashes(None, generated=9)) == [False] * 4 + [True] * 2
    assert differing(mine, hashes(replace(plan, request_id="s"), generated=9))[4:] == [True] * 2
    assert hashes(plan, generated=9) == mine


@pytest.mark.usefixtures("_hooked")
def test_the_epoch_parts_touched_blocks_and_nothing_else() -> None:
    plan = Plan("r", (add(1, where=((9, 10),)),))
    later = hashes(replace(plan, epoch=1))
    assert differing(hashes(plan), later) == [False, False, True, True]


@pytest.mark.usefixtures("_hooked")
@pytest.mark.parametrize("wire", ["text", 5, [1], {"id": 3}, {"id": "r", "acts": [None]}])
def test_a_plan_that_cannot_be_read_shares_nothing(wire: object) -> None:
    one, again, other = (request(wire, request_id=name).block_hashes for name in "aab")
    assert one == again
    assert differing(one, other) == [True] * 4
    assert differing(one, hashes(None)) == [True] * 4


@HOOKED
@pytest.mark.usefixtures("_hooked")
@given(plans(), plans(), st.integers(0, LIMIT))
def test_hashes_are_equal_as_long_as_all_keys_have_been(
    one: Plan, other: Plan, generated: int
) -> None:
    keys = [block_keys(one), block_keys(other)]
    blocks = [(b, b + BLOCK) for b in range(0, len(PROMPT) + generated - BLOCK + 1, BLOCK)]
    apart, expected = False, []
    for block in blocks:
        apart |= keys[0].key(*block) != keys[1].key(*block)
        expected.append(apart)
    found = differing(hashes(one, generated=generated), hashes(other, generated=generated))
    assert found == expected


@pytest.mark.usefixtures("_hooked")
def test_what_vllm_puts_into_a_key_stays_in_it() -> None:
    made = request(Plan("r", (add(1),)).to_wire())
    made.cache_salt = "salt"
    keys, following = getattr(kv_cache_utils, NAME)(made, 0, BLOCK, 3)
    expected, stock_following = STOCK(made, 0, BLOCK, 3)
    touching = block_keys(Plan("r", (add(1),))).key(0, BLOCK)
    assert keys == (*expected, ("rheostat", touching))
    assert following == stock_following
    assert getattr(kv_cache_utils, NAME)(made, BLOCK, 2 * BLOCK, 0)[0] == (
        ("rheostat", block_keys(Plan("r", (add(1),))).key(BLOCK, 2 * BLOCK)),
    )


@pytest.mark.usefixtures("_hooked")
def test_a_plan_is_read_once_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []

    def reading(wire: object) -> ReceivedPlan:
        found.append(wire)
        return read_plan(wire)

    monkeypatch.setattr(request_plan, "read_plan", reading)
    wire = Plan("r", (add(1),)).to_wire()
    made = request(wire)
    for token in range(20):
        made.append_output_token_ids(token)
    assert len(made.block_hashes) == 9
    assert found == [wire]


@pytest.mark.usefixtures("_hooked")
def test_equal_tables_are_read_once_for_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[bytes] = []

    def reading(wire: bytes) -> SteeringTable:
        tables.append(wire)
        return steering_from(wire)

    monkeypatch.setattr(plan, "steering_from", reading)
    acts = (add(1, where=((1, 2), (7, 9)), scale=0.125),)
    wires = [Plan(f"r{number}", acts, epoch=number).to_wire() for number in range(64)]
    samples = [request(wire, request_id=f"{number}") for number, wire in enumerate(wires)]
    assert len({sample.block_hashes[0] for sample in samples}) == 64
    encoded = read_plan(wires[0]).acts
    assert encoded is not None
    plan.steering_of(encoded)  # as the worker does, in the same process
    assert len(tables) == 1


@pytest.mark.usefixtures("_as_it_was")
def test_installing_again_changes_nothing() -> None:
    install_block_keys()
    first = getattr(kv_cache_utils, NAME)
    install_block_keys()
    assert getattr(kv_cache_utils, NAME) is getattr(block_pool, NAME) is first is not STOCK


class Made:
    """Stands for vLLM's scheduler."""

    def __init__(self, **arguments: object) -> None:
        self.arguments = arguments
        self.kv_cache_manager = SimpleNamespace(
            get_computed_blocks=None,
            coordinator=SimpleNamespace(cache_blocks=None),
            block_pool=SimpleNamespace(hash_block_size=BLOCK),
        )

    def schedule(self, throttle_prefills: bool = False) -> object:
        return SimpleNamespace(scheduled_new_reqs=[throttle_prefills])

    def _enqueue_waiting_request(self, request: Request) -> None:
        raise NotImplementedError

    get_request_counts = _free_request = _preempt_request = _enqueue_waiting_request
    add_request = update_from_output = _enqueue_waiting_request


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize("stages", [1, 2])
def test_the_scheduler_is_the_one_that_vllm_would_have_made(
    monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    monkeypatch.setattr(async_scheduler, "AsyncScheduler", Made)
    config = SchedulerConfig(
        max_model_len=64, is_encoder_decoder=False, async_scheduling=True, scheduler_cls="ours"
    )
    device = SimpleNamespace(device_type="cuda")
    vllm_config: Any = SimpleNamespace(  # in place of a VllmConfig
        scheduler_config=config,
        device_config=device,
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )
    made = site_scheduler(vllm_config, block_size=16, log_stats=True)
    assert isinstance(made, Made)
    assert made.arguments == {"vllm_config": vllm_config, "block_size": 16, "log_stats": True}
    assert config.scheduler_cls == "ours"
    assert made.kv_cache_manager.get_computed_blocks is not None
    assert {"schedule", "_preempt_request", "_free_request"} <= vars(made).keys()
    assert ("update_from_output" in vars(made)) == (stages == 1)  # asks for decisions of gates
    assert getattr(kv_cache_utils, NAME) is not STOCK
