"""Settings of the unit tests."""

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while test modules import a million objects of vLLM and others."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """Exempts these objects from collections. Servers end the exemption when they end."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
