"""How tests on the real engine share engines, and the machine."""

import os
from collections.abc import Iterator

import pytest
from _pytest.nodeid import coerce_node_id

# Without this, vLLM binds the threads of every engine to the same core.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

SERVERS = ("server", "small_server", "tight_server", "compiled_server")
"""Fixtures of servers. The tests of each are a group, except those of `server`.

The tests of `server` are a group for each module. A worker that runs any of them starts one
`server` for all that it runs.
"""
LONG = ("small_server", "server test_documents", "test_split", "test_ending", *SERVERS[2:])
"""Groups that take minutes. They begin first, so that no worker is left with one at the end."""
LAST = "server test_ending"
"""The group that ends a `server`. No group that needs one begins after it."""
ORDER = {**{group: number for number, group in enumerate(LONG)}, LAST: len(LONG) + 1}


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Groups tests that share a server or an engine: one worker runs all tests of a group."""
    ours = [item for item in items if item.get_closest_marker("integration")]
    for item in ours:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: (_place(item), _ends_its_server(item), *_engine_of(item)))
    yield
    # pytest-xdist 3.8 adds the group to an attribute that pytest 9.2 no longer reads.
    for item in ours:
        if grouped := getattr(item, "_nodeid", None):
            item._id = coerce_node_id(grouped)


def _group(item: pytest.Item) -> str:
    names = item.fixturenames if isinstance(item, pytest.Function) else []
    module = item.path.stem
    group = next((name for name in SERVERS if name in names), module)
    return f"{group} {module}" if group == "server" else group


def _place(item: pytest.Item) -> int:
    mark = item.get_closest_marker("xdist_group")
    return ORDER.get(mark.args[0], len(LONG)) if mark else len(LONG)


def _ends_its_server(item: pytest.Item) -> bool:
    return item.path.name == "test_ending.py"


def _engine_of(item: pytest.Item) -> tuple[bool, bool]:
    """Sorts tests of a group so that no engine is started twice.

    `test_invariants` comes first, because it starts stock vLLM before the engine that all tests of
    its group share. Compiled engines come before others.
    """
    if item.path.parent.name != "engine":
        return False, False
    return item.path.name != "test_invariants.py", "compiled" not in item.name
