"""CaptureRun: runs a prompt for one token, and stores rows of it as a run.

The request passes admission, the queue and the engine as a Generate request with a capture into a
run does. So its steering, its run and its errors are the same.
"""

from contextlib import aclosing
from dataclasses import replace

from rheostat_server.admission.admit import admit
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.derivation.prompt_rows import (
    check_prompt,
    check_prompt_selector,
    is_stop,
    renamed_errors,
    request_for,
    selected_rows,
    stopped_error,
)
from rheostat_server.errors import Defect, Draining, MissingField, RheostatError
from rheostat_server.generation.responses import run
from rheostat_server.generation.sample import Response
from rheostat_server.requests.manager import RequestManager
from rheostat_wire.v1 import capture_pb2, generation_service_pb2, receipt_pb2, run_service_pb2

_FIELDS = (
    ("captures[0].run.", ""),
    ("captures[0].", ""),
    ("captures", "sites"),
    ("text", "prompt.text"),
    ("token_ids", "prompt.token_ids"),
    ("chat", "prompt.chat"),
)
"""How fields of the request begin, and what CaptureRun has in their place."""


async def capture_run(
    message: run_service_pb2.CaptureRunRequest, manager: RequestManager
) -> receipt_pb2.Receipt:
    """Runs a prompt and stores its run. A cancelled call aborts the request, and leaves no run.

    Raises:
        RheostatError: the request cannot run, or has failed.
    """
    check_prompt(message.prompt, "prompt")
    if not message.HasField("sites"):
        raise MissingField("sites are required", field="sites")
    if message.HasField("where"):
        check_prompt_selector(message.where)
    with renamed_errors(_rename):
        admitted = await admit(_request(message), manager.admission)
        admitted = _all_or_none(admitted, selected_rows(admitted, message.where))
        receipt: receipt_pb2.Receipt | None = None
        stopped = False
        async with aclosing(run(admitted, manager)) as responses:
            async for response in responses:
                stopped = stopped or is_stop(response)
                if isinstance(response, Response) and response.HasField("receipt"):
                    receipt = response.receipt
    if receipt is None or not receipt.captures[0].run_id:
        if manager.draining:
            raise Draining("the server is ending; it did not run the prompt")
        if stopped:
            raise stopped_error()
        raise Defect("the request ended without its run")
    return receipt


def _all_or_none(admitted: AdmittedRequest, count: int) -> AdmittedRequest:
    """The request, whose run is stored only if it has rows at `count` positions.

    If it were stored and then deleted, other clients could use, delete or replace it before.
    """
    (capture,) = admitted.captures
    assert capture.run is not None, "the request asks for it"
    target = capture.run._replace(least=count)
    return replace(admitted, captures=(replace(capture, run=target),))


def _request(
    message: run_service_pb2.CaptureRunRequest,
) -> generation_service_pb2.GenerateRequest:
    capture = capture_pb2.CaptureSpec(
        sites=message.sites,
        where=message.where if message.HasField("where") else None,
        dtype=message.dtype if message.HasField("dtype") else None,
        run=capture_pb2.RunTarget(
            run_id=message.run_id, lease=message.lease if message.HasField("lease") else None
        ),
    )
    steering = message.steering if message.HasField("steering") else None
    request = request_for(message.prompt, [capture], lora_name=message.lora_name, steering=steering)
    request.labels.update(message.labels)
    return request


def _rename(error: RheostatError) -> None:
    """Makes an error of the request name the fields of the CaptureRun call."""
    for begin, instead in _FIELDS:
        if error.field.startswith(begin):
            error.field = instead + error.field.removeprefix(begin)
            break
    if error.field == "run":
        error.field = "run_id"
