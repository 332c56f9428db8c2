"""CUDA graphs whose site kernels can be disabled one by one, without another capture.

How
    While vLLM captures a graph, every site's kernel is launched and its node recorded. Three kinds
    of graph are replayed:

    * No site is active: a copy without site nodes. It launches the same kernels as the stock model.
    * Otherwise the captured graph, with the nodes of inactive sites disabled. A disabled node still
      costs the device half a microsecond.
    * A set of sites that stays active gets a copy with only its nodes (a "set graph"). Making it
      costs the host some milliseconds, once.

Invariants: a replay runs exactly the sites that are active now, even if there is no memory for a
set graph. Whatever sets of sites clients choose, each captured graph has at most `_SET_GRAPHS` set
graphs, and all of them together at most `_ALL_SET_GRAPHS`.
"""

import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from cuda.bindings import runtime

from rheostat_engine.sites.op import recording
from rheostat_engine.worker.state.active_sites import ActiveSites

_LOG = logging.getLogger(__name__)

_CudaGraph = torch.cuda.CUDAGraph

_PATIENCE = 128
"""Replays with one set of sites before it gets a set graph."""
_COUNTED_SETS = 64
"""Sets of sites whose replays are counted at once."""
_SET_GRAPHS = 4
"""Set graphs of one captured graph."""
_ALL_SET_GRAPHS = 256
"""Set graphs of all captured graphs. Each takes device memory, which clients could exhaust without
a limit by choosing many sets."""


class _CudaError(RuntimeError):
    """A CUDA call failed."""


class _SetGraphLimits:
    """Limits the set graphs of all captured graphs: their number, and one new graph in each step.

    All piecewise graphs of one size reach `_PATIENCE` in the same step. Making all their set graphs
    at once would delay that step.
    """

    def __init__(self, active: ActiveSites) -> None:
        self.active = active
        self._stopped = False
        self._last_step = 0
        self._graphs: OrderedDict[tuple[int, bytes], weakref.ref[SiteGraph]] = OrderedDict()
        """By `id` of the captured graph and key of the set; the last used is last."""

    def try_take(self) -> bool:
        """Whether a set graph may be made now. True at most once in a step."""
        if self._stopped or self._last_step == self.active.steps["active"]:
            return False
        self._last_step = self.active.steps["active"]
        return True

    def stop(self) -> None:
        """Stops making set graphs."""
        self._stopped = True

    def mark_used(self, graph: "SiteGraph", key: bytes) -> None:
        """Marks a set graph as used now; frees the least recently used graphs beyond the limit."""
        self._graphs[id(graph), key] = weakref.ref(graph)
        self._graphs.move_to_end((id(graph), key))
        while len(self._graphs) > _ALL_SET_GRAPHS:
            (_, old), captured_ref = self._graphs.popitem(last=False)
            captured = captured_ref()
            if captured is not None:
                captured.free(old)
        self.active.held_graphs = len(self._graphs)

    def remove(self, number: int, key: bytes) -> None:
        """Removes a freed set graph; `number` is the `id` of its captured graph."""
        self._graphs.pop((number, key), None)
        self.active.held_graphs = len(self._graphs)


class _Current:
    limits: _SetGraphLimits | None = None


