"""A file of the cells of a sweep, written while the sweep runs.

A program that is killed loses no cell that has come. The same sweep with the same file goes on with
the cells that are left.

The format: a line that names it, then protobuf messages, each after its length: the model's name
and the request, then `SweepStarted` and the cells as they come. If the program was killed while it
wrote the last message, that message is discarded.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Self, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.proto import parse_length_prefixed, serialize_length_prefixed

from rheostat._errors import InvalidRequest, invalid
from rheostat_wire.v1 import engine_service_pb2, sweep_service_pb2

_FORMAT = b"rheostat sweep checkpoint 1\n"

_MAY_DIFFER = (
    "request_id",
    "zoom",
    "baseline_count",
    "done",
    "done_values",
    "priority",
    "max_concurrent_cells",
    "keep_runs",
)
"""Fields of a request that change which cells run, and when, but no cell."""

_ARGUMENTS = {
    "sites": "points or layers",
    "layer_window": "window",
    "group_labels": "groups",
    "alignment": "align",
    "lora_name": "lora",
}
"""Arguments of `Engine.sweep` whose fields have other names."""

_MessageT = TypeVar("_MessageT", bound=Message)


class Checkpoint:
    """An open checkpoint. Only one sweep at a time may write a file."""

    def __init__(
        self, path: str | Path, request: sweep_service_pb2.SweepRequest, model_name: str
    ) -> None:
        """Reads the file, or creates it.

        Args:
            path: the file.
            request: the sweep that goes on, or begins.
            model_name: the model that the server runs.

        Raises InvalidRequest if the file is no checkpoint, or one of another sweep or model. It is
        unchanged then.
        """
        self._path = Path(path)
        self.responses: list[sweep_service_pb2.SweepResponse] = []
        """What an earlier call has received: `SweepStarted`, then cells."""
        same = _comparable(request)
        data = self._path.read_bytes() if self._path.exists() else b""
        read = io.BytesIO(data)
        whole = 0
        if not _FORMAT.startswith(data[: len(_FORMAT)]):
            raise self._invalid("is no checkpoint of a sweep")
        if read.read(len(_FORMAT)) == _FORMAT:
            about = _next(read, engine_service_pb2.GetModelResponse)
            earlier = _next(read, sweep_service_pb2.SweepRequest)
            if about is not None and earlier is not None:
                self._check(about.model_name, model_name, earlier, same)
                whole = read.tell()
                while (response := _next(read, sweep_service_pb2.SweepResponse)) is not None:
                    self.responses.append(response)
                    whole = read.tell()
        self._file = self._path.open("r+b" if self._path.exists() else "xb")
        self._file.truncate(whole)
        self._file.seek(whole)
        if not whole:
            self._file.write(_FORMAT)
            self._write(engine_service_pb2.GetModelResponse(model_name=model_name))
            self._write(same)

    def append(self, response: sweep_service_pb2.SweepResponse) -> None:
        """Writes a response, which is in the file then even if this process is killed.

        Raises OSError if it can't be written.
        """
        self._write(response)
        self._file.flush()

    def changed(self) -> InvalidRequest:
        """The error if the server has other rows, columns or tokens than the file."""
        return self._invalid(
            "has cells of a model with other layers or tokens than the server's: choose another "
            "file"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _write(self, message: Message) -> None:
        part = io.BytesIO()
        serialize_length_prefixed(message, part)
        self._file.write(part.getvalue())

    def _check(
        self,
        earlier_model: str,
        model: str,
        earlier: sweep_service_pb2.SweepRequest,
        request: sweep_service_pb2.SweepRequest,
    ) -> None:
        """Refuses a file of another sweep."""
        if earlier_model != model:
            raise self._invalid(f"has cells of {earlier_model}; the server runs {model}")
        before, now = (
            {field.name: value for field, value in one.ListFields()} for one in (earlier, request)
        )
        other = [
            _ARGUMENTS.get(field.name, field.name)
            for field in request.DESCRIPTOR.fields
            if before.get(field.name) != now.get(field.name)
        ]
        if other:
            raise self._invalid(
                f"has cells of a sweep with other {', '.join(other)}: choose another file"
            )

    def _invalid(self, problem: str) -> InvalidRequest:
        return invalid("checkpoint", f"{self._path} {problem}")


def _next(file: io.BytesIO, kind: type[_MessageT]) -> _MessageT | None:
    """The next message; None if there is no whole one."""
    try:
        return parse_length_prefixed(kind, file)
    except (DecodeError, ValueError):  # the end of the message is missing
        return None


def _comparable(
    request: sweep_service_pb2.SweepRequest,
) -> sweep_service_pb2.SweepRequest:
    """The part of a request on which cells depend."""
    part = sweep_service_pb2.SweepRequest()
    part.CopyFrom(request)
    for name in _MAY_DIFFER:
        part.ClearField(name)  # type: ignore[arg-type]  # they are fields
    for pair in part.pairs:
        pair.ClearField("label")
    return part
