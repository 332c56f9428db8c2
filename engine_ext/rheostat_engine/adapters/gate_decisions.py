"""Shares the KV of requests whose gates the prompt has decided to stay shut.

Why the scheduler must ask
    A block's key is computed when its tokens are known. Whether a gate is open is known on the
    device only. So the message of the step that decides a request's gates asks, and the output of
    the step answers. vLLM waits for this output anyway, because it has the sampled tokens.
What waits
    The request's blocks from its first token under a gate on, mostly none at all: the answer
    arrives before the first generated token is appended. A prompt that ends with a block has one
    block that waits. Meanwhile these blocks have no hashes and aren't cached.
Preemption
    A preempted request computes its gates again. So what was decided is discarded, and so are the
    hashes. Blocks that were cached under them stay: their KV was computed under the old decision.

Invariants: a request's keys are those of a request without gates only after a worker has reported
that all gates were shut in the computation to which the blocks belong. A report of a step that was
scheduled before a preemption is ignored. If no report comes, blocks are never shared. A waiting
request costs a step one lookup in a set.
"""

from typing import Any, NamedTuple, cast

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rheostat_engine.adapters.request_plan import request_plan
from rheostat_engine.plan.block_keys import BlockKeys
from rheostat_engine.plan.gate_decisions import DecidedOnce, DecisionQuery
from rheostat_engine.worker.gate_decisions import DecisionReport, GateDecisions, Questions

_QUERIES = "rheostat_decision_queries"
_SHUT = "rheostat_shut"
_CACHE_BLOCKS = "cache_blocks"


class _Undecided(NamedTuple):
    request: Request
    keys: BlockKeys
    decided: DecidedOnce


class DecidedBlocks:
    """The requests of a scheduler whose gates are decided once."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Replaces methods of the scheduler and of its cache. No request has gates.

        Not for pipelines, whose outputs come from the last stage alone.
        """
        self._scheduler = scheduler
        self._undecided: dict[str, _Undecided] = {}
        self._hashers: dict[str, Any] = {}
        """vLLM's function that hashes blocks, by the id of each request with such gates."""
        self._size: int = scheduler.kv_cache_manager.block_pool.hash_block_size
        self._coordinator = scheduler.kv_cache_manager.coordinator
        self._add = scheduler.add_request
        self._schedule = scheduler.schedule
        self._update = scheduler.update_from_output
        self._preempt = scheduler._preempt_request
        self._free = scheduler._free_request
        self._cache = self._coordinator.cache_blocks
        replaced = {
            "add_request": self._add_and_wait,
            "schedule": self._schedule_and_ask,
            "update_from_output": self._decide_and_update,
            "_preempt_request": self._preempt_and_wait,
            "_free_request": self._free_and_forget,
        }
        for name, method in replaced.items():
            setattr(scheduler, name, method)

    def _add_and_wait(self, request: Request) -> None:
        plan = request_plan(request)
        decided = None if plan is None else plan.keys.decided_once
        if (
            decided is not None
            # Otherwise a hit could end behind the position, which would never be computed.
            and decided.position >= request.num_prompt_tokens - 1
            and request._block_hasher is not None
            and not request.resumable
        ):
            self._hashers[request.request_id] = request._block_hasher
            self._wait(request)
        self._add(request)

    def _wait(self, request: Request) -> None:
        """Discards what depends on the gates of a request that computes nothing yet."""
        plan = request_plan(request)
        assert plan is not None
        assert plan.keys.decided_once is not None
        plan.keys.await_decision()
        del request.block_hashes[plan.keys.keyed_end // self._size :]
        request._block_hasher = _hash_nothing
        if not self._undecided:
            setattr(self._coordinator, _CACHE_BLOCKS, self._cache_hashed)
        undecided = _Undecided(request, plan.keys, plan.keys.decided_once)
        self._undecided[request.request_id] = undecided

    def _remove(self, name: str) -> None:
        """Removes a request that is decided or ended."""
        if self._undecided.pop(name, None) is not None and not self._undecided:
            setattr(self._coordinator, _CACHE_BLOCKS, self._cache)

    def _schedule_and_ask(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = self._schedule(throttle_prefills)
        if not self._undecided:
            return output
        queries: dict[str, DecisionQuery] = {}
        for name in self._undecided.keys() & output.num_scheduled_tokens.keys():
            request, _, decided = self._undecided[name]
            end = request.num_computed_tokens  # after this step
            if end - output.num_scheduled_tokens[name] <= decided.position < end:
                queries[name] = DecisionQuery(decided, request.num_preemptions)
        if queries:
            setattr(output, _QUERIES, queries)
        return output

    def _decide_and_update(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        shut = getattr(model_runner_output, _SHUT, ())
        for name, query in _queries_of(scheduler_output).items():
            undecided = self._undecided.get(name)
            if undecided is not None and undecided.request.num_preemptions == query.preemptions:
                self._decide(undecided, shut=name in shut)
        return self._update(scheduler_output, model_runner_output)

    def _decide(self, undecided: _Undecided, *, shut: bool) -> None:
        """Hashes the blocks that have waited, and caches those that are computed."""
        request, keys, decided = undecided
        self._remove(request.request_id)
        keys.decide(shut=shut)
        request._block_hasher = self._hashers[request.request_id]
        request.update_block_hashes()
        if request.status == RequestStatus.RUNNING:
            self._scheduler.kv_cache_manager.cache_blocks(request, decided.position + 1)

    def _preempt_and_wait(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        self._preempt(request, timestamp, drop_stale_output=drop_stale_output)
        if request.request_id in self._hashers:
            self._wait(request)

    def _free_and_forget(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:  # vLLM's own
        self._remove(request.request_id)
        self._hashers.pop(request.request_id, None)
        return self._free(request, delay_free_blocks)

    def _cache_hashed(self, request: Request, num_computed_tokens: int) -> None:
        """Caches the blocks of a request that have hashes. Only while a request is undecided.

        vLLM calls this twice for each request of a step, so other steps call its own method.
        """
        if request.request_id in self._undecided:
            hashed = len(request.block_hashes) * self._size
            num_computed_tokens = min(num_computed_tokens, hashed)
        self._cache(request, num_computed_tokens)


def questions_of(output: SchedulerOutput) -> Questions:
    """The questions that the output of a scheduler carries."""
    return {name: query.decided for name, query in _queries_of(output).items()}


def _queries_of(output: SchedulerOutput) -> dict[str, DecisionQuery]:
    return cast(dict[str, DecisionQuery], getattr(output, _QUERIES, {}))


def with_decisions(output: object, decisions: GateDecisions) -> object:
    """The output of a step, with the report of the step if there is one.

    Args:
        output: as a model runner returns it.
        decisions: of the worker.
    """
    report = decisions.take()
    if report is None:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return _DecidedOutput(output, report)
    if isinstance(output, ModelRunnerOutput) and output.req_ids:  # vLLM shares empty ones
        setattr(output, _SHUT, report.shut())
    return output


class _DecidedOutput(AsyncModelRunnerOutput):
    """An output that is still computed, with a report."""

    def __init__(self, output: AsyncModelRunnerOutput, report: DecisionReport) -> None:
        self._output = output
        self._report = report

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        setattr(output, _SHUT, self._report.shut())
        return output


def _hash_nothing(request: Request) -> list[BlockHash]:
    return []
