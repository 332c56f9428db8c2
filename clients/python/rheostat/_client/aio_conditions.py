"""Conditions that the server fits, of the asyncio client.

``tools/generate`` writes the synchronous twin, ``conditions.py``, from this module.
"""

from __future__ import annotations

from collections.abc import Iterable

from rheostat._client import condition_calls
from rheostat._client.aio_streams import Reader
from rheostat._connection.aio_connection import Connection
from rheostat._fields import checks_arguments
from rheostat._points import LayersLike, PointsLike
from rheostat._prompts import Prompt
from rheostat._selectors import SelectorLike
from rheostat._steering.condition_fits import ConditionFits, FitDirection
from rheostat._steering.gates import Pool
from rheostat._steering.readouts import Normalise
from rheostat._steering.transfers import Progress
from rheostat._steering.vectors import Vector


class Conditions:
    """Conditions that the server fits."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @checks_arguments
    async def fit(
        self,
        positive: Iterable[Prompt],
        negative: Iterable[Prompt],
        *,
        points: PointsLike,
        layers: LayersLike,
        where: SelectorLike = None,
        pools: Pool | Iterable[Pool] = ("last", "mean"),
        directions: FitDirection | Iterable[FitDirection] | None = None,
        vectors: Vector | Iterable[Vector] = (),
        normalises: Normalise | Iterable[Normalise] = ("unit", "cosine"),
        name: str | None = None,
        description: str = "",
        lora: str | None = None,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> ConditionFits:
        """Find a condition that holds of ``positive`` prompts and not of ``negative`` ones.

        The server runs every prompt, and tries each combination of a site, a pool, a direction and
        a normalisation, with the best threshold. Each is judged by prompts that were held out. The
        result has the best as a `Condition`, decided at the prompt's end, and the table of all::

            found = engine.conditions.fit(harmful, harmless, points="resid_post", layers="all")
            gate = rheostat.gate(found.condition, hold="rest")
            engine.generate(prompt, steering=refusal.when(gate))

        ``where`` are the prompt tokens that are read; default: all. ``pools``: the last of them, or
        the mean of what is read of all. ``directions``: "difference_of_means", and the
        "principal_component" of both sets (Lee et al., 2024), of at most 1024 prompts; default:
        both, or none if there are ``vectors``, which are directions of your own. ``normalises``:
        the coordinate along the direction ("unit"), or the cosine with it.

        The best direction is stored, under ``name`` if there is one. ``progress`` is called with
        the number of prompts that have run, and of all prompts. Its exceptions end the call and are
        raised unchanged. ``timeout`` is in seconds; None waits without limit. If a prompt cannot
        run, InvalidRequest names it (``positive[3].text``). Refused is raised if both sets read
        alike everywhere.
        """
        call = condition_calls.fit_conditions(
            positive,
            negative,
            points=points,
            layers=layers,
            where=where,
            pools=pools,
            directions=directions,
            vectors=vectors,
            normalises=normalises,
            name=name,
            description=description,
            lora=lora,
            progress=progress,
        )
        responses = self._connection.download(call, timeout)
        async with Reader(responses, call.accumulator()) as reader:
            return await reader.result()

    def __repr__(self) -> str:
        return f"Conditions({self._connection.target!r})"
