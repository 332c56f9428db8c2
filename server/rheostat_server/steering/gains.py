"""Checks gains: numbers by which a session or a rule multiplies the request's own steering."""

from rheostat_engine import LARGEST_GAIN
from rheostat_server import validation
from rheostat_server.errors import InvalidValue, MissingField
from rheostat_server.limits import INTERVENTIONS
from rheostat_server.validation import counted, field_path
from rheostat_wire.v1 import gain_pb2


def check_form(gain: gain_pb2.Gain, path: str) -> None:
    """Checks what does not depend on the request.

    Raises:
        MissingField, NonFinite, InvalidValue: the message is malformed.
    """
    factor, indices = field_path(path, "factor"), field_path(path, "interventions")
    if not gain.HasField("factor"):
        raise MissingField("a factor is required", field=factor)
    validation.finite(gain.factor, factor)
    if not 0 <= gain.factor <= LARGEST_GAIN:
        raise InvalidValue(
            f"a gain is from 0 to {LARGEST_GAIN:g}, not {gain.factor:g}", field=factor
        )
    validation.check_count(len(gain.interventions), INTERVENTIONS, indices, "interventions")


def check_indices(gain: gain_pb2.Gain, count: int, path: str) -> None:
    """Checks that the steering has what a gain multiplies.

    Args:
        gain: the message.
        count: the number of interventions.
        path: the path of the message.

    Raises:
        InvalidValue: there is no such intervention.
    """
    if not count:
        raise InvalidValue(
            "the request has no steering of its own that a gain could multiply", field=path
        )
    for number, index in enumerate(gain.interventions):
        if index >= count:
            raise InvalidValue(
                f"the request's steering has {counted(count, 'intervention')}; there is "
                f"no intervention {index}",
                field=field_path(path, f"interventions[{number}]"),
            )
