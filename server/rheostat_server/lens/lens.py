"""Lens: reads rows of a prompt with the model's final norm and unembedding.

First a request captures the rows, then the workers read them piece by piece. A step waits for each
piece, so a piece is small, and only one runs at a time. A call that ends early leaves no running
request and no piece. The rows of all calls together take at most `ALL_LENS_BYTES`.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rheostat_engine import Site, Spans
from rheostat_server import validation
from rheostat_server.admission.admit import AdmittedRequest
from rheostat_server.delivery.row_messages import add_runs
from rheostat_server.derivation.prompt_rows import Reading, prompt_selector, read_rows
from rheostat_server.engine.backend import LensReading
from rheostat_server.errors import InvalidValue, MissingField, NonFinite, NotSupported, QueueFull
from rheostat_server.limits import (
    ALL_LENS_BYTES,
    LENS_BYTES,
    LENS_LOGITS,
    LENS_TOKEN_IDS,
    LENS_TOP_K,
    RETRY_SECONDS,
)
from rheostat_server.requests.manager import RequestManager
from rheostat_server.selectors.sites import refuse_what_is_no_stream, resolve_sites, to_wire
from rheostat_server.selectors.spans import clipped
from rheostat_server.tasks.offload import offload
from rheostat_server.tensors import FloatType
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import capture_pb2, lens_service_pb2, tensor_pb2, types_pb2

_pb = lens_service_pb2

_TOP_K = 5

_TEXT_BYTES = 128
"""Bytes that `offload` counts for the text of a token."""


class PromptRows:
    """Whole rows of a prompt, as they arrive."""

    def __init__(self, sites: Sequence[Site], width: int) -> None:
        """Nothing has come yet."""
        messages = [to_wire(site) for site in sites]
        self._indices = {(site.point, site.layer): i for i, site in enumerate(messages)}
        self._width = width
        self._came = np.zeros(len(sites), dtype=np.int64)
        self.token_ids: tuple[int, ...] = ()
        """The prompt."""
        self.spans: Spans = ()
        """Positions of the rows."""
        self.rows: FloatArray = np.empty((0, 0, width), np.float32)
        """[sites, positions, W]."""

    def begin(self, admitted: AdmittedRequest, count: int) -> None:
        """Makes room for the rows.

        Raises:
            InvalidValue: there are too many.
        """
        self.token_ids = tuple(admitted.prompt.token_ids)
        known = admitted.captures[0].selection.known
        self.spans = clipped(known, 0, admitted.prompt_len)
        size = len(self._came) * count * self._width * FloatType.FLOAT32.itemsize
        if size > LENS_BYTES:
            raise InvalidValue(
                f"the rows take {size} bytes; at most {LENS_BYTES} are allowed. Name fewer layers, "
                "points or positions",
                field="sites",
            )
        self.rows = np.empty((len(self._came), count, self._width), np.float32)

    def add(self, part: capture_pb2.Captured) -> None:
        """Takes rows [sites, positions, W], positions ascending."""
        shape = tuple(part.tensor.shape)
        rows = np.frombuffer(part.tensor.inline, dtype="<f4").reshape(shape)
        for site, values in zip(part.sites, rows, strict=True):
            index = self._indices[site.point, site.layer]
            first = self._came[index]
            self.rows[index, first : first + shape[1]] = values
            self._came[index] += shape[1]

    def complete(self) -> bool:
        """Whether every row has come."""
        return bool((self._came == self.rows.shape[1]).all())

    def check_finite(self, sites: Sequence[Site], path: str) -> None:
        """Refuses rows with a number that is not finite.

        Raises:
            NonFinite: there is one.
        """
        for index in np.flatnonzero(~np.isfinite(self.rows).all(axis=(1, 2))):
            site = sites[index]
            raise NonFinite(
                f"the stream at {site.point.value} {site.layer} is not finite", field=path
            )


@dataclass(frozen=True, slots=True)
class _CheckedRequest:
    prompt: types_pb2.Prompt
    reading: Reading
    top_k: int
    token_ids: tuple[int, ...]


class Lenses:
    """Reads the lenses of a server."""

    def __init__(self) -> None:
        """No lens is being read."""
        self._reserved = 0

    async def lens(
        self, request: lens_service_pb2.LensRequest, manager: RequestManager
    ) -> AsyncGenerator[lens_service_pb2.LensResponse, None]:
        """Runs a prompt, and reads its rows.

        Raises:
            RheostatError: the request is invalid, or has failed.
        """
        checked = _check(request, manager)
        reading = checked.reading
        with self._reserve():
            rows = PromptRows(reading.sites, manager.sites.width)
            await read_rows(checked.prompt, "prompt", reading, manager, rows)
            await asyncio.to_thread(rows.check_finite, reading.sites, "prompt")
            started = _pb.LensStarted(sites=map(to_wire, reading.sites))
            add_runs(started.positions.add, rows.spans)
            started.prompt_token_ids.ids.extend(rows.token_ids)
            if manager.prompts.has_tokenizer:
                started.prompt_texts.extend(await _texts(rows.token_ids, manager))
                started.texts.extend(await _texts(checked.token_ids, manager))
            yield _pb.LensResponse(started=started)
            flat = rows.rows.reshape(-1, manager.sites.width)
            step = rows_per_call(manager.info.vocabulary)
            for first in range(0, len(flat), step):
                read = await manager.backend.lens(
                    flat[first : first + step], checked.top_k, checked.token_ids
                )
                part = _to_wire(first, read)
                if manager.prompts.has_tokenizer:
                    part.top_texts.extend(await _texts(read.top_ids.ravel().tolist(), manager))
                yield _pb.LensResponse(rows=part)

    @contextmanager
    def _reserve(self) -> Iterator[None]:
        if self._reserved + LENS_BYTES > ALL_LENS_BYTES:
            raise QueueFull(
                "too many lenses are being read. Try again later",
                field="sites",
                retry_after=RETRY_SECONDS,
            )
        self._reserved += LENS_BYTES
        try:
            yield
        finally:
            self._reserved -= LENS_BYTES


def rows_per_call(vocabulary: int) -> int:
    """How many rows a call to the workers reads; see `LENS_LOGITS`."""
    return max(1, LENS_LOGITS // vocabulary)


def refuse_without_lens(manager: RequestManager) -> None:
    """Refuses a model whose final norm the workers did not find.

    Raises:
        NotSupported: the model is one.
    """
    if manager.sites.no_lens:
        raise NotSupported(
            f"this model has no lens: {manager.sites.no_lens}. Capture the rows, and apply the "
            "model's weights to them"
        )


def check_prompt(prompt: types_pb2.Prompt) -> None:
    """Checks that there is a prompt.

    Raises:
        MissingField: there is none.
    """
    validation.required(prompt.WhichOneof("prompt"), "prompt", "text, token_ids and chat")


def _check(request: lens_service_pb2.LensRequest, manager: RequestManager) -> _CheckedRequest:
    refuse_without_lens(manager)
    check_prompt(request.prompt)
    if not request.HasField("sites"):
        raise MissingField("sites are required", field="sites")
    selection = resolve_sites(request.sites, manager.sites, "sites")
    refuse_what_is_no_stream(selection, "sites")
    vocabulary = manager.info.vocabulary
    top_k = request.top_k if request.HasField("top_k") else _TOP_K
    if top_k > LENS_TOP_K:
        raise InvalidValue(f"at most {LENS_TOP_K} tokens of each row are read", field="top_k")
    validation.check_count(len(request.token_ids), LENS_TOKEN_IDS, "token_ids", "tokens")
    if request.token_ids:
        validation.token_ids(request.token_ids, vocabulary, "token_ids")
        validation.no_repeats(request.token_ids, "token_ids", "tokens")
    reading = Reading(
        request.sites,
        selection.sites,
        prompt_selector(request.where if request.HasField("where") else None),
        request.lora_name,
        request.steering,
    )
    return _CheckedRequest(
        request.prompt, reading, min(top_k, vocabulary), tuple(request.token_ids)
    )


async def _texts(token_ids: Sequence[int], manager: RequestManager) -> list[str]:
    text_of = manager.backend.text_of
    return await offload(_TEXT_BYTES * len(token_ids), lambda: [*map(text_of, token_ids)])


def _to_wire(first: int, read: LensReading) -> lens_service_pb2.LensRows:
    return _pb.LensRows(
        first_row=first,
        row_count=len(read.log_normalizers),
        top_token_ids=raw_tensor(read.top_ids),
        top_logprobs=raw_tensor(read.top_logprobs),
        logprobs=raw_tensor(read.logprobs),
        ranks=raw_tensor(read.ranks),
        log_normalizers=raw_tensor(read.log_normalizers),
    )


_DTYPES = {
    np.dtype("<i4"): tensor_pb2.DTYPE_INT32,
    np.dtype("<f4"): tensor_pb2.DTYPE_FLOAT32,
    np.dtype("<f8"): tensor_pb2.DTYPE_FLOAT64,
}


def raw_tensor(values: npt.NDArray[np.generic]) -> tensor_pb2.Tensor:
    """An array of int32, float32 or float64 as a message."""
    return tensor_pb2.Tensor(
        dtype=_DTYPES[values.dtype],
        shape=values.shape,
        encoding=tensor_pb2.ENCODING_RAW,
        inline=values.tobytes(),
    )
