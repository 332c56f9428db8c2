"""Batches of rows as Arrow record batches or a Hugging Face dataset; the libraries are optional."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from rheostat._errors import NotFound, missing_library
from rheostat.captures._batches import RowBatch

if TYPE_CHECKING:
    import datasets
    import pyarrow


def reader(batches: Iterator[RowBatch]) -> pyarrow.RecordBatchReader:
    """A reader with one record batch per batch. Raises NotFound if there is no batch."""
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise missing_library("this", error, "datasets") from error
    first = next(batches, None)
    if first is None:
        raise NotFound("no rows of this site are stored", reason="REASON_ARTIFACT_NOT_FOUND")
    schema = pyarrow.schema(
        [
            ("tag", pyarrow.string()),
            ("request_id", pyarrow.string()),
            ("sample", pyarrow.int32()),
            ("baseline", pyarrow.bool_()),
            ("position", pyarrow.int32()),
            ("token_id", pyarrow.int32()),
            ("values", pyarrow.list_(pyarrow.float32(), first.values.shape[1])),
        ]
    )
    return pyarrow.RecordBatchReader.from_batches(
        schema, (_record_batch(batch, schema) for batch in chain([first], batches))
    )


def dataset(batches: Iterator[RowBatch]) -> datasets.Dataset:
    """A dataset of all rows, in memory."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise missing_library("this", error, "datasets") from error
    return datasets.Dataset(reader(batches).read_all())


def _record_batch(batch: RowBatch, schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    import pyarrow

    def per_row(texts: list[str]) -> pyarrow.Array:
        """From one text per request to one text per row."""
        return pyarrow.array(texts).take(pyarrow.array(batch.request_index))

    values = np.ascontiguousarray(batch.values).reshape(-1)
    columns = [
        per_row([request.tag for request in batch.requests]),
        per_row([request.request_id for request in batch.requests]),
        pyarrow.array(batch.samples.astype(np.int32)),
        pyarrow.array(batch.baseline),
        pyarrow.array(batch.positions.astype(np.int32)),
        pyarrow.array(batch.token_ids.astype(np.int32)),
        pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values), batch.values.shape[1]),
    ]
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema)
