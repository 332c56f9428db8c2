"""When the V2 runner makes the instructions of a step. `Engine` stands in for vLLM."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from rheostat_engine.worker.step_tokens import Batch

NAME = "rheostat_engine.adapters.runner_v2"
GRAPHS = "rheostat_engine.adapters.graphs"


class Engine:
    """A runner whose runtime and superclass record their calls."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[str] = []
        self.batches: list[Batch] = []
        self.omitted = False
        """Whether `execute_model` omits the call of the model state's `prepare_inputs`."""
        monkeypatch.setattr(GPUModelRunner, "prepare_inputs", lambda runner, batch: batch)
        monkeypatch.setattr(
            GPUModelRunner, "execute_model", lambda *args, **kwargs: self._step(*args, **kwargs)
        )
        monkeypatch.setattr(module, "apply_scheduler_output", lambda *_: self.note("apply"))
        self.runner = module.GpuSiteRunner.__new__(module.GpuSiteRunner)
        state = SimpleNamespace(prepare_inputs=lambda *_: self.note("prepare last") or {"a": 1})
        module.call_after(state, self.runner._begin_step)
        self.runner.model_state = state
        runtime = SimpleNamespace(begin=self._begin, end=lambda: self.note("end"))
        self.runner.sites = SimpleNamespace(runtime=runtime)

    def note(self, word: str) -> None:
        self.notes.append(word)

    def _begin(self, batch: Batch) -> None:
        self.note("begin")
        self.batches.append(batch)

    def _step(
        self, made: Any, scheduled: Any, tensors: object = None, dummy_run: bool = False
    ) -> str:
        if not dummy_run:
            made.prepare_inputs(scheduled)
        self.note("prepare attention")
        if not self.omitted:
            assert made.model_state.prepare_inputs(scheduled, None) == {"a": 1}
        self.note("launch")
        return "output"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    graphs = ModuleType(GRAPHS)  # the real one needs CUDA's bindings
    graphs.site_graphs = None  # type: ignore[attr-defined]  # a module takes anything
    monkeypatch.setitem(sys.modules, GRAPHS, graphs)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield Engine(importlib.import_module(NAME), monkeypatch)
    del sys.modules[NAME]


BATCH: Any = SimpleNamespace(
    req_ids=["a", "b"],
    num_computed_tokens_np=np.array([3, 0]),
    num_scheduled_tokens=np.array([1, 4]),
    num_tokens_after_padding=8,
    input_ids="ids",
)


def test_the_instructions_are_made_last_before_the_launch(engine: Engine) -> None:
    for _ in range(2):
        engine.notes.clear()
        assert engine.runner.execute_model(BATCH) == "output"
        assert engine.notes == [
            "apply", "prepare attention", "prepare last", "begin", "launch", "end"
        ]  # fmt: skip
    batch = engine.batches[1]
    assert (batch.request_ids, batch.padded_tokens, batch.input_ids) == (["a", "b"], 8, "ids")
    assert (batch.computed.tolist(), batch.scheduled.tolist()) == ([3, 0], [1, 4])


def test_a_dummy_batch_has_no_instructions(engine: Engine) -> None:
    assert engine.runner.execute_model(BATCH, dummy_run=True) == "output"
    assert engine.notes == ["prepare attention", "prepare last", "launch"]


def test_a_step_without_instructions_fails(engine: Engine) -> None:
    engine.omitted = True
    with pytest.raises(RuntimeError, match="without the instructions"):
        engine.runner.execute_model(BATCH)
    engine.omitted = False
    engine.notes.clear()
    assert engine.runner.execute_model(BATCH, dummy_run=True) == "output"
    assert "begin" not in engine.notes


def test_the_output_of_a_step_carries_its_decisions(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = ModelRunnerOutput(["a"], {"a": 0})
    monkeypatch.setattr(GPUModelRunner, "sample_tokens", lambda runner, grammar: output)
    report = SimpleNamespace(shut=lambda: ["a"])
    engine.runner.sites.runtime.decisions = SimpleNamespace(take=lambda: report)
    assert engine.runner.sample_tokens(None) is output
    assert vars(output)["rheostat_shut"] == ["a"]


def test_splits_are_fixed_before_the_graphs_are_captured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = sys.modules[NAME]
    monkeypatch.setattr(module, "site_graphs", lambda active: nullcontext())
    monkeypatch.setattr(
        module,
        "fix_splits_for_full_graphs_only",
        lambda manager, groups: engine.note(f"splits of {groups} by {manager}"),
    )

    def capture(runner: GPUModelRunner, profile_only: bool) -> int:
        engine.note("capture")
        return 7

    monkeypatch.setattr(GPUModelRunner, "capture_model", capture)
    engine.runner.sites.runtime.buffers = SimpleNamespace(active=None)
    engine.runner.attn_groups = "groups"
    for profile_only in (True, False):
        engine.notes.clear()
        engine.runner.cudagraph_manager = "graphs"
        assert engine.runner.capture_model(profile_only=profile_only) == 7
        assert engine.notes == ["splits of groups by graphs", "capture"]
