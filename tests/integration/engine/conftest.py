"""Engines for the tests of the extension: vLLM in this process makes batches deterministic."""

import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from .forked import (
    check_vector_instructions_once,
    inspect_models_here,
    sleep_while_waiting,
)
from .models import build
from .offline import OfflineEngine

Start = Callable[..., OfflineEngine]


@pytest.fixture(scope="session")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the small random models lie."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    """vLLM runs in this process. Servers, which other tests start, must not inherit this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


@contextmanager
def uncollected() -> Iterator[None]:
    """vLLM neither collects garbage nor freezes objects.

    It does both when an engine starts and ends. Each collection then goes through all objects that
    were ever imported, which takes a second.
    """
    with mock.patch.multiple(gc, collect=mock.DEFAULT, freeze=mock.DEFAULT, unfreeze=mock.DEFAULT):
        yield


INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
CACHE = os.environ.get(INDUCTOR_CACHE)
"""Inductor's cache of all sessions, if it is not the default."""
AHEAD_OF_TIME = frozenset({"enforce_eager", "pipeline_parallel_size", "sited"})
"""Options of engines that compile Llama as a server does."""


@contextmanager
def reusing_compiled_code(name: str, options: Mapping[str, object]) -> Iterator[None]:
    """Most engines that start here compile just in time, so that Inductor reuses equal graphs.

    A server compiles ahead of time. vLLM 0.32 on a CPU compiles anew whenever it does so, for 15
    seconds: it stores the code and cannot load it (`finalize_loading`). Inductor's code is the same
    either way. Llama's engines that have no other options than `AHEAD_OF_TIME` compile as a server.
    """
    with pytest.MonkeyPatch.context() as patch:
        if name != "llama" or options.keys() - AHEAD_OF_TIME:
            patch.setenv("VLLM_USE_AOT_COMPILE", "0")
            # An engine that compiled ahead of time has set a cache of its own.
            if CACHE is None:
                patch.delenv(INDUCTOR_CACHE, raising=False)
            else:
                patch.setenv(INDUCTOR_CACHE, CACHE)
        yield


def collect() -> None:
    """Frees what is left of an engine, and exempts all else from later collections of garbage.

    An engine is never exempted, because this runs after one has ended and before the next starts.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def start(models_root: Path) -> Iterator[Start]:
    """Starts engines, one at a time: starting one stops the one before.

    If the engine before has the same options, it goes on, with an empty prefix cache.
    """
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rheostat")))
        running: dict[str, OfflineEngine] = {}
        count = 0

        def stop() -> None:
            with uncollected():
                while running:
                    running.popitem()[1].close()

        def begin(name: str = "llama", **options: object) -> OfflineEngine:
            nonlocal count
            if options.get("enforce_eager"):
                del options["enforce_eager"]  # the default
            asked = repr((name, sorted(options.items())))
            if asked in running:
                assert running[asked].llm.reset_prefix_cache()
                return running[asked]
            stop()
            collect()
            check_vector_instructions_once()
            inspect_models_here()
            sleep_while_waiting()
            count += 1
            model, channel = build(name, models_root), f"ipc://{scratch}/{count}"
            with uncollected(), reusing_compiled_code(name, options):
                running[asked] = OfflineEngine(model, channel, **options)
            return running[asked]

        cleanup.callback(stop)
        yield begin
