"""The answers to updates of running requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rheostat._errors import RheostatError, from_status
from rheostat_wire.v1 import generation_pb2


@dataclass(frozen=True)
class UpdateApplied:
    """An update was carried out."""

    update_id: int
    """The id that the call returned, e.g. `Session.steer` or `Watch.stop`."""
    first_positions: Mapping[int, int]
    """First absolute position on which it acts, by sample; finished samples have none."""


@dataclass(frozen=True)
class UpdateRefused:
    """An update was refused; the request continues unchanged."""

    update_id: int
    """The id that the call returned, e.g. `Session.steer` or `Watch.stop`."""
    error: RheostatError
    """The error that a call would raise, e.g. `ResourceExhausted` if the bank is full."""

    @property
    def reason(self) -> str:
        """The reason of the error, e.g. "REASON_BANK_FULL"."""
        return self.error.reason

    @property
    def message(self) -> str:
        """The message of the error."""
        return self.error.message

    @property
    def field(self) -> str:
        """Path of the wrong field, e.g. "steering.interventions[2].where"; "" if there is none."""
        return self.error.path


def read_applied(message: generation_pb2.UpdateApplied) -> UpdateApplied:
    return UpdateApplied(
        message.update_id, {sample.sample: sample.position for sample in message.first_positions}
    )


def read_refused(message: generation_pb2.UpdateRefused) -> UpdateRefused:
    return UpdateRefused(message.update_id, from_status(message.status))
