"""Replacing rows: activation patching with rows of a run, a vector or an array, and noise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, Never, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from rheostat._arrays import ArrayLike, Element, raw_tensor, read_element, rows_data
from rheostat._errors import Unimplemented, invalid
from rheostat._fields import UINT64, check_arguments, whole_number
from rheostat._points import Layers, Site, point_of, site_to_wire
from rheostat._runs import RunInfo, valid_run_id
from rheostat._steering.interventions import fraction
from rheostat._steering.read_gates import stored_vector
from rheostat._steering.vectors import Intervention, Vector, finite, row_ref
from rheostat_wire.dtypes import widen
from rheostat_wire.v1 import replace_pb2, steering_pb2, tensor_pb2

Align: TypeAlias = Literal["identity", "affixes"]
"""How positions correspond to those of a run. "identity": position p to position p. "affixes": by
the longest common prefix of both prompts' tokens, then the longest common suffix; a position
between them has no partner and is refused."""

ALIGNMENTS = {
    "identity": replace_pb2.ALIGNMENT_IDENTITY,
    "affixes": replace_pb2.ALIGNMENT_AFFIXES,
}


@dataclass(frozen=True)
class FromRun:
    """Rows of a run, as `from_run` makes it."""

    run_id: str
    positions: tuple[int, ...] | None = None
    """Positions in the run, one for each replaced position."""
    align: Align = "identity"
    site: Site | None = None
    """The site whose rows are taken; None: the replaced one."""


@dataclass(frozen=True)
class RunMean:
    """The mean of a run's rows, as `run_mean` makes it."""

    run_id: str
    positions: tuple[int, ...] | None = None
    """Positions of the run to average over; None: all that it has."""


@dataclass(frozen=True)
class Zeros:
    """Rows of zeros."""


@dataclass(frozen=True, init=False)
class Noise:
    """The request's own rows with normal noise on them; give `std` or `embedding_std`.

    The same seed gives the same noise at the same site and position, in every request. Alpha and
    mask of `replace` scale the noise. `NoiseSource` in replace.proto says how it is drawn.

    Raises:
        InvalidRequest: both or none of the two are given, or one is not above 0.
    """

    std: float | None = None
    """Standard deviation of the noise, in the units of the rows' own numbers: 1 adds noise of 1 to
    each number, however small the model's rows are."""
    embedding_std: float | None = None
    """The same as a multiple of the standard deviation of the model's token embedding,
    `ModelInfo.embedding_std`. Causal traces use 3."""
    seed: int = 0
    """Another seed gives other noise: 0 to 2**64 - 1."""

    def __init__(
        self,
        *by_position: Never,
        std: float | None = None,
        embedding_std: float | None = None,
        seed: int = 0,
        **unknown: Never,
    ) -> None:
        """Noise of one of the two standard deviations, which are given by name."""
        check_arguments("Noise", unknown, [argument.name for argument in fields(self)])
        if by_position:
            number = f"{by_position[0]!r:.60}"
            raise TypeError(
                f"Noise() takes its options by name only: write std={number} or "
                f"embedding_std={number}"
            )
        object.__setattr__(self, "std", std)
        object.__setattr__(self, "embedding_std", embedding_std)
        object.__setattr__(self, "seed", seed)
        given = [number for number in (std, embedding_std) if number is not None]
        if len(given) != 1:
            raise invalid(
                "noise",
                "give std or embedding_std: a number, or a multiple of the standard deviation of "
                "the model's token embedding, of which causal traces use 3",
            )
        name = "embedding_std" if std is None else "std"
        if finite(given[0], f"noise.{name}", name) <= 0:
            raise invalid(f"noise.{name}", f"{name} is above 0, not {given[0]:.6g}")
        whole_number(seed, "noise.seed", "a seed", most=UINT64)


@dataclass(frozen=True, eq=False)
class RowArray:
    """A row for each site and position."""

    element: Element
    shape: tuple[int, int, int]
    """[sites, positions, width]."""
    data: bytes


Source: TypeAlias = Vector | FromRun | RunMean | Zeros | Noise | RowArray


