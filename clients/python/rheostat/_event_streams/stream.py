"""A stream of events of the synchronous client.

Each stream has a thread that runs its call. So events arrive, and a broken connection is replaced,
while the reader is busy. The thread has no reference to the `EventStream`: if the program drops
it, the call ends, and the server keeps the stream for its resume window.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Self

from rheostat._connection.connection import Connection
from rheostat._errors import RheostatError
from rheostat._event_streams.state import CLOSE_TIMEOUT, E, EventStreamState, M, not_opened_error
from rheostat._event_streams.worker import BaseWorker, StreamBase


class EventStream(StreamBase[M, E]):
    """The methods that a subscription and a watch have in common: an iterator of events."""

    def __init__(self, connection: Connection, state: EventStreamState[M, E]) -> None:
        """Returns once the server has opened the stream."""
        self._state = state
        self._worker: StreamWorker[M, E] = StreamWorker(connection, state)
        worker = self._worker
        weakref.finalize(self, worker.abandon)
        threading.Thread(target=worker.run, name=f"rheostat-{state.kind}", daemon=True).start()
        worker.wait_until_open()

    def __iter__(self) -> Self:
        self._worker.check_open()
        return self

    def __next__(self) -> E:
        return self._worker.next_event()

    def close(self) -> None:
        """End the stream, and drop events that were not read. Iterating in another thread ends.

        Returns once the server has ended the stream, or after 5 seconds with a warning in the log.
        Closing then continues in the background, and the server drops the stream after its resume
        window at the latest. Does nothing if the stream has ended already.
        """
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class StreamWorker(BaseWorker[M, E]):
    """Runs the calls of one stream in a thread. Other threads share it."""

    def __init__(self, connection: Connection, state: EventStreamState[M, E]) -> None:
        BaseWorker.__init__(self, connection, state)
        self._connection = connection
        self._lock = self._changed = threading.Condition()
        self._abandoned = False
        """Whether the program has dropped the `EventStream`."""

    @property
    def _left_alone(self) -> bool:
        """Whether the program has dropped the `EventStream` without closing it."""
        return self._abandoned and not self._closing

    def _notify(self) -> None:
        self._changed.notify_all()

    def _caller(self) -> int:
        return threading.get_ident()

    def run(self) -> None:
        """Runs calls until the stream has ended."""
        failure: RheostatError | None = self._state.ended_early_error()
        try:
            while not (self._ended or self._leaving or self._left_alone):
                try:
                    self._call()
                except RheostatError as error:
                    if self._connection.closed or not self._state.id:
                        raise
                    if self._leaving:  # another client may read the stream now
                        break
                    pause = self._reconnects.pause(error)
                    with self._changed:
                        self._changed.wait_for(lambda: self._ended or self._leaving, pause)
            failure = None
        except RheostatError as error:
            failure = error
        finally:
            self._end(failure)

    def _call(self) -> None:
        with self._changed:
            if self._ended:
                return
            responses = self._connection.bidi(self._state.call, None)
            self._begin_call(responses)
        try:
            for message in responses:
                self._receive(message)
                if self._left_alone:
                    return
        finally:
            responses.cancel()
            responses.send(None)
        if not (self._finishing or self._leaving):
            raise self._state.ended_early_error()
        self._end(None)

    def wait_until_open(self) -> None:
        """Raises the error of the call, or DeadlineExceeded after the connection's timeout."""
        timeout = self._connection.timeout
        with self._changed:
            self._wait(lambda: self._ended or bool(self._state.id), timeout)
            if self._state.id:
                if (refusal := self._state.refusal) is not None:
                    self.close()
                    raise refusal
                return
            if self._failure is not None:
                raise self._failure
            self.drop()
            raise not_opened_error(timeout)

    def _wait(self, condition: Callable[[], bool], timeout: float | None) -> None:
        try:
            self._changed.wait_for(condition, timeout)
        except KeyboardInterrupt:
            self.drop()
            raise

    def next_event(self) -> E:
        """The next event; waits for it."""
        with self._changed:
            while (event := self._take()) is None:
                if self._exhausted:
                    raise StopIteration
                self._changed.wait(self._state.seconds_to_ack())
            return event

    def close(self) -> None:
        """End the stream, and wait until the server has ended it."""
        with self._changed:
            self._begin_close()
            self._changed.wait_for(lambda: self._ended, CLOSE_TIMEOUT)
            self._warn_unless_ended()

    def abandon(self) -> None:
        """End the call at its next message, a heartbeat at the latest.

        The garbage collector may call this in a thread that holds any lock, so it takes no lock.
        """
        self._abandoned = True

    def leave(self) -> None:
        """End the call, not the stream, once the server has received the acks."""
        with self._changed:
            if self._begin_leave():
                self._changed.wait_for(lambda: self._ended, CLOSE_TIMEOUT)
        self.drop()
