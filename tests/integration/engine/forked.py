"""Workers of vLLM that are forked from one process, which imports vLLM once for all of them.

A spawned worker imports it anew, which takes 11 seconds of an idle core.
"""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, cast

PRELOADED = [
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_moe",
    "rheostat_engine.adapters.worker_cpu",
]


class Context:
    """What `multiprocessing` starts vLLM's workers with."""

    def __init__(self) -> None:
        self._forks = cast(ForkServerContext, multiprocessing.get_context("forkserver"))
        self._forks.set_forkserver_preload(PRELOADED)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forks, name)

    def Process(
        self, *, target: Callable[..., None], kwargs: Mapping[str, Any], **options: Any
    ) -> BaseProcess:
        """A process with the environment of this one, as a spawned one has it."""
        args = (dict(os.environ), target, kwargs)
        return self._forks.Process(target=_run, args=args, **options)


def _run(
    environment: Mapping[str, str], target: Callable[..., None], kwargs: Mapping[str, Any]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(**kwargs)
