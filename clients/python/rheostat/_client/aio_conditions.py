"""Conditions that the server fits, of the asyncio client.

``tools/generate`` writes the synchronous twin, ``conditions.py``, from this module.
"""

from __future__ import annotations

from collections.abc import Iterable

from rheostat._client import condition_calls
from rheostat._client.aio_streams import run_download
from rheostat._connection.aio_connection import Connection
from rheostat._fields import checks_arguments
from rheostat._points import LayersLike, PointsLike
from rheostat._prompts import Prompt
from rheostat._selectors import SelectorLike
from rheostat._steering.condition_fits import ConditionFits, FitDirection
from rheostat._steering.gates import Pool, ProbeRows
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
        rows: ProbeRows | Iterable[ProbeRows] = "each",
        pools: Pool | Iterable[Pool] | None = None,
        directions: FitDirection | Iterable[FitDirection] | None = None,
        vectors: Vector | Iterable[Vector] = (),
        normalises: Normalise | Iterable[Normalise] = ("unit", "cosine"),
        name: str | None = None,
        description: str = "",
        lora: str | None = None,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> ConditionFits:
        """Find a condition that holds for ``positive`` prompts and not for ``negative`` ones.

        The server runs every prompt, and tries each combination of a site, a pool or the mean row,
        a direction and a normalisation, with the best threshold. Each is judged by prompts that
        were held out. The result has the best as a `Condition`, decided at the prompt's end, and
        the table of all::

            found = engine.conditions.fit(harmful, harmless, points="resid_post", layers="all")
            gate = rheostat.gate(found.condition, hold="rest")
            engine.generate(prompt, steering=refusal.when(gate))

        The number of conditional activation steering (CAST; Lee et al., 2024) is that of
        ``rows="prompt_mean", normalises="projected_cosine"``.

        Args:
            positive: 1 to 1024 prompts for which the condition should hold.
            negative: 1 to 1024 prompts for which it should not hold.
            points: where it may read; each point of each layer is tried.
            layers: the layers of these points.
            where: the prompt tokens that are read. Default: all.
            rows: "each" reads the row of each of these tokens, "prompt_mean" the mean of their
                rows; see `probe`.
            pools: how the readings of "each" become one score: the "last", or the "mean" of all.
                Default: both. Not with "prompt_mean" alone, which has one reading of a prompt.
            directions: "difference_of_means", and the "principal_component" of both sets, of at
                most 1024 prompts. Default: both, or none if there are ``vectors``.
            vectors: directions of your own: at most 8, of one row, [1, width], or one row per
                layer.
            normalises: the number that is read of a row: its coordinate along the direction
                ("unit", in the stream's units), the "cosine" with it, -1 to 1, or the
                "projected_cosine" of `probe`, 0 to 1. The mean of projected cosines of tokens is
                not tried, because the server keeps no rows of all tokens.
            name: the best direction is stored under it, or without a name. The condition's probe
                has it too, if a probe may: `probe`.
            description: text that is stored with the name.
            lora: the adapter under which the prompts run.
            progress: called with the number of prompts that have run, and of all prompts. Its
                exceptions end the call and are raised unchanged.
            timeout: in seconds; None waits without limit.

        Raises:
            InvalidRequest: an argument is none that is served, or a prompt cannot run; the error
                names it (``positive[3].text``).
            Refused: both sets read alike everywhere.
        """
        call = condition_calls.fit_conditions(
            positive,
            negative,
            points=points,
            layers=layers,
            where=where,
            rows=rows,
            pools=pools,
            directions=directions,
            vectors=vectors,
            normalises=normalises,
            name=name,
            description=description,
            lora=lora,
            progress=progress,
        )
        return await run_download(self._connection, call, timeout)

    def __repr__(self) -> str:
        return f"Conditions({self._connection.target!r})"
