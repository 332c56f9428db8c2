"""Reads the rows of one site from tables, in batches that may span requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rheostat._arrays import Element, widened
from rheostat._capture.activations import IntArray
from rheostat._capture.encodings import WIRE_ENCODINGS, Encoding, decoded
from rheostat._errors import invalid
from rheostat._points import PointLike, Site, point_of
from rheostat.captures._arrays import ArrayLocation, arrays_in, damaged, read_rows
from rheostat.captures._manifests import StoredRequest, StoredTable
from rheostat_wire.dtypes import TO_WIRE, FloatArray
from rheostat_wire.v1 import tensor_pb2

_PARTS = {
    "raw": ("rows",),
    "full8": ("scales", "offsets", "codes"),
    "rp8": ("scales", "offsets", "codes"),
    "topk8": ("scales", "offsets", "indices", "codes"),
}


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Rows of one site. Row i of every array is the same row."""

    requests: tuple[StoredRequest, ...]
    request_index: IntArray
    """Index of each row's request, int64 [rows]."""
    samples: IntArray
    """Sample of each row, int64 [rows]."""
    baseline: npt.NDArray[np.bool_]
    """Whether the row is of the baseline, [rows]."""
    positions: IntArray
    """Absolute position of each row, int64 [rows]; ascending per request, sample and baseline."""
    token_ids: IntArray
    """Input token at each position, int64 [rows]."""
    values: FloatArray
    """The stream, float32 [rows, width], exact unless the encoding is lossy. For "rp8" its
    projection, [rows, kept]."""
    encoding: Encoding
    """The encoding in which the rows are stored."""
    max_error: FloatArray | None
    """Largest error in each row, float32 [rows]; None: exact."""

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        return f"RowBatch(requests={len(self.requests)}, shape={list(self.values.shape)})"


@dataclass(frozen=True)
class RowFilter:
    """Selects rows of a request; None selects all."""

    point: PointLike
    layer: int
    sample: int | None
    baseline: bool | None
    capture_index: int | None


def table_of(request: StoredRequest, row_filter: RowFilter) -> StoredTable | None:
    """The table of a request that matches a filter; None if there is none.

    Raises InvalidRequest if several captures have the site and the filter selects none of them.
    """
    tables = request.tables_at(row_filter.point, row_filter.layer)
    if row_filter.capture_index is not None:
        tables = tuple(table for table in tables if table.capture_index == row_filter.capture_index)
    if len(tables) > 1:
        site = Site(point_of(row_filter.point), row_filter.layer)
        specs = ", ".join(str(table.capture_index) for table in tables)
        raise invalid(
            "capture_index",
            f"captures {specs} of {request.request_id} have rows of {site}: give capture_index=",
        )
    return tables[0] if tables else None


def read_batches(request: StoredRequest, row_filter: RowFilter, size: int) -> Iterator[RowBatch]:
    """The rows of a request, in batches of at most ``size`` rows."""
    table = table_of(request, row_filter)
    if table is None:
        return
    arrays = arrays_in(table.part, request.format, f"{table.name}.")
    for first in range(0, table.rows, size):
        count = min(size, table.rows - first)
        samples = _ints(_read(table, arrays, "samples", first, count))
        baseline = _read(table, arrays, "baseline", first, count).astype(np.bool_)
        chosen = np.ones(count, np.bool_)
        if row_filter.sample is not None:
            chosen &= samples == row_filter.sample
        if row_filter.baseline is not None:
            chosen &= baseline == row_filter.baseline
        if not chosen.any():
            continue
        values, error = _values(table, arrays, first, count)
        batch = RowBatch(
            (request,),
            np.zeros(count, np.int64),
            samples,
            baseline,
            _ints(_read(table, arrays, "positions", first, count)),
            _ints(_read(table, arrays, "token_ids", first, count)),
            values,
            table.encoding,
            error,
        )
        yield batch if chosen.all() else _select(batch, chosen)


