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


def forks() -> ForkServerContext:
    """A context of `multiprocessing` whose processes have imported vLLM when they begin."""
    context = cast(ForkServerContext, multiprocessing.get_context("forkserver"))
    context.set_forkserver_preload(PRELOADED)
    return context


class Context:
    """What `multiprocessing` starts vLLM's workers with."""

    def __init__(self) -> None:
        self._forks = forks()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forks, name)

    def Process(
        self, *, target: Callable[..., None], kwargs: Mapping[str, Any], **options: Any
    ) -> BaseProcess:
        """A process with the environment of this one, as a spawned one has it."""
        args = (dict(os.environ), target, kwargs)
        return self._forks.Process(target=run, args=args, **options)


def run(
    environment: Mapping[str, str], target: Callable[..., None], kwargs: Mapping[str, Any]
) -> None:
    """Calls a function in an environment."""
    os.environ.clear()
    os.environ.update(environment)
    sleep_while_waiting()
    target(**kwargs)


def sleep_while_waiting() -> None:
    """Lets vLLM's processes sleep while they wait for each other.

    By default a process uses a whole core for a second before it sleeps, and longer if more comes.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.SpinCondition.__init__.__defaults__ = (0.0,)
    # A notification is lost if a process is not connected yet.
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 50


def inspect_models_here() -> None:
    """Lets vLLM inspect models in this process.

    It does so in another one, which imports vLLM, because the inspection may initialise CUDA. Its
    cache of what it found is empty on a new machine.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def check_vector_instructions_once() -> None:
    """Checks that the compiler knows this machine's vector instructions, for all engines to come.

    Inductor compiles four programs for it in each new cache, which takes 12 seconds of a core. vLLM
    makes a cache for each engine that it compiles ahead of time.
    """
    from torch._inductor import config, cpu_vec_isa

    if config.cpp.vec_isa_ok is None:
        checked = cpu_vec_isa.valid_vec_isa_list()
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        config.cpp.vec_isa_ok = True
        if cpu_vec_isa.valid_vec_isa_list() == checked:
            os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
        else:
            config.cpp.vec_isa_ok = None
            cpu_vec_isa.valid_vec_isa_list.cache_clear()
