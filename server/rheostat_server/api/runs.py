"""RunService: stored runs. A call makes one, or a request by a capture into a run."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from google.protobuf import timestamp_pb2

from rheostat_server import validation
from rheostat_server.api.paging import fitting, from_token, page_size, parse_number, to_token
from rheostat_server.api.readiness import Readiness
from rheostat_server.api.rpc import Context
from rheostat_server.capture.encodings import Form
from rheostat_server.delivery.row_messages import add_runs
from rheostat_server.delivery.run_messages import run_chunks
from rheostat_server.derivation.captured_run import capture_run
from rheostat_server.errors import NotSupported
from rheostat_server.limits import UNREAD_SECONDS
from rheostat_server.requests.manager import RequestManager
from rheostat_server.runs.positions import named_rows, named_sites
from rheostat_server.runs.store import Run, RunStore
from rheostat_server.runs.targets import RUN_ID, lease_seconds
from rheostat_server.runs.upload import receive_run
from rheostat_server.selectors.sites import to_wire
from rheostat_server.selectors.spans import runs as runs_of
from rheostat_server.tasks.interruption import while_read
from rheostat_server.tasks.offload import offload
from rheostat_server.validation import known_enum
from rheostat_wire.message_parts import MessageParts
from rheostat_wire.v1 import run_pb2, run_service_pb2, run_service_pb2_grpc, tensor_pb2

_pb = run_service_pb2

_SITE_BYTES = 16
_TOKEN_BYTES = 4
"""Approximate bytes of a site and of a token of a run in an answer."""

_SERVED = (tensor_pb2.ENCODING_RAW, tensor_pb2.ENCODING_LZ4_PLANES)


class RunService(run_service_pb2_grpc.RunServiceServicer):
    """Makes, reads, lists, leases and deletes runs."""

    def __init__(self, readiness: Readiness) -> None:
        """A service of the server in this state."""
        self._readiness = readiness

    async def CaptureRun(
        self, request: run_service_pb2.CaptureRunRequest, context: Context
    ) -> run_service_pb2.CaptureRunResponse:
        """Runs a prompt and stores rows of it."""
        manager = self._readiness.manager()
        receipt = await capture_run(request, manager)
        run = _find(receipt.captures[0].run_id, manager.runs)
        message = await offload(_weight(run), _to_wire, run)
        return _pb.CaptureRunResponse(run=message, receipt=receipt)

    async def PutRun(
        self, request_iterator: AsyncIterator[run_service_pb2.PutRunRequest], context: Context
    ) -> run_service_pb2.PutRunResponse:
        """Stores uploaded rows."""
        manager = self._readiness.manager()
        run = await receive_run(request_iterator, manager.runs, manager.sites, manager.info)
        return _pb.PutRunResponse(run=await offload(_weight(run), _to_wire, run))

    async def GetRun(
        self, request: run_service_pb2.GetRunRequest, context: Context
    ) -> run_service_pb2.GetRunResponse:
        """Describes the run with an id."""
        run = _find(request.run_id, self._readiness.manager().runs)
        return _pb.GetRunResponse(run=await offload(_weight(run), _to_wire, run))

    def ReadRun(  # type: ignore[override]  # `Rpcs` also sends messages in wire format
        self, request: run_service_pb2.ReadRunRequest, context: Context
    ) -> AsyncGenerator[MessageParts, None]:
        """Sends rows of a run."""
        return while_read(_rows(request, self._readiness.manager()), UNREAD_SECONDS)

    async def ListRuns(
        self, request: run_service_pb2.ListRunsRequest, context: Context
    ) -> run_service_pb2.ListRunsResponse:
        """Lists the stored runs."""
        runs = self._readiness.manager().runs
        after = 0
        if request.page_token:
            after = parse_number(*from_token(request.page_token, 1))
        found, more = runs.page(after, page_size(request.page_size))
        page = fitting(found, _weight)
        answer = await offload(sum(map(_weight, page)), _listed, page)
        if more or len(page) < len(found):
            answer.next_page_token = to_token(str(page[-1].number))
        answer.used_bytes = runs.used_bytes
        answer.capacity_bytes = runs.capacity
        return answer

    async def DeleteRun(
        self, request: run_service_pb2.DeleteRunRequest, context: Context
    ) -> run_service_pb2.DeleteRunResponse:
        """Deletes a run."""
        runs = self._readiness.manager().runs
        validation.matches(request.run_id, RUN_ID, "run_id")
        return _pb.DeleteRunResponse(freed_bytes=runs.delete(request.run_id, "run_id"))

    async def RenewLease(
        self, request: run_service_pb2.RenewLeaseRequest, context: Context
    ) -> run_service_pb2.RenewLeaseResponse:
        """Extends a run's lease."""
        runs = self._readiness.manager().runs
        validation.matches(request.run_id, RUN_ID, "run_id")
        given = request.lease if request.HasField("lease") else None
        run = runs.renew(request.run_id, lease_seconds(given, "lease"), "run_id")
        return _pb.RenewLeaseResponse(run=await offload(_weight(run), _to_wire, run))


