"""Passes the scheduler's statistics of each step to a function, and switches off all others.

Why
    With any logger, `AsyncLLM` keeps statistics of every token and passes them to Prometheus. At
    256 streams that took 17 % of the CPU of the process that reads the engine's answers. Nothing
    reads these statistics here.
How
    The engine must be started with `disable_log_stats=False`, so that its scheduler counts. Then
    `AsyncLLM` and its output processor are told to keep no statistics, and `AsyncLLM` gets a
    manager of loggers that has none. Both are read when the output handler starts, so it may not
    run yet.
"""

from collections.abc import Callable

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

Engine = AsyncLLM

Record = Callable[[SchedulerStats], None]


def watch_scheduler(llm: Engine, record: Record) -> None:
    """Calls `record` with the scheduler's statistics of each step.

    Raises:
        RuntimeError: the engine's output handler runs already.
    """
    if llm.output_handler is not None:
        raise RuntimeError("statistics can only be switched off before the first request")
    llm.log_stats = llm.output_processor.log_stats = False
    llm.logger_manager = _SchedulerOnly(record)


class _SchedulerOnly(StatLoggerManager):
    """A manager of no loggers."""

    def __init__(self, record: Record) -> None:
        self.engine_indexes = [0]
        self.stat_loggers = []
        self._record = record

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int | None = None,
    ) -> None:
        if scheduler_stats is not None:
            self._record(scheduler_stats)
