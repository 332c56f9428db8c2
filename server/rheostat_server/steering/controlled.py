"""Requests whose gains a controller of the server sets.

The workers call the controller; see `plan.controllers` of the engine. The server checks that a
request may have it, gives its plan a table with gains, and keeps which controllers are disabled.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from rheostat_engine import MAX_CONTROLLED, MAX_GAIN_CHANGES, Act, Control, PackedActs, Plan
from rheostat_server import validation
from rheostat_server.errors import (
    ControllerDisabled,
    ControllerNotFound,
    InvalidValue,
    MissingField,
    NotSupported,
    Resource,
)
from rheostat_server.limits import ID_BYTES
from rheostat_server.selectors.selection import SelectionContext
from rheostat_server.steering.interventions import Intervention
from rheostat_server.steering.probes import Probe
from rheostat_server.validation import counted
from rheostat_wire.v1 import gain_pb2, generation_service_pb2

_LOG = logging.getLogger(__name__)

CONTROLLED = "a controller of the server sets the gains of this request"
"""Why a watch that steers does not read a request."""


class Controllers:
    """The controllers of a server. Used on the event loop, and read on threads."""

    def __init__(self, names: Collection[str]) -> None:
        """All of them are enabled."""
        self.names = tuple(sorted(names))
        self._disabled: dict[str, str] = {}

    def disable(self, name: str, reason: str) -> None:
        """Notes that the workers have disabled a controller."""
        if name not in self._disabled:
            _LOG.error("controller %s is disabled: %s", name, reason)
            self._disabled[name] = reason

    def check(self, name: str) -> None:
        """Checks that requests may use a controller.

        Raises:
            ControllerNotFound: there is no such controller.
            ControllerDisabled: it is disabled.
        """
        field, resource = "controlled.controller_name", Resource("controller", name)
        if name not in self.names:
            raise ControllerNotFound(
                f"there is no controller {name!r}: the server has "
                f"{', '.join(self.names) or 'none'}",
                field=field,
                resource=resource,
            )
        if name in self._disabled:
            raise disabled_error(name, self._disabled[name], field)


class ControlledBy(NamedTuple):
    """The controller of a request."""

    name: str
    goes_on: bool
    """Whether the request goes on if the controller is disabled."""


def disabled_error(name: str, reason: str, field: str = "") -> ControllerDisabled:
    """The error for a request whose controller is disabled."""
    return ControllerDisabled(
        f"the controller {name!r} is disabled until the server restarts: {reason}", field=field
    )


def check_controlled(
    request: generation_service_pb2.GenerateRequest, controllers: Controllers, *, in_session: bool
) -> ControlledBy | None:
    """Checks the controller of a request, apart from the rest of it. None if it has none.

    Raises:
        RheostatError: the message is malformed, or the controller may not be used.
    """
    if not request.HasField("controlled"):
        return None
    message = request.controlled
    path = "controlled.controller_name"
    if not message.controller_name:
        raise MissingField("a name is required", field=path)
    validation.text_bytes(message.controller_name, ID_BYTES, path)
    if message.HasField("on_disabled"):
        path = "controlled.on_disabled"
        validation.known_enum(message.on_disabled, gain_pb2.OnDisabled.values(), path)
    if in_session:
        raise NotSupported(
            "a session sets gains itself: use Generate, or send it without a controller",
            field="controlled",
        )
    controllers.check(message.controller_name)
    goes_on = message.on_disabled == gain_pb2.ON_DISABLED_CONTINUE
    return ControlledBy(message.controller_name, goes_on)


def control(
    plan: Plan,
    name: str,
    interventions: Sequence[Intervention],
    probes: Collection[Probe],
    context: SelectionContext,
) -> Plan:
    """A packed plan whose gains a controller sets.

    Args:
        plan: the packed plan of the request, with the acts of the interventions first.
        name: the controller.
        interventions: all of them, server-wide ones first.
        probes: the request's own.
        context: the request.

    Raises:
        InvalidValue: the request has nothing to control, or too much.
    """
    own = sum(intervention.own for intervention in interventions)
    columns = [column for probe in probes for column in probe.columns]
    if not columns:
        raise InvalidValue("a controller needs probes: add what it must read", field="controlled")
    if not 1 <= own <= MAX_CONTROLLED:
        raise InvalidValue(
            f"a controller sets the gains of 1 to {MAX_CONTROLLED} interventions of the request; "
            f"it has {own}",
            field="controlled",
        )
    max_tokens = context.max_tokens
    if own * max_tokens > MAX_GAIN_CHANGES:
        raise InvalidValue(
            f"the gains of a request may change {MAX_GAIN_CHANGES} numbers; "
            f"{counted(own, 'intervention')} and {counted(max_tokens, 'token')} are more: "
            "lower sampling.max_tokens",
            field="controlled",
        )
    acts: list[Act] = []
    for intervention in interventions:
        acts += (
            (replace(act, gain=intervention.index) for act in intervention.acts)
            if intervention.own
            else intervention.acts
        )
    acts += plan.acts[len(acts) :]
    try:
        gained = PackedActs(tuple(acts), plan.signals).build()
        span = min(columns), max(columns) + 1
        wanted = Control(name, gained, span, own, context.prompt_len)
        return replace(plan, control=wanted, private_from=context.prompt_len).pack()
    except ValueError as error:
        raise InvalidValue(
            f"with a gain for each intervention: {error}", field="controlled"
        ) from error
