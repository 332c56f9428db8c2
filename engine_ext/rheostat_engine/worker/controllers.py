"""Controllers in a worker: readings of a step in, gains of the next position out.

Where the wait is
    vLLM prepares step k+1 while the device still computes step k, but the host needs the gains of
    step k+1 to write its instructions. So `end` of step k only launches the copy of its readings,
    and `finish`, right before the instructions of step k+1 are looked up, waits for it. The runners
    call `SiteRuntime.begin` last, so that the rest of step k+1 is prepared before the wait.
Alike on every rank
    The rank that reports calls the controller, and sends its decision to the other ranks. Otherwise
    a clock, or a plugin that is not deterministic, could make the ranks disagree.

Why arrays
    The next step is not launched before the decisions, so the device is idle meanwhile. All samples
    together cost a few numpy calls, and one short loop over those whose gains change.

Invariants: a step without controlled samples pays one comparison. A decision of position p acts at
p + 1, and each position is decided once, also if it is recomputed. Nothing that a controller does
raises here or takes longer than `_LONGEST` seconds, unless it keeps Python's lock.

Which time counts
    The budget limits the time that a controller computes. Threads that serve clients may keep
    Python's lock for 5 ms each, and a busy machine may suspend the thread. If such waits counted,
    clients could get a controller disabled. But a controller that itself waits, as for a network,
    holds up all requests. So a call also counts as an overrun if it takes `_LONG_WAIT` longer than
    its budget, whatever it waited for.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.plan.controllers import MAX_CONTROLLED, Controller, ControllerStep
from rheostat_engine.plan.gains import LARGEST_GAIN
from rheostat_engine.plan.plan import ReceivedControl
from rheostat_engine.worker.state.buffers import GateBuffers
from rheostat_engine.worker.state.device_table import HostCopy, to_device
from rheostat_engine.worker.state.position_functions import Int64

_LOG = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]

Share = Callable[[Floats], Floats]
"""Returns the array of the rank that reports, on every rank. The arrays have the same shape."""

_LONGEST = 1.0
"""Seconds after which a call is given up."""

_LONG_WAIT = 0.1
"""Seconds by which a call may exceed its budget without computing: twenty waits for the lock."""

_RECENT_CALLS = 100
_OVERRUNS = 10
"""A controller is disabled if so many of its recent calls were overruns."""

_TIMED_CALLS = 4096
"""Calls whose times are kept, for the statistics."""

_FEWEST = 16
"""Requests for which memory is allocated initially."""

_LAST_GAINS = 32
"""The last decisions about a sample that are reported at its end, for the rows that are computed
beyond its last token. If the server ends a sample, up to 16 tokens still wait for later ones (see
`adapters.outputs`), and the engine runs a few steps more."""


class ControllerDisabledError(Exception):
    """A controller failed or was too slow; the message says why."""


class ControllerHost:
    """A controller, its thread and its times."""

    def __init__(self, controller: Controller, budget: float) -> None:
        """Starts the thread.

        Args:
            controller: is called on the thread alone.
            budget: seconds that a call may compute.
        """
        self.calls = 0
        self.overruns = 0
        self.longest = 0.0
        self._controller = controller
        self._budget = budget
        self._times: deque[float] = deque(maxlen=_TIMED_CALLS)
        self._recent: deque[bool] = deque(maxlen=_RECENT_CALLS)
        self._steps: queue.SimpleQueue[ControllerStep] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[object, float]] = queue.SimpleQueue()
        # A daemon, because a call that never returns must not keep the process.
        threading.Thread(target=self._run, name="rheostat-controller", daemon=True).start()

    def decide(self, step: ControllerStep, counts: Int64) -> Floats:
        """The controller's gains, checked.

        Args:
            step: what it sees.
            counts: [n]: the number of interventions of each sample.

        Returns:
            [n, g]; `step.gains` beyond the interventions of a sample.

        Raises:
            ControllerDisabledError: it must not be called again.
        """
        started = time.perf_counter()
        self._steps.put(step)
        try:
            result, computed = self._results.get(timeout=_LONGEST)
        except queue.Empty:
            result = ControllerDisabledError(f"a call did not return within {_LONGEST:g} s")
            computed = _LONGEST
        took = time.perf_counter() - started
        overrun = computed > self._budget or took > self._budget + _LONG_WAIT
        self.calls += 1
        self._times.append(took)
        self.longest = max(self.longest, took)
        self._recent.append(overrun)
        self.overruns += overrun
        if isinstance(result, Exception):
            if isinstance(result, ControllerDisabledError):
                raise result
            raise ControllerDisabledError(f"it raised {type(result).__name__}: {result}")
        gains = _checked(result, step, counts)
        if sum(self._recent) >= _OVERRUNS:
            raise ControllerDisabledError(
                f"{_OVERRUNS} of its last {len(self._recent)} calls computed longer than "
                f"{self._budget * 1000:g} ms, or waited for {_LONG_WAIT * 1000:g} ms beyond that"
            )
        return gains

    def stats(self) -> tuple[int, int, float, float, float]:
        """Number of calls and of overruns; median, 99th percentile and longest time in seconds."""
        times = np.array(self._times or [0.0])
        median, high = np.quantile(times, [0.5, 0.99]).tolist()
        return self.calls, self.overruns, median, high, self.longest

    def _run(self) -> None:
        while True:
            step = self._steps.get()
            result: object
            started = time.thread_time()
            try:
                result = self._controller.decide(step)
            except Exception as error:  # whatever a plugin raises must not end the engine
                _LOG.exception("a controller raised")
                result = error
            self._results.put((result, time.thread_time() - started))


class _Samples(NamedTuple):
    """Samples about which controllers decide after a step, those of a controller together."""

    controllers: Int64
    """[n]: the index of each sample's controller, ascending."""
    requests: Int64
    """[n]: the worker's numbers of the requests."""
    samples: Int64
    """[n]: the numbers that the controllers see."""
    positions: Int64
    """[n]: the position that was computed."""
    tokens: Int64
    """[n]: its token in the step."""
    columns: Int64
    """[n, 2]: first and end of the columns of readings that the controller sees."""
    counts: Int64
    """[n]: the number of gains."""
    states: Int64
    """[n]: the states of the gains."""

    def at(self, which: Int64 | slice) -> "_Samples":
        """Some of them."""
        return _Samples(*(part[which] for part in self))


