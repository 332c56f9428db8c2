"""RunService: the stored runs. A request makes one by a capture into a run."""

from collections.abc import Sequence

from google.protobuf import timestamp_pb2

from rheostat_server import validation
from rheostat_server.api.paging import fitting, from_token, no_token, page_size, to_token
from rheostat_server.api.readiness import Readiness
from rheostat_server.api.rpc import Context
from rheostat_server.delivery.row_messages import add_runs
from rheostat_server.runs.store import Run
from rheostat_server.runs.targets import RUN_ID, lease_seconds
from rheostat_server.selectors.sites import to_wire
from rheostat_server.selectors.spans import runs as runs_of
from rheostat_server.tasks.offload import offload
from rheostat_wire.v1 import run_pb2, run_service_pb2, run_service_pb2_grpc

_pb = run_service_pb2

_SITE_BYTES = 16
_TOKEN_BYTES = 4
"""Approximate bytes of a site and of a token of a run in an answer."""


class RunService(run_service_pb2_grpc.RunServiceServicer):
    """Lists, leases and deletes runs."""

    def __init__(self, readiness: Readiness) -> None:
        """A service of the server in this state."""
        self._readiness = readiness

    async def ListRuns(
        self, request: run_service_pb2.ListRunsRequest, context: Context
    ) -> run_service_pb2.ListRunsResponse:
        """Lists the stored runs."""
        runs = self._readiness.manager().runs
        after = _number(request.page_token) if request.page_token else 0
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
    )
    message.prompt_token_ids.ids.extend(run.prompt_token_ids.tolist())
    add_runs(message.positions.add, runs_of(run.positions))
    return message


def _timestamp(moment: float) -> timestamp_pb2.Timestamp:
    return timestamp_pb2.Timestamp(seconds=int(moment), nanos=int(moment % 1 * 1e9))


def _number(token: str) -> int:
    """The number of the last run of the previous page."""
    (number,) = from_token(token, 1)
    if not (number.isascii() and number.isdecimal()) or len(number) > 18:
        raise no_token()
    return int(number)
