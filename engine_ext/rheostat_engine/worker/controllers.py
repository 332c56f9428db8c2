"""Controllers in a worker: readings of a step in, gains of the next position out.

Where the wait is
    vLLM prepares step k+1 while the device still computes step k, but the host needs the gains of
    step k+1 to write its instructions. So `end` of step k only launches the copy of its readings,
    and `finish`, right before the instructions of step k+1 are looked up, waits for it.
Alike on every rank
    The rank that reports calls the controller, and sends its decision to the other ranks. Otherwise
    a clock, or a plugin that is not deterministic, could make the ranks disagree.

Invariants: a step without controlled samples pays one comparison. A decision of position p acts at
p + 1, and each position is decided once, also if it is recomputed. Nothing that a controller does
raises here or takes longer than `_LONGEST` seconds, unless it keeps Python's lock.
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

from rheostat_engine.plan.controllers import Controller, ControllerStep
from rheostat_engine.plan.gains import LARGEST_GAIN
from rheostat_engine.plan.plan import ReceivedControl
from rheostat_engine.worker.state.buffers import GateBuffers
from rheostat_engine.worker.state.device_table import to_device
from rheostat_engine.worker.state.position_functions import Int64

_LOG = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]

Share = Callable[[Floats], Floats]
"""Returns the array of the rank that reports, on every rank. The arrays have the same shape."""

_LONGEST = 1.0
"""Seconds after which a call is given up."""

_RECENT_CALLS = 100
_OVERRUNS = 10
"""A controller is disabled if so many of its recent calls exceeded the budget."""

_TIMED_CALLS = 4096
"""Calls whose times are kept, for the statistics."""


class ControllerDisabledError(Exception):
    """A controller failed or was too slow; the message says why."""


class ControllerHost:
    """A controller, its thread and its times."""

    def __init__(self, controller: Controller, budget: float) -> None:
        """Starts the thread.

        Args:
            controller: is called on the thread alone.
            budget: seconds that a call may take.
        """
        self.calls = 0
        self.overruns = 0
        self.longest = 0.0
        self._controller = controller
        self._budget = budget
        self._times: deque[float] = deque(maxlen=_TIMED_CALLS)
        self._recent: deque[bool] = deque(maxlen=_RECENT_CALLS)
        self._steps: queue.SimpleQueue[ControllerStep] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[object] = queue.SimpleQueue()
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
            result = self._results.get(timeout=_LONGEST)
        except queue.Empty:
            result = ControllerDisabledError(f"a call did not return within {_LONGEST:g} s")
        took = time.perf_counter() - started
        self.calls += 1
        self._times.append(took)
        self.longest = max(self.longest, took)
        self._recent.append(took > self._budget)
        self.overruns += took > self._budget
        if isinstance(result, Exception):
            if isinstance(result, ControllerDisabledError):
                raise result
            raise ControllerDisabledError(f"it raised {type(result).__name__}: {result}")
        gains = _checked(result, step, counts)
        if sum(self._recent) >= _OVERRUNS:
            raise ControllerDisabledError(
                f"{_OVERRUNS} of its last {len(self._recent)} calls took longer than "
                f"{self._budget * 1000:g} ms"
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
            try:
                self._results.put(self._controller.decide(step))
            except Exception as error:  # whatever a plugin raises must not end the engine
                _LOG.exception("a controller raised")
                self._results.put(error)


class _Sample(NamedTuple):
    request: int
    """The worker's number of the request."""
    sample: int
    """The number that the controller sees."""
    control: ReceivedControl


class _Pending(NamedTuple):
    """The samples of the last step that one controller decides for."""

    name: str
    samples: list[_Sample]
    positions: Int64
    """[n]."""
    rows: slice
    """Their rows of the copied readings."""


