"""Functions shared by the two model runners.

Invariant: finished, preempted and new requests of a scheduler output are processed in this order
before its step, because vLLM may reuse an id within one output.
"""

from vllm import envs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from rheostat_engine.adapters.gains import gains_of
from rheostat_engine.adapters.gate_decisions import questions_of
from rheostat_engine.adapters.probing import PROBE_TOKENS
from rheostat_engine.plan.plan import CACHED_TOKENS_RECOMPUTED_ARG, EXTRA_ARG
from rheostat_engine.worker.runtime import SiteRuntime


def apply_scheduler_output(runtime: SiteRuntime, scheduled: SchedulerOutput) -> None:
    """Applies the request changes of a scheduler output to the runtime."""
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
    if gains := gains_of(scheduled):
        runtime.set_gains(gains)
    if questions := questions_of(scheduled):
        runtime.decisions.ask(questions)


def disable_lora(runner: LoRAModelRunnerMixin) -> None:
    """Disables LoRA for the probe's tokens, because vLLM has not initialized the mapping yet."""
    if runner.lora_config is not None:
        runner._set_active_loras((0,), (0,) * PROBE_TOKENS, set())


def server_request_id(request_id: str) -> str:
    """The server's id of a request, from vLLM's id.

    vLLM's front end appends a hyphen and random letters to an id to make it unique, unless an
    environment variable disables that.
    """
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        return request_id
    return request_id.rpartition("-")[0]
