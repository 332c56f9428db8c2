"""One prompt of a contrast: runs a request for one token, and averages its captured rows.

A mean contains each selected row of the prompt once. Otherwise an error names the prompt.
"""

from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import Site
from rheostat_server.admission.admit import AdmittedRequest, admit
from rheostat_server.delivery.row_messages import CapturedRows
from rheostat_server.errors import (
    Defect,
    Draining,
    EmptySelector,
    InvalidPosition,
    NonFinite,
    RheostatError,
)
from rheostat_server.generation.responses import run
from rheostat_server.requests.manager import RequestManager
from rheostat_server.selectors.sites import to_wire
from rheostat_server.selectors.spans import clipped, length
from rheostat_server.tasks.offload import offload
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import (
    capture_pb2,
    generation_pb2,
    generation_service_pb2,
    selector_pb2,
    tensor_pb2,
    types_pb2,
)


@dataclass(frozen=True, slots=True)
class Reading:
    """The captures of every prompt."""

    site_set: types_pb2.SiteSet
    """The sites, as a message."""
    sites: tuple[Site, ...]
    """The same sites, resolved."""
    where: selector_pb2.Selector
    """The selected tokens; see `prompt_selector`."""
    lora: str
    """Name of the adapter; empty if there is none."""


class PromptMean(NamedTuple):
    """The means of a prompt."""

    rows: FloatArray
    """[sites, width]: the mean of the selected rows."""
    norms: npt.NDArray[np.float64]
    """[sites]: the mean of their L2 norms."""


def prompt_selector(where: selector_pb2.Selector | None) -> selector_pb2.Selector:
    """Checks a selector of prompt tokens; returns one for the last prompt token if it is None.

    Raises:
        EmptySelector: the selector has no range.
        InvalidPosition: the selector includes generated tokens.
    """
    last = selector_pb2.Range(positions=selector_pb2.Window(start=-1))
    if where is None:
        return selector_pb2.Selector(include=[last])
    check_prompt_selector(where)
    return where


def check_prompt_selector(where: selector_pb2.Selector) -> None:
    """Checks a selector of prompt tokens.

    It need not exclude generated tokens, because the only generated token has no row.

    Raises:
        EmptySelector: the selector has no range.
        InvalidPosition: the selector includes generated tokens.
    """
    if not where.include and not where.exclude:
        raise EmptySelector("a selector needs at least one range", field="where")
    for index, token_range in enumerate(where.include):
        kind = token_range.WhichOneof("kind")
        if kind == "generated" or token_range.phase == types_pb2.PHASE_GENERATED:
            raise InvalidPosition(
                "only tokens of the prompt can be selected, because nothing is generated",
                field=f"where.include[{index}].{kind}",
            )


async def read_prompt(
    prompt: types_pb2.Prompt, path: str, reading: Reading, manager: RequestManager
) -> PromptMean:
    """Runs a prompt, and returns its means. A cancelled call aborts the request.

    `path` is the field of the prompt, for errors.

    Raises:
        RheostatError: the request cannot run, or has failed.
    """
    with _naming(path):
        admitted = await admit(_request(prompt, reading), manager.admission)
        count = selected_rows(admitted, reading.where)
        mean = _Mean(reading.sites, manager.sites.width)
        async with aclosing(run(admitted, manager)) as responses:
            async for response in responses:
                if isinstance(response, CapturedRows):
                    part = response.to_message()
                    await offload(len(part.tensor.inline), mean.add, part)
        if not mean.complete(count):
            if manager.draining:
                raise Draining("the server is ending; it did not run all prompts")
            raise Defect("the engine did not deliver every row")
        result = await offload(mean.nbytes, mean.result)
        for index in np.flatnonzero(~np.isfinite(result.norms)):
            site = reading.sites[index]
            raise NonFinite(
                f"the stream at {site.point.value} {site.layer} is not finite", field=path
            )
        return result


def _request(prompt: types_pb2.Prompt, reading: Reading) -> generation_service_pb2.GenerateRequest:
    capture = capture_pb2.CaptureSpec(
        sites=reading.site_set,
        where=reading.where,
        inline=capture_pb2.InlineTarget(),
        dtype=tensor_pb2.DTYPE_FLOAT32,
    )
    return request_for(prompt, capture, lora_name=reading.lora)


def request_for(
    prompt: types_pb2.Prompt, capture: capture_pb2.CaptureSpec, *, lora_name: str
) -> generation_service_pb2.GenerateRequest:
    """A request that runs a prompt for one token, with one capture."""
    request = generation_service_pb2.GenerateRequest(
        sampling=generation_pb2.Sampling(max_tokens=1, temperature=0),
        captures=[capture],
        lora_name=lora_name,
    )
    if prompt.HasField("text"):
        request.text = prompt.text
    elif prompt.HasField("token_ids"):
        request.token_ids.CopyFrom(prompt.token_ids)
    else:
        request.chat.CopyFrom(prompt.chat)
    return request


def selected_rows(admitted: AdmittedRequest, where: selector_pb2.Selector) -> int:
    """The number of selected rows of each site of the only capture.

    Raises:
        InvalidPosition: no row is selected, or a window ends after the prompt.
    """
    end = admitted.prompt_len
    for index, token_range in enumerate(where.include):
        if token_range.HasField("positions") and token_range.positions.end > end:
            raise InvalidPosition(
                f"the window ends at {token_range.positions.end}, the prompt at {end}",
                field=f"where.include[{index}].positions.end",
            )
    count = length(clipped(admitted.captures[0].selection.known, 0, end))
    if not count:
        raise InvalidPosition("no token of the prompt is selected", field="where")
    return count


class _Mean:
    """Sums rows in float64 as they arrive."""

    def __init__(self, sites: tuple[Site, ...], width: int) -> None:
        messages = [to_wire(site) for site in sites]
        self._indices = {(site.point, site.layer): i for i, site in enumerate(messages)}
        self._sums = np.zeros((len(sites), width))
        self._norms = np.zeros(len(sites))
        self._counts = np.zeros(len(sites), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return self._sums.nbytes

    def add(self, part: capture_pb2.Captured) -> None:
        """Adds rows, [sites, positions, width], float32."""
        indices = [self._indices[site.point, site.layer] for site in part.sites]
        shape = tuple(part.tensor.shape)
        rows = np.frombuffer(part.tensor.inline, dtype="<f4").reshape(shape).astype(np.float64)
        with np.errstate(invalid="ignore"):
            self._sums[indices] += rows.sum(axis=1)
            self._norms[indices] += np.linalg.norm(rows, axis=2).sum(axis=1)
        self._counts[indices] += rows.shape[1]

    def complete(self, count: int) -> bool:
        """Whether every site got `count` rows."""
        return bool((self._counts == count).all())

    def result(self) -> PromptMean:
        """The means. Every site must have a row."""
        rows = self._sums / self._counts[:, None]
        return PromptMean(rows.astype(np.float32), self._norms / self._counts)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Makes errors of a prompt's request name the fields of the DeriveVectors call."""
    try:
        yield
    except RheostatError as error:
        field = error.field.removeprefix("captures[0].")
        if field.startswith(("text", "token_ids", "chat")):
            error.field = f"{path}.{field}"
            raise
        if field == "captures":
            field = "sites"
        elif not field.startswith(("where", "sites", "lora_name", path)):
            field = path if field else ""
        error.field = field
        if field not in ("", path, "lora_name"):
            error.message = f"{path}: {error.message}"
        raise
