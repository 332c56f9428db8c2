"""Sends each table of plans only once in a step's message to the workers.

With several worker processes, vLLM pickles each step's `SchedulerOutput`. All samples of a request
have equal tables. `pickle` writes an object once, so equal tables are replaced by one object.

Invariant: a message contains each table once. A plan that can't be parsed stays unchanged, and the
worker fails its request.
"""

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from rheostat_engine.plan.plan import EXTRA_ARG, EncodedTable, read_plan


def share_tables(scheduler: Scheduler) -> None:
    """Makes the outputs of this scheduler share equal tables."""
    stock = scheduler.schedule

    def schedule(throttle_prefills: bool = False) -> SchedulerOutput:
        output = stock(throttle_prefills)
        tables: dict[bytes, EncodedTable] = {}
        gates: dict[bytes, bytes] = {}
        for new in output.scheduled_new_reqs:
            if new.sampling_params is not None:
                _share(new.sampling_params, tables, gates)
        return output

    scheduler.schedule = schedule


def _share(
    params: SamplingParams, tables: dict[bytes, EncodedTable], gates: dict[bytes, bytes]
) -> None:
    """Parses a request's plan, and replaces its tables and gates by equal ones of earlier requests.

    So pickle writes each only once.
    """
    extra = params.extra_args
    if not extra or EXTRA_ARG not in extra:
        return
    try:
        plan = read_plan(extra[EXTRA_ARG])
    except ValueError:
        return
    plan.acts = _same(plan.acts, tables)
    plan.captures = _same(plan.captures, tables)
    plan.outside = _same(plan.outside, tables)
    plan.encoded_gates = gates.setdefault(plan.encoded_gates, plan.encoded_gates)
    if plan.control is not None:
        gained = tables.setdefault(plan.control.acts.digest, plan.control.acts)
        plan.control = plan.control._replace(acts=gained)
    params.extra_args = {**extra, EXTRA_ARG: plan}


def _same(table: EncodedTable | None, tables: dict[bytes, EncodedTable]) -> EncodedTable | None:
    return None if table is None else tables.setdefault(table.digest, table)
