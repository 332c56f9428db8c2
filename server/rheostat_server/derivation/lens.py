"""Lens: reads rows of a prompt or of a stored run with the model's final norm and unembedding.

First a request captures the rows, or they are copied from the run. Then the workers read them piece
by piece. A step waits for each
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
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.config import ModelInfo
from rheostat_server.delivery.row_messages import add_runs
from rheostat_server.derivation.prompt_rows import (
    LAST_TOKEN,
    Reading,
    Rows,
    check_finite,
    check_prompt,
    check_prompt_selector,
    read_rows,
    sites_of_call,
)
from rheostat_server.engine.backend import LensReading
from rheostat_server.errors import InvalidValue, NotSupported, QueueFull, RunIncomplete
from rheostat_server.limits import (
    ALL_LENS_BYTES,
    LENS_BYTES,
    LENS_LOGITS,
    LENS_TOKEN_IDS,
    LENS_TOP_K,
    RETRY_SECONDS,
)
from rheostat_server.requests.manager import RequestManager
from rheostat_server.runs.positions import named_rows, named_sites
from rheostat_server.runs.store import Run
from rheostat_server.runs.targets import RUN_ID
from rheostat_server.selectors.sites import NO_STREAM, of_routers, to_wire
from rheostat_server.selectors.spans import clipped
from rheostat_server.selectors.spans import runs as runs_of
from rheostat_server.tasks.offload import offload
from rheostat_server.tensors import FloatType, widened
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import capture_pb2, lens_service_pb2, replace_pb2, tensor_pb2, types_pb2

_pb = lens_service_pb2

_TOP_K = 5

_TEXT_BYTES = 128
"""Bytes that `offload` counts for the text of a token."""


class _PromptRows(Rows):
    """Whole rows of a prompt, as they arrive."""

    def __init__(self, sites: Sequence[Site], width: int) -> None:
        """Nothing has come yet."""
        super().__init__(sites)
        self.token_ids: tuple[int, ...] = ()
        """The prompt."""
        self.spans: Spans = ()
        """Positions of the rows."""
        self.rows: FloatArray = np.empty((len(sites), 0, width), np.float32)
        """[sites, positions, W]."""

    def begin(self, admitted: AdmittedRequest, count: int) -> None:
        """Makes room for the rows.

        Raises:
            InvalidValue: there are too many.
        """
        super().begin(admitted, count)
        self.token_ids = tuple(admitted.prompt.token_ids)
        known = admitted.captures[0].selection.known
        self.spans = clipped(known, 0, admitted.prompt_len)
        sites, _, width = self.rows.shape
        _check_size(sites, count, width)
        self.rows = np.empty((sites, count, width), np.float32)

    def _take(self, indices: list[int], rows: FloatArray, part: capture_pb2.Captured) -> None:
        for index, values in zip(indices, rows, strict=True):
            first = self._counts[index]
            self.rows[index, first : first + len(values)] = values


@dataclass(frozen=True, slots=True)
class LensRows:
    """The rows that a lens reads."""

    sites: tuple[Site, ...]
    spans: Spans
    """Their positions, the same at each site."""
    prompt_token_ids: Sequence[int]
    values: FloatArray
    """[sites, positions, W]."""


@dataclass(frozen=True, slots=True)
class _CheckedRequest:
    reading: Reading | None
    """What to capture of the prompt; None for a run."""
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
        """Runs a prompt, or finds a run, and reads its rows.

        Raises:
            RheostatError: the request is invalid, or has failed.
        """
        checked = _check(request, manager)
        with self._reserve():
            if checked.reading is None:
                rows = await _rows_of_run(request, manager)
            else:
                rows = await rows_of_prompt(request.prompt, checked.reading, manager)
            started = _pb.LensStarted(sites=map(to_wire, rows.sites))
            add_runs(started.positions.add, rows.spans)
            started.prompt_token_ids.ids.extend(rows.prompt_token_ids)
            if manager.prompts.has_tokenizer:
                started.prompt_texts.extend(await _texts(rows.prompt_token_ids, manager))
                started.texts.extend(await _texts(checked.token_ids, manager))
            yield _pb.LensResponse(started=started)
            flat = rows.values.reshape(-1, manager.sites.width)
            step = rows_per_call(manager.info, top_k=checked.top_k, tokens=len(checked.token_ids))
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


def rows_per_call(info: ModelInfo, *, top_k: int = 0, tokens: int = 0) -> int:
    """How many rows a call to the workers reads; see `LENS_LOGITS`.

    Args:
        info: the model.
        top_k: number of likeliest tokens that are wanted.
        tokens: number of tokens whose ranks are wanted.
    """
    # Ranks are slow on a CPU: those of 64 tokens take ten times as long as the logits.
    logits = LENS_LOGITS[info.device] / (1 + tokens / 16 + top_k / 64)
    return max(1, int(logits) // info.vocabulary)


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


def _check(request: lens_service_pb2.LensRequest, manager: RequestManager) -> _CheckedRequest:
    refuse_without_lens(manager)
    reading = None
    if request.run_id:
        validation.matches(request.run_id, RUN_ID, "run_id")
        _refuse_fields_of_a_prompt(request)
    else:
        reading = _reading(request, manager)
    vocabulary = manager.info.vocabulary
    top_k = request.top_k if request.HasField("top_k") else _TOP_K
    if top_k > LENS_TOP_K:
        raise InvalidValue(f"at most {LENS_TOP_K} tokens of each row are read", field="top_k")
    validation.check_count(len(request.token_ids), LENS_TOKEN_IDS, "token_ids", "tokens")
    if request.token_ids:
        validation.token_ids(request.token_ids, vocabulary, "token_ids")
        validation.no_repeats(request.token_ids, "token_ids", "tokens")
    return _CheckedRequest(reading, min(top_k, vocabulary), tuple(request.token_ids))


def _reading(request: lens_service_pb2.LensRequest, manager: RequestManager) -> Reading:
    check_prompt(request.prompt, "prompt")
    if request.HasField("positions"):
        raise InvalidValue(
            "positions are those of a run; select tokens of a prompt with where", field="positions"
        )
    return Reading(
        request.sites,
        sites_of_call(request, manager.sites).sites,
        check_prompt_selector(request.where) if request.HasField("where") else LAST_TOKEN,
        request.lora_name,
        request.steering,
    )


def _refuse_fields_of_a_prompt(request: lens_service_pb2.LensRequest) -> None:
    for field in ("prompt", "where", "steering"):
        if request.HasField(field):
            raise InvalidValue(f"a run is read as it is stored: leave out {field}", field=field)
    if request.lora_name:
        raise InvalidValue(
            "a run is read as it is stored: leave out the adapter", field="lora_name"
        )


async def rows_of_prompt(
    prompt: types_pb2.Prompt, reading: Reading, manager: RequestManager
) -> LensRows:
    """Runs a prompt for its rows.

    Raises:
        RheostatError: the prompt cannot run, or its rows are too many or not finite.
    """
    rows = _PromptRows(reading.sites, manager.sites.width)
    await read_rows(prompt, "prompt", reading, manager, rows)
    await asyncio.to_thread(check_finite, rows.rows, reading.sites, "prompt")
    return LensRows(reading.sites, rows.spans, rows.token_ids, rows.rows)


async def _rows_of_run(request: lens_service_pb2.LensRequest, manager: RequestManager) -> LensRows:
    """Copies rows of a stored run, which is in use meanwhile."""
    run = manager.runs.hold(request.run_id, "run_id")
    try:
        sites = named_sites(
            run, request.sites if request.HasField("sites") else None, manager.sites
        )
        if of_routers(sites):
            raise NotSupported(NO_STREAM, field="sites")
        positions = request.positions if request.HasField("positions") else None
        return await asyncio.to_thread(_copied, run, sites, positions)
    finally:
        manager.runs.release(run)


def _copied(
    run: Run, sites: tuple[Site, ...], positions: replace_pb2.PositionList | None
) -> LensRows:
    at = named_rows(run, positions)
    if not len(at):
        raise RunIncomplete(f"the run {run.id} has no rows", field="run_id")
    _check_size(len(sites), len(at), run.width)
    values = widened(run.read([run.index_of(site) for site in sites], at), run.dtype)
    check_finite(values, sites, "run_id")
    return LensRows(sites, runs_of(run.positions[at]), run.prompt_token_ids.tolist(), values)


def _check_size(sites: int, positions: int, width: int) -> None:
    size = sites * positions * width * FloatType.FLOAT32.itemsize
    if size > LENS_BYTES:
        raise InvalidValue(
            f"the rows take {size} bytes; at most {LENS_BYTES} are allowed. Name fewer layers, "
            "points or positions",
            field="sites",
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