async def _rows(
    request: run_service_pb2.ReadRunRequest, manager: RequestManager
) -> AsyncGenerator[MessageParts, None]:
    """The requested rows of a run, which is in use until the generator ends."""
    form = Form(_encoding(request))
    validation.matches(request.run_id, RUN_ID, "run_id")
    run = manager.runs.hold(request.run_id, "run_id")
    try:
        sites = named_sites(
            run, request.sites if request.HasField("sites") else None, manager.sites
        )
        positions = request.positions if request.HasField("positions") else None
        at = await offload(_weight(run) + request.ByteSize(), named_rows, run, positions)
        for chunk in run_chunks(run, sites, at):
            rows = await offload(chunk.nbytes, chunk.encoded, form)
            yield rows.as_field(_pb.ReadRunResponse.CAPTURED_FIELD_NUMBER)
    finally:
        manager.runs.release(run)


def _find(run_id: str, runs: RunStore) -> Run:
    """A run, which may be evicted while it is used.

    Raises:
        RunNotFound: there is none.
    """
    validation.matches(run_id, RUN_ID, "run_id")
    run = runs.hold(run_id, "run_id")
    runs.release(run)
    return run


def _encoding(request: run_service_pb2.ReadRunRequest) -> tensor_pb2.Encoding.ValueType:
    if not request.HasField("encoding"):
        return tensor_pb2.ENCODING_RAW
    known_enum(request.encoding, tensor_pb2.Encoding.values(), "encoding")
    if request.encoding not in _SERVED:
        raise NotSupported(
            "runs are read in ENCODING_RAW and ENCODING_LZ4_PLANES, which are exact",
            field="encoding",
        )
    return request.encoding


def _weight(run: Run) -> int:
    """Approximate bytes of its message."""
    tokens = len(run.prompt_token_ids) + len(run.positions)
    return _SITE_BYTES * len(run.sites) + _TOKEN_BYTES * tokens + 512


def _listed(runs: Sequence[Run]) -> run_service_pb2.ListRunsResponse:
    return _pb.ListRunsResponse(runs=map(_to_wire, runs))


def _to_wire(run: Run) -> run_pb2.Run:
    message = run_pb2.Run(
        run_id=run.id,
        sites=map(to_wire, run.sites),
        size_bytes=run.size,
        create_time=_timestamp(run.create_time),
        lease_expire_time=_timestamp(run.lease_expire_time),
        labels=run.labels,
        dtype=run.dtype.wire,
        width=run.width,
    )
    message.prompt_token_ids.ids.extend(run.prompt_token_ids.tolist())
    add_runs(message.positions.add, runs_of(run.positions))
    return message


def _timestamp(moment: float) -> timestamp_pb2.Timestamp:
    return timestamp_pb2.Timestamp(seconds=int(moment), nanos=int(moment % 1 * 1e9))
