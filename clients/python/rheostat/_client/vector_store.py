"""The server's store of vectors, as `Engine.vectors`; `rheostat.aio` has its twin."""

from __future__ import annotations

from collections.abc import Iterable

import numpy.typing as npt

from rheostat._arrays import ArrayLike, Element
from rheostat._client import vector_calls
from rheostat._connection.connection import Connection, Reader
from rheostat._points import LayersLike, PointsLike
from rheostat._prompts import Prompt
from rheostat._selectors import SelectorLike
from rheostat._steering.derivations import Derivation, DeriveMethod
from rheostat._steering.transfers import Progress
from rheostat._steering.vectors import Vector, VectorInfo


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
        """Store a vector and return its handle. Equal numbers are stored once.

        ``array`` is [width], one row for every layer, or [layers, width], one row per layer: a
        numpy array, a torch tensor or anything with ``__array__``. float32, float16 and bfloat16
        are kept, other numbers are rounded to float32. ``dtype`` converts; ``dtype="bfloat16"``
        reads uint16 as bits.

        The handle acts at ``points`` and ``layers`` by default. With ``name`` and both given, the
        server keeps them for other clients. If another vector has the name, the name moves to this
        one. A vector without a name may be evicted when no request uses it. A `Vector` that holds
        its numbers, for instance from `load_vector`, supplies the name, description, points and
        layers that are not given.

        Raises InvalidRequest for another rank and for elements that are not finite. An exception of
        ``progress`` ends the upload and is raised unchanged.
        """
        call = vector_calls.put_vector(
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
        call, timeout = vector_calls.get_vector(name, digest), self._connection.limit(timeout)
        responses = self._connection.download(call, timeout)
        return Reader(self._connection, responses, call.accumulator(), timeout).result()

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
        """Make and store vectors that separate two sets of prompts, and say how well they do.

        The server runs every prompt and captures it at the points and layers, on the tokens
        ``where`` (default: the last prompt token), averaged per prompt. A vector has one row per
        layer, by ``method``:

        * "difference_of_means": the mean of the positive prompts less the mean of the negative ones
          (Rimsky et al., 2023).
        * "principal_component": the first principal component of the pairwise differences, of norm
          1 (Zou et al., 2023). The sets pair up in order.

        With several points there is one vector per point, and "/resid_pre" etc. is appended to
        ``name``. A vector without a name may be evicted.

        To steer at the best layer alone, take its row:
        ``derived.vector.at(layers=derived.best.site.layer)``.

        ``progress`` is called with the number of prompts that have run and the number of all
        prompts; its exceptions end the call and are raised unchanged. ``timeout`` is in seconds;
        None waits without limit. If a prompt cannot run, InvalidRequest names it
        (``positive[3].text``).
        """
        call = vector_calls.derive_vectors(
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
        with Reader(self._connection, responses, call.accumulator(), timeout) as reader:
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
        """Name a stored vector, and return the digest that had the name before, "" for none.

        ``vector`` and ``expected`` are handles or digests. If another vector has the name, the name
        moves, and no numbers are sent. Running requests keep the vector that they started with.

        ``expected`` is the vector that should have the name now, "" for none. If that is not so,
        Refused is raised with REASON_NAME_CONFLICT. ``points``, ``layers`` and ``description`` are
        stored with the name; those that are neither given nor part of the handle stay unchanged.
        Raises NotFound if ``vector`` is not stored.
        """
        call = vector_calls.set_name(
            name,
            vector,
            expected=expected,
            points=points,
            layers=layers,
            description=description,
        )
        return self._connection.unary(call)

    def list(self, prefix: str = "") -> list[VectorInfo]:
        """Stored vectors whose name begins with ``prefix``, by name; "" lists unnamed ones too."""
        return self._connection.paged(vector_calls.list_vectors(prefix))

    def delete(self, name: str) -> str:
        """Delete a name and return its vector's digest. Running requests keep the vector."""
        return self._connection.unary(vector_calls.delete_name(name))
