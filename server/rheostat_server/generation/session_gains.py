"""The gains of a session: numbers that multiply its own steering.

The first gain of a list of interventions has a second table of the list built in the workers, with
a gain in each program. That is an update of the steering, which needs room in the engine. All
later gains of the list are numbers.

Invariants: each gain is answered once. No gain waits for the answer to an earlier one. An update of
the steering waits until all gains before it have been answered, so a gain acts on the list that was
in force when it was sent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from rheostat_engine import (
    LARGEST_GAIN,
    MAX_GAIN_CHANGES,
    Act,
    GainsUpdate,
    Plan,
)
from rheostat_server import validation
from rheostat_server.admission.admit import AdmittedRequest
from rheostat_server.admission.planning import problem_of
from rheostat_server.errors import (
    InvalidValue,
    MissingField,
    QueueFull,
    RequestNotFound,
    RheostatError,
)
from rheostat_server.errors.status import to_status
from rheostat_server.limits import INTERVENTIONS, RETRY_SECONDS, WAITING_GAINS
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.manager import RequestManager
from rheostat_server.requests.sequence import EngineSequence, SampleGains
from rheostat_server.steering.interventions import Intervention
from rheostat_server.tasks.offload import offload
from rheostat_wire.v1 import gain_pb2, generation_pb2, receipt_pb2

Install = Callable[[Plan], Awaitable[object]]
"""Applies a packed plan to the samples, as an update of the steering does."""


class _SentGain:
    """A gain that was sent to the engine."""

    def __init__(
        self,
        gains: SampleGains,
        samples: int,
        done: Callable[[Sequence[generation_pb2.SamplePosition]], None],
    ) -> None:
        """No sample has answered.

        Args:
            gains: the gains from then on, without their position.
            samples: the number of samples that it was sent to.
            done: is called once all samples have answered, with the first positions.
        """
        self._gains = gains
        self._left = samples
        self._done = done
        self._firsts: list[generation_pb2.SamplePosition] = []

    def resolve(self, sequence: EngineSequence, first: int | None) -> None:
        """Takes the answer of a sample: its first position, or None if it has ended."""
        if first is not None:
            sequence.note_gains(self._gains._replace(first=first))
            self._firsts.append(
                generation_pb2.SamplePosition(sample=sequence.sample, position=first)
            )
        self._left -= 1
        if not self._left:
            self._done(sorted(self._firsts, key=lambda one: one.sample))


class SessionGains:
    """The gains of a session. Used on the event loop alone."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        active: ActiveRequest,
        manager: RequestManager,
    ) -> None:
        """Every gain is 1."""
        self._admitted = admitted
        self._active = active
        self._manager = manager
        self._accepted = 0
        """Gains that have not been answered."""
        self._sent = 0
        """Of these, those that were sent to the engine."""
        self._settled = asyncio.Event()
        self._settled.set()
        self._changes = 0
        self.begin_list(0, admitted.interventions, admitted.plan, admitted.work)

    def begin_list(
        self, update_id: int, interventions: Sequence[Intervention], plan: Plan, work: int
    ) -> None:
        """Begins with gains of 1 for the interventions that are in force from now on.

        Args:
            update_id: the update that brought them; 0: the request.
            interventions: all of them, server-wide ones first.
            plan: their plan, with the acts of the interventions first.
            work: bytes that `offload` counts for a pass over them.
        """
        self._update_id = update_id
        self._interventions = interventions
        self._plan = plan
        self._work = work
        own = [one for one in interventions if one.origin != receipt_pb2.ORIGIN_GLOBAL]
        self._gains = [1.0] * len(own)
        self._installed = False

    def check(self, gain: gain_pb2.Gain) -> None:
        """Checks a message, and accepts it. It must then be given to `apply`.

        Raises:
            MissingField, NonFinite, InvalidValue: it is malformed.
            QueueFull: too many gains wait.
        """
        if not gain.HasField("factor"):
            raise MissingField("a factor is required", field="gain.factor")
        validation.finite(gain.factor, "gain.factor")
        if not 0 <= gain.factor <= LARGEST_GAIN:
            raise InvalidValue(
                f"a gain is from 0 to {LARGEST_GAIN:g}, not {gain.factor:g}", field="gain.factor"
            )
        validation.check_count(
            len(gain.interventions), INTERVENTIONS, "gain.interventions", "interventions"
        )
        if self._accepted >= WAITING_GAINS:
            raise QueueFull(
                f"{WAITING_GAINS} gains wait for their answers already; send the next once some "
                "have been answered",
                field="gain",
                retry_after=RETRY_SECONDS,
            )
        self._accepted += 1

    async def apply(self, update_id: int, gain: gain_pb2.Gain, install: Install) -> None:
        """Sends an accepted gain to the engine. It is answered once the engine has reported it.

        Args:
            update_id: its id.
            gain: the message.
            install: gives samples the table with gains, if they do not have it.

        Raises:
            EngineLost, Defect: the request has failed.
            RheostatError: the gain is refused.
        """
        try:
            changed = self._changed(gain)
            if not self._installed:
                await self._install_table(update_id, install)
            self._send(update_id, changed)
        except BaseException:
            self._accepted -= 1
            raise

    async def settled(self) -> None:
        """Returns once all gains that were sent have been answered."""
        await self._settled.wait()

    def _changed(self, gain: gain_pb2.Gain) -> dict[int, float]:
        """The gains that a message changes, by intervention."""
        if not self._gains:
            raise InvalidValue(
                "the request has no steering of its own that a gain could multiply", field="gain"
            )
        for number, index in enumerate(gain.interventions):
            if index >= len(self._gains):
                raise InvalidValue(
                    f"the request's steering has {len(self._gains)} interventions; there is no "
                    f"intervention {index}",
                    field=f"gain.interventions[{number}]",
                )
        indices = gain.interventions or range(len(self._gains))
        changed = {index: gain.factor for index in indices if self._gains[index] != gain.factor}
        if self._changes + len(changed) > MAX_GAIN_CHANGES:
            raise InvalidValue(
                f"the gains of a session may change {MAX_GAIN_CHANGES} numbers; {self._changes} "
                f"were changed, and this gain would change {len(changed)}",
                field="gain",
            )
        return changed

    async def _install_table(self, update_id: int, install: Install) -> None:
        """Has the table with gains built, and gives it to the samples.

        Raises:
            EngineLost, Defect: the request has failed.
            RheostatError: the engine cannot hold it, or every sample has ended.
        """
        plan_id = self._active.plan_id(f"gains{update_id}")
        plan = await offload(self._work, _with_gains, self._interventions, self._plan, plan_id)
        try:
            await install(plan)
        except RheostatError as error:
            if error.field:
                error.field = "gain"
            raise
        self._installed = True

    def _send(self, update_id: int, changed: dict[int, float]) -> None:
        """Sends changes to the samples that run.

        Raises:
            RequestNotFound: every sample has ended.
        """
        running = [
            sequence
            for sequence in self._active.own_samples
            if sequence.installed and not sequence.ended
        ]
        if not running:
            raise RequestNotFound("every sample has ended")
        self._changes += len(changed)
        for index, factor in changed.items():
            self._gains[index] = factor
        self._sent += 1
        self._settled.clear()
        gains = SampleGains(0, self._update_id, tuple(self._gains))
        sent = _SentGain(gains, len(running), partial(self._answer, update_id))
        for sequence in running:
            change = sequence.await_gain(sent.resolve)
            update = GainsUpdate(sequence.plan_id, change, self._admitted.prompt_len, changed)
            self._manager.gain_updates.set(update, self._active.fail)

    def _answer(self, update_id: int, firsts: Sequence[generation_pb2.SamplePosition]) -> None:
        self._accepted -= 1
        self._sent -= 1
        if not self._sent:
            self._settled.set()
        if firsts:
            self._active.notify(
                generation_pb2.UpdateApplied(update_id=update_id, first_positions=firsts)
            )
        else:
            self._active.notify(refused(update_id, RequestNotFound("every sample has ended")))


def refused(update_id: int, error: RheostatError) -> generation_pb2.UpdateRefused:
    """The answer to an update that is refused."""
    return generation_pb2.UpdateRefused(update_id=update_id, status=to_status(error))


def _with_gains(interventions: Sequence[Intervention], plan: Plan, request_id: str) -> Plan:
    """A packed plan with the acts of another, the request's own with gains.

    Args:
        interventions: whose acts the plan begins with.
        plan: the plan; its other acts read.
        request_id: the id of the result.

    Raises:
        InvalidValue: no engine can run it.
    """
    acts: list[Act] = []
    for one in interventions:
        own = one.origin != receipt_pb2.ORIGIN_GLOBAL
        acts += (replace(act, gain=one.index) for act in one.acts) if own else one.acts
    acts += plan.acts[len(acts) :]
    try:
        return Plan(request_id, tuple(acts), signals=plan.signals, gained=True).pack()
    except ValueError as error:
        raise InvalidValue(
            f"with a gain for each intervention: {problem_of(error)}", field="gain"
        ) from error
