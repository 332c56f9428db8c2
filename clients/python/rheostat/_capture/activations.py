"""Captured rows: one array per site, rows by ascending position, each position once.

Rows of a site that arrived in different encodings or widths are never mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Generic, NamedTuple, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from rheostat._capture.encodings import RAW, Encoding, read_tensor
from rheostat._errors import ServerError, invalid
from rheostat._points import Point, PointLike, Site, point_of, read_site, site_order
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import capture_pb2, tensor_pb2, types_pb2

IntArray = npt.NDArray[np.int64]
Numbers = TypeVar("Numbers")
"""What a tensor becomes when it is read."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one site, as the server sent them."""

    sample: int
    """Sample, from 0."""
    point: Point
    layer: int
    positions: IntArray
    """Absolute position of each row, int64 [rows]."""
    token_ids: IntArray
    """Input token at each position, int64 [rows]."""
    values: FloatArray
    """The stream, float32 [rows, width]. For encoding "rp8" its projection, [rows, kept]; for
    ``projection=`` x.d for each direction d, [rows, directions]."""
    baseline: bool = False
    """Whether the rows are of the baseline."""
    encoding: Encoding = RAW
    """The encoding in which the rows were sent."""
    max_error: FloatArray | None = None
    """Largest error in each row, float32 [rows]; NaN for rows that were not finite. None: exact."""

    def __repr__(self) -> str:
        of = f"{'baseline ' if self.baseline else ''}sample={self.sample}"
        return f"Rows({of}, {Site(self.point, self.layer)}, shape={list(self.values.shape)})"


class CapturedTensor(NamedTuple, Generic[Numbers]):
    """Rows of several sites at the same positions."""

    sites: tuple[Site, ...]
    positions: IntArray
    """Absolute position of each row, int64 [positions]."""
    token_ids: IntArray
    """Input token at each position, int64 [positions]."""
    tensor: Numbers
    """The rows, [sites, positions, width]."""


def read_captured(message: capture_pb2.Captured) -> list[Rows]:
    """The rows of a message, one `Rows` per site. Raises as `read_captured_tensor`."""
    captured = read_captured_tensor(message, read_tensor)
    values, error = captured.tensor.values, captured.tensor.max_error
    shared = {
        "sample": message.sample,
        "positions": captured.positions,
        "token_ids": captured.token_ids,
        "baseline": message.baseline,
        "encoding": captured.tensor.encoding,
        "max_error": None,
    }
    parts = []
    for number, site in enumerate(captured.sites):
        rows = object.__new__(Rows)
        # `Rows(...)` would take five times as long, and a message may have hundreds of sites.
        fields = vars(rows)
        fields.update(shared)
        fields["point"], fields["layer"] = site
        fields["values"] = values[number]
        if error is not None:
            fields["max_error"] = error[number]
        parts.append(rows)
    return parts


def read_captured_tensor(
    message: capture_pb2.Captured, read: Callable[[tensor_pb2.Tensor], Numbers]
) -> CapturedTensor[Numbers]:
    """The rows of a message; ``read`` decodes its tensor.

    Raises ServerError if shapes do not match, DataLoss if the checksum is wrong.
    """
    tensor = read(message.tensor)
    positions = positions_of(message.positions)
    token_ids = np.array(message.token_ids, dtype=np.int64)
    labels = (len(message.sites), len(positions))
    shape = tuple(message.tensor.shape)
    if len(shape) != 3 or shape[:2] != labels or len(token_ids) != len(positions):
        raise ServerError(
            f"captured rows of shape {list(shape)} are labelled with {labels[0]} sites, "
            f"{labels[1]} positions and {len(token_ids)} tokens"
        )
    return CapturedTensor(tuple(map(read_site, message.sites)), positions, token_ids, tensor)


def positions_of(ranges: Iterable[types_pb2.PositionRun]) -> IntArray:
    """Every position of the ranges, int64 [positions]."""
    parts = [np.arange(part.start, part.start + part.count, dtype=np.int64) for part in ranges]
    if len(parts) == 1:  # as in most messages
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


