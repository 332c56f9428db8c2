"""Runs a prompt for the rows of its tokens: a request for one token, with captures.

Each selected row comes once, or an error names the prompt.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rheostat_engine import ModelSites, Site
from rheostat_server import validation
from rheostat_server.admission.admit import admit
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.delivery.row_messages import CapturedRows
from rheostat_server.errors import (
    Defect,
    Draining,
    EmptySelector,
    InvalidPosition,
    MissingField,
    NonFinite,
    NotSupported,
    RheostatError,
)
from rheostat_server.generation.responses import run
from rheostat_server.generation.sample import Response
from rheostat_server.requests.manager import RequestManager
from rheostat_server.requests.response_queue import Notice
from rheostat_server.selectors.sites import (
    SiteSelection,
    refuse_what_is_no_stream,
    resolve_sites,
    to_wire,
)
from rheostat_server.selectors.spans import clipped, length
from rheostat_server.tasks.offload import offload
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import (
    capture_pb2,
    generation_pb2,
    generation_service_pb2,
    lens_service_pb2,
    selector_pb2,
    steering_pb2,
    steering_service_pb2,
    sweep_service_pb2,
    tensor_pb2,
    types_pb2,
)

LAST_TOKEN = selector_pb2.Selector(
    include=[selector_pb2.Range(positions=selector_pb2.Window(start=-1))]
)
"""Selects the last prompt token."""

EVERY_TOKEN = selector_pb2.Selector(include=[selector_pb2.Range(phase=types_pb2.PHASE_PROMPT)])
"""Selects every prompt token."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The captures of every prompt."""

    site_set: types_pb2.SiteSet
    """The sites, as a message."""
    sites: tuple[Site, ...]
    """The same sites, resolved."""
    where: selector_pb2.Selector
    """The selected tokens; see `check_prompt_selector`."""
    lora: str
    """Name of the adapter; empty if there is none."""
    steering: steering_pb2.Steering | None = None
    """The steering of every prompt."""


class Rows(ABC):
    """Receives the rows of a prompt."""

    def __init__(self, sites: Sequence[Site]) -> None:
        """Nothing has come yet."""
        messages = [to_wire(site) for site in sites]
        self._indices = {(site.point, site.layer): i for i, site in enumerate(messages)}
        self._counts = np.zeros(len(sites), dtype=np.int64)
        """[sites]: the number of rows that have come."""
        self._expected = 0
        """The number of selected rows of each site."""

    def begin(self, admitted: AdmittedRequest, count: int) -> None:
        """Is called once, with the number of selected rows of each site.

        Raises:
            RheostatError: the rows are refused.
        """
        self._expected = count

    def add(self, part: capture_pb2.Captured) -> None:
        """Takes rows, [sites, positions, width], float32. May be called on a thread."""
        indices = [self._indices[site.point, site.layer] for site in part.sites]
        shape = tuple(part.tensor.shape)
        self._take(indices, np.frombuffer(part.tensor.inline, dtype="<f4").reshape(shape), part)
        self._counts[indices] += shape[1]

    @abstractmethod
    def _take(self, indices: list[int], rows: FloatArray, part: capture_pb2.Captured) -> None:
        """Takes rows, which `_counts` does not count yet.

        Args:
            indices: the index of each site.
            rows: [sites, positions, width].
            part: their message.
        """

    def complete(self) -> bool:
        """Whether every row has come."""
        return bool((self._counts == self._expected).all())


def check_finite(numbers: npt.NDArray[np.floating], sites: Sequence[Site], path: str) -> None:
    """Checks that numbers [sites, ...] are finite.

    Raises:
        NonFinite: one is not.
    """
    finite = np.isfinite(numbers).all(axis=tuple(range(1, numbers.ndim)))
    for index in np.flatnonzero(~finite):
        site = sites[index]
        raise NonFinite(f"the stream at {site.point.value} {site.layer} is not finite", field=path)


def check_prompt(prompt: types_pb2.Prompt, path: str) -> None:
    """Checks that there is a prompt.

    Raises:
        MissingField: there is none.
    """
    validation.required(prompt.WhichOneof("prompt"), path, "text, token_ids and chat")


