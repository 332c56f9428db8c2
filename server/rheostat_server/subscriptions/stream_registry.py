"""The open event streams of a server, and those that wait until their readers reconnect."""

import asyncio
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any, Generic, TypeVar

from rheostat_server import validation
from rheostat_server.errors import NotFound, RheostatError
from rheostat_server.limits import ID_BYTES
from rheostat_server.subscriptions.event_stream import EventStream

_LOG = logging.getLogger(__name__)

_ID = re.compile(r"[0-9a-f]{32}")
"""Ids of streams. The first 8 digits are those of the process that opened it."""

_REMEMBERED = 256
"""Failed streams whose errors are kept for readers that resume them."""

S = TypeVar("S", bound=EventStream[Any])


class EventStreams(ABC, Generic[S]):
    """Streams that are open or can be resumed. Used on the event loop alone."""

    def __init__(self, *, resume_window: float, heartbeat: float) -> None:
        """No stream is open.

        Args:
            resume_window: seconds in which a reader may reconnect.
            heartbeat: the longest silence of a stream, in seconds.
        """
        self.resume_window = resume_window
        self._heartbeat = heartbeat
        self._process = secrets.token_hex(4)
        self._open: dict[str, S] = {}
        self._failed: OrderedDict[str, S] = OrderedDict()
        self._expiries: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        """Number of streams that are open or can be resumed."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Number of streams without a reader."""
        return len(self._expiries)

    def resume(self, name: str, after_sequence: int) -> S:
        """A stream whose connection broke.

        Args:
            name: its id.
            after_sequence: the last sequence number that its reader has.

        Raises:
            NotFound: it has ended.
            CursorExpired: events after the cursor were already discarded.
            InvalidValue: the cursor is a number that was never sent.
            RheostatError: it has failed meanwhile.
        """
        path = self._resume_path
        validation.text_bytes(name, ID_BYTES, path)
        stream = self._open.get(name) or self._failed.get(name)
        if stream is None:
            raise self._not_found(name, path)
        stream.resume_after(after_sequence)
        self._cancel_expiry(name)
        return stream

    def disconnected(self, stream: S, call: object) -> None:
        """Handles the end of a call. The stream waits for another one."""
        stream.leave(call)
        if stream.ended:
            self._remove(stream)
        elif not stream.connected and stream.name in self._open:
            self._cancel_expiry(stream.name)
            loop = asyncio.get_running_loop()
            self._expiries[stream.name] = loop.call_later(self.resume_window, self._expire, stream)

    def discard(self, stream: S) -> None:
        """Removes a stream whose reader has ended it, never got its id, or came back too late."""
        self._remove(stream)
        stream.fail(self._not_found(stream.name, self._resume_path))

    def end(self, reason: RheostatError) -> None:
        """Takes no more events, sends the waiting ones, then ends each call with `reason`."""
        for stream in list(self._open.values()):
            stream.close(reason)

    def lose(self, error: RheostatError) -> None:
        """Ends every stream with an error."""
        for stream in list(self._open.values()):
            stream.fail(error)

    @property
    @abstractmethod
    def _resume_path(self) -> str:
        """The field of the id of a stream that is resumed."""

    @abstractmethod
    def _not_found(self, name: str, field: str) -> NotFound:
        """The error for an id of no open stream."""

    @abstractmethod
    def _released(self, stream: S) -> None:
        """Releases what the server holds for a stream that has ended."""

    def _new_name(self) -> str:
        return self._process + secrets.token_hex(12)

    def _of_another_process(self, name: str) -> bool:
        """Whether an id is that of a stream which another process of the server opened."""
        return _ID.fullmatch(name) is not None and not name.startswith(self._process)

    def _on_failed(self, name: str) -> None:
        stream = self._open.get(name)
        if stream is None:
            return  # it was discarded
        _LOG.info("%s %s failed: %s", stream.kind, stream.name, stream.failure)
        self._remove(stream)
        self._failed[stream.name] = stream
        while len(self._failed) > _REMEMBERED:
            self._failed.popitem(last=False)

    def _expire(self, stream: S) -> None:
        _LOG.info("%s %s: its reader did not come back", stream.kind, stream.name)
        self.discard(stream)

    def _remove(self, stream: S) -> None:
        self._cancel_expiry(stream.name)
        stream.release()
        if self._open.pop(stream.name, None) is not None:
            self._released(stream)

    def _cancel_expiry(self, name: str) -> None:
        expiry = self._expiries.pop(name, None)
        if expiry is not None:
            expiry.cancel()
