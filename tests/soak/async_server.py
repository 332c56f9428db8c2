"""`rheostat` on a CPU with vLLM's async scheduling, which its CPU platform turns off.

    python -c "from tests.soak.async_server import main; main()" FILE serve MODEL ...

How it is forced
    `CpuPlatform.check_and_update_config` has the last word on `async_scheduling`. It is replaced in
    the server's process, which makes the configuration; the engine and its workers get the result.
    So the scheduler is vLLM's `AsyncScheduler`, and up to two steps are in flight.
Evidence that it is on
    The engine does not start with another scheduler. FILE gets `Steps` as JSON each time that no
    step is in flight, and every hundred steps.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rheostat_engine
from rheostat._cli import main as run
from rheostat_engine import engine_kwargs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler

PROGRAM = "from tests.soak.async_server import main; main()"
_FILE = "RHEOSTAT_TEST_STEPS"
"""The environment variable that names the file."""


@dataclass
class Steps:
    """Steps that computed tokens."""

    steps: int = 0
    ahead: int = 0
    """Steps that were scheduled before the tokens of the step before had come."""


def main() -> None:
    """Runs the command line of `rheostat`."""
    file, *sys.argv[1:] = sys.argv[1:]
    os.environ[_FILE] = file

    def forced_kwargs(*arguments: Any, **options: Any) -> dict[str, object]:
        _keep_async_scheduling()
        scheduler = f"{__name__}.{counting_scheduler.__name__}"
        return {**engine_kwargs(*arguments, **options), "scheduler_cls": scheduler}

    rheostat_engine.engine_kwargs = forced_kwargs
    sys.exit(run())


def _keep_async_scheduling() -> None:
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def keep(config: "VllmConfig") -> None:
        stock(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(keep)


def counting_scheduler(vllm_config: "VllmConfig", **arguments: Any) -> "Scheduler":
    """Creates our scheduler, and counts its steps.

    Raises:
        RuntimeError: it is not vLLM's scheduler for async scheduling.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from rheostat_engine.adapters.scheduler import site_scheduler

    scheduler = site_scheduler(vllm_config, **arguments)
    if not isinstance(scheduler, AsyncScheduler):
        raise RuntimeError(f"async scheduling is off: {type(scheduler)}")
    _count(scheduler, Path(os.environ[_FILE]))
    return scheduler


def _count(scheduler: "Scheduler", file: Path) -> None:
    found = Steps()
    in_flight = 0
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def counted_schedule(*arguments: Any, **options: Any) -> Any:
        nonlocal in_flight
        output = schedule(*arguments, **options)
        if output.total_num_scheduled_tokens:
            found.steps += 1
            found.ahead += in_flight > 0
            in_flight += 1
        return output

    def counted_update(output: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal in_flight
        if output.total_num_scheduled_tokens:
            in_flight -= 1
            if not in_flight or found.steps % 100 == 0:
                file.write_text(json.dumps(asdict(found)), encoding="utf-8")
        return update(output, *arguments, **options)

    scheduler.schedule, scheduler.update_from_output = counted_schedule, counted_update
