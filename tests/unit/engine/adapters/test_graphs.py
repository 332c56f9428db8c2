"""Which of a captured graph's executables is replayed; CUDA itself is played by a few lines."""

import gc
import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rheostat_engine.worker.state.active_sites import ActiveSites

SITES = 4
SUCCESS, NO_MEMORY = 0, 2
NAME = "rheostat_engine.adapters.graphs"
Nodes = list[int]


class Cuda:
    """Graphs are lists of nodes, executables are numbers, and every launch is noted."""

    cudaError_t = SimpleNamespace(cudaSuccess=SUCCESS)
    cudaGraph_t = list
    cudaGraphExec_t = cudaGraphNode_t = int

    def __init__(self) -> None:
        self.launched: list[Nodes] = []
        self.memory = 1000
        self.graphs = 0
        self.asked = 0
        self.enabled: dict[int, bool] = {}
        self._executables: dict[int, Nodes] = {}

    def cudaGraphClone(self, graph: Nodes) -> tuple[int, Nodes]:
        self.graphs += 1
        return SUCCESS, [*graph]

    def cudaGraphDestroy(self, graph: Nodes) -> tuple[int]:
        self.graphs -= 1
        return (SUCCESS,)

    def cudaGraphNodeFindInClone(self, node: int, clone: Nodes) -> tuple[int, tuple[Nodes, int]]:
        return SUCCESS, (clone, node)

    def cudaGraphNodeGetDependencies(self, twin: object, count: int) -> tuple[int, None, int]:
        return SUCCESS, None, 0

    cudaGraphNodeGetDependentNodes = cudaGraphNodeGetDependencies

    def cudaGraphDestroyNode(self, twin: tuple[Nodes, int]) -> tuple[int]:
        clone, node = twin
        clone.remove(node)
        return (SUCCESS,)

    @property
    def held(self) -> int:
        """Executables that are not freed."""
        return len(self._executables)

    def cudaGraphInstantiate(self, graph: Nodes, flags: int) -> tuple[int, int | None]:
        self.asked += 1
        if not self.memory:
            return NO_MEMORY, None
        self.memory -= 1
        self._executables[self.asked] = [*graph]
        return SUCCESS, self.asked

    def cudaGraphLaunch(self, executable: int, stream: int) -> tuple[int]:
        self.launched.append(self._executables[executable])
        return (SUCCESS,)

    def cudaGraphExecDestroy(self, executable: int) -> tuple[int]:
        del self._executables[executable]
        return (SUCCESS,)

    def cudaGraphNodeSetEnabled(self, executable: int, node: int, enabled: int) -> tuple[int]:
        self.enabled[node] = bool(enabled)
        return (SUCCESS,)

    def cudaGetLastError(self) -> tuple[int]:
        return (SUCCESS,)

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:
        return SUCCESS, b"out of memory"


class Graph:
    """Stands for torch's CUDA graph; node n belongs to site n."""

    cuda: Cuda

    def __new__(cls, keep_graph: bool = False) -> "Graph":
        return super().__new__(cls)

    def __init__(self, keep_graph: bool = False) -> None:
        self.cuda.enabled = dict.fromkeys(range(SITES), True)

    def capture_end(self) -> None:
        pass

    def instantiate(self) -> None:
        pass

    def raw_cuda_graph(self) -> Nodes:
        return [*range(SITES)]

    def raw_cuda_graph_exec(self) -> int:
        return 0

    def replay(self) -> None:
        self.cuda.launched.append([node for node, on in self.cuda.enabled.items() if on])


class Engine:
    """Graphs that follow the same sites."""

    def __init__(self, cuda: Cuda, module: Any, graphs: int) -> None:  # a module made for the test
        self.cuda = cuda
        self.active = ActiveSites(SITES)
        with module.site_graphs(self.active):
            self.graphs = [torch.cuda.CUDAGraph() for _ in range(graphs)]
        for graph in self.graphs:
            graph._nodes = [(site, site) for site in range(SITES)]
            graph.capture_end()

    def steps(self, count: int, *sites: int) -> list[Nodes]:
        """Replays every graph in each of some steps; what was launched in the last."""
        for _ in range(count):
            self.active.set(np.isin(np.arange(SITES), sites))
            self.cuda.launched.clear()
            for graph in self.graphs:
                graph.replay()
            self.active.clear()
        return [*self.cuda.launched]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cuda, Any]]:
    """CUDA, and the module made anew on it."""
    made = Cuda()
    package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    bindings.runtime = made  # type: ignore[attr-defined]  # a module takes anything
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr(Graph, "cuda", made, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    yield made, importlib.import_module(NAME)
    monkeypatch.delitem(sys.modules, NAME)


def test_a_set_that_stays_active_gets_a_graph_without_the_other_nodes(
    cuda: tuple[Cuda, Any],
) -> None:
    engine = Engine(*cuda, graphs=1)
    made = cuda[0].asked
    assert engine.steps(1) == [[]]
    assert engine.steps(127, 1, 2) == [[1, 2]]
    assert cuda[0].asked == made
    assert engine.steps(2, 1, 2) == [[1, 2]]
    assert (cuda[0].asked, engine.active.own_graphs) == (made + 1, 1)
    assert engine.steps(1, 3) == [[3]]
    assert cuda[0].graphs == 0


def test_one_step_makes_one_graph_at_most(cuda: tuple[Cuda, Any]) -> None:
    engine = Engine(*cuda, graphs=3)
    seen = []
    for _ in range(131):
        assert engine.steps(1, 2) == [[2]] * 3
        seen.append(cuda[0].asked)
    assert Counter(np.diff(seen).tolist()) == {0: 127, 1: 3}


def test_where_there_is_no_memory_for_another_graph_steps_go_on_without(
    cuda: tuple[Cuda, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(*cuda, graphs=2)
    cuda[0].memory = 0
    assert engine.steps(300, 1) == [[1], [1]]
    assert engine.steps(300, 0, 3) == [[0, 3], [0, 3]]
    assert engine.steps(1) == [[], []]
    assert cuda[0].asked == 3
    assert cuda[0].graphs == 0
    (record,) = caplog.records
    assert "CUDA: out of memory" in record.message


def test_clients_that_change_their_sites_hold_few_graphs_of_each_size(
    cuda: tuple[Cuda, Any],
) -> None:
    engine = Engine(*cuda, graphs=1)
    before = cuda[0].held
    sets = [(site, other) for site in range(SITES) for other in range(site)]
    for sites in sets * 2:
        assert engine.steps(130, *sites) == [[*sorted(sites)]]
    assert (cuda[0].held - before, engine.active.held_graphs) == (4, 4)
    assert engine.active.own_graphs == 2 * len(sets)


def test_the_graphs_of_all_sizes_share_a_limit_and_the_oldest_goes_first(
    cuda: tuple[Cuda, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda[1], "_ALL_SET_GRAPHS", 5)
    engine = Engine(*cuda, graphs=8)
    before = cuda[0].held
    assert engine.steps(140, 1) == [[1]] * 8
    assert (cuda[0].held - before, engine.active.held_graphs) == (5, 5)
    assert engine.steps(140, 0, 2) == [[0, 2]] * 8
    assert (cuda[0].held - before, engine.active.held_graphs) == (5, 5)


def test_a_graph_that_goes_takes_those_of_its_sets_along(cuda: tuple[Cuda, Any]) -> None:
    engine = Engine(*cuda, graphs=2)
    engine.steps(140, 1)
    assert engine.active.held_graphs == 2
    engine.graphs.pop()
    gc.collect()
    assert engine.active.held_graphs == 1
