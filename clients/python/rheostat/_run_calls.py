"""The calls about stored runs; see `_calls`."""

from __future__ import annotations

from rheostat._calls import Script, Unary
from rheostat._proto.v1 import patch_pb2, patch_service_pb2
from rheostat._runs import RunInfo, lease_duration, read_run, valid_run_id

_PAGE = 1000


def list_runs() -> Script[patch_service_pb2.ListRunsResponse, list[RunInfo]]:
    """Every run, page by page."""
    found: list[RunInfo] = []
    token = ""
    while True:
        page = yield Unary(
            "/rheostat.v1.PatchService/ListRuns",
            patch_service_pb2.ListRunsRequest(page_size=_PAGE, page_token=token),
            patch_service_pb2.ListRunsResponse,
            lambda answer: answer,
        )
        found.extend(map(read_run, page.runs))
        token = page.next_page_token
        if not token:
            return found


def delete_run(run_id: str) -> Unary[patch_service_pb2.DeleteRunResponse, int]:
    """Delete a run; gives the bytes that became free."""
    return Unary(
        "/rheostat.v1.PatchService/DeleteRun",
        patch_service_pb2.DeleteRunRequest(run_id=valid_run_id(run_id)),
        patch_service_pb2.DeleteRunResponse,
        lambda answer: answer.freed_bytes,
    )


def renew_lease(
    run_id: str, seconds: float
) -> Unary[patch_service_pb2.RenewLeaseResponse, RunInfo]:
    """Extend a run's lease."""
    lease = patch_pb2.Lease(duration=lease_duration(seconds, "lease"))
    return Unary(
        "/rheostat.v1.PatchService/RenewLease",
        patch_service_pb2.RenewLeaseRequest(run_id=valid_run_id(run_id), lease=lease),
        patch_service_pb2.RenewLeaseResponse,
        lambda answer: read_run(answer.run),
    )
