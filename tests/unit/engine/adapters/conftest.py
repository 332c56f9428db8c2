"""Clients of an engine's core: vLLM's own, and as the server changes it."""

from collections.abc import AsyncIterator

import pytest

from .links import Link, make_fast


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
