"""What a step's message to the workers holds of the plans of its new requests.

With several worker processes, vLLM pickles each step's `SchedulerOutput` and sends it to all of
them. Each new request brings its plan, and all samples of a request bring equal tables. `pickle`
writes an object once, however often it is referred to.

Invariant: a message holds each table once. A plan that can't be read stays as it is, and the worker
fails its request.
"""

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from rheostat_engine.plan import EXTRA_ARG, Sealed, read

_SCHEDULE = "schedule"


def share_tables(scheduler: Scheduler) -> None:
    """From now on this scheduler's outputs hold each table once."""
    stock = scheduler.schedule

    def schedule(throttle_prefills: bool = False) -> SchedulerOutput:
        output = stock(throttle_prefills)
        held: dict[bytes, Sealed] = {}
        for new in output.scheduled_new_reqs:
            if new.sampling_params is not None:
                _share(new.sampling_params, held)
        return output

    setattr(scheduler, _SCHEDULE, schedule)


def _share(params: SamplingParams, held: dict[bytes, Sealed]) -> None:
    """Puts what was read of a request's plan in its place, with the tables of `held`."""
    extra = params.extra_args
    if not extra or EXTRA_ARG not in extra:
        return
    try:
        plan = read(extra[EXTRA_ARG])
    except ValueError:
        return
    acts, captures = (
        None if one is None else held.setdefault(one.digest, one)
        for one in (plan.acts, plan.captures)
    )
    params.extra_args = {**extra, EXTRA_ARG: plan._replace(acts=acts, captures=captures)}