def sites_of_call(
    request: steering_service_pb2.DeriveVectorsRequest
    | steering_service_pb2.FitConditionsRequest
    | lens_service_pb2.LensRequest
    | sweep_service_pb2.SweepRequest,
    model: ModelSites,
) -> SiteSelection:
    """The sites that a call names, at the field `sites`. All are part of the residual stream.

    Raises:
        InvalidArgument: they are missing or malformed.
        SiteNotServed, NotSupported: the model does not serve one, or it is no part of the stream.
    """
    if not request.HasField("sites"):
        raise MissingField("sites are required", field="sites")
    selection = resolve_sites(request.sites, model, "sites")
    refuse_what_is_no_stream(selection, "sites")
    return selection


def check_prompt_selector(where: selector_pb2.Selector) -> selector_pb2.Selector:
    """Returns a selector, if it selects prompt tokens alone.

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
    return where


def stopped_error() -> NotSupported:
    """The error for a prompt whose rows did not all come, because it was stopped."""
    return NotSupported("a rule of the server's policy, or a watch, ended this prompt early")


def is_stop(response: Response | CapturedRows | Notice | None) -> bool:
    """Whether a response says that a rule or a watch ended the request."""
    reasons = types_pb2.FINISH_REASON_RULE, types_pb2.FINISH_REASON_WATCH
    return isinstance(response, Response) and response.finished.reason in reasons


async def read_rows(
    prompt: types_pb2.Prompt, path: str, reading: Reading, manager: RequestManager, rows: Rows
) -> None:
    """Runs a prompt, and hands its rows over. A cancelled call aborts the request.

    `path` is the field of the prompt, for errors.

    Raises:
        RheostatError: the request cannot run, or has failed.
    """
    with renamed_errors(lambda error: _rename(error, path)):
        admitted = await admit(_request(prompt, reading), manager.admission)
        rows.begin(admitted, selected_rows(admitted, reading.where))
        stopped = False
        async with aclosing(run(admitted, manager)) as responses:
            async for response in responses:
                stopped = stopped or is_stop(response)
                if isinstance(response, CapturedRows):
                    part = response.to_message()
                    await offload(len(part.tensor.inline), rows.add, part)
        if not rows.complete():
            if manager.draining:
                raise Draining("the server is ending; it did not run all prompts")
            if stopped:
                raise stopped_error()
            raise Defect("the engine did not deliver every row")


def _request(prompt: types_pb2.Prompt, reading: Reading) -> generation_service_pb2.GenerateRequest:
    capture = capture_pb2.CaptureSpec(
        sites=reading.site_set,
        where=reading.where,
        inline=capture_pb2.InlineTarget(),
        dtype=tensor_pb2.DTYPE_FLOAT32,
    )
    return request_for(prompt, [capture], lora_name=reading.lora, steering=reading.steering)


def request_for(
    prompt: types_pb2.Prompt,
    captures: Sequence[capture_pb2.CaptureSpec],
    *,
    lora_name: str,
    steering: steering_pb2.Steering | None,
    max_tokens: int = 1,
) -> generation_service_pb2.GenerateRequest:
    """A request that runs a prompt under some steering, with captures."""
    request = generation_service_pb2.GenerateRequest(
        sampling=generation_pb2.Sampling(max_tokens=max_tokens, temperature=0),
        captures=captures,
        lora_name=lora_name,
        steering=steering,
    )
    match prompt.WhichOneof("prompt"):
        case "text":
            request.text = prompt.text
        case "token_ids":
            request.token_ids.CopyFrom(prompt.token_ids)
        case "chat":
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


@contextmanager
def renamed_errors(rename: Callable[[RheostatError], None]) -> Iterator[None]:
    """Makes errors of a prompt's request name the fields of the call that runs it.

    Args:
        rename: changes an error. It is then raised.
    """
    try:
        yield
    except RheostatError as error:
        rename(error)
        raise


def _rename(error: RheostatError, path: str) -> None:
    """Makes an error of a prompt's request name the prompt, or a field that all prompts share."""
    field = error.field.removeprefix("captures[0].")
    if field.startswith(("text", "token_ids", "chat")):
        error.field = f"{path}.{field}"
        return
    if field == "captures":
        field = "sites"
    elif not field.startswith(("where", "sites", "lora_name", "steering", path)):
        field = path if field else ""
    error.field = field
    if field not in ("", path, "lora_name") and not field.startswith("steering"):
        error.message = f"{path}: {error.message}"
