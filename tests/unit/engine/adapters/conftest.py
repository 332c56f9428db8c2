"""Clients of an engine's core, and the settings of a scheduler."""

from collections.abc import AsyncIterator

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from .links import Link, make_fast
from .scripted_engine import BLOCK, MODEL


@pytest.fixture
async def stock(tmp_path) -> AsyncIterator[Link]:
    link = Link(tmp_path)
    link.connect()
    yield link
    link.core.close(linger=0)
    link.context.destroy(linger=0)


@pytest.fixture
def link(stock) -> Link:
    make_fast(stock)
    return stock


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return EngineArgs(
        model=str(MODEL),
        max_model_len=1024,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        async_scheduling=False,
        block_size=BLOCK,
        kv_cache_memory_bytes=1 << 24,
        enable_prefix_caching=False,
        enforce_eager=True,
    ).create_engine_config()
