"""An engine whose server is gone ends."""

import ast
import gc
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from rheostat_engine.adapters import parent_watch, worker_rpc
from rheostat_engine.adapters.worker_cpu import CpuSiteWorker


def config() -> Any:  # in place of a VllmConfig
    """An engine's, which lets requests go on for a while."""
    return SimpleNamespace(shutdown_timeout=31)


def test_a_process_that_is_nobodys_child_watches_nobody() -> None:
    before = threading.active_count()
    assert multiprocessing.parent_process() is None
    parent_watch.end_with_parent(config())
    assert threading.active_count() == before


def test_once_the_parent_is_another_the_process_is_told_to_end_now_and_killed_if_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = config()
    told: list[tuple[int, int, int]] = []

    stock = os.kill

    def kill(pid: int, number: int) -> None:
        if pid == worker.pid:
            stock(pid, number)
        told.append((pid, number, served.shutdown_timeout))

    parents = iter([7, 7, 1])
    monkeypatch.setattr(parent_watch.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(parent_watch.os, "kill", kill)
    monkeypatch.setattr(parent_watch, "_POLL_INTERVAL", 0.0)
    monkeypatch.setattr(parent_watch, "_GRACE", 0.0)
    worker = multiprocessing.get_context("spawn").Process(
        target=time.sleep, args=(60,), daemon=True
    )
    worker.start()
    parent_watch._watch(7, served)
    own = os.getpid()
    assert told == [
        (own, signal.SIGTERM, 0),
        (worker.pid, signal.SIGKILL, 0),
        (own, signal.SIGKILL, 0),
    ]
    worker.join(30)
    assert worker.exitcode == -signal.SIGKILL


def test_a_process_of_the_engine_has_a_group_of_its_own() -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=parent_watch.leave_group) as pool:
        pool.submit(parent_watch.leave_group).result(
            60
        )  # an engine and its worker may be one process
        assert pool.submit(os.getpgid, 0).result(60) == pool.submit(os.getpid).result(60)


def test_a_process_that_is_nobodys_child_stays_in_its_group() -> None:
    before = os.getpgid(0)
    parent_watch.leave_group()
    assert os.getpgid(0) == before


def test_a_worker_leaves_the_group_once_its_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it loads, a signal to the group is all that ends it: vLLM watches over it later."""
    done: list[str] = []
    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", lambda self: done.append("warm"))
    monkeypatch.setattr(worker_rpc, "leave_group", lambda: done.append("left"))
    monkeypatch.setattr(worker_rpc, "skip_last_collection", lambda: done.append("prepared"))
    monkeypatch.setattr(worker_rpc, "freeze_gc_heap", lambda: done.append("frozen"))
    CpuSiteWorker.compile_or_warm_up_model(object.__new__(CpuSiteWorker))
    assert done == ["warm", "left", "prepared", "frozen"]


def test_no_collection_visits_the_objects_of_a_workers_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", lambda self: None)
    gc.unfreeze()
    try:
        CpuSiteWorker.compile_or_warm_up_model(object.__new__(CpuSiteWorker))
        assert gc.get_freeze_count() > 100_000
    finally:
        gc.unfreeze()


def test_the_gpu_worker_does_so_too() -> None:
    """Its module needs CUDA, so the sources are compared: bases, and vLLM's signature."""
    name = "compile_or_warm_up_model"
    adapters = Path(worker_rpc.__file__).parent
    gpu = adapters / "worker_cuda.py"
    assert "class GpuSiteWorker(SiteRpc, Worker):" in gpu.read_text()
    assert name not in gpu.read_text()
    theirs = Path(cpu_worker.__file__).with_name("gpu_worker.py")
    ours, stock = (method_of(path, name) for path in (adapters / "worker_rpc.py", theirs))
    assert ast.dump(stock.args) == ast.dump(ours.args)


def method_of(path: Path, name: str) -> ast.FunctionDef:
    tree = ast.parse(path.read_text())
    (found,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return found
