"""What both of vLLM's model runners need around them to follow requests.

Invariant: the runtime hears of finished, preempted and new requests, in this order, before the step
that the same scheduler output describes; vLLM may reuse an id in one output.
"""

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from rheostat_engine.adapters.probing import PROBE_TOKENS
from rheostat_engine.core.runtime import SiteRuntime
from rheostat_engine.plan import EXTRA_ARG, FORGONE_ARG


def follow(runtime: SiteRuntime, scheduled: SchedulerOutput) -> None:
    """Tells the runtime what the scheduler decided."""
    for request_id in scheduled.finished_req_ids:
        runtime.forget(request_id)
    runtime.settle()
    for request_id in scheduled.preempted_req_ids or ():
        runtime.preempt(request_id)
    for new in scheduled.scheduled_new_reqs:
        extra = new.sampling_params.extra_args if new.sampling_params is not None else None
        if extra and EXTRA_ARG in extra:
            runtime.install(new.req_id, extra[EXTRA_ARG], extra.get(FORGONE_ARG, 0))


def without_adapters(runner: LoRAModelRunnerMixin) -> None:
    """Says that no token of the probe's pass uses an adapter; a fresh mapping says nothing yet."""
    if runner.lora_config is not None:
        runner._set_active_loras((0,), (0,) * PROBE_TOKENS, set())