class SiteGraph(_CudaGraph):
    """A CUDA graph whose site kernels can be disabled."""

    def __new__(cls, keep_graph: bool = False) -> "SiteGraph":
        """Always keeps the graph, through which nodes are enabled and removed."""
        return super().__new__(cls, True)

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(True)  # type: ignore[call-arg]  # torch's stub has __new__ alone
        if _Current.limits is None:
            raise RuntimeError("a SiteGraph can only be created inside site_graphs")
        self._limits = _Current.limits
        self._active = self._limits.active
        self._nodes: list[tuple[int, runtime.cudaGraphNode_t]] = []
        self._enabled: list[bool] = []
        self._key: bytes | None = None
        self._replays: Counter[bytes] = Counter()
        self._set_graphs: OrderedDict[bytes, runtime.cudaGraphExec_t] = OrderedDict()
        self._without_sites: runtime.cudaGraphExec_t | None = None
        self._recording = ExitStack()

    def note(self, site: int) -> None:
        """Assigns the last captured kernel to `site`."""
        stream = torch.cuda.current_stream().cuda_stream
        info = _checked(runtime.cudaStreamGetCaptureInfo(stream))
        (node,) = next(part for part in info if isinstance(part, (list, tuple)))
        self._nodes.append((site, node))

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:  # torch's own, passed through
        """Starts to capture, and to record the nodes of sites."""
        self._recording.enter_context(recording(self.note))
        super().capture_begin(*args, **kwargs)

    def capture_end(self) -> None:
        """Ends both, and makes the copy without site nodes."""
        super().capture_end()
        self._recording.close()
        self.instantiate()
        self._enabled = [True] * len(self._nodes)
        if self._nodes:
            self._without_sites = self._instantiate_without([node for _, node in self._nodes])

    def replay(self) -> None:
        """Replays the graph with exactly the active sites."""
        key = self._active.key
        set_graph = self._without_sites if key is None else self._graph_of(key)
        if set_graph is not None:
            stream = torch.cuda.current_stream().cuda_stream
            _checked(runtime.cudaGraphLaunch(set_graph, stream))
            return
        if key != self._key and self._nodes:
            self._enable_active()
        super().replay()

    def __del__(self) -> None:
        set_graphs = getattr(self, "_set_graphs", {})
        for executable in (getattr(self, "_without_sites", None), *set_graphs.values()):
            if executable is not None:
                runtime.cudaGraphExecDestroy(executable)
        for key in set_graphs:
            self._limits.remove(id(self), key)

    def free(self, key: bytes) -> None:
        """Frees a set graph. If the device still runs it, the driver waits."""
        self._limits.remove(id(self), key)
        _checked(runtime.cudaGraphExecDestroy(self._set_graphs.pop(key)))

    def _graph_of(self, key: bytes) -> runtime.cudaGraphExec_t | None:
        """The set graph of the active sites, if there is one now."""
        set_graph = self._set_graphs.get(key)
        if set_graph is not None:
            self._set_graphs.move_to_end(key)
            self._limits.mark_used(self, key)
            return set_graph
        if key not in self._replays and len(self._replays) >= _COUNTED_SETS:
            self._replays.clear()
        self._replays[key] += 1
        if self._replays[key] < _PATIENCE or not self._nodes or not self._limits.try_take():
            return None
        self._replays.clear()
        mask = self._active.mask
        try:
            set_graph = self._instantiate_without(
                [node for site, node in self._nodes if not mask[site]]
            )
        except _CudaError as error:
            _LOG.warning(
                "no CUDA graph could be made for only the active sites (%s); the nodes of other "
                "sites are disabled instead, which costs half a microsecond each",
                error,
            )
            self._limits.stop()
            return None
        self._set_graphs[key] = set_graph
        self._active.own_graphs += 1
        self._limits.mark_used(self, key)
        if len(self._set_graphs) > _SET_GRAPHS:
            self.free(next(iter(self._set_graphs)))
        return set_graph

    def _enable_active(self) -> None:
        executable = runtime.cudaGraphExec_t(self.raw_cuda_graph_exec())
        mask = self._active.mask
        for number, (site, node) in enumerate(self._nodes):
            wanted = bool(mask[site])
            if self._enabled[number] != wanted:
                _checked(runtime.cudaGraphNodeSetEnabled(executable, node, int(wanted)))
                self._enabled[number] = wanted
        self._key = self._active.key

    def _instantiate_without(
        self, nodes: Sequence[runtime.cudaGraphNode_t]
    ) -> runtime.cudaGraphExec_t:
        (clone,) = _checked(runtime.cudaGraphClone(runtime.cudaGraph_t(self.raw_cuda_graph())))
        try:
            for node in nodes:
                _remove_node(node, clone)
            (executable,) = _checked(runtime.cudaGraphInstantiate(clone, 0))
        finally:
            runtime.cudaGraphDestroy(clone)
        return executable


@contextmanager
def site_graphs(active: ActiveSites) -> Iterator[None]:
    """Makes all CUDA graphs created in the `with` block follow `active`."""
    _Current.limits = _SetGraphLimits(active)
    torch.cuda.CUDAGraph = SiteGraph  # type: ignore[misc]  # restored below
    try:
        yield
    finally:
        torch.cuda.CUDAGraph = _CudaGraph  # type: ignore[misc]  # as it was
        _Current.limits = None


def _remove_node(node: runtime.cudaGraphNode_t, clone: runtime.cudaGraph_t) -> None:
    """Removes a node from a clone of its graph, and connects its dependencies to its dependents."""
    (twin,) = _checked(runtime.cudaGraphNodeFindInClone(node, clone))
    before = _neighbours(runtime.cudaGraphNodeGetDependencies, twin)
    after = _neighbours(runtime.cudaGraphNodeGetDependentNodes, twin)
    _checked(runtime.cudaGraphDestroyNode(twin))
    pairs = [(a, b) for a in before for b in after]
    if pairs:
        sources, targets = zip(*pairs, strict=True)
        edges = [runtime.cudaGraphEdgeData() for _ in pairs]
        _checked(
            runtime.cudaGraphAddDependencies(clone, list(sources), list(targets), edges, len(pairs))
        )


def _neighbours(query: Any, node: runtime.cudaGraphNode_t) -> list[runtime.cudaGraphNode_t]:
    count = _checked(query(node, 0))[-1]
    return list(_checked(query(node, count))[0]) if count else []


def _checked(result: Any) -> Any:  # tuples of cuda.bindings, error first
    error, *rest = result
    if error != runtime.cudaError_t.cudaSuccess:
        runtime.cudaGetLastError()  # clears the error; else torch raises it after its next launch
        raise _CudaError(f"CUDA: {runtime.cudaGetErrorString(error)[1].decode()}")
    return rest
