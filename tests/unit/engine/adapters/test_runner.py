"""What both runners do around their steps."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rheostat_engine import EXTRA_ARG, GainsUpdate
from rheostat_engine.adapters.probing import PROBE_TOKENS
from rheostat_engine.adapters.runner import apply_scheduler_output, disable_lora
from rheostat_engine.plan.plan import CACHED_TOKENS_RECOMPUTED_ARG


class Heard:
    """Notes what the runtime is told."""

    def __init__(self) -> None:
        self.words: list[tuple[str, ...]] = []

    def remove_request(self, request_id: str) -> None:
        self.words.append(("remove_request", request_id))

    def preempt(self, request_id: str) -> None:
        self.words.append(("preempt", request_id))

    def add_request(self, request_id: str, wire: object, cached_tokens_recomputed: int) -> None:
        self.words.append(("add_request", request_id, str(wire), str(cached_tokens_recomputed)))

    def send_released(self) -> None:
        self.words.append(("send_released",))

    def set_gains(self, updates: Sequence[GainsUpdate]) -> None:
        self.words.append(("set_gains", *(update.name for update in updates)))


def test_the_runtime_hears_of_what_ends_before_what_begins() -> None:
    def new(request_id: str, extra: dict[str, object] | None) -> SimpleNamespace:
        return SimpleNamespace(req_id=request_id, sampling_params=SimpleNamespace(extra_args=extra))

    heard: Any = Heard()  # in place of a SiteRuntime
    scheduled: Any = SimpleNamespace(  # in place of a SchedulerOutput
        finished_req_ids={"a"},
        preempted_req_ids={"b"},
        scheduled_new_reqs=[
            new("a", {EXTRA_ARG: "plan"}),
            new("c", None),
            new("d", {"other": 1}),
            new("f", {EXTRA_ARG: "capture", CACHED_TOKENS_RECOMPUTED_ARG: 32}),
            SimpleNamespace(req_id="e", sampling_params=None),
        ],
    )
    apply_scheduler_output(heard, scheduled)
    scheduled.preempted_req_ids = None
    scheduled.scheduled_new_reqs = []
    scheduled.rheostat_gains = [GainsUpdate("a", 1, 0, {0: 2.0})]
    apply_scheduler_output(heard, scheduled)
    assert heard.words == [
        ("remove_request", "a"),
        ("send_released",),
        ("preempt", "b"),
        ("add_request", "a", "plan", "0"),
        ("add_request", "f", "capture", "32"),
        ("remove_request", "a"),
        ("send_released",),
        ("set_gains", "a"),
    ]


class Adapters:
    """Notes which adapters a runner is told to use."""

    def __init__(self, config: object) -> None:
        self.lora_config = config
        self.told: list[tuple[object, ...]] = []

    def _set_active_loras(self, *arguments: object) -> None:
        self.told.append(arguments)


def test_the_probes_tokens_use_no_adapter_where_there_could_be_one() -> None:
    told = []
    for config in (None, object()):
        runner: Any = Adapters(config)  # in place of vLLM's mixin
        disable_lora(runner)
        told.append(runner.told)
    assert told == [[], [((0,), (0,) * PROBE_TOKENS, set())]]
