"""Reports to the scheduler which requests' gates are shut at a position of a step.

The scheduler asks in the message of the step that computes the position. After the forward pass and
the fold, the openness of the asked tokens is copied to the host on the step's own stream. The
report waits for the copy only when vLLM reads the step's output, so no step is delayed.

Invariant: a request is reported only if the openness of all asked gates was computed in this step
and is exactly 0. NaN is not 0. Everything else is unknown, and the scheduler shares nothing then.
"""

from collections.abc import Mapping

import numpy as np
import torch

from rheostat_engine.plan.gate_decisions import DecidedOnce
from rheostat_engine.worker.state.buffers import GateBuffers
from rheostat_engine.worker.state.device_table import to_device
from rheostat_engine.worker.state.position_functions import Int64
from rheostat_engine.worker.step_tokens import Batch

Questions = Mapping[str, DecidedOnce]
"""By vLLM's request id."""


class DecisionReport:
    """The openness of the asked tokens, on its way to the host."""

    def __init__(self, asked: Questions, openness: torch.Tensor) -> None:
        """Begins the copy.

        Args:
            asked: the requests.
            openness: [requests, gates]: a copy of their tokens' openness, on the device.
        """
        self._asked = asked
        self._openness = openness.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if openness.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def shut(self) -> list[str]:
        """The requests whose asked gates are all shut. Waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        rows = self._openness.numpy()
        return [
            name
            for (name, decided), row in zip(self._asked.items(), rows, strict=True)
            if (row[list(decided.gates)] == 0).all()
        ]


class GateDecisions:
    """The questions of the current step, and its report."""

    def __init__(self, gates: GateBuffers) -> None:
        """Nothing is asked."""
        self._gates = gates
        self._asked: Questions = {}
        self._found: dict[str, DecidedOnce] = {}
        """The questions that the step can answer."""
        self._tokens: list[int] = []
        """Their tokens in the step."""
        self._report: DecisionReport | None = None

    @property
    def asked(self) -> bool:
        """Whether the next step has questions."""
        return bool(self._asked)

    def ask(self, questions: Questions) -> None:
        """Asks about requests of the next step."""
        self._asked = questions

    def begin(self, batch: Batch, gate_states: Int64) -> None:
        """Finds the tokens of a step whose gates are computed.

        Args:
            batch: the batch.
            gate_states: [n]: the state of the first gate of each token's sample; 0: it has none.
        """
        if not self._asked:
            return
        begins = np.cumsum(batch.scheduled) - batch.scheduled
        for name, begin, computed, count in zip(
            batch.request_ids, begins, batch.computed, batch.scheduled, strict=True
        ):
            decided = self._asked.get(name)
            if decided is None or not 0 <= decided.position - computed < count:
                continue
            token = int(begin + decided.position - computed)
            if gate_states[token]:  # otherwise its plan was not installed
                self._found[name] = decided
                self._tokens.append(token)

    def end(self) -> None:
        """Begins the report, once the forward pass and the fold were launched."""
        self._asked = {}
        found, tokens, self._found, self._tokens = self._found, self._tokens, {}, []
        if found:
            where = to_device(torch.tensor(tokens), self._gates.openness.device)
            self._report = DecisionReport(found, self._gates.openness.index_select(0, where))

    def take(self) -> DecisionReport | None:
        """The report of the last step, once; None if nothing was asked."""
        report, self._report = self._report, None
        return report
