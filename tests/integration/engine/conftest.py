"""Engines for the tests of the extension: vLLM in this process makes batches deterministic."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .models import build
from .offline import OfflineEngine

Start = Callable[..., OfflineEngine]


@pytest.fixture(scope="session")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the small random models lie."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def start(models_root: Path) -> Iterator[Start]:
    """Starts engines, one at a time: starting one stops the one before."""
    with ExitStack() as cleanup, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rheostat")))
        running: list[OfflineEngine] = []
        count = 0

        def stop() -> None:
            while running:
                running.pop().close()

        def begin(name: str = "llama", **options: object) -> OfflineEngine:
            nonlocal count
            stop()
            count += 1
            running.append(
                OfflineEngine(build(name, models_root), f"ipc://{scratch}/{count}", **options)
            )
            return running[-1]

        cleanup.callback(stop)
        yield begin
