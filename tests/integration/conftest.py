"""How tests on the real engine share engines, and the machine."""

import os
from collections.abc import Iterator

import pytest
from _pytest.nodeid import coerce_node_id

# Without this, vLLM binds the threads of every engine to the same core.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

LONG = ("test_split.py", "test_ending.py", "test_compiled.py")
"""Modules whose few tests take minutes. They begin early, so that no worker is left with them."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Groups tests that share a server or an engine: one worker runs all tests of a group."""
    ours = [item for item in items if item.get_closest_marker("integration")]
    for item in ours:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(_group(item)))
    first = {id(item) for item in ours if _group(item) == "server" or item.path.name in LONG}
    items.sort(key=lambda item: id(item) not in first)
    yield
    # pytest-xdist 3.8 adds the group to an attribute that pytest 9.2 no longer reads.
    for item in ours:
        if grouped := getattr(item, "_nodeid", None):
            item._id = coerce_node_id(grouped)


def _group(item: pytest.Item) -> str:
    names = item.fixturenames if isinstance(item, pytest.Function) else []
    return next((name for name in ("server", "small_server") if name in names), item.path.stem)
