"""The server's store of vectors, as `Engine.vectors`; `rheostat.aio` has its twin."""

from __future__ import annotations

from collections.abc import Iterable

import numpy.typing as npt

from rheostat import _vector_calls
from rheostat._arrays import ArrayLike, Element
from rheostat._connection import Connection, Reader
from rheostat._derivations import Derivation, DeriveMethod
from rheostat._points import LayersLike, PointsLike
from rheostat._requests import Prompt
from rheostat._selectors import SelectorLike
from rheostat._uploads import Progress
from rheostat._vectors import Vector, VectorInfo


class Vectors:
    """The server's store of vectors."""

    def __init__(self, connection: Connection) -> None:
        """Made by `Engine`."""
        self._connection = connection

    def put(
        self,
        array: ArrayLike | npt.ArrayLike | Vector,
        *,
        points: PointsLike | None = None,
        layers: LayersLike | None = None,
        name: str | None = None,
        description: str | None = None,
        dtype: Element | None = None,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> Vector:
        """Store a vector and give a handle on it. Storing the same numbers twice stores them once.

        ``array`` is [width], one row for every layer, or [layers, width], one row per layer: a
        numpy array, a torch tensor or anything with ``__array__``. float32, float16 and bfloat16
        are kept as they are, other numbers rounded to float32; ``dtype`` converts, and
        ``dtype="bfloat16"`` reads uint16 as bits. ``points`` and ``layers`` are where the handle
        acts by default; with a name and both given, the server keeps them for others to see. A name
        that is on another vector moves here. Without a name the server may evict the vector once
        no request uses it. A `Vector` that holds its numbers, as from `load_vector`, brings its own
        name, description, points and layers for those that are not given. Raises InvalidRequest for
        another rank and for elements that are not finite. What ``progress`` raises ends the upload
        and comes out as it is.
        """
        call = _vector_calls.put_vector(
            array,
            points=points,
            layers=layers,
            name=name,
            description=description,
            dtype=dtype,
            progress=progress,
        )
        return self._connection.upload(call, timeout)

    def get(
        self, name: str | None = None, *, digest: str | None = None, timeout: float | None = None
    ) -> Vector:
        """Fetch a vector with its numbers (``vector.values``), by name or by digest."""
        call, timeout = _vector_calls.get_vector(name, digest), self._connection.limit(timeout)
        responses = self._connection.download(call, timeout)
        return Reader(self._connection, responses, call.fold(), timeout).result()

    def derive(
        self,
        positive: Iterable[Prompt],
        negative: Iterable[Prompt],
        *,
        points: PointsLike,
        layers: LayersLike,
        where: SelectorLike = None,
        method: DeriveMethod = "difference_of_means",
        name: str | None = None,
        description: str = "",
        lora: str | None = None,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> Derivation:
        """Make vectors that tell two sets of prompts apart, store them, and say how well they do.

        The server runs every prompt and takes its rows at the points and layers on the tokens
        ``where`` (default: the last prompt token), averaged per prompt. A row of a vector, one per
        layer, is then the mean of the positive prompts' less that of the negative ones'
        ("difference_of_means"; Rimsky et al., 2023), or the first principal component of the
        pairwise differences, of norm 1 ("principal_component"; Zou et al., 2023), for which the
        sets pair up in order. With several points there is one vector per point, and "/resid_pre"
        etc. is appended to ``name``. Without a name the server may evict a vector.

        To steer at the best layer alone, derive there once more:
        ``derive(..., layers=derivation.best.site.layer, name="joy")``.

        ``progress`` is called with the number of prompts that have run, and that of all; what it
        raises ends the call and comes out as it is. ``timeout`` is in seconds; None waits. Raises
        InvalidRequest that names the prompt (``positive[3].text``) where one cannot run.
        """
        call = _vector_calls.derive_vectors(
            positive,
            negative,
            points=points,
            layers=layers,
            where=where,
            method=method,
            name=name,
            description=description,
            lora=lora,
            progress=progress,
        )
        responses = self._connection.download(call, timeout)
        with Reader(self._connection, responses, call.fold(), timeout) as reader:
            return reader.result()

    def set_name(
        self,
        name: str,
        vector: Vector | str,
        *,
        expected: Vector | str | None = None,
        points: PointsLike | None = None,
        layers: LayersLike | None = None,
        description: str | None = None,
    ) -> str:
        """Put ``name`` on a stored vector; give the digest that had it before, "" for none.

        Vectors are given as handles or digests. A name on another vector moves, without the numbers
        being sent again; running requests go on. ``expected``: the vector that has the name now,
        or "" where none should: if that is not so, Refused is raised with REASON_NAME_CONFLICT.
        ``points``, ``layers`` and ``description`` are kept with the name; those that neither are
        given nor come with the handle stay as they are. Raises NotFound for a vector that is not
        stored.
        """
        call = _vector_calls.set_name(
            name,
            vector,
            expected=expected,
            points=points,
            layers=layers,
            description=description,
        )
        return self._connection.unary(call)

    def list(self, prefix: str = "") -> list[VectorInfo]:
        """Stored vectors by name, those whose name begins with ``prefix``; "": unnamed ones too."""
        return self._connection.script(_vector_calls.list_vectors(prefix))

    def delete(self, name: str) -> str:
        """Take a name off its vector, and give the vector's digest. Running requests go on."""
        return self._connection.unary(_vector_calls.delete_name(name))