class Activations(Mapping[tuple[Point, int], FloatArray]):
    """Captured rows by (point, layer): ``activations["resid_post", 3]`` is float32 [rows, width].

    Points are given by name or alias. ``resid_post`` of layer L and ``resid_pre`` of layer L+1 are
    one site: either name returns rows that were captured under the other.
    """

    def __init__(
        self,
        parts: Mapping[Site, list[Rows]],
        *,
        in_answer: bool = True,
        destinations: Sequence[str] = (),
    ) -> None:
        """Concatenates the parts of each site. The other arguments are for error texts.

        ``in_answer``: a capture of the request had no destination; ``destinations``: those of the
        other captures.
        """
        self._in_answer = in_answer
        self._destinations = tuple(dict.fromkeys(destinations))
        self._sites = {site: _merge(parts[site]) for site in sorted(parts, key=site_order)}

    def __getitem__(self, key: tuple[PointLike, int]) -> FloatArray:
        """The rows of a site, float32 [rows, width]; of "rp8" their projection.

        Raises KeyError, which lists the captured sites, if there are none. Raises InvalidRequest
        if ``key`` is not a point and a layer, or if captures differ in encoding or width; the
        `Rows` events of a stream have such rows separately.
        """
        return self._rows(*self._key(key)).values

    def __iter__(self) -> Iterator[tuple[Point, int]]:
        """The sites by layer, then point."""
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def positions(self, point: PointLike, layer: int) -> IntArray:
        """Absolute position of each row, int64 [rows], ascending."""
        return self._rows(point, layer).positions

    def token_ids(self, point: PointLike, layer: int) -> IntArray:
        """Input token at each row's position, int64 [rows]."""
        return self._rows(point, layer).token_ids

    def encoding(self, point: PointLike, layer: int) -> Encoding:
        """The encoding in which the rows of a site were sent."""
        return self._rows(point, layer).encoding

    def max_error(self, point: PointLike, layer: int) -> FloatArray:
        """Largest error in each row, float32 [rows]; 0 if the encoding is exact.

        NaN if the row was not finite. For "rp8" the error is that of the projection.
        """
        rows = self._rows(point, layer)
        if rows.max_error is None:
            return np.zeros(len(rows.positions), np.float32)
        return rows.max_error

    def layers(self, point: PointLike) -> tuple[int, ...]:
        """Layers captured under the name of this point, ascending."""
        chosen = point_of(point)
        return tuple(site.layer for site in self._sites if site.point is chosen)

    def stack(self, point: PointLike) -> FloatArray:
        """All layers of a point, float32 [layers, rows, width], in the order of `layers`.

        Raises KeyError if no rows were captured there, InvalidRequest if the positions of layers
        differ.
        """
        layers = self.layers(point)
        if not layers:
            raise KeyError(f"no rows of {point_of(point)}; {self._listing()}")
        first = self.positions(point, layers[0])
        if any(not np.array_equal(first, self.positions(point, layer)) for layer in layers):
            raise invalid("captures", f"layers of {point} hold rows of different positions")
        return np.stack([self[point, layer] for layer in layers])

    def _key(self, key: object) -> tuple[PointLike, int]:
        """Returns ``key`` if it is a point and a layer."""
        match key:
            case (str() as point, SupportsIndex() as layer):
                return point, index(layer)
        named = [site for site in self._sites if isinstance(key, str) and site.point in key]
        point, layer = next(iter([*named, *self._sites]), Site(Point.RESID_POST, 3))
        raise invalid(
            "captures",
            f'rows go by point and layer, e.g. activations["{point}", {layer}], not by {key!r}; '
            f"{self._listing()}",
        )

    def _rows(self, point: PointLike, layer: int) -> Rows:
        site = Site(point_of(point), layer)
        parts = self._sites.get(site)
        if parts is None and site.twin is not None:
            parts = self._sites.get(site.twin)
        if parts is None:
            raise KeyError(f"no rows of {site}; {self._listing()}")
        if len(parts) > 1:
            kinds = " and ".join(
                f"{rows.encoding.name} of width {rows.values.shape[1]}" for rows in parts
            )
            raise invalid("captures", f"{site} holds rows in {kinds}: read them from the stream")
        return parts[0]

    def _listing(self) -> str:
        went = f"went to {' and '.join(self._destinations)}"
        if not self._in_answer:
            return f"they {went}" if self._destinations else "no capture= was asked for"
        listing = f"there are {', '.join(str(site) for site in self._sites) or 'none at all'}"
        return f"{listing}, and others {went}" if self._destinations else listing

    def __repr__(self) -> str:
        shapes = [
            f"{site}: {list(rows.values.shape)}"
            for site, parts in self._sites.items()
            for rows in parts
        ]
        return f"Activations({', '.join(shapes)})"


def _merge(parts: list[Rows]) -> tuple[Rows, ...]:
    """One `Rows` per encoding and width; all exact encodings are merged."""
    if len(parts) == 1:  # mostly
        return (parts[0],)
    groups: dict[tuple[Encoding, int], list[Rows]] = {}
    for part in parts:
        encoding = RAW if part.encoding.exact else part.encoding
        groups.setdefault((encoding, part.values.shape[1]), []).append(part)
    return tuple(_concatenate(group) for group in groups.values())


def _concatenate(parts: list[Rows]) -> Rows:
    """Concatenates rows, each position once: two captures may share positions and equal rows."""
    if len(parts) == 1:
        return parts[0]
    positions, first = np.unique(
        np.concatenate([part.positions for part in parts]), return_index=True
    )
    errors = [part.max_error for part in parts if part.max_error is not None]
    return replace(
        parts[0],
        positions=positions,
        token_ids=np.concatenate([part.token_ids for part in parts])[first],
        values=np.concatenate([part.values for part in parts])[first],
        max_error=np.concatenate(errors)[first] if errors else None,
    )
