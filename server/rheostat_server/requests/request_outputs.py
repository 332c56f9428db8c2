"""The destinations of a request's rows: its response, subscriptions, sinks and runs.

Invariants: every destination is closed once, with the finish reasons of the samples. A run is kept
only if every other destination has succeeded.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence

from rheostat_engine import Released, Rows
from rheostat_server.delivery.items import SequenceKey
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.errors import RheostatError
from rheostat_server.requests.sink_writer import SinkWriter
from rheostat_server.runs.store import RunDraft
from rheostat_wire.v1 import types_pb2


class RequestOutputs:
    """The feeds of a request, and the writers that read some of them."""

    def __init__(self) -> None:
        """There are none."""
        self._feeds: list[tuple[RowFeed, Mapping[int, int]]] = []
        self._writers: list[SinkWriter] = []
        self._runs: dict[int, RunDraft] = {}

    def add(self, feed: RowFeed, own: Mapping[int, int]) -> None:
        """Adds a feed.

        Args:
            feed: takes the request's rows from now on.
            own: index in the request's captures, by the number of those that are its own.
        """
        self._feeds.append((feed, own))

    def remove(self, feed: RowFeed) -> None:
        """Removes a feed, which takes no more rows."""
        # Another list, because `feed` may be going over the old one.
        self._feeds = [entry for entry in self._feeds if entry[0] is not feed]

    def add_writer(self, writer: SinkWriter) -> None:
        """Adds a writer to a sink or a run."""
        self.add(writer.feed, {index: index for index in writer.feed.captures})
        self._writers.append(writer)

    def add_run(self, index: int, draft: RunDraft) -> None:
        """Adds the run of the capture `index`; `add_writer` adds its writer."""
        self._runs[index] = draft

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._feeds)

    @property
    def writing(self) -> bool:
        """Whether a sink has not published or failed yet."""
        return any(not writer.task.done() for writer in self._writers)

    def extend(self, sequence_key: SequenceKey, token_ids: Sequence[int]) -> None:
        """Adds generated tokens."""
        for feed, _ in self._feeds:
            feed.extend(sequence_key, token_ids)

    def reach(self, sequence_key: SequenceKey, end: int) -> None:
        """Takes note that the rows before a position were computed, whatever token comes next."""
        for feed, _ in self._feeds:
            feed.reach(sequence_key, end)

    def add_rows(self, sequence_key: SequenceKey, rows: Rows) -> None:
        """Adds rows."""
        for feed, _ in self._feeds:
            feed.add(sequence_key, rows)

    def release(self, sequence_key: SequenceKey, released: Released) -> None:
        """Handles the engine's last report about a sequence."""
        for feed, _ in self._feeds:
            feed.release(sequence_key, released)

    def close(
        self,
        reasons: Sequence[types_pb2.FinishReason.ValueType],
        *,
        excluding: Collection[RowFeed] = frozenset(),
    ) -> None:
        """Closes all feeds except those in `excluding`. Each sends its end after its rows."""
        for feed, _ in self._feeds:
            if feed not in excluding:
                feed.close(reasons)

    async def written(self) -> None:
        """Returns once every sink has published its rows.

        Raises:
            RheostatError: a sink has failed.
        """
        await self.settle()
        for writer in self._writers:
            if writer.failure is not None:
                raise writer.failure

    async def settle(self) -> None:
        """Returns once every sink has published or failed. Cancelling the call stops no sink."""
        if self._writers:
            await asyncio.wait([writer.task for writer in self._writers])

    def abandon(
        self, error: RheostatError, *, excluding: Collection[RowFeed] = frozenset()
    ) -> None:
        """Discards all feeds except those in `excluding`, because the request does not start.

        Sinks keep nothing.
        """
        self.drop_runs()
        for writer in self._writers:
            writer.overflow(error)
        for feed, _ in self._feeds:
            if feed not in excluding:
                feed.discard()

    def keep_runs(self) -> dict[int, str]:
        """Publishes the complete runs; returns their ids, by capture."""
        return {index: draft.id for index, draft in self._runs.items() if draft.keep()}

    def drop_runs(self) -> None:
        """Discards the runs that were not published."""
        for draft in self._runs.values():
            draft.drop()

    def handed_over(self) -> dict[int, tuple[int, int]]:
        """Positions of the request's samples that were delivered, and lost, by capture."""
        return {
            own[number]: counts
            for feed, own in self._feeds
            if own
            for number, counts in feed.counts().items()
            if number in own
        }
