"""Lets other requests reuse a request's KV blocks if its prompt decides that its gates stay shut.

Why the scheduler must ask
    vLLM hashes a block when its tokens are known, but only the device computes whether a gate is
    open. So the `SchedulerOutput` of the step that decides a request's gates carries a query, and
    the `ModelRunnerOutput` of that step carries the report. The scheduler waits for that output
    anyway, because it has the sampled tokens.
Which blocks wait
    Blocks from the request's first gated token on have no hashes until the report, so they are not
    cached. Usually no block waits, because the report is processed before the first generated token
    is appended. If the prompt ends at the end of a block, that block waits.
Preemption
    A preempted request computes its gates again. So its decision and the hashes that depend on it
    are discarded. Blocks already cached under those hashes stay valid: their KV was computed under
    the old decision.

Invariants: a request gets the block keys of a request without gates only after a worker has
reported that all its gates were shut in the computation that wrote the blocks. A report of a step
that was scheduled before a preemption is ignored. Without a report, gated blocks are never shared.
While a request is undecided, each step costs it one lookup in a set.
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


class _Undecided(NamedTuple):
    request: Request
    keys: BlockKeys
    decided: DecidedOnce


class DecidedBlocks:
    """Withholds block hashes of requests whose gates are decided once, until the decision."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Wraps methods of the scheduler and of its KV cache coordinator.

        The scheduler must have no requests yet. Not for pipeline parallelism, because
        only the last stage's output reaches the scheduler.
        """
        self._scheduler = scheduler
        self._undecided: dict[str, _Undecided] = {}
        self._hashers: dict[str, Any] = {}
        """vLLM's block hasher of each request with such gates, by request id. Kept until the
        request is freed, because a preemption withholds the hashes again."""
        self._hash_block_size: int = scheduler.kv_cache_manager.block_pool.hash_block_size
        self._coordinator = scheduler.kv_cache_manager.coordinator
        self._add = scheduler.add_request
        self._schedule = scheduler.schedule
        self._update = scheduler.update_from_output
        self._preempt = scheduler._preempt_request
        self._free = scheduler._free_request
        self._cache = self._coordinator.cache_blocks
        scheduler.add_request = self._add_and_withhold
        scheduler.schedule = self._schedule_and_ask
        scheduler.update_from_output = self._decide_and_update
        scheduler._preempt_request = self._preempt_and_withhold
        scheduler._free_request = self._free_and_forget

    def _add_and_withhold(self, request: Request) -> None:
        plan = request_plan(request)
        decided = None if plan is None else plan.keys.decided_once
        if (
            decided is not None
            # At an earlier position, a prefix cache hit could skip the token that decides.
            and decided.position >= request.num_prompt_tokens - 1
            and request._block_hasher is not None
            and not request.resumable
        ):
            self._hashers[request.request_id] = request._block_hasher
            self._withhold(request)
        self._add(request)

    def _withhold(self, request: Request) -> None:
        """Withholds the hashes that depend on a request's gates. No token is computed yet."""
        plan = request_plan(request)
        assert plan is not None
        assert plan.keys.decided_once is not None
        plan.keys.await_decision()
        del request.block_hashes[plan.keys.keyed_end // self._hash_block_size :]
        request._block_hasher = _hash_nothing
        if not self._undecided:
            self._coordinator.cache_blocks = self._cache_hashed
        undecided = _Undecided(request, plan.keys, plan.keys.decided_once)
        self._undecided[request.request_id] = undecided

    def _remove(self, request_id: str) -> None:
        """Removes a request that is decided or finished."""
        if self._undecided.pop(request_id, None) is not None and not self._undecided:
            self._coordinator.cache_blocks = self._cache

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
        """Hashes the blocks that waited for the decision, and caches the computed ones."""
        request, keys, decided = undecided
        self._remove(request.request_id)
        keys.decide(shut=shut)
        request._block_hasher = self._hashers[request.request_id]
        request.update_block_hashes()
        if request.status == RequestStatus.RUNNING:
            self._scheduler.kv_cache_manager.cache_blocks(request, decided.position + 1)

    def _preempt_and_withhold(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        self._preempt(request, timestamp, drop_stale_output=drop_stale_output)
        if request.request_id in self._hashers:
            self._withhold(request)

    def _free_and_forget(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:  # vLLM's own
        self._remove(request.request_id)
        self._hashers.pop(request.request_id, None)
        return self._free(request, delay_free_blocks)

    def _cache_hashed(self, request: Request, num_computed_tokens: int) -> None:
        """Caches only blocks that have hashes. Installed only while some request is undecided.

        vLLM calls `cache_blocks` twice per request and step, so at other times its own method runs.
        """
        if request.request_id in self._undecided:
            hashed = len(request.block_hashes) * self._hash_block_size
            num_computed_tokens = min(num_computed_tokens, hashed)
        self._cache(request, num_computed_tokens)


def questions_of(output: SchedulerOutput) -> Questions:
    """The questions to workers that a scheduler output carries, by request id."""
    return {name: query.decided for name, query in _queries_of(output).items()}


def _queries_of(output: SchedulerOutput) -> dict[str, DecisionQuery]:
    return cast(dict[str, DecisionQuery], getattr(output, _QUERIES, {}))


def with_decisions(output: object, decisions: GateDecisions) -> object:
    """The output of a step. Carries the step's report, if there is one.

    Args:
        output: the output that the model runner returned.
        decisions: the worker's questions and report.
    """
    report = decisions.take()
    if report is None:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return _DecidedOutput(output, report)
    if isinstance(output, ModelRunnerOutput) and output.req_ids:  # vLLM shares an empty output
        setattr(output, _SHUT, report.shut())
    return output


class _DecidedOutput(AsyncModelRunnerOutput):
    """An asynchronous output that adds the report once the step has run."""

    def __init__(self, output: AsyncModelRunnerOutput, report: DecisionReport) -> None:
        self._output = output
        self._report = report

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        setattr(output, _SHUT, self._report.shut())
        return output


def _hash_nothing(request: Request) -> list[BlockHash]:
    return []
