"""Uploads of runs: a header, then rows in pieces of any order, each row once.

Invariants:

* A run is stored only if every row has come. Otherwise its memory and its id are free again.
* Memory is reserved for rows that come, in blocks of about `_BLOCK`, and never beyond what the
  header announces.
* Elements are finite, so that a stored run can replace rows.
* Nothing long runs on the event loop: pieces are decoded, checked and copied on threads.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import ModelSites, Point, Site
from rheostat_server import validation
from rheostat_server.config import ModelInfo
from rheostat_server.errors import (
    Defect,
    InvalidPosition,
    InvalidValue,
    MessageTooLarge,
    MissingField,
    NonFinite,
    NotSupported,
    PromptTooLong,
    RheostatError,
    TruncatedUpload,
    VectorShape,
)
from rheostat_server.limits import RUN_RANGES, RUN_SITES, RUN_TOKENS, TENSOR_MESSAGE_BYTES
from rheostat_server.runs.store import Run, RunDraft, RunStore
from rheostat_server.runs.targets import RUN_ID, RunTarget, lease_seconds
from rheostat_server.selectors.sites import NO_STREAM, from_wire, resolve_site
from rheostat_server.sinks import CaptureAbout, Labels
from rheostat_server.tasks.offload import offload
from rheostat_server.tasks.uploads import drain, next_message
from rheostat_server.tensors import checked_payload, float_type, widened
from rheostat_server.validation import counted
from rheostat_wire.dtypes import StoredArray
from rheostat_wire.v1 import run_service_pb2, tensor_pb2, types_pb2

Messages = AsyncIterator[run_service_pb2.PutRunRequest]

Indices = npt.NDArray[np.intp]

_BLOCK = 1 << 20
"""Bytes of rows for which memory is reserved at a time: rows of all sites at some positions."""

_FIELD_WORK = 16
"""Bytes that `offload` counts for a byte of labels, which Python goes over one by one."""


class Header(NamedTuple):
    """A checked header."""

    target: RunTarget
    about: CaptureAbout
    """The sites, by layer, then point, and the rows' type."""
    positions: Labels
    """Ascending, [positions]."""
    token_ids: Labels
    """[positions]."""
    prompt_token_ids: Sequence[int]
    labels: dict[str, str]

    @property
    def rows_bytes(self) -> int:
        """Bytes of all rows."""
        about = self.about
        row = about.width * about.dtype.itemsize
        return len(about.sites) * len(self.positions) * row


async def receive_run(
    messages: Messages, store: RunStore, model: ModelSites, info: ModelInfo
) -> Run:
    """Reads an upload to its end, and stores it.

    Raises:
        InvalidArgument: the upload is malformed or incomplete, or a row comes twice.
        RunExists: another run has its id.
        SiteNotServed, NotSupported: the model has no rows at a site, or no rows of the stream.
        StoreFull: it is too large, or other runs leave too little memory.
    """
    try:
        header = await _read_header(messages, model, info)
        store.check(header.target.id, header.rows_bytes, "header.run_id")
        draft = store.begin(
            header.target,
            header.about,
            header.prompt_token_ids,
            header.labels,
            "header.run_id",
            lossless=True,
            upload=True,
        )
        try:
            await _read_rows(messages, header, draft)
            run = draft.keep()
        finally:
            draft.drop()
    except RheostatError:
        await drain(messages, run_service_pb2.PutRunRequest.ByteSize)
        raise
    if run is None:
        raise Defect("the upload was dropped before it was stored")
    return run


async def _read_header(messages: Messages, model: ModelSites, info: ModelInfo) -> Header:
    async for message in messages:
        if _part(message) != "header":
            raise MissingField("the first message is the header", field="header")
        work = _FIELD_WORK * message.header.ByteSize()
        return await offload(work, check_header, message.header, model, info)
    raise TruncatedUpload("the upload ended without a header", field="header")