def batched(parts: Iterable[RowBatch], size: int) -> Iterator[RowBatch]:
    """The same rows in batches of ``size``; the last one may be smaller."""
    waiting: list[RowBatch] = []
    row_count = 0
    for part in parts:
        while row_count + len(part) >= size:
            cut = size - row_count
            yield concatenate([*waiting, _select(part, slice(cut))])
            part = _select(part, slice(cut, None))
            waiting, row_count = [], 0
        if len(part):
            waiting.append(part)
            row_count += len(part)
    if row_count:
        yield concatenate(waiting)


def concatenate(parts: Sequence[RowBatch]) -> RowBatch:
    """Joins batches. Raises InvalidRequest if rows differ in width or encoding."""
    if len(parts) == 1:
        return parts[0]
    kinds = {(part.values.shape[1], part.encoding): part for part in parts}
    if len(kinds) > 1:
        first, second = (part.requests[0].request_id for part in list(kinds.values())[:2])
        raise invalid(
            "rows",
            f"{first} and {second} hold rows of different widths or encodings: read them by "
            "request, or store them under different tags",
        )
    requests = {_key(request): request for part in parts for request in part.requests}
    indices = {key: index for index, key in enumerate(requests)}
    errors = [part.max_error for part in parts if part.max_error is not None]
    return RowBatch(
        tuple(requests.values()),
        np.concatenate(
            [
                np.array([indices[_key(request)] for request in part.requests], np.int64)[
                    part.request_index
                ]
                for part in parts
            ]
        ),
        np.concatenate([part.samples for part in parts]),
        np.concatenate([part.baseline for part in parts]),
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.values for part in parts]),
        parts[0].encoding,
        np.concatenate(errors) if errors else None,
    )


def _key(request: StoredRequest) -> tuple[str, str]:
    return request.tag, request.request_id


def _select(batch: RowBatch, rows: slice | npt.NDArray[np.bool_]) -> RowBatch:
    """Some rows of a batch: a range of them, or those where an array is True."""
    return RowBatch(
        batch.requests,
        batch.request_index[rows],
        batch.samples[rows],
        batch.baseline[rows],
        batch.positions[rows],
        batch.token_ids[rows],
        batch.values[rows],
        batch.encoding,
        None if batch.max_error is None else batch.max_error[rows],
    )


def _read(
    table: StoredTable, arrays: Mapping[str, ArrayLocation], column: str, first: int, count: int
) -> npt.NDArray[np.generic]:
    location = arrays.get(f"{table.name}.{column}")
    if location is None or location.shape[:1] != (table.rows,):
        raise damaged(table.part.path, f"it lacks {column} of {table.name}")
    return read_rows(table.part.path, location, first, count)


def _ints(numbers: npt.NDArray[np.generic]) -> IntArray:
    return numbers.astype(np.int64)


def _values(
    table: StoredTable, arrays: Mapping[str, ArrayLocation], first: int, count: int
) -> tuple[FloatArray, FloatArray | None]:
    name, element = table.encoding.name, _element(table)
    if name not in _PARTS:
        raise damaged(table.part.path, f"it holds rows in the unknown encoding {name}")
    parts = [_read(table, arrays, part, first, count) for part in _PARTS[name]]
    if name == "raw":
        (rows,) = parts
        return widened(rows.tobytes(), element, (count, table.width)), None
    numbers = table.encoding.kept if name == "rp8" else table.width
    seed = (table.encoding.seed or 0) if name == "rp8" else None
    quantization = tensor_pb2.Quantization(
        kept=table.encoding.kept or 0, width=table.width, seed=seed
    )
    tensor = tensor_pb2.Tensor(
        dtype=TO_WIRE[element],
        shape=(count, numbers or 0),
        encoding=WIRE_ENCODINGS[name],
        quantization=None if name == "full8" else quantization,
    )
    result = decoded(tensor, b"".join(part.tobytes() for part in parts))
    return result.values, result.max_error


def _element(table: StoredTable) -> Element:
    for element in TO_WIRE:
        if element == table.dtype:
            return element
    raise damaged(table.part.path, f"it holds elements of type {table.dtype}")
