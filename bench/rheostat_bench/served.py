"""A server, stock vLLM, and clients of the server, as benchmarks of the whole way use them.

Invariant: the server's engine and stock vLLM are given the same arguments, those of one
`ServerConfig`. What differs is the extension, and what either takes by default for the tokens of a
step and its CUDA graphs.
"""

import argparse
import gc
import itertools
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

import rheostat
from rheostat_bench.machine import device
from rheostat_server.config import ServerConfig
from rheostat_server.engine.vllm_engine import cpu_memory, engine_arguments
from rheostat_server.serve import SWITCH_INTERVAL, RunningServer, bring_up, start

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


@asynccontextmanager
async def serving(config: ServerConfig) -> AsyncIterator[RunningServer]:
    """A server of its own, whose process is set up as that of `rheostat serve`."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    server = await start(config, bring_up)
    try:
        yield server
    finally:
        await server.stop()


async def address(server: RunningServer) -> str:
    """An order: where the server listens."""
    return f"127.0.0.1:{server.port}"


@asynccontextmanager
async def connected(target: str) -> AsyncIterator[rheostat.aio.Engine]:
    """A client with a connection of its own."""
    gc.collect()
    gc.freeze()  # otherwise full collections visit all imported modules, which takes 50 ms
    async with rheostat.aio.connect(target) as engine:
        yield engine


class Stock:
    """Stock vLLM. It has the only reference to the engine, as `LoadedEngine` says why."""

    def __init__(self, config: ServerConfig) -> None:
        """Starts an engine with the arguments that a server would give it.

        It has the defaults of `vllm serve`. Otherwise an `AsyncLLM` has others for a step: 2,048
        tokens on an H200, in place of 8,192.
        """
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments: dict[str, Any] = {
            **(cpu_memory(config) if device() == "cpu" else {}),
            **engine_arguments(config, config.model),
        }
        self._llm: AsyncLLM = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments), usage_context=UsageContext.OPENAI_API_SERVER
        )
        self._names = itertools.count()

    def stream(self, prompt: list[int], tokens: int) -> AsyncGenerator["RequestOutput", None]:
        """A greedy request of so many tokens, which come as they are sampled."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=self._llm.tokenizer is not None,
            output_kind=RequestOutputKind.DELTA,
        )
        return self._llm.generate(tokens_input(prompt), params, f"stock-{next(self._names)}")

    async def read_step_tokens(self) -> int:
        """The most tokens of a step."""
        return self._llm.vllm_config.scheduler_config.max_num_batched_tokens

    def close(self) -> None:
        """Ends it and its processes."""
        self._llm.shutdown()
        del self._llm


@asynccontextmanager
async def stock(config: ServerConfig) -> AsyncIterator[Stock]:
    """Stock vLLM, beside a server of this config."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as the server has it
    engine = Stock(config)
    gc.collect()
    gc.freeze()  # as the server does, and vLLM's own servers
    try:
        yield engine
    finally:
        engine.close()


def add_client_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--client-processes`."""
    half = len(os.sched_getaffinity(0)) // 2
    parser.add_argument(
        "--client-processes", type=int, default=min(8, max(1, half)), help="which the clients share"
    )


def prompts(count: int, length: int) -> list[list[int]]:
    """Prompts that no request has had before, so that none is found in the prefix cache."""
    drawn = np.random.default_rng().integers(5, 1000, (count, length))
    found: list[list[int]] = drawn.tolist()
    return found