async def _read_rows(messages: Messages, header: Header, draft: RunDraft) -> None:
    draft.store.reserve(draft, header.positions.nbytes + header.token_ids.nbytes)
    upload = Upload(header, draft)
    begun, received = asyncio.get_running_loop().time(), 0
    while (
        message := await next_message(messages, begun, received, header.rows_bytes, "rows")
    ) is not None:
        if _part(message) == "header":
            raise InvalidValue("only the first message is a header", field="header")
        size = message.rows.ByteSize()
        received += size
        raw = message.rows.tensor.encoding == tensor_pb2.ENCODING_RAW
        await offload(size if raw else TENSOR_MESSAGE_BYTES, upload.add, message.rows)
    upload.finish()


def _part(message: run_service_pb2.PutRunRequest) -> str:
    return validation.required(message.WhichOneof("part"), "", "header and rows")


def check_header(header: run_service_pb2.RunHeader, model: ModelSites, info: ModelInfo) -> Header:
    """Checks a header.

    Raises:
        InvalidArgument: it is malformed.
        SiteNotServed, NotSupported: the model has no rows at a site, or no rows of the stream.
    """
    if header.run_id:
        validation.matches(header.run_id, RUN_ID, "header.run_id")
    lease = lease_seconds(header.lease if header.HasField("lease") else None, "header.lease")
    target = RunTarget(header.run_id or uuid.uuid4().hex, lease)
    validation.labels(header.labels, "header.labels")
    kind = float_type(header.dtype, "header.dtype")
    sites = _sites(header.sites, model)
    validation.check_count(len(header.positions), RUN_RANGES, "header.positions", "ranges")
    spans = _spans(header.positions, "header.positions")
    if spans[-1][1] > info.model_tokens:
        raise InvalidPosition(
            f"position {spans[-1][1] - 1} lies behind the context of {info.model_tokens} tokens",
            field="header.positions",
        )
    positions = _flat(spans)
    prompt = list(header.prompt_token_ids.ids)
    if len(prompt) > info.model_tokens:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens; the context has {info.model_tokens}",
            field="header.prompt_token_ids.ids",
        )
    validation.token_ids(prompt, info.vocabulary, "header.prompt_token_ids.ids")
    tokens = _token_ids(header.token_ids, positions, prompt, info.vocabulary)
    about = CaptureAbout(0, sites, kind, model.width)
    return Header(target, about, positions, tokens, prompt, dict(header.labels))


def _sites(messages: Sequence[types_pb2.Site], model: ModelSites) -> tuple[Site, ...]:
    """Different sites of the stream, by layer, then point."""
    path = "header.sites"
    if not messages:
        raise MissingField("at least one site is required", field=path)
    validation.check_count(len(messages), RUN_SITES, path, "sites")
    sites: dict[int, Site] = {}
    for number, message in enumerate(messages):
        field_of_site = f"{path}[{number}]"
        _check_layer(message, field_of_site)
        site = resolve_site(message, model, field_of_site)
        if site.point is Point.ROUTER_LOGITS:
            raise NotSupported(NO_STREAM, field=field_of_site)
        other = sites.setdefault(site.index, site)
        if other is not site:
            names = f"{_label(other)} and {_label(site)} are one site"
            raise InvalidValue(f"{names}, which comes once", field=field_of_site)
    order = list(Point)
    return tuple(sorted(sites.values(), key=lambda site: (site.layer, order.index(site.point))))


def _check_layer(site: types_pb2.Site, path: str) -> None:
    if not site.HasField("layer"):
        raise MissingField("a layer is required", field=f"{path}.layer")


def _label(site: Site) -> str:
    return f"{site.point.value} {site.layer}"


def _spans(runs: Sequence[types_pb2.PositionRun], path: str) -> list[tuple[int, int]]:
    """Positions as half-open spans, ascending."""
    if not runs:
        raise MissingField("at least one position is required", field=path)
    spans, end = [], 0
    for number, run in enumerate(runs):
        if not run.count:
            raise InvalidValue("at least one position", field=f"{path}[{number}].count")
        if run.start < end:
            raise InvalidValue("positions ascend, each once", field=f"{path}[{number}].start")
        end = run.start + run.count
        spans.append((run.start, end))
    return spans


