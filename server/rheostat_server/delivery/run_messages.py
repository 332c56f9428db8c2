"""Rows of a stored run as `Captured` messages."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import Site
from rheostat_server.capture.encodings import Form
from rheostat_server.capture.row_tensors import describe_raw, view_of
from rheostat_server.delivery.capture_rows import CHUNK_POSITIONS
from rheostat_server.delivery.row_messages import CapturedRows, add_runs
from rheostat_server.limits import CHUNK_BYTES
from rheostat_server.runs.store import Run
from rheostat_server.selectors.sites import write_site
from rheostat_server.selectors.spans import runs
from rheostat_wire.v1 import capture_pb2, tensor_pb2


class RunChunk(NamedTuple):
    """Rows of a run for one message."""

    run: Run
    sites: tuple[Site, ...]
    """Their names in the message, by layer, then point."""
    at: npt.NDArray[np.intp]
    """Indices of their positions in the run, ascending."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        row = self.run.width * self.run.dtype.itemsize
        return len(self.sites) * len(self.at) * row

    def encoded(self, form: Form) -> CapturedRows:
        """The message. A raw payload is not copied once more."""
        run, message = self.run, capture_pb2.Captured()
        for site in self.sites:
            write_site(message.sites.add(), site)
        add_runs(message.positions.add, runs(run.positions[self.at]))
        message.token_ids.extend(run.token_ids[self.at].tolist())
        rows = run.read([run.index_of(site) for site in self.sites], self.at)
        if form.encoding != tensor_pb2.ENCODING_RAW:
            encoded = form.encode(rows, row_type=run.dtype, wanted=run.dtype)
            message.tensor.CopyFrom(encoded)
            return CapturedRows(message)
        tensor, payload = tensor_pb2.Tensor(), view_of(rows)
        describe_raw(tensor, rows.shape, run.dtype, payload)
        return CapturedRows(message, tensor, payload)


def run_chunks(run: Run, sites: tuple[Site, ...], at: npt.NDArray[np.intp]) -> Iterator[RunChunk]:
    """Rows of a run in chunks of about `CHUNK_BYTES`: by site, then position.

    Args:
        run: the run.
        sites: names of its sites, in the order in which they are sent.
        at: indices of its positions, ascending.
    """
    row = run.width * run.dtype.itemsize
    positions = min(CHUNK_POSITIONS, max(1, CHUNK_BYTES // row))
    together = max(1, CHUNK_BYTES // max(1, row * len(at))) if len(at) <= positions else 1
    for first in range(0, len(sites), together):
        for start in range(0, len(at), positions):
            yield RunChunk(run, sites[first : first + together], at[start : start + positions])
