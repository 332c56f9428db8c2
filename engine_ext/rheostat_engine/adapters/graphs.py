"""CUDA graphs whose site kernels can be left out, one by one, without capturing again.

While vLLM captures, every site's kernel is launched and its node stored. Each captured graph gets a
copy without those nodes. The copy is replayed when no site is active, and launches exactly what an
uninstrumented model does. Otherwise the captured graph is replayed, with the nodes of inactive
sites disabled. A disabled node still costs the device half a microsecond. A set of sites that stays
active therefore gets a graph of its own, which costs the host some milliseconds once.

Invariants: a replay runs exactly the sites that are active at that moment, even if there is no
memory for a graph of its own. However many sets of sites clients choose, there are at most `_OWN`
such graphs beside each of vLLM's graphs, and `_ALL_OWN` beside all of them.
"""

import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cuda.bindings import runtime

from rheostat_engine.sites.recorder import recording
from rheostat_engine.worker.state.active_sites import ActiveSites

_LOG = logging.getLogger(__name__)

_CudaGraph = torch.cuda.CUDAGraph

_PATIENCE = 128
"""Replays with one set of active sites after which it gets a graph of its own."""
_WAITING = 64
"""Sets of sites whose replays are counted."""
_OWN = 4
"""Graphs of single sets of sites beside one of vLLM's graphs."""
_ALL_OWN = 256
"""The same beside all of vLLM's graphs together. Clients choose the sites, and each graph takes
memory of the device, so without a limit they could take all of it."""


class _CudaError(RuntimeError):
    """A call of CUDA has failed."""


class _Turns:
    """Decides when a set of sites may get a graph of its own, for all graphs with the same sites.

    All piecewise graphs of one size are due in the same step; they take one step each.
    """

    def __init__(self, active: ActiveSites) -> None:
        self.active = active
        self._given_up = False
        self._last: npt.NDArray[np.bool_] | None = None
        self._graphs: OrderedDict[tuple[int, bytes], weakref.ref[SiteGraph]] = OrderedDict()
        """The graphs of sets of sites, by `id` of their `SiteGraph`; the last used is last."""

    def take(self) -> bool:
        """Whether one may be made now; not again in the same step."""
        if self._given_up or self._last is self.active.mask:
            return False
        self._last = self.active.mask
        return True

    def give_up(self) -> None:
        """No further one will be made."""
        self._given_up = True

    def use(self, graph: "SiteGraph", key: bytes) -> None:
        """Stores that a set's graph is replayed now; frees the oldest graphs beyond the limit."""
        self._graphs[id(graph), key] = weakref.ref(graph)
        self._graphs.move_to_end((id(graph), key))
        while len(self._graphs) > _ALL_OWN:
            (_, old), owner = self._graphs.popitem(last=False)
            holder = owner()
            if holder is not None:
                holder.free(old)
        self.active.held_graphs = len(self._graphs)

    def remove(self, number: int, key: bytes) -> None:
        """Stores that the graph of a set is freed.

        Args:
            number: `id` of the `SiteGraph` that held it.
            key: of the set of sites.
        """
        self._graphs.pop((number, key), None)
        self.active.held_graphs = len(self._graphs)


class _Current:
    turns: _Turns | None = None