def _flat(spans: Sequence[tuple[int, int]]) -> Labels:
    return np.concatenate([np.arange(start, end, dtype=np.int32) for start, end in spans])


def _token_ids(
    given: Sequence[int], positions: Labels, prompt: Sequence[int], vocabulary: int
) -> Labels:
    """The input token at each position."""
    path = "header.token_ids"
    validation.check_count(len(given), RUN_TOKENS, path, "tokens")
    prompt_tokens = np.array(prompt, np.int32)
    inside = positions[positions < len(prompt)]
    if not given:
        if len(inside) < len(positions):
            raise MissingField(
                f"position {positions[len(inside)]} lies behind the prompt's {len(prompt)} tokens: "
                "the token at each position is required",
                field=path,
            )
        return prompt_tokens[inside]
    if len(given) != len(positions):
        raise InvalidValue(
            f"{counted(len(given), 'token')} came for {counted(len(positions), 'position')}; give "
            "one for each",
            field=path,
        )
    validation.token_ids(given, vocabulary, path)
    tokens = np.array(given, np.int32)
    wrong = np.flatnonzero(tokens[: len(inside)] != prompt_tokens[inside])
    if len(wrong):
        at = int(wrong[0])
        raise InvalidValue(
            f"the prompt has token {prompt_tokens[inside[at]]} at position {inside[at]}",
            field=f"{path}[{at}]",
        )
    return tokens


@dataclass(slots=True)
class _Block:
    """Rows of all sites at consecutive positions of a run."""

    rows: StoredArray
    """[sites, positions, W]."""
    present: npt.NDArray[np.bool_]
    """Which of them have come: [sites, positions]."""


