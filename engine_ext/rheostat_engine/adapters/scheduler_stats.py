"""Passes the scheduler's statistics of each step to a function, and disables all others.

Why
    With any logger, `AsyncLLM` keeps statistics of every token for Prometheus. At 256 streams that
    took 17 % of the CPU of its process. The server does not use these statistics.
How
    The engine must be started with `disable_log_stats=False`, so that its scheduler counts. Then
    `log_stats` is disabled in `AsyncLLM` and its output processor, and the logger manager is
    replaced. The output handler reads both when it starts, so it must not be running.
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
        RuntimeError: the engine's output handler is running already.
    """
    if llm.output_handler is not None:
        raise RuntimeError("statistics can only be disabled before the first request")
    llm.log_stats = llm.output_processor.log_stats = False
    llm.logger_manager = _SchedulerOnly(record)


class _SchedulerOnly(StatLoggerManager):
    """Passes on the scheduler's statistics, and has no loggers."""

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
