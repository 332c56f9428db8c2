"""Sites of interventions in receipts, in wire format.

Why: a receipt has a message for each site of an intervention, with the message of a dose in it.
Writing their fields one by one takes longer than everything else that a request steered at all
layers costs when it ends.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rheostat_server.steering.interventions import Intervention
from rheostat_server.tensors import LARGEST_FLOAT32, float32
from rheostat_wire.message_parts import field_head, number_field
from rheostat_wire.v1 import receipt_pb2

_SITES = receipt_pb2.AppliedIntervention.SITES_FIELD_NUMBER
_ROW_COUNT = receipt_pb2.AppliedSite.ROW_COUNT_FIELD_NUMBER

_NUMBERS = struct.Struct("<BfBfBf")
"""A `Dose` in wire format: the tag and the number of each field."""

_NORM, _RELATIVE_MEAN, _RELATIVE_MAX = (
    number << 3 | 5  # the wire type of a float
    for number in (
        receipt_pb2.Dose.NORM_FIELD_NUMBER,
        receipt_pb2.Dose.RELATIVE_MEAN_FIELD_NUMBER,
        receipt_pb2.Dose.RELATIVE_MAX_FIELD_NUMBER,
    )
)

_DOSE = field_head(receipt_pb2.AppliedSite.DOSE_FIELD_NUMBER, _NUMBERS.size)

_DOSES = np.dtype(
    [
        ("norm_tag", "u1"),
        ("norm", "<f4"),
        ("mean_tag", "u1"),
        ("mean", "<f4"),
        ("max_tag", "u1"),
        ("max", "<f4"),
    ]
)
"""The same as `_NUMBERS`, for arrays."""

_TAGS = np.array((_NORM, 0, _RELATIVE_MEAN, 0, _RELATIVE_MAX, 0), _DOSES)

_KEPT_HEADS = 16
"""Numbers of rows for which an intervention keeps the heads of its sites."""


class Moved(NamedTuple):
    """How far an intervention moved the rows of a site, summed up."""

    rows: int
    change: float
    """Sum of |change|."""
    relative: float
    """Sum of |change| / |x|."""
    relative_max: float
    """Largest |change| / |x|."""


def applied_site(field: bytes, rows: int, moved: Moved | None) -> bytes:
    """A site of an intervention in wire format, as a field of an `AppliedIntervention`.

    Args:
        field: the field with its name; see `Intervention.site_fields`.
        rows: its changed rows.
        moved: how far they were moved; None: it has no dose.
    """
    count, dose = number_field(_ROW_COUNT, rows), b""
    if moved is not None:
        norm, mean = float32(moved.change / moved.rows), float32(moved.relative / moved.rows)
        largest = float32(moved.relative_max)
        dose = _DOSE + _NUMBERS.pack(_NORM, norm, _RELATIVE_MEAN, mean, _RELATIVE_MAX, largest)
    return b"".join((field_head(_SITES, len(field) + len(count) + len(dose)), field, count, dose))


def applied_sites(
    intervention: Intervention,
    rows: int,
    moved_rows: int,
    moved: tuple[Sequence[float], Sequence[float], Sequence[float]],
) -> bytes:
    """`applied_site` of all sites of an intervention that changed the same number of rows at each.

    Args:
        intervention: the intervention.
        rows: the changed rows of a site, at least one.
        moved_rows: `Moved.rows` of a site.
        moved: the other fields of `Moved`, with a number for each site.
    """
    fields = np.full(len(moved[0]), _TAGS)
    for name, sums, divisor in zip(
        ("norm", "mean", "max"), moved, (moved_rows, moved_rows, 1), strict=True
    ):
        numbers = np.array(sums) / divisor
        fields[name] = np.where(numbers <= LARGEST_FLOAT32, numbers, LARGEST_FLOAT32)
    written, size = fields.tobytes(), fields.itemsize
    numbered = enumerate(_heads(intervention, rows))
    return b"".join([head + written[size * n : size * (n + 1)] for n, head in numbered])


def _heads(intervention: Intervention, rows: int) -> tuple[bytes, ...]:
    """The bytes of each site up to the numbers of its dose, if it has `rows` changed rows."""
    known = intervention.receipt_heads
    heads = known.get(rows)
    if heads is None:
        count = number_field(_ROW_COUNT, rows)
        heads = tuple(
            [
                field_head(_SITES, len(field) + len(count) + len(_DOSE) + _NUMBERS.size)
                + b"".join((field, count, _DOSE))
                for field in intervention.site_fields
            ]
        )
        if len(known) >= _KEPT_HEADS:
            known.clear()
        known[rows] = heads
    return heads
