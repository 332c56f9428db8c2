"""The calls that make, read, list and delete runs, as values of `rheostat._connection.calls`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from rheostat._arrays import ArrayLike, Element, raw_tensor, rows_data
from rheostat._capture.activations import Activations, Rows, read_captured
from rheostat._capture.encodings import WIRE_ENCODINGS
from rheostat._connection.calls import PAGE, DownloadCall, PagedCall, UnaryCall, UploadCall
from rheostat._errors import invalid
from rheostat._fields import builds_message, counted, utf8_text, whole_number
from rheostat._points import (
    LayersLike,
    PointLike,
    PointsLike,
    Site,
    layers_of,
    point_of,
    points_of,
    site_set,
    site_to_wire,
)
from rheostat._positions import ranges_of
from rheostat._prompts import Prompt, labels_to_wire, put_prompt
from rheostat._responses.receipts import Receipt, read_receipt
from rheostat._runs import (
    MOST_POSITIONS,
    RunInfo,
    id_of,
    lease_duration,
    position_list,
    read_run,
    valid_run_id,
)
from rheostat._selectors import SelectorLike, selector_of
from rheostat._selectors import to_wire as selector_to_wire
from rheostat._steering.steering import SteeringLike, steering_to_wire
from rheostat_wire.dtypes import TO_WIRE
from rheostat_wire.v1 import run_service_pb2, tensor_pb2, types_pb2

ExactEncoding: TypeAlias = Literal["raw", "lz4_planes"]
"""Encodings in which a run can be read."""

RowsBySite: TypeAlias = Mapping[tuple[PointLike, int], ArrayLike | npt.ArrayLike]
"""Rows by (point, layer), each [positions, width]. An `Activations` is one."""

_CHUNK = 1024 * 1024


@dataclass(frozen=True, repr=False)
class CapturedRun(RunInfo):
    """A run that a call of `Engine.capture_run` stored."""

    receipt: Receipt = field(kw_only=True)
    """The receipt of the request that made it."""


@builds_message
def capture_run(
    prompt: Prompt,
    *,
    points: PointsLike,
    layers: LayersLike,
    where: SelectorLike,
    steering: SteeringLike,
    run_id: str | None,
    lease: float | None,
    lora: str | None,
    labels: Mapping[str, str] | None,
    dtype: Element | None,
) -> UnaryCall[run_service_pb2.CaptureRunResponse, CapturedRun]:
    request = run_service_pb2.CaptureRunRequest(
        run_id="" if run_id is None else valid_run_id(run_id),
        sites=site_set(points_of(points), layers_of(layers)),
        where=selector_to_wire(selector_of(where)),
        steering=steering_to_wire(steering),
        lora_name="" if lora is None else utf8_text(lora, "lora", "an adapter's name"),
        lease=None if lease is None else lease_duration(lease, "lease"),
        labels=None if labels is None else labels_to_wire(labels, "labels"),
        dtype=None if dtype is None else _dtype(dtype),
    )
    put_prompt(request.prompt, prompt)
    return UnaryCall(
        "/rheostat.v1.RunService/CaptureRun",
        request,
        run_service_pb2.CaptureRunResponse,
        _captured_run,
    )


def _captured_run(answer: run_service_pb2.CaptureRunResponse) -> CapturedRun:
    return CapturedRun(**vars(read_run(answer.run)), receipt=read_receipt(answer.receipt))


def get_run(run_id: str) -> UnaryCall[run_service_pb2.GetRunResponse, RunInfo]:
    return UnaryCall(
        "/rheostat.v1.RunService/GetRun",
        run_service_pb2.GetRunRequest(run_id=valid_run_id(run_id)),
        run_service_pb2.GetRunResponse,
        lambda answer: read_run(answer.run),
    )


class RunAccumulator:
    """Turns `ReadRunResponse` messages into arrays by site."""

    def __init__(self) -> None:
        self._parts: dict[Site, list[Rows]] = {}

    def add(self, message: run_service_pb2.ReadRunResponse) -> list[Rows]:
        """The rows of the next message."""
        parts = read_captured(message.captured)
        for rows in parts:
            self._parts.setdefault(Site(rows.point, rows.layer), []).append(rows)
        return parts

    def result(self) -> Activations:
        """The rows."""
        return Activations(self._parts)


@builds_message
def read_rows(
    run: str | RunInfo,
    *,
    points: PointsLike | None,
    layers: LayersLike,
    positions: int | Iterable[int] | None,
    encoding: ExactEncoding,
) -> DownloadCall[run_service_pb2.ReadRunResponse, Rows, Activations]:
    if encoding not in get_args(ExactEncoding):
        raise invalid("encoding", f'a run is read as "raw" or "lz4_planes", not {encoding!r}')
    request = run_service_pb2.ReadRunRequest(run_id=id_of(run), encoding=WIRE_ENCODINGS[encoding])
    if points is not None:
        request.sites.CopyFrom(site_set(points_of(points), layers_of(layers)))
    elif layers != "all":
        raise invalid("sites.points", "layers need points", "REASON_MISSING_FIELD")
    if positions is not None:
        request.positions.CopyFrom(position_list(positions))
    return DownloadCall(
        "/rheostat.v1.RunService/ReadRun",
        request,
        run_service_pb2.ReadRunResponse,
        RunAccumulator,
    )


@builds_message
def put_run(
    rows: RowsBySite,
    *,
    prompt_token_ids: Sequence[int],
    positions: Iterable[int] | None,
    token_ids: Iterable[int] | None,
    run_id: str | None,
    lease: float | None,
    labels: Mapping[str, str] | None,
    dtype: Element | None,
) -> UploadCall[run_service_pb2.PutRunResponse, RunInfo]:
    if not isinstance(rows, Mapping):
        raise invalid(
            "rows", f'rows go by site, e.g. {{("resid_post", 3): array}}, not {type(rows).__name__}'
        )
    element, arrays = _arrays(rows, dtype)
    count = len(next(iter(arrays.values())))
    if isinstance(rows, Activations):
        first = next(iter(rows))
        positions = rows.positions(*first).tolist() if positions is None else positions
        token_ids = rows.token_ids(*first).tolist() if token_ids is None else token_ids
    places = _positions(range(count) if positions is None else positions, count)
    header = run_service_pb2.RunHeader(
        run_id="" if run_id is None else valid_run_id(run_id),
        sites=[site_to_wire(site) for site in arrays],
        positions=_ranges(places),
        prompt_token_ids=types_pb2.TokenIds(ids=map(int, prompt_token_ids)),
        token_ids=() if token_ids is None else map(int, token_ids),
        dtype=TO_WIRE[element],
        lease=None if lease is None else lease_duration(lease, "lease"),
        labels=None if labels is None else labels_to_wire(labels, "labels"),
    )
    return UploadCall(
        "/rheostat.v1.RunService/PutRun",
        RunUpload(header, element, arrays, places),
        run_service_pb2.PutRunResponse,
        lambda answer: read_run(answer.run),
    )


@dataclass
class RunUpload:
    """The header of a run, then its rows, site by site in pieces of about 1 MiB."""

    header: run_service_pb2.RunHeader
    element: Element
    arrays: Mapping[Site, npt.NDArray[np.generic]]
    places: Sequence[int]
    failure: BaseException | None = None
    """Always None, because no code of a caller runs."""

    def __iter__(self) -> Iterator[Message]:
        """The messages."""
        yield run_service_pb2.PutRunRequest(header=self.header)
        for site, array in self.arrays.items():
            step = max(1, _CHUNK // array[0].nbytes)
            for start in range(0, len(self.places), step):
                part = array[start : start + step]
                yield run_service_pb2.PutRunRequest(
                    rows=run_service_pb2.RunRows(
                        sites=[site_to_wire(site)],
                        positions=_ranges(self.places[start : start + step]),
                        tensor=raw_tensor(self.element, (1, *part.shape), part.tobytes()),
                    )
                )


def _arrays(
    rows: RowsBySite, dtype: Element | None
) -> tuple[Element, dict[Site, npt.NDArray[np.generic]]]:
    """The rows of each site in their storage type, all of one type and shape."""
    arrays: dict[Site, npt.NDArray[np.generic]] = {}
    elements: set[Element] = set()
    for key, array in rows.items():
        point, layer = key
        site = Site(point_of(point), whole_number(layer, "rows", "a layer"))
        path = f"rows[{site}]"
        element, arrays[site] = rows_data(array, 2, path, dtype)
        elements.add(element)
    if not arrays:
        raise invalid("rows", "rows of at least one site are required", "REASON_MISSING_FIELD")
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) > 1:
        listed = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise invalid("rows", f"sites have rows of shapes {listed}", "REASON_VECTOR_SHAPE")
    if len(elements) > 1:
        raise invalid("rows", f"sites have rows of {' and '.join(sorted(elements))}: give dtype=")
    return elements.pop(), arrays


def _positions(positions: Iterable[int], count: int) -> list[int]:
    """Ascending positions, one for each of ``count`` rows."""
    places = [
        whole_number(place, "positions", "a position", most=MOST_POSITIONS) for place in positions
    ]
    if len(places) != count:
        given = "1 position is" if len(places) == 1 else f"{len(places)} positions are"
        raise invalid("positions", f"{given} given for {counted(count, 'row')} of a site")
    if any(after <= before for before, after in pairwise(places)):
        raise invalid("positions", "positions ascend, each once")
    return places


def _ranges(places: Sequence[int]) -> list[types_pb2.PositionRun]:
    """Ascending positions as runs."""
    return [types_pb2.PositionRun(start=run.start, count=len(run)) for run in ranges_of(places)]


def _dtype(element: Element) -> tensor_pb2.Dtype.ValueType:
    if not isinstance(element, str) or element not in TO_WIRE:
        raise invalid("dtype", f"dtype is one of {', '.join(TO_WIRE)}, not {element!r}")
    return TO_WIRE[element]


def list_runs() -> PagedCall[run_service_pb2.ListRunsResponse, RunInfo]:
    return PagedCall(
        "/rheostat.v1.RunService/ListRuns",
        lambda token: run_service_pb2.ListRunsRequest(page_size=PAGE, page_token=token),
        run_service_pb2.ListRunsResponse,
        lambda page: [read_run(run) for run in page.runs],
    )


def delete_run(run_id: str) -> UnaryCall[run_service_pb2.DeleteRunResponse, int]:
    """Its result is the number of freed bytes."""
    return UnaryCall(
        "/rheostat.v1.RunService/DeleteRun",
        run_service_pb2.DeleteRunRequest(run_id=valid_run_id(run_id)),
        run_service_pb2.DeleteRunResponse,
        lambda answer: answer.freed_bytes,
    )


def renew_lease(
    run_id: str, seconds: float
) -> UnaryCall[run_service_pb2.RenewLeaseResponse, RunInfo]:
    lease = lease_duration(seconds, "lease")
    return UnaryCall(
        "/rheostat.v1.RunService/RenewLease",
        run_service_pb2.RenewLeaseRequest(run_id=valid_run_id(run_id), lease=lease),
        run_service_pb2.RenewLeaseResponse,
        lambda answer: read_run(answer.run),
    )
