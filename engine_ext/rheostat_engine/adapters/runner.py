"""Functions that both of vLLM's model runners use.

Invariant: the runtime processes finished, preempted and new requests in this order, before the step
of the same scheduler output, because vLLM may reuse an id in one output.
"""

from vllm import envs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from rheostat_engine.adapters.probing import PROBE_TOKENS
from rheostat_engine.plan.plan import CACHED_TOKENS_RECOMPUTED_ARG, EXTRA_ARG
from rheostat_engine.worker.runtime import SiteRuntime


def follow(runtime: SiteRuntime, scheduled: SchedulerOutput) -> None:
    """Applies the decisions of the scheduler to the runtime."""
    for request_id in scheduled.finished_req_ids:
        runtime.remove_request(request_id)
    runtime.send_released()
    for request_id in scheduled.preempted_req_ids or ():
        runtime.preempt(request_id)
    for new in scheduled.scheduled_new_reqs:
        extra = new.sampling_params.extra_args if new.sampling_params is not None else None
        if extra and EXTRA_ARG in extra:
            runtime.add_request(
                new.req_id, extra[EXTRA_ARG], extra.get(CACHED_TOKENS_RECOMPUTED_ARG, 0)
            )


def without_adapters(runner: LoRAModelRunnerMixin) -> None:
    """Sets no adapter for the tokens of the probe's pass, because a new mapping is undefined."""
    if runner.lora_config is not None:
        runner._set_active_loras((0,), (0,) * PROBE_TOKENS, set())


def name_of(request_id: str) -> str:
    """The server's name of a request, from vLLM's id.

    vLLM's front end adds a hyphen and random letters to the id that it receives, unless an option
    disables that, so that two requests with one id stay apart.
    """
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        return request_id
    return request_id.rpartition("-")[0]
