"""Runs the prompts of a sweep, unchanged or with the rows of a cell, and computes metrics.

Invariant: if the rows of a cell are missing, the result is an error. The cell is never asked
without its rows.
"""

import asyncio
import math
import uuid
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from rheostat_engine import Window
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.errors import NonFinite
from rheostat_server.requests.manager import RequestManager
from rheostat_server.sweeps.answers import Question, Reading
from rheostat_server.sweeps.cell_requests import CellGroup, CellRequests
from rheostat_server.sweeps.cells import Asked, ask
from rheostat_server.sweeps.divergence import Divergences
from rheostat_server.sweeps.grades import LastRow, PooledReading, RowReader
from rheostat_server.sweeps.pairs import Pair
from rheostat_server.sweeps.prefetch import Prefetch
from rheostat_server.sweeps.request_starter import RequestStarter
from rheostat_server.sweeps.scores import Metrics
from rheostat_server.sweeps.settings import Settings
from rheostat_server.sweeps.sources import HeldRuns, Source, sources_of
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import sweep_pb2

_PART = 4
"""The captured rows of a request's samples take at most 1 / `_PART` of the engine's ring."""


class _Answered(NamedTuple):
    """The answers to all questions of a prompt, and its captured rows."""

    readings: dict[Question, Reading]
    readers: Sequence[RowReader | None]
    """For each grade, the reader of the rows that the grade needs; None if it needs none."""

    @property
    def last_row(self) -> FloatArray:
        """[1, W]: the last row of the stream, if a grade compares distributions."""
        return next(reader for reader in self.readers if isinstance(reader, LastRow)).row


class Measured(NamedTuple):
    """The result of a cell in one prompt."""

    metrics: Metrics
    top_token_id: int | None
    """The most likely token after the prompt, if it is known."""