@dataclass(frozen=True)
class Replace(Intervention):
    """(1 - alpha * m) * x + alpha * m * t, with t the source's row and m the mask."""

    source: Source
    """Where t comes from."""
    alpha: float = 1.0
    """0 (nothing) to 1."""
    mask: tuple[float, ...] | None = None
    """m: a weight from 0 to 1 for each dimension; None: 1 for all."""
    dimensions: tuple[int, ...] | None = None
    """The dimensions with weight 1; all others have weight 0."""

    _needs_vectors: ClassVar[bool] = False

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The vector, if that is the source."""
        return (self.source,) if isinstance(self.source, Vector) else ()

    def _op(self, path: str, layers: Layers) -> steering_pb2.Intervention:
        path = f"{path}.replace"
        message = replace_pb2.Replace(alpha=fraction(self.alpha, f"{path}.alpha", "alpha"))
        match self.source:
            case Vector() as vector:
                message.vector.CopyFrom(row_ref(vector, layers, f"{path}.vector"))
            case FromRun() as source:
                message.run.CopyFrom(_run_source(source))
            case RunMean(run_id, positions):
                message.mean.run_id = run_id
                if positions is not None:
                    message.mean.positions.positions.extend(positions)
            case Zeros():
                message.zeros.SetInParent()
            case Noise() as source:
                message.noise.CopyFrom(noise_to_wire(source))
            case RowArray(element, shape, data):
                message.rows.CopyFrom(raw_tensor(element, shape, data))
        if self.dimensions is not None:
            message.mask.dimensions.dimensions.extend(self.dimensions)
        if self.mask is not None:
            weights = np.asarray(self.mask, "<f4")
            message.mask.weights.CopyFrom(raw_tensor("float32", weights.shape, weights.tobytes()))
        return steering_pb2.Intervention(replace=message)

    def _text(self) -> str:
        match self.source:
            case Vector() as vector:
                source = vector.label
            case FromRun(run_id):
                source = f"run {run_id}"
            case RunMean(run_id):
                source = f"the mean of run {run_id}"
            case Zeros():
                source = "zeros"
            case Noise(std=std, embedding_std=embedding_std, seed=seed):
                scale = f"{embedding_std:g} embedding_std" if std is None else f"std {std:g}"
                source = f"x + noise of {scale}, seed {seed}"
            case RowArray(_, shape):
                source = f"rows {list(shape)}"
        part = "" if self.alpha == 1 else f" (alpha {self.alpha:.6g})"
        masked = "" if self.mask is None and self.dimensions is None else ", masked"
        return f"replace by {source}{part}{masked}"


def replace(
    source: Vector | FromRun | RunMean | Zeros | Noise | ArrayLike | npt.ArrayLike,
    *,
    alpha: float = 1.0,
    dimensions: Iterable[int] | None = None,
    mask: ArrayLike | npt.ArrayLike | None = None,
    dtype: Element | None = None,
) -> Replace:
    """Replace rows of the stream: x becomes (1 - alpha * m) * x + alpha * m * t.

    With ``alpha=1`` and no mask, x becomes t bit for bit, rounded to the model's element type. A
    replacement acts after all other ops at its site, whatever its place in the list. Say where it
    acts with ``.at(points=, layers=, where=)``; positions are required, token ids not allowed.

    ``source`` is `from_run` or `run_mean`, a vector of one row or of one row per layer,
    ``Zeros()``, ``Noise(std=...)``, or an array [sites, positions, width] with sites by layer, then
    point. ``alpha`` is 0 (nothing) to 1. ``dimensions`` are the replaced dimensions. ``mask`` has a
    weight, 0 to 1, for each dimension. By default all are replaced. ``dtype`` converts an array to
    that element type, except that ``dtype="bfloat16"`` reads uint16 as its bits.
    """
    if isinstance(source, Vector | FromRun | RunMean | Zeros | Noise):
        rows: Source = source
    elif isinstance(source, str | RunInfo):
        raise invalid("steering", "to replace by the rows of a run, use rheostat.from_run(run)")
    elif isinstance(source, type):
        raise invalid("steering", f"{source.__name__} is a class: use {source.__name__}()")
    else:
        element, numbers = rows_data(source, 3, "rows", dtype)
        sites, positions, width = numbers.shape
        rows = RowArray(element, (sites, positions, width), numbers.tobytes())
    if mask is not None and dimensions is not None:
        raise invalid("mask", "give dimensions or a mask, not both")
    chosen = None
    if dimensions is not None:
        chosen = tuple(whole_number(d, "dimensions", "a dimension") for d in dimensions)
    weights = None
    if mask is not None:
        kind, given = rows_data(mask, 1, "mask")
        weights = tuple(widen(given, kind).tolist())
        if not all(0 <= weight <= 1 for weight in weights):
            raise invalid("mask", "the weights of a mask are 0 to 1")
    return Replace(rows, alpha, weights, chosen)


def from_run(
    run: str | RunInfo,
    positions: int | Iterable[int] | None = None,
    *,
    align: Align = "identity",
    site: Site | None = None,
) -> FromRun:
    """Rows of a stored run, for `replace`.

    ``positions`` are the run's, one for each replaced position; the first is for the lowest one.
    Negative positions count from the end of the run's prompt. Without ``positions``, ``align``
    decides which row replaces which. ``site`` is the site from which the rows come; by default the
    replaced one.

    The server refuses the request if the run does not exist, or lacks a site or a position.
    """
    if align not in get_args(Align):
        raise invalid("align", f'align is "identity" or "affixes", not {align!r}')
    if positions is not None and align != "identity":
        raise invalid("positions", "give positions or an alignment, not both")
    return FromRun(
        _run_id(run), _positions(positions), align, None if site is None else _site(site)
    )


def run_mean(run: str | RunInfo, positions: int | Iterable[int] | None = None) -> RunMean:
    """The mean of a run's rows at each site, for `replace` (mean ablation).

    ``positions`` are the positions to average over; by default all that the run has.
    """
    return RunMean(_run_id(run), _positions(positions))


def _run_id(run: str | RunInfo) -> str:
    return valid_run_id(run.id if isinstance(run, RunInfo) else run, "run_id")


def _positions(positions: int | Iterable[int] | None) -> tuple[int, ...] | None:
    if positions is None:
        return None
    several = positions if isinstance(positions, Iterable) else (positions,)
    return tuple(
        int(whole_number(position, "positions", "a position", least=-(2**31), most=2**31 - 1))
        for position in several
    )


def _site(site: object) -> Site:
    if not isinstance(site, tuple) or len(site) != 2:
        raise invalid("site", f'a site is (point, layer), as ("resid_post", 3), not {site!r}')
    point, layer = site
    return Site(point_of(point), int(whole_number(layer, "site", "a layer")))


def _run_source(source: FromRun) -> replace_pb2.RunSource:
    message = replace_pb2.RunSource(
        run_id=source.run_id, site=None if source.site is None else site_to_wire(source.site)
    )
    if source.positions is not None:
        message.positions.positions.extend(source.positions)
    else:
        message.alignment = ALIGNMENTS[source.align]
    return message


def read_replace(message: replace_pb2.Replace, path: str) -> Replace:
    """The replacement of a message of the server, by a vector, zeros or noise.

    Raises Unimplemented for other sources: those by position and of runs are not server-wide.
    """
    source: Vector | Zeros | Noise
    match message.WhichOneof("source"):
        case "vector":
            source = stored_vector(message.vector)
        case "zeros":
            source = Zeros()
        case "noise" if message.noise.HasField("std"):
            source = Noise(std=message.noise.std, seed=message.noise.seed)
        case "noise" if message.noise.HasField("embedding_std"):
            source = Noise(embedding_std=message.noise.embedding_std, seed=message.noise.seed)
        case other:
            raise Unimplemented(
                f"{path} of the server has a source unknown to this client: {other}"
            )
    alpha = message.alpha if message.HasField("alpha") else 1.0
    match message.mask.WhichOneof("kind"):
        case "weights":
            weights = message.mask.weights
            if (
                read_element(weights.dtype) != "float32"
                or weights.encoding != tensor_pb2.ENCODING_RAW
            ):
                raise Unimplemented(f"{path}.mask of the server is not float32")
            given = np.frombuffer(weights.inline, "<f4")
            return Replace(source, alpha, mask=tuple(given.tolist()))
        case "dimensions":
            return Replace(source, alpha, dimensions=tuple(message.mask.dimensions.dimensions))
    return Replace(source, alpha)


def noise_to_wire(source: Noise) -> replace_pb2.NoiseSource:
    """The message."""
    message = replace_pb2.NoiseSource(seed=source.seed)
    if source.std is not None:
        message.std = source.std
    if source.embedding_std is not None:
        message.embedding_std = source.embedding_std
    return message