class Decision(NamedTuple):
    """Gains of samples, each from a position on."""

    states: Int64
    """[n]: the states of the gains."""
    firsts: Int64
    """[n]: the positions."""
    gains: Floats
    """[n, g]; 1 beyond the gains of a sample."""


class Disabled(NamedTuple):
    """A controller was disabled."""

    name: str
    reason: str
    requests: Mapping[int, int]
    """The first position without its decision, by number of each request that it controlled."""


class StepControllers:
    """The controllers of a worker, their samples, and their part in each step."""

    def __init__(
        self,
        gates: GateBuffers,
        hosts: Mapping[str, ControllerHost] | None,
        share: Share,
        gains_of: Callable[[Int64, int], Floats],
    ) -> None:
        """No sample is controlled.

        Args:
            gates: the forward pass writes readings there.
            hosts: the controllers by name; None on a rank that does not report.
            share: sends a decision to the other ranks.
            gains_of: the present gains of some states, and how many of each are returned.
        """
        self.disabled: dict[str, str] = {}
        """The reason by name of a disabled controller. Only the rank that reports knows it."""
        self._gates = gates
        self._hosts = hosts
        self._share = share
        self._gains_of = gains_of
        self._names: list[str] = []
        """Of the controllers that have had a sample; alike on every rank."""
        self._controls: dict[int, ReceivedControl] = {}
        """By number of the request."""
        self._made = 0
        self._ended: dict[str, list[int]] = {}
        self._pending: _Samples | None = None
        self._read: HostCopy | None = None
        """The readings of the last step."""
        # By number of the request; 0 is the number of none.
        self._controllers: Int64 = np.full(_FEWEST, -1, np.int64)
        """-1: none decides about it."""
        self._samples: Int64 = np.zeros(_FEWEST, np.int64)
        self._next: Int64 = np.zeros(_FEWEST, np.int64)
        """The next position that is read. Before the first decision it is the prompt's last."""
        self._columns: Int64 = np.zeros((_FEWEST, 2), np.int64)
        self._counts: Int64 = np.zeros(_FEWEST, np.int64)
        self._states: Int64 = np.zeros(_FEWEST, np.int64)
        self._decisions: Int64 = np.zeros(_FEWEST, np.int64)
        """How many decisions there were. The last are kept, each at its number's remainder."""
        self._last_firsts: Int64 = np.zeros((_FEWEST, _LAST_GAINS), np.int64)
        self._last_gains: Floats = np.ones((_FEWEST, _LAST_GAINS, MAX_CONTROLLED), np.float32)

    def __len__(self) -> int:
        """Number of controlled samples."""
        return len(self._controls)

    def stats(self) -> dict[str, tuple[int, int, float, float, float, str]]:
        """`ControllerHost.stats` of each controller, and why it is disabled; empty: it is not."""
        hosts = self._hosts or {}
        return {name: (*host.stats(), self.disabled.get(name, "")) for name, host in hosts.items()}

    def check(self, control: ReceivedControl) -> None:
        """Raises ValueError if the worker has no such controller."""
        if self._hosts is not None and control.name not in self._hosts:
            raise ValueError(f"there is no controller {control.name!r}")

    def add(self, request: int, control: ReceivedControl, state: int) -> None:
        """Puts a new sample under control; `state` is that of its gains."""
        while request >= len(self._controllers):
            self._grow()
        if control.name not in self._names:
            self._names.append(control.name)
        self._made += 1
        disabled = control.name in self.disabled
        self._controls[request] = control
        self._controllers[request] = -1 if disabled else self._names.index(control.name)
        self._samples[request] = self._made
        self._next[request] = control.first - 1
        self._columns[request] = control.columns
        self._counts[request] = control.gains
        self._states[request] = state
        self._decisions[request] = 0

    def remove(self, request: int, end: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Ends the control of a sample that has ended, if it was controlled.

        Args:
            request: the number of its request.
            end: one past the last position that was computed.

        Returns:
            (first position, gains) of the last decisions that acted.
        """
        control = self._controls.pop(request, None)
        if control is None:
            return ()
        seen = self._next[request] >= control.first
        if seen and control.name not in self.disabled:
            self._ended.setdefault(control.name, []).append(int(self._samples[request]))
        self._controllers[request] = -1
        self._samples[request] = 0
        count = int(self._decisions[request])
        slots = np.arange(max(0, count - _LAST_GAINS), count) % _LAST_GAINS
        firsts = self._last_firsts[request, slots].tolist()
        gains = self._last_gains[request, slots, : control.gains].tolist()
        decisions = zip(firsts, map(tuple, gains), strict=True)
        return tuple([decision for decision in decisions if decision[0] < end])

    def begin(self, numbers: Int64, computed: Int64, scheduled: Int64) -> bool:
        """Prepares a step; returns whether a controller decides after it.

        Args:
            numbers: [r]: the number of each request of the batch.
            computed: [r]: the position of its first token.
            scheduled: [r]: the number of its tokens.
        """
        if not self._controls:
            return False
        numbers = np.where(numbers < len(self._controllers), numbers, 0)
        controllers = self._controllers[numbers]
        last = computed + scheduled - 1
        (rows,) = np.nonzero((controllers >= 0) & (last >= self._next[numbers]))
        if not len(rows):
            return False
        rows = rows[np.argsort(controllers[rows], kind="stable")]
        requests, positions = numbers[rows], last[rows]
        self._next[requests] = positions + 1
        self._pending = _Samples(
            controllers[rows],
            requests,
            self._samples[requests],
            positions,
            (np.cumsum(scheduled) - 1)[rows],
            self._columns[requests],
            self._counts[requests],
            self._states[requests],
        )
        return True

    def end(self) -> None:
        """Launches the copy of the step's readings, once its forward pass was launched."""
        if self._pending is None or self._hosts is None:
            return
        readings = self._gates.readings
        rows = to_device(torch.from_numpy(self._pending.tokens), readings.device)
        values = readings[:, : int(self._pending.columns.max())].index_select(0, rows)
        self._read = HostCopy(values)

    def finish(self) -> tuple[list[Decision], list[Disabled]]:
        """The decisions about the last step. Waits for its readings, then for the controllers."""
        if self._pending is None:
            return [], []
        pending, self._pending = self._pending, None
        read = None if self._read is None else self._read.numpy()
        self._read = None
        decisions: list[Decision] = []
        disabled: list[Disabled] = []
        for controller in np.unique(pending.controllers).tolist():
            (rows,) = np.nonzero(pending.controllers == controller)
            ours = pending.at(rows)
            gains, reason = self._decided(ours, None if read is None else read[rows])
            if gains is None:
                disabled.append(self._disable(controller, reason))
                continue
            (running,) = np.nonzero(self._running(ours))
            decisions.append(self._decision(ours.at(running), gains[running]))
        return decisions, disabled

    def _running(self, ours: _Samples) -> npt.NDArray[np.bool_]:
        """Which samples have not ended since their step."""
        running: npt.NDArray[np.bool_] = self._samples[ours.requests] == ours.samples
        return running

    def _decision(self, ours: _Samples, gains: Floats) -> Decision:
        firsts = ours.positions + 1
        slots = self._decisions[ours.requests] % _LAST_GAINS
        self._decisions[ours.requests] += 1
        self._last_firsts[ours.requests, slots] = firsts
        self._last_gains[ours.requests, slots, : gains.shape[1]] = gains
        return Decision(ours.states, firsts, gains)

    def _decided(self, ours: _Samples, read: Floats | None) -> tuple[Floats | None, str]:
        """Gains of one controller; None and the reason if it must be disabled."""
        width = int(ours.counts.max())
        # The last column tells the other ranks whether the controller is disabled.
        shared = np.zeros((len(ours.samples), width + 1), np.float32)
        reason = ""
        if self._hosts is not None and read is not None:
            name = self._names[int(ours.controllers[0])]
            try:
                shared[:, :width] = self._hosts[name].decide(
                    self._step(name, ours, read, width), ours.counts
                )
            except ControllerDisabledError as error:
                reason = str(error)
                shared[:, width] = 1.0
        shared = self._share(shared)
        return (None, reason) if shared[0, width] else (shared[:, :width], "")

    def _step(self, name: str, ours: _Samples, read: Floats, width: int) -> ControllerStep:
        firsts = ours.columns[:, :1]
        counts = ours.columns[:, 1:] - firsts
        lanes = np.arange(counts.max())
        values = np.take_along_axis(read, np.minimum(firsts + lanes, read.shape[1] - 1), axis=1)
        gains = self._gains_of(ours.states, width)
        return ControllerStep(
            samples=ours.samples,
            positions=ours.positions,
            readings=np.where(lanes < counts, values, np.float32(np.nan)),
            gains=np.where(self._running(ours)[:, None], gains, np.float32(1)),
            ended=tuple(self._ended.pop(name, ())),
        )

    def _disable(self, controller: int, reason: str) -> Disabled:
        name = self._names[controller]
        self.disabled[name] = reason
        self._ended.pop(name, None)
        if self._hosts is not None:
            _LOG.error("the controller %s is disabled: %s", name, reason)
        (numbers,) = np.nonzero(self._controllers == controller)
        self._controllers[numbers] = -1
        last = (self._decisions[numbers] - 1) % _LAST_GAINS
        decided = np.where(self._decisions[numbers], self._last_firsts[numbers, last] + 1, 0)
        firsts = {
            number: max(end, self._controls[number].first)
            for number, end in zip(numbers.tolist(), decided.tolist(), strict=True)
        }
        return Disabled(name, reason, firsts)

    def _grow(self) -> None:
        more = len(self._controllers)
        self._controllers = np.pad(self._controllers, (0, more), constant_values=-1)
        self._samples = np.pad(self._samples, (0, more))
        self._next = np.pad(self._next, (0, more))
        self._columns = np.pad(self._columns, ((0, more), (0, 0)))
        self._counts = np.pad(self._counts, (0, more))
        self._states = np.pad(self._states, (0, more))
        self._decisions = np.pad(self._decisions, (0, more))
        self._last_firsts = np.pad(self._last_firsts, ((0, more), (0, 0)))
        self._last_gains = np.pad(self._last_gains, ((0, more), (0, 0), (0, 0)))


def _checked(result: object, step: ControllerStep, counts: Int64) -> Floats:
    """The gains that a controller returned.

    Raises:
        ControllerDisabledError: they are none.
    """
    shape = step.gains.shape
    if not isinstance(result, np.ndarray) or result.shape != shape:
        got = getattr(result, "shape", type(result).__name__)
        raise ControllerDisabledError(f"it returned {got} instead of an array of shape {shape}")
    if not np.issubdtype(result.dtype, np.floating):
        raise ControllerDisabledError(f"it returned {result.dtype} instead of floating point")
    own = np.arange(shape[1]) < counts[:, None]
    gains = np.where(own, result, 1.0).astype(np.float32)
    if not ((gains >= 0) & (gains <= LARGEST_GAIN)).all():
        wrong = gains[~((gains >= 0) & (gains <= LARGEST_GAIN))][0]
        raise ControllerDisabledError(
            f"it returned the gain {wrong:g}; a gain is from 0 to {LARGEST_GAIN:g}"
        )
    return gains
