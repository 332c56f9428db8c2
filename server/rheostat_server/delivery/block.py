"""Rows of one capture, ready to be sent."""

import numpy as np

from rheostat_engine import Site
from rheostat_server.capture.row_tensors import (
    Memory,
    SiteRows,
    estimate_copy,
    estimate_encoding,
    write_joined,
    write_raw,
)
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.row_batch import Positions
from rheostat_server.tensors import FloatType
from rheostat_wire.dtypes import StoredArray
from rheostat_wire.message_parts import Payload
from rheostat_wire.v1 import tensor_pb2


class Block:
    """Rows of one capture, ready to be sent.

    They are in one array if they arrived together and are only copied, as nearly always. Then
    nothing is done for each site.
    """

    __slots__ = ("_parts", "capture", "capture_index", "joined", "positions", "row_type")

    def __init__(
        self,
        capture_index: int,
        positions: Positions,
        rows: StoredArray | tuple[SiteRows, ...],
        row_type: FloatType,
        capture: ResolvedCapture,
    ) -> None:
        """Makes a block.

        Args:
            capture_index: number of the capture.
            positions: positions, ascending.
            rows: those of each site; or raw rows of all sites in order, [sites, positions, width].
            row_type: element type of raw rows.
            capture: says how they are projected and encoded.
        """
        self.capture_index = capture_index
        self.positions = positions
        self.joined = rows if isinstance(rows, np.ndarray) else None
        """The rows of all sites, [sites, positions, width]; None if they are not in one array."""
        self._parts = None if isinstance(rows, np.ndarray) else rows
        self.row_type = row_type
        self.capture = capture

    @property
    def parts(self) -> tuple[SiteRows, ...]:
        """The rows of each site."""
        if self._parts is None:
            assert self.joined is not None
            sites = self.capture.sites
            self._parts = tuple(
                [SiteRows(site, data, False) for site, data in zip(sites, self.joined, strict=True)]
            )
        return self._parts

    @property
    def of_all_sites(self) -> bool:
        """Whether it has rows of all sites of the capture."""
        return self.joined is not None or len(self.parts) == len(self.capture.sites)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Names of the sites."""
        if self.of_all_sites:
            return self.capture.sites
        return tuple(part.site for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes of the rows."""
        if self.joined is not None:
            return self.joined.nbytes
        return sum(part.data.nbytes for part in self.parts)

    @property
    def work(self) -> int:
        """Bytes that their encoding reads; see `offload`."""
        if self.joined is not None:
            return estimate_copy(self.joined.nbytes)
        return estimate_encoding(self.parts, self.capture)

    def write_raw(self, tensor: tensor_pb2.Tensor, room: Memory | None = None) -> Payload:
        """Makes a raw tensor in an empty message; see `row_tensors.write_raw`."""
        if self.joined is not None:
            return write_joined(self.joined, self.capture, self.row_type, tensor, room)
        return write_raw(self.parts, self.capture, self.row_type, tensor, room)
