"""The tensor of a block of rows, whatever was already done to them on the device.

Invariant: the tensor is the same whether the device, this server or both encoded the rows. It is
equal to the bit if rows are cast or coded. If rows are projected (`projection` and ENCODING_RP8),
it is equal up to the order of float32 sums.
"""

from collections.abc import Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from rheostat_engine import Site
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.tensors import FloatType, converted, stack_rows, widened
from rheostat_wire.dtypes import StoredArray
from rheostat_wire.message_parts import Payload
from rheostat_wire.v1 import tensor_pb2

Memory = npt.NDArray[np.uint8]
"""Memory for a payload, [bytes]."""

_COPY = 8
"""Rows that are only copied count for an eighth of their bytes: a thread would cost more."""


class SiteRows(NamedTuple):
    """Rows of one site."""

    site: Site
    """Its name."""
    data: StoredArray
    """[positions, width]; encoded rows are uint8 [positions, bytes of a row]."""
    encoded: bool
    """Whether the device has encoded them."""


def estimate_encoding(parts: Sequence[SiteRows], capture: ResolvedCapture) -> int:
    """Bytes that `tensor_of` goes over; see `offload`."""
    size = sum(part.data.nbytes for part in parts)
    if only_copied(capture):
        return estimate_copy(size)
    if all(part.encoded for part in parts):
        return size
    if capture.projection is not None:
        size += 4 * capture.numbers * capture.width
    return size + capture.form.work(capture.numbers)


def estimate_copy(size: int) -> int:
    """The same for rows of `size` bytes that are only copied."""
    return size // _COPY


def only_copied(capture: ResolvedCapture) -> bool:
    """Whether the rows of a capture are sent raw, without a projection, by this server alone."""
    raw = capture.form.encoding == tensor_pb2.ENCODING_RAW
    return raw and capture.projection is None and not capture.row_encodings


def tensor_of(
    parts: Sequence[SiteRows], capture: ResolvedCapture, row_type: FloatType
) -> tensor_pb2.Tensor:
    """The tensor [sites, positions, ...] of rows of a capture.

    Args:
        parts: the rows, site by site.
        capture: says what becomes of them.
        row_type: element type of raw rows.
    """
    form, kind = capture.form, capture.kind
    if not any(part.encoded for part in parts):
        numbers, source_types = zip(
            *(_numbers(part, capture, row_type) for part in parts), strict=True
        )
        return form.encode(stack_rows(numbers), row_type=source_types[0], wanted=kind)
    if form.coded:
        coded = [
            part.data if part.encoded else form.codes(widened(*_numbers(part, capture, row_type)))
            for part in parts
        ]
        return form.tensor_of_codes(np.stack(coded), capture.numbers, kind)
    rows = [elements(part, capture, row_type) for part in parts]
    return form.encode(stack_rows(rows), row_type=kind, wanted=kind)


def write_raw(
    parts: Sequence[SiteRows],
    capture: ResolvedCapture,
    row_type: FloatType,
    tensor: tensor_pb2.Tensor,
    room: Memory | None = None,
) -> Payload:
    """Makes a raw tensor in an empty message, without its payload. Returns the payload.

    The payload is a view of the rows, if they are of one site and need no conversion.

    Args:
        parts: the rows, site by site.
        capture: says what becomes of them.
        row_type: element type of raw rows.
        tensor: the message.
        room: memory for the payload; None: it gets memory of its own, or is a view.
    """
    if row_type is capture.kind and capture.projection is None and not capture.row_encodings:
        rows = [part.data for part in parts]
    else:
        rows = [elements(part, capture, row_type) for part in parts]
    payload: Payload
    if room is not None:
        np.concatenate(rows, out=room.view(rows[0].dtype).reshape(-1, rows[0].shape[1]))
        payload = room.data
    elif len(rows) == 1:
        payload = view_of(rows[0])
    else:
        payload = b"".join([np.ascontiguousarray(part).data for part in rows])
    describe_raw(tensor, (len(rows), len(rows[0]), capture.numbers), capture.kind, payload)
    return payload


def write_joined(
    rows: StoredArray,
    capture: ResolvedCapture,
    row_type: FloatType,
    tensor: tensor_pb2.Tensor,
    room: Memory | None = None,
) -> Payload:
    """As `write_raw`, for rows of all sites in one array. The device must not have encoded them.

    Without `room` the payload is a view of the rows, unless they need a conversion.

    Args:
        rows: [sites, positions, width].
        capture: its rows are neither projected nor encoded.
        row_type: element type of the rows.
        tensor: the message.
        room: memory for the payload; None: see above.
    """
    if row_type is not capture.kind:
        rows = converted(rows, row_type=row_type, wanted=capture.kind)
    payload = view_of(rows) if room is None else room.data
    if room is not None:
        np.copyto(room.view(rows.dtype).reshape(rows.shape), rows)
    describe_raw(tensor, (*rows.shape[:2], capture.numbers), capture.kind, payload)
    return payload


def view_of(rows: StoredArray) -> memoryview:
    """The bytes of rows; a view if they are contiguous."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data


def describe_raw(
    tensor: tensor_pb2.Tensor, shape: Sequence[int], kind: FloatType, payload: Payload
) -> None:
    """Writes everything about a raw payload into its tensor."""
    tensor.dtype = kind.wire
    tensor.shape.extend(shape)
    tensor.encoding = tensor_pb2.ENCODING_RAW
    tensor.crc32c = google_crc32c.value(np.frombuffer(payload, np.uint8))


def bytes_of(payload: Payload) -> bytes:
    """The bytes of a payload, without a copy if they are all of a bytes object."""
    owner: object = payload if isinstance(payload, bytes) else payload.obj
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, bytes) and len(owner) == len(payload):
        return owner
    return bytes(payload)


def elements(part: SiteRows, capture: ResolvedCapture, row_type: FloatType) -> StoredArray:
    """Rows of a site as ENCODING_RAW has them, [positions, numbers]."""
    if part.encoded:
        return np.ascontiguousarray(part.data).view(capture.kind.numpy)
    numbers, source_type = _numbers(part, capture, row_type)
    return converted(numbers, row_type=source_type, wanted=capture.kind)


def _numbers(
    part: SiteRows, capture: ResolvedCapture, row_type: FloatType
) -> tuple[StoredArray, FloatType]:
    """Raw rows, or their projection, and their element type."""
    if capture.projection is None:
        return part.data, row_type
    projected = capture.projection.apply(widened(part.data, row_type), part.site.layer)
    return projected, FloatType.FLOAT32