class SiteGraph(_CudaGraph):
    """A CUDA graph whose site kernels can be disabled."""

    def __new__(cls, keep_graph: bool = False) -> "SiteGraph":
        """Always keeps the graph: nodes are enabled and removed through it."""
        return super().__new__(cls, True)

    def __init__(self, keep_graph: bool = False) -> None:
        """Empty, to be captured into."""
        super().__init__(True)  # type: ignore[call-arg]  # torch's stub has __new__ alone
        if _Current.turns is None:
            raise RuntimeError("a SiteGraph is made by site_graphs alone")
        self._turns = _Current.turns
        self._active = self._turns.active
        self._nodes: list[tuple[int, runtime.cudaGraphNode_t]] = []
        self._enabled: list[bool] = []
        self._key: bytes | None = None
        self._waited: Counter[bytes] = Counter()
        self._own: OrderedDict[bytes, runtime.cudaGraphExec_t] = OrderedDict()
        self._without: runtime.cudaGraphExec_t | None = None
        self._recording = ExitStack()

    def note(self, site: int) -> None:
        """The last captured kernel belongs to `site`."""
        stream = torch.cuda.current_stream().cuda_stream
        info = _checked(runtime.cudaStreamGetCaptureInfo(stream))
        (node,) = next(part for part in info if isinstance(part, (list, tuple)))
        self._nodes.append((site, node))

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:  # torch's own, passed through
        """Starts capturing and noting."""
        self._recording.enter_context(recording(self))
        super().capture_begin(*args, **kwargs)

    def capture_end(self) -> None:
        """Ends both, and makes the graph without site kernels."""
        super().capture_end()
        self._recording.close()
        self.instantiate()
        self._enabled = [True] * len(self._nodes)
        if self._nodes:
            self._without = self._instantiate_without([node for _, node in self._nodes])

    def replay(self) -> None:
        """Replays with exactly the active sites."""
        key = self._active.key
        own = self._without if key is None else self._graph_of(key)
        if own is not None:
            stream = torch.cuda.current_stream().cuda_stream
            _checked(runtime.cudaGraphLaunch(own, stream))
            return
        if key != self._key and self._nodes:
            self._enable()
        super().replay()

    def __del__(self) -> None:
        """Frees the further graphs; torch frees the first."""
        own = getattr(self, "_own", {})
        for executable in (getattr(self, "_without", None), *own.values()):
            if executable is not None:
                runtime.cudaGraphExecDestroy(executable)
        for key in own:
            self._turns.remove(id(self), key)

    def free(self, key: bytes) -> None:
        """Frees the graph of a set of sites. Where the device still runs it, the driver waits."""
        self._turns.remove(id(self), key)
        _checked(runtime.cudaGraphExecDestroy(self._own.pop(key)))

    def _graph_of(self, key: bytes) -> runtime.cudaGraphExec_t | None:
        """The graph of the active sites alone, if they have one."""
        own = self._own.get(key)
        if own is not None:
            self._own.move_to_end(key)
            self._turns.use(self, key)
            return own
        if key not in self._waited and len(self._waited) >= _WAITING:
            self._waited.clear()
        self._waited[key] += 1
        if self._waited[key] < _PATIENCE or not self._nodes or not self._turns.take():
            return None
        self._waited.clear()
        mask = self._active.mask
        try:
            own = self._instantiate_without([node for site, node in self._nodes if not mask[site]])
        except _CudaError as error:
            _LOG.warning(
                "no graph could be made for the active sites alone (%s); steps go on with the "
                "other sites' nodes disabled, half a microsecond each, and no more are made",
                error,
            )
            self._turns.give_up()
            return None
        self._own[key] = own
        self._active.own_graphs += 1
        self._turns.use(self, key)
        if len(self._own) > _OWN:
            self.free(next(iter(self._own)))
        return own

    def _enable(self) -> None:
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
                _take_out(node, clone)
            (executable,) = _checked(runtime.cudaGraphInstantiate(clone, 0))
        finally:
            runtime.cudaGraphDestroy(clone)
        return executable


@contextmanager
def site_graphs(active: ActiveSites) -> Iterator[None]:
    """Makes all CUDA graphs that are created in the `with` block follow `active`."""
    _Current.turns = _Turns(active)
    torch.cuda.CUDAGraph = SiteGraph  # type: ignore[misc]  # restored below
    try:
        yield
    finally:
        torch.cuda.CUDAGraph = _CudaGraph  # type: ignore[misc]  # as it was
        _Current.turns = None


def _take_out(node: runtime.cudaGraphNode_t, clone: runtime.cudaGraph_t) -> None:
    """Removes a node from a clone of its graph, and joins its dependencies to its dependents."""
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


def _neighbours(ask: Any, node: runtime.cudaGraphNode_t) -> list[runtime.cudaGraphNode_t]:
    count = _checked(ask(node, 0))[-1]
    return list(_checked(ask(node, count))[0]) if count else []


def _checked(result: Any) -> Any:  # the binding's tuples: error first
    error, *rest = result
    if error != runtime.cudaError_t.cudaSuccess:
        runtime.cudaGetLastError()  # or torch reports it after its next launch
        raise _CudaError(f"CUDA: {runtime.cudaGetErrorString(error)[1].decode()}")
    return rest