class Upload:
    """The rows of an upload that have come. It is used by one thread at a time."""

    def __init__(self, header: Header, draft: RunDraft) -> None:
        """No rows have come."""
        about, count = header.about, len(header.positions)
        self.header = header
        self.draft = draft
        self._numbers = {site: number for number, site in enumerate(about.sites)}
        """The index of each site."""
        self._step = max(1, _BLOCK // (len(about.sites) * about.width * about.dtype.itemsize))
        """Positions of a block."""
        self._blocks: list[_Block | None] = [None] * -(-count // self._step)
        self._missing = len(about.sites) * count
        """Rows that have not come."""

    def add(self, message: run_service_pb2.RunRows) -> None:
        """Adds rows.

        Raises:
            InvalidArgument: they are malformed or not finite, or one of them has come before.
            MessageTooLarge: they are too many for one message.
            StoreFull: the store has too little free memory.
        """
        validation.check_count(len(message.sites), RUN_SITES, "rows.sites", "sites")
        validation.check_count(len(message.positions), RUN_RANGES, "rows.positions", "ranges")
        numbers = self._site_numbers(message.sites)
        at = self._indices(message.positions)
        rows = self._elements(message.tensor, len(numbers), len(at))
        first = 0
        while first < len(at):
            index = int(at[first]) // self._step
            last = int(np.searchsorted(at, (index + 1) * self._step))
            block = self._block(index)
            inside = np.ix_(numbers, at[first:last] - index * self._step)
            if block.present[inside].any():
                raise self._repeated(numbers, at[first:last], block.present[inside])
            block.rows[inside] = rows[:, first:last]
            block.present[inside] = True
            first = last
        self._missing -= len(numbers) * len(at)

    def finish(self) -> None:
        """Completes the run.

        Raises:
            TruncatedUpload: rows are missing.
        """
        about, positions = self.header.about, self.header.positions
        if self._missing:
            total = len(about.sites) * len(positions)
            raise TruncatedUpload(
                f"{self._missing} of {total} rows did not come, among them {self._first_missing()}",
                field="rows",
            )
        pieces = [block.rows for block in self._blocks if block is not None]
        self.draft.fill(positions, self.header.token_ids, pieces)

    def _site_numbers(self, messages: Sequence[types_pb2.Site]) -> Indices:
        if not messages:
            raise MissingField("at least one site is required", field="rows.sites")
        numbers: list[int] = []
        seen: set[int] = set()
        for number, message in enumerate(messages):
            path = f"rows.sites[{number}]"
            _check_layer(message, path)
            validation.known_enum(message.point, types_pb2.Point.values(), f"{path}.point")
            index = self._numbers.get(from_wire(message))
            if index is None:
                raise InvalidValue("the header does not have this site", field=path)
            if index in seen:
                raise InvalidValue("sites may not be repeated", field=path)
            seen.add(index)
            numbers.append(index)
        return np.array(numbers, np.intp)

    def _indices(self, runs: Sequence[types_pb2.PositionRun]) -> Indices:
        """Indices of positions in the header's, ascending."""
        path, own = "rows.positions", self.header.positions
        spans = _spans(runs, path)
        count = sum(end - start for start, end in spans)
        if spans[-1][1] <= int(own[-1]) + 1 and count <= len(own):
            positions = _flat(spans)
            at = np.searchsorted(own, positions)
            if (own[at] == positions).all():
                return at
        raise InvalidPosition("the header does not have all of these positions", field=path)

    def _elements(self, tensor: tensor_pb2.Tensor, sites: int, positions: int) -> StoredArray:
        """The rows of a piece, [sites, positions, W]."""
        about, path = self.header.about, "rows.tensor"
        if float_type(tensor.dtype, f"{path}.dtype") is not about.dtype:
            raise InvalidValue(f"the header's type is {about.dtype.value}", field=f"{path}.dtype")
        expected = [sites, positions, about.width]
        if list(tensor.shape[:4]) != expected:
            got = str(list(tensor.shape[:4]))
            raise VectorShape(
                f"the shape is {got}; it must be {expected}",
                field=f"{path}.shape",
                metadata={"expected": str(expected), "got": got},
            )
        size = sites * positions * about.width * about.dtype.itemsize
        if size > TENSOR_MESSAGE_BYTES:
            raise MessageTooLarge(
                f"a piece has {size} bytes of rows; at most {TENSOR_MESSAGE_BYTES} are allowed",
                field=path,
            )
        data = checked_payload(tensor, path, kind=about.dtype)
        rows = np.frombuffer(data, about.dtype.numpy).reshape(expected)
        finite = np.isfinite(widened(rows, about.dtype))
        if not finite.all():
            where = np.argwhere(~finite)[0].tolist()
            raise NonFinite(f"element {where} is not finite", field=f"{path}.inline")
        return rows

    def _block(self, index: int) -> _Block:
        """A block, with memory reserved for it.

        Raises:
            StoreFull: the store has too little free memory.
        """
        block = self._blocks[index]
        if block is None:
            about = self.header.about
            count = min(self._step, len(self.header.positions) - index * self._step)
            shape = (len(about.sites), count)
            size = len(about.sites) * count * about.width * about.dtype.itemsize
            self.draft.store.reserve(self.draft, size)
            block = self._blocks[index] = _Block(
                np.empty((*shape, about.width), about.dtype.numpy), np.zeros(shape, np.bool_)
            )
        return block

    def _repeated(
        self, numbers: Indices, at: Indices, present: npt.NDArray[np.bool_]
    ) -> InvalidValue:
        site, position = np.argwhere(present)[0]
        return InvalidValue(f"{self._name(numbers[site], at[position])} came before", field="rows")

    def _first_missing(self) -> str:
        for index, block in enumerate(self._blocks):
            if block is None:
                return self._name(0, index * self._step)
            absent = np.argwhere(~block.present)
            if len(absent):
                site, position = absent[0]
                return self._name(site, index * self._step + position)
        raise AssertionError("every row has come")

    def _name(self, site: int, at: int) -> str:
        position = self.header.positions[at]
        return f"{_label(self.header.about.sites[site])} at position {position}"