class Measurements:
    """Asks the prompts of one sweep."""

    def __init__(self, settings: Settings, runs: HeldRuns, manager: RequestManager) -> None:
        """No pair is prepared.

        Args:
            settings: the sweep's settings.
            runs: holds the runs that cells take rows from.
            manager: runs the requests.
        """
        self._settings = settings
        self._pairs = settings.pairs
        self._runs = runs
        self._manager = manager
        self.starter = RequestStarter(manager, background=settings.background)
        """Starts all requests."""
        self._sources: list[list[Source]] = [[] for _ in settings.pairs]
        """For each pair and noise, where rows come from."""
        self.requests = CellRequests(settings, self._sources, manager)
        """Makes the requests of cells."""
        self.prefetch = Prefetch(settings, self._sources, manager.worker_vectors)
        """Loads the rows of cells that will be asked soon."""
        self._references: list[FloatArray | None] = [None] * len(settings.pairs)
        """The last row [1, W] of each clean prompt, if a grade compares distributions."""
        self._divergences = Divergences(manager)
        self._reads_rows = any(grade.capture is not None for grade in settings.grades)
        """Whether a grade needs captured rows."""
        self._most_together = min(
            self.requests.most_together, _most_capturing(settings.pairs, manager)
        )
        """The most cells that may share a request while no other request runs."""
        self._unique = uuid.uuid4().hex[:12]
        self.computed = 0
        """Prompt tokens that were computed so far, rather than read from the prefix cache."""

    async def capture(self, index: int) -> None:
        """Captures the rows of a pair, before its cells are asked.

        Raises:
            RheostatError: a run is missing or unfit, or a prompt cannot run.
        """
        pair = self._pairs[index]
        name = f"sweep-{self._unique}-{index}"
        grid, sites = self._settings.grid, self.prefetch.site_count
        captured = await sources_of(
            pair, name, grid, sites, self._runs, self._manager, self.starter
        )
        self._sources[index] = captured.sources
        self.computed += captured.computed

    async def set_reference(self, index: int) -> None:
        """Computes the last row of a clean prompt, which a grade of KL compares with.

        To be called before anything else of the pair is measured.

        Raises:
            RheostatError: the prompt cannot run.
        """
        pair = self._pairs[index]
        if any(grade.metric == sweep_pb2.METRIC_KL for grade in self._settings.grades):
            (answered,) = await self._answered(pair.clean, pair)
            self._references[index] = answered.last_row

    async def unchanged(self, prompt: AdmittedRequest, number: int) -> Metrics:
        """[grades]: the metrics of an unchanged prompt of a pair.

        Raises:
            NonFinite: a metric is not finite. The error names the pair.
            RheostatError: the prompt cannot run.
        """
        pair = self._pairs[number]
        try:
            (answered,) = await self._answered(prompt, pair)
            return await self._metrics(answered, number)
        except NonFinite as error:
            error.field = pair.path
            raise

    def most_together(self) -> int:
        """The most cells that one request may measure if it begins now."""
        return self.starter.most_together(self._most_together)

    async def cells(self, group: CellGroup, pair: int) -> list[Measured | NonFinite]:
        """Measures the cells of a group in a prompt of a pair.

        Returns:
            The result of each cell, or the error if one of its metrics is not finite.

        Raises:
            RheostatError: the group's request cannot run.
        """
        answered = await self._answered(group.request, self._pairs[pair], tuple(group.windows))
        if self._reads_rows:  # `Divergences` compares rows of several cells in one call
            return await asyncio.gather(*(self._measured(cell, pair) for cell in answered))
        return [await self._measured(cell, pair) for cell in answered]

    async def _measured(self, answered: _Answered, pair: int) -> Measured | NonFinite:
        """The result of a cell, or the error if one of its metrics is not finite."""
        first = answered.readings[self._pairs[pair].answers.questions[0]]
        try:
            return Measured(await self._metrics(answered, pair), first.top_token_id)
        except NonFinite as error:
            return error

    async def _answered(
        self, prompt: AdmittedRequest, pair: Pair, windows: tuple[Window, ...] = ()
    ) -> list[_Answered]:
        """Asks a prompt all questions of its pair. The first question captures rows.

        Returns a result for each window, or one result if there are no windows; see `ask`.
        """
        samples = max(1, len(windows))
        first, *others = pair.answers.questions
        answers, readers = await self.starter.run(
            partial(self._ask_and_read, prompt, first, windows), samples
        )
        answered = [
            _Answered({first: asked.reading}, own)
            for asked, own in zip(answers, readers, strict=True)
        ]
        self.computed += sum(asked.computed for asked in answers)
        for question in others:
            answers = await self.starter.run(
                partial(ask, prompt, question, windows=windows), samples
            )
            self.computed += sum(asked.computed for asked in answers)
            for own, asked in zip(answered, answers, strict=True):
                own.readings[question] = asked.reading
        return answered

    async def _ask_and_read(
        self,
        prompt: AdmittedRequest,
        question: Question,
        windows: tuple[Window, ...],
        request_id: str,
        manager: RequestManager,
    ) -> tuple[list[Asked], list[list[RowReader | None]]]:
        """Asks a question, and reads the rows that grades need.

        The readers are new in each attempt, because an attempt that fails may have read some rows.
        """
        grades, samples = self._settings.grades, max(1, len(windows))
        if not self._reads_rows:
            asked = await ask(prompt, question, request_id, manager, windows)
            return asked, [[None] * len(grades) for _ in range(samples)]
        readers = [[grade.row_reader() for grade in grades] for _ in range(samples)]
        reading = [[reader for reader in own if reader is not None] for own in readers]
        return await ask(prompt, question, request_id, manager, windows, reading), readers

    async def _metrics(self, answered: _Answered, pair: int) -> Metrics:
        """[grades]: the metrics of a prompt that was asked.

        Raises:
            NonFinite: a metric is not finite.
        """
        values: list[float] = []
        for grade, reader in zip(self._settings.grades, answered.readers, strict=True):
            if isinstance(reader, PooledReading):
                value = reader.value
            elif isinstance(reader, LastRow):
                reference = self._references[pair]
                assert reference is not None
                value = await self._divergences.between(reference, reader.row)
            else:
                assert grade.metric is not None
                answers = self._pairs[pair].answers
                value = answers.value(grade.metric, answered.readings)
            if not math.isfinite(value):
                raise NonFinite(
                    f"{grade.name} is {value}: the model gives the answer no probability, or its "
                    "numbers overflow"
                )
            values.append(value)
        return values


def _most_capturing(pairs: Sequence[Pair], manager: RequestManager) -> int:
    """The most samples of a request whose captured rows take at most a part of the engine's ring.

    With more, the engine may have too little capacity for a request even if it is empty.
    """
    step_tokens = manager.info.step_tokens
    needed = max(
        base.unobserved.packed_captures.need(
            prompt_len=base.prompt_len, max_step_tokens=step_tokens
        ).rows
        for pair in pairs
        for base in pair.bases
    )
    return max(1, manager.sites.capacity.capture_rows // (_PART * max(1, needed)))
