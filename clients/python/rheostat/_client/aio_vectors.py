"""The store of vectors of the asyncio client.

``tools/generate`` writes the synchronous twin, ``vectors.py``, from this module.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy.typing as npt

from rheostat._arrays import ArrayLike, Element
from rheostat._client import vector_calls
from rheostat._client.aio_streams import list_all, run_download
from rheostat._connection.aio_connection import Connection
from rheostat._fields import checks_arguments
from rheostat._points import LayersLike, PointsLike
from rheostat._prompts import Prompt
from rheostat._selectors import SelectorLike
from rheostat._steering.derivations import Derivation, DeriveMethod
from rheostat._steering.transfers import Progress
from rheostat._steering.vectors import Vector, VectorInfo


class Vectors:
    """The server's store of vectors."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @checks_arguments
    async def put(
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
        """Store a vector and return its handle. Equal content is stored once.

        ``array`` is [width], one row for every layer, or [layers, width], one row per layer: a
        numpy array, a torch tensor or anything with ``__array__``. float32, float16 and bfloat16
        are kept, other numbers are rounded to float32. ``dtype`` converts; ``dtype="bfloat16"``
        reads uint16 as bits.

        The handle acts at ``points`` and ``layers`` by default. If ``name`` and both are given, the
        server stores them for other clients. If another vector has the name, the name moves to this
        vector. A vector without a name may be evicted while no request uses it. A `Vector` that
        holds its numbers, for instance from `load_vector`, supplies omitted arguments.

        Raises InvalidRequest for a dose, for another rank, for elements that are not finite, if
        the number of rows is neither 1 nor that of ``layers``, and for layers that the model lacks.
        ``progress`` is called on a thread of gRPC, in `rheostat.aio` on the event loop. Its
        exceptions end the upload and are raised unchanged.
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
        return await self._connection.upload(call, timeout)

    async def get(
        self, name: str | None = None, *, digest: str | None = None, timeout: float | None = None
    ) -> Vector:
        """Fetch a vector with its numbers (``vector.values``), by name or by digest."""
        call = vector_calls.get_vector(name, digest)
        return await run_download(self._connection, call, self._connection.limit(timeout))

    @checks_arguments
    async def derive(
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
        """Derive and store vectors that separate two sets of prompts, and measure how well.

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
        ``derived.vector.select(layers=derived.best.site.layer)``.

        ``progress`` is called with the number of prompts that have run, and of all prompts. Its
        exceptions end the call and are raised unchanged. ``timeout`` is in seconds; None waits
        without limit. If a prompt cannot run, InvalidRequest names it (``positive[3].text``).
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
        return await run_download(self._connection, call, timeout)

    @checks_arguments
    async def set_name(
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

        ``expected`` is the vector that should have the name now, "" for none. If another vector has
        it, Refused is raised with REASON_NAME_CONFLICT. ``points``, ``layers`` and ``description``
        are stored with the name. If neither the call nor the handle has a value, the stored value
        stays. Raises NotFound if ``vector`` is not stored, InvalidRequest for layers that the model
        lacks.
        """
        call = vector_calls.set_name(
            name,
            vector,
            expected=expected,
            points=points,
            layers=layers,
            description=description,
        )
        return await self._connection.unary(call)

    async def list(self, prefix: str = "") -> list[VectorInfo]:
        """Stored vectors whose name begins with ``prefix``, by name; "" adds unnamed vectors."""
        return await list_all(self._connection, vector_calls.list_vectors(prefix))

    async def delete(self, name: str) -> str:
        """Delete a name and return its vector's digest. Running requests keep the vector."""
        return await self._connection.unary(vector_calls.delete_name(name))

    def __repr__(self) -> str:
        return f"Vectors({self._connection.target!r})"
