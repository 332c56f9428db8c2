"""The gains of a request: numbers that multiply its own steering, set by its session and watches.

The gain of an intervention is the product of what each of them has set. So a watch that halves the
steering halves it whatever the session sets.

The first gain of a list of interventions has a second table of the list built in the workers, with
a gain in each program. That is an update of the steering, which needs room in the engine. All
later gains of the list are numbers.

Invariants: each gain is answered once. No gain waits for the answer to an earlier one. An update of
the steering waits until all gains before it have been answered, so a gain acts on the list that was
in force when it was sent.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from rheostat_engine import (
    LARGEST_GAIN,
    MAX_GAIN_CHANGES,
    Act,
    GainsUpdate,
    Plan,
)
from rheostat_server.admission.planning import GoingOn, problem_of
from rheostat_server.engine.gain_updates import GainUpdates
from rheostat_server.errors import (
    InvalidValue,
    RequestNotFound,
    RheostatError,
)
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.sequence import EngineSequence, SampleGains
from rheostat_server.steering.gains import check_indices
from rheostat_server.steering.interventions import Intervention
from rheostat_server.tasks.offload import offload_plan
from rheostat_wire.v1 import gain_pb2, generation_pb2

Positions = Sequence[generation_pb2.SamplePosition]

Install = Callable[[Plan], Awaitable[object]]
"""Applies a packed plan to the samples, as an update of the steering does."""

Answer = Callable[[Positions], None]
"""Is called with the first positions on which a gain acts; empty if every sample has ended."""


class RequestGains:
    """The gains of a request. Used on the event loop alone."""

    def __init__(self, active: ActiveRequest, updates: GainUpdates) -> None:
        """Every gain is 1.

        Args:
            active: the request.
            updates: sends the gains to the engine.
        """
        self._active = active
        self._updates = updates
        self._sent = 0
        """Gains that were sent to the engine and have not been answered."""
        self._settled = asyncio.Event()
        self._settled.set()
        self._changes = 0
        admitted = active.admitted
        self.begin_list(("", 0), admitted.interventions, admitted.plan, admitted.work)

    def begin_list(
        self,
        source: tuple[str, int],
        interventions: Sequence[Intervention],
        plan: Plan,
        work: int,
    ) -> None:
        """Begins with gains of 1 for the interventions that are in force from now on.

        Args:
            source: `Intervention.source` of the own ones.
            interventions: all of them, server-wide ones first.
            plan: their plan, with the acts of the interventions first.
            work: bytes that `offload` counts for a pass over them.
        """
        self._source = source
        self._count = sum(intervention.own for intervention in interventions)
        self._gains = [1.0] * self._count
        self._factors: dict[str, list[float]] = {}
        """What each setter has set, for each intervention."""
        self.begin_plan(interventions, plan, work)

    def begin_plan(self, interventions: Sequence[Intervention], plan: Plan, work: int) -> None:
        """Begins with another plan of the same own interventions, whose gains are all 1.

        Arguments as in `begin_list`.
        """
        self._interventions = interventions
        self._plan = plan
        self._work = work
        self.installed = False
        """Whether the samples have the table with gains, so that a gain is sent as a number."""

    @property
    def multiply(self) -> bool:
        """Whether a gain is not 1."""
        return any(gain != 1 for gain in self._gains)

    async def install(
        self, setter: str, update_id: int, gain: gain_pb2.Gain, install: Install
    ) -> None:
        """Gives the samples the table with gains. The gain itself is checked, but not set.

        Args:
            setter: the id of the watch that sets the gain; empty: the session.
            update_id: the setter's update.
            gain: the message; see `check_form`.
            install: gives samples a table.

        Raises:
            EngineLost, Defect: the request has failed.
            RheostatError: the gain is refused, the engine cannot hold the table, or every sample
                has ended.
        """
        self._changed(setter, gain)
        plan_id = self._active.plan_id(f"gains{update_id}{setter}")
        plan = await offload_plan(self._work, _with_gains, self._interventions, self._plan, plan_id)
        try:
            await install(plan)
        except RheostatError as error:
            if error.field:
                error.field = "gain"
            raise
        self.installed = True

    def apply(self, setter: str, gain: gain_pb2.Gain, answer: Answer) -> None:
        """Sends a checked gain to the engine. It is answered once the engine has reported it.

        Args:
            setter: the id of the watch that sets it; empty: the session.
            gain: the message; see `check_form`. The table is `installed`.
            answer: is called with the first positions.

        Raises:
            RheostatError: the gain is refused.
        """
        factors, changed = self._changed(setter, gain)
        self._send(changed, answer)
        self._factors[setter] = factors

    async def settled(self) -> None:
        """Returns once all gains that were sent have been answered."""
        await self._settled.wait()

    def _changed(self, setter: str, gain: gain_pb2.Gain) -> tuple[list[float], dict[int, float]]:
        """What the setter has set then, and the gains that change, by intervention."""
        check_indices(gain, self._count, "gain")
        factors = list(self._factors.get(setter, [1.0] * self._count))
        others = [by_index for name, by_index in self._factors.items() if name != setter]
        changed: dict[int, float] = {}
        for index in gain.interventions or range(self._count):
            factors[index] = gain.factor
            product = math.prod([gain.factor, *(by_index[index] for by_index in others)])
            if product > LARGEST_GAIN:
                raise InvalidValue(
                    f"with what others have set, the gain of intervention {index} would be "
                    f"{product:g}; the largest is {LARGEST_GAIN:g}",
                    field="gain.factor",
                )
            if self._gains[index] != product:
                changed[index] = product
        if self._changes + len(changed) > MAX_GAIN_CHANGES:
            raise InvalidValue(
                f"the gains of a request may change {MAX_GAIN_CHANGES} numbers; {self._changes} "
                f"were changed, and this gain would change {len(changed)}",
                field="gain",
            )
        return factors, changed

    def _send(self, changed: Mapping[int, float], answer: Answer) -> None:
        """Sends changes to the samples that run.

        The engine may have released a sample whose last token has not arrived yet. It would never
        answer.

        Raises:
            RequestNotFound: every sample has ended.
        """
        running = [
            sequence
            for sequence in self._active.own_samples
            if sequence.installed and not sequence.ended and not sequence.engine_done
        ]
        if not running:
            raise RequestNotFound("every sample has ended")
        self._changes += len(changed)
        for index, factor in changed.items():
            self._gains[index] = factor
        self._sent += 1
        self._settled.clear()
        source, gains = self._source, tuple(self._gains)
        waiting, firsts = len(running), list[generation_pb2.SamplePosition]()

        def resolve(sequence: EngineSequence, first: int | None) -> None:
            """Takes the answer of a sample: its first position, or None if it has ended."""
            nonlocal waiting
            if first is not None:
                sequence.note_gains(SampleGains(first, source, gains))
                firsts.append(generation_pb2.SamplePosition(sample=sequence.sample, position=first))
            waiting -= 1
            if not waiting:
                self._sent -= 1
                if not self._sent:
                    self._settled.set()
                answer(sorted(firsts, key=lambda position: position.sample))

        for sequence in running:
            change = sequence.await_gain(resolve)
            prompt_len = self._active.admitted.prompt_len
            update = GainsUpdate(sequence.plan_id, change, prompt_len, changed)
            self._updates.set(update, self._active.fail)


def _with_gains(interventions: Sequence[Intervention], plan: Plan, request_id: str) -> Plan:
    """A packed plan with the acts of another, the request's own with gains.

    A sample keeps the states of its gates, so the plan reserves none.

    Args:
        interventions: whose acts the plan begins with.
        plan: the packed plan; its other acts read.
        request_id: the id of the result.

    Raises:
        InvalidValue: no engine can run it.
    """
    acts: list[Act] = []
    for intervention in interventions:
        acts += (
            (replace(act, gain=intervention.index) for act in intervention.acts)
            if intervention.own
            else intervention.acts
        )
    acts += plan.acts[len(acts) :]
    signals = GoingOn.of(plan).signals
    try:
        return Plan(request_id, tuple(acts), signals=signals, gained=True).pack()
    except ValueError as error:
        raise InvalidValue(
            f"with a gain for each intervention: {problem_of(error)}", field="gain"
        ) from error