class Decision(NamedTuple):
    """The gains of a sample from a position on."""

    request: int
    first: int
    gains: Mapping[int, float]


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
        gains_of: Callable[[int, int], Floats],
    ) -> None:
        """No sample is controlled.

        Args:
            gates: the forward pass writes readings there.
            hosts: the controllers by name; None on a rank that does not report.
            share: sends a decision to the other ranks.
            gains_of: the present gains of a request, by its number and how many it has.
        """
        self.disabled: dict[str, str] = {}
        """Why each disabled controller is, by name. Other ranks than the one that reports only know
        that it is."""
        self._gates = gates
        self._hosts = hosts
        self._share = share
        self._gains_of = gains_of
        self._samples: dict[int, _Sample] = {}
        self._next: dict[int, int] = {}
        """By number of the request: the next position that has no decision."""
        self._made = 0
        self._ended: dict[str, list[int]] = {}
        self._pending: list[_Pending] = []
        self._tokens: Int64 = np.zeros(0, np.int64)
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def __len__(self) -> int:
        """Number of controlled samples."""
        return len(self._samples)

    def stats(self) -> dict[str, tuple[int, int, float, float, float, str]]:
        """`ControllerHost.stats` of each controller, and why it is disabled; empty: it is not."""
        hosts = self._hosts or {}
        return {name: (*host.stats(), self.disabled.get(name, "")) for name, host in hosts.items()}

    def control_of(self, request: int) -> ReceivedControl | None:
        """The control of a request; None if it has no controller."""
        sample = self._samples.get(request)
        return None if sample is None else sample.control

    def add(self, request: int, control: ReceivedControl) -> None:
        """Puts a new sample under control.

        Raises:
            ValueError: the worker has no such controller.
        """
        if self._hosts is not None and control.name not in self._hosts:
            raise ValueError(f"there is no controller {control.name!r}")
        self._made += 1
        self._samples[request] = _Sample(request, self._made, control)
        self._next[request] = control.first - 1

    def remove(self, request: int) -> None:
        """Ends the control of a sample that has ended, if it was controlled."""
        sample = self._samples.pop(request, None)
        if sample is not None:
            seen = self._next.pop(request) >= sample.control.first
            if seen and sample.control.name not in self.disabled:
                self._ended.setdefault(sample.control.name, []).append(sample.sample)

    def begin(self, numbers: Int64, computed: Int64, scheduled: Int64) -> bool:
        """Prepares a step; returns whether a controller decides after it.

        Args:
            numbers: [r]: the number of each request of the batch.
            computed: [r]: the position of its first token.
            scheduled: [r]: the number of its tokens.
        """
        if not self._samples:
            return False
        found: dict[str, list[tuple[_Sample, int, int]]] = {}
        last = computed + scheduled - 1
        tokens = np.cumsum(scheduled) - 1
        for index, number in enumerate(numbers.tolist()):
            sample = self._samples.get(number)
            if sample is None or sample.control.name in self.disabled:
                continue
            if last[index] >= self._next[number]:
                self._next[number] = int(last[index]) + 1
                part = (sample, int(last[index]), int(tokens[index]))
                found.setdefault(sample.control.name, []).append(part)
        rows = 0
        of_tokens: list[int] = []
        for name in sorted(found):
            samples, positions, at = zip(*found[name], strict=True)
            count = len(samples)
            place = slice(rows, rows + count)
            self._pending.append(
                _Pending(name, list(samples), np.array(positions, np.int64), place)
            )
            of_tokens += at
            rows += count
        self._tokens = np.array(of_tokens, np.int64)
        return bool(rows)

    def end(self) -> None:
        """Launches the copy of the step's readings, once its forward pass was launched."""
        if not self._pending or self._hosts is None:
            return
        readings = self._gates.readings
        columns = max(sample.control.columns[1] for one in self._pending for sample in one.samples)
        rows = to_device(torch.from_numpy(self._tokens), readings.device)
        values = readings[:, :columns].index_select(0, rows)
        if readings.device.type != "cuda":
            self._host = values
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def finish(self) -> tuple[list[Decision], list[Disabled]]:
        """The decisions about the last step. Waits for its readings, then for the controllers."""
        if not self._pending:
            return [], []
        pending, self._pending = self._pending, []
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        read = None if self._host is None else self._host.numpy()
        self._host = None
        decisions: list[Decision] = []
        disabled: list[Disabled] = []
        for one in pending:
            gains, reason = self._decided(one, read)
            if gains is None:
                disabled.append(self._disable(one.name, reason))
                continue
            for sample, position, row in zip(one.samples, one.positions, gains, strict=True):
                if self._samples.get(sample.request) is sample:  # it has not ended meanwhile
                    own = dict(enumerate(row[: sample.control.gains].tolist()))
                    decisions.append(Decision(sample.request, int(position) + 1, own))
        return decisions, disabled

    def _decided(self, one: _Pending, read: Floats | None) -> tuple[Floats | None, str]:
        """Gains of one controller; None and the reason if it must be disabled."""
        width = max(sample.control.gains for sample in one.samples)
        # The last column tells the other ranks whether the controller is disabled.
        shared = np.zeros((len(one.samples), width + 1), np.float32)
        reason = ""
        if self._hosts is not None and read is not None:
            step, counts = self._step(one, read[one.rows], width)
            try:
                shared[:, :width] = self._hosts[one.name].decide(step, counts)
            except ControllerDisabledError as error:
                reason = str(error)
                shared[:, width] = 1.0
        shared = self._share(shared)
        return (None, reason) if shared[0, width] else (shared[:, :width], "")

    def _step(self, one: _Pending, read: Floats, width: int) -> tuple[ControllerStep, Int64]:
        controls = [sample.control for sample in one.samples]
        most = max(control.columns[1] - control.columns[0] for control in controls)
        readings = np.full((len(controls), most), np.nan, np.float32)
        gains = np.ones((len(controls), width), np.float32)
        for row, sample in enumerate(one.samples):
            first, end = sample.control.columns
            readings[row, : end - first] = read[row, first:end]
            if self._samples.get(sample.request) is sample:
                count = sample.control.gains
                gains[row, :count] = self._gains_of(sample.request, count)
        step = ControllerStep(
            samples=np.array([sample.sample for sample in one.samples], np.int64),
            positions=one.positions,
            readings=readings,
            gains=gains,
            ended=tuple(self._ended.pop(one.name, ())),
        )
        return step, np.array([control.gains for control in controls], np.int64)

    def _disable(self, name: str, reason: str) -> Disabled:
        self.disabled[name] = reason
        self._ended.pop(name, None)
        if self._hosts is not None:
            _LOG.error("the controller %s is disabled: %s", name, reason)
        requests = {
            number: self._next[number]
            for number, sample in self._samples.items()
            if sample.control.name == name
        }
        return Disabled(name, reason, requests)


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
