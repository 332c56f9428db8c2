"""The calls of Watch."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Protocol

from rheostat_server import validation
from rheostat_server.errors import MissingField, NotSupported, RequestNotFound, RheostatError
from rheostat_server.errors.status import to_status
from rheostat_server.limits import BATCH_EVENTS, LABEL_VALUE_BYTES
from rheostat_server.monitors.registry import Watches
from rheostat_server.monitors.watch import Response, Watch
from rheostat_server.subscriptions.event_stream import Outgoing
from rheostat_server.subscriptions.stream_call import call_events, read_opening
from rheostat_server.tasks.client_messages import ClientMessages
from rheostat_wire.v1 import generation_pb2, monitor_service_pb2

Message = monitor_service_pb2.WatchRequest

Answer = Callable[[generation_pb2.UpdateApplied | generation_pb2.UpdateRefused], None]
"""Receives the answer to a change."""

_NOT_RUNNING = "no running request of this watch has this id"


class Requests(Protocol):
    """The requests that watches read."""

    def announce_running(self, watch: Watch, /) -> None:
        """Reports to a new watch the requests that already run."""

    def stop(self, watch: Watch, request_id: str, label: str, /) -> bool:
        """Ends a request of a watch, with a label; returns whether the request ran."""

    def steer(self, watch: Watch, steer: monitor_service_pb2.WatchSteer, answer: Answer, /) -> bool:
        """Changes the steering of a request of a watch; returns whether the request ran.

        If it ran and no `RheostatError` is raised, `answer` is called later.
        """

    def send_gains(self) -> None:
        """Sends the gains that were set by `steer`."""


async def watch(
    messages: ClientMessages[Message], watches: Watches, requests: Requests
) -> AsyncGenerator[Outgoing, None]:
    """Answers a call of Watch.

    Args:
        messages: the client's messages.
        watches: the open watches.
        requests: the requests that they read.

    Raises:
        RheostatError: the call is refused, or the watch has failed.
    """
    opened = await read_opening(messages)
    resumed = opened.HasField("resume")
    if resumed:
        found = watches.resume(opened.resume.watch_id, opened.resume.after_sequence)
    else:
        found = await watches.open(opened)

    async def attach(new: Watch) -> None:
        requests.announce_running(new)

    events = call_events(
        messages,
        watches,
        found,
        resumed=resumed,
        credit=opened.credit_bytes,
        batched=opened.batches,
        attach=attach,
        handle=_Changes(requests, messages.keep, watches.change_turns.turn).handle,
    )
    async with aclosing(events):
        async for event in events:
            yield event


class _Changes:
    """Carries out the messages of a call that act on requests."""

    def __init__(
        self,
        requests: Requests,
        keep: Callable[[], Callable[[], None]],
        turn: Callable[[], Awaitable[None]],
    ) -> None:
        """Nothing is carried out yet.

        Args:
            requests: the requests.
            keep: see `ClientMessages.keep`.
            turn: waits until the next change may be made.
        """
        self._requests = requests
        self._keep = keep
        self._turn = turn

    async def handle(self, found: Watch, message: Message, reads: Callable[[], bool]) -> bool:
        """Carries out a message. The answer is sent now or later.

        If another call resumes the watch meanwhile, the rest of the message is not carried out,
        because the client sends unanswered changes again in that call.

        Args:
            found: the watch.
            message: the message.
            reads: returns whether this call still reads the watch.

        Returns:
            Whether the message acts on requests.

        Raises:
            InvalidValue: it has too many changes.
            QueueFull: too many answers wait to be read.
        """
        match message.WhichOneof("action"):
            case "stop":
                await self._turn()
                if reads():
                    self._stop(found, message.stop)
            case "steer":
                await self._steer_all(found, [message.steer], reads)
            case "steer_batch":
                steers = message.steer_batch.steers
                validation.check_count(len(steers), BATCH_EVENTS, "steer_batch.steers", "changes")
                await self._steer_all(found, steers, reads)
            case _:
                return False
        return True

    def _stop(self, found: Watch, message: monitor_service_pb2.WatchStop) -> None:
        """Ends a request, and answers."""
        with _answering(found, message.update_id):
            found.check_update(message.update_id)
            validation.matches(message.request_id, validation.REQUEST_ID, "stop.request_id")
            validation.text_bytes(message.label, LABEL_VALUE_BYTES, "stop.label")
            if not self._requests.stop(found, message.request_id, message.label):
                raise RequestNotFound(_NOT_RUNNING, field="stop.request_id")
            applied = generation_pb2.UpdateApplied(update_id=message.update_id)
            found.answer(Response(applied=applied))

    async def _steer_all(
        self,
        found: Watch,
        messages: Sequence[monitor_service_pb2.WatchSteer],
        reads: Callable[[], bool],
    ) -> None:
        """Changes the steering of requests, as long as the call reads the watch.

        Raises:
            QueueFull: too many answers wait to be read. The other changes are not carried out.
        """
        release = _after(len(messages), self._keep())
        begun = 0
        try:
            for message in messages:
                await self._turn()
                if not reads():
                    break
                begun += 1
                self._steer(release, found, message)
        finally:
            for _ in range(len(messages) - begun):
                release()
        self._requests.send_gains()

    def _steer(
        self,
        release: Callable[[], None],
        found: Watch,
        message: monitor_service_pb2.WatchSteer,
    ) -> None:
        """Changes the steering of a request; `release` is called once that has been answered."""

        def answer(result: generation_pb2.UpdateApplied | generation_pb2.UpdateRefused) -> None:
            release()
            if isinstance(result, generation_pb2.UpdateApplied):
                found.answer_later(Response(applied=result))
            else:
                found.answer_later(Response(refused=result))

        with _answering(found, message.update_id):
            try:
                found.check_update(message.update_id)
                _check_steer(found, message)
                self._submit(found, message, answer)
            except RheostatError:
                release()
                raise

    def _submit(
        self, found: Watch, message: monitor_service_pb2.WatchSteer, answer: Answer
    ) -> None:
        try:
            running = self._requests.steer(found, message, answer)
        except RheostatError as error:
            error.field = f"steer.{error.field}" if error.field else ""
            raise
        if not running:
            raise RequestNotFound(_NOT_RUNNING, field="steer.request_id")


def _after(count: int, release: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls `release` when it has been called `count` times.

    If `count` is 0, `release` is called at once.
    """
    left = count

    def count_down() -> None:
        nonlocal left
        left -= 1
        if not left:
            release()

    if not count:
        release()
    return count_down


@contextmanager
def _answering(found: Watch, number: int) -> Iterator[None]:
    """Answers an update with a refusal if the block raises a RheostatError.

    Raises:
        QueueFull: too many answers wait to be read.
    """
    try:
        yield
    except RheostatError as error:
        refused = generation_pb2.UpdateRefused(update_id=number, status=to_status(error))
        found.answer(Response(refused=refused))


def _check_steer(found: Watch, message: monitor_service_pb2.WatchSteer) -> None:
    validation.matches(message.request_id, validation.REQUEST_ID, "steer.request_id")
    if not found.settings.steers:
        raise NotSupported(
            "the watch was opened without steers, so the cache may share what its requests "
            "generate: open one with steers",
            field="steer",
        )
    if message.WhichOneof("change") is None:
        raise MissingField("one of layer, gain and replace is required", field="steer")
