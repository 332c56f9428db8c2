"""The calls about stored runs; see `_calls`."""

from __future__ import annotations

from rheostat._capture.runs import RunInfo, lease_duration, read_run, valid_run_id
from rheostat._connection.calls import PAGE, PagedCall, UnaryCall, every_page
from rheostat_wire.v1 import run_service_pb2


def list_runs() -> PagedCall[run_service_pb2.ListRunsResponse, list[RunInfo]]:
    """Every run, page by page."""
    pages = yield from every_page(
        "/rheostat.v1.RunService/ListRuns",
        lambda token: run_service_pb2.ListRunsRequest(page_size=PAGE, page_token=token),
        run_service_pb2.ListRunsResponse,
    )
    return [read_run(run) for page in pages for run in page.runs]


def delete_run(run_id: str) -> UnaryCall[run_service_pb2.DeleteRunResponse, int]:
    """Delete a run; gives the bytes that became free."""
    return UnaryCall(
        "/rheostat.v1.RunService/DeleteRun",
        run_service_pb2.DeleteRunRequest(run_id=valid_run_id(run_id)),
        run_service_pb2.DeleteRunResponse,
        lambda answer: answer.freed_bytes,
    )


def renew_lease(
    run_id: str, seconds: float
) -> UnaryCall[run_service_pb2.RenewLeaseResponse, RunInfo]:
    """Extend a run's lease."""
    lease = lease_duration(seconds, "lease")
    return UnaryCall(
        "/rheostat.v1.RunService/RenewLease",
        run_service_pb2.RenewLeaseRequest(run_id=valid_run_id(run_id), lease=lease),
        run_service_pb2.RenewLeaseResponse,
        lambda answer: read_run(answer.run),
    )
