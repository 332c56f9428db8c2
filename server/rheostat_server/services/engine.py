"""EngineService: what this server is, how it fares, and its end."""

import time

from google.protobuf import duration_pb2

from rheostat._proto.v1 import engine_service_pb2, engine_service_pb2_grpc, receipt_pb2
from rheostat_server.engine import EngineHost
from rheostat_server.errors import InvalidValue
from rheostat_server.host import WorkerStats
from rheostat_server.model_report import report_model
from rheostat_server.readiness import Readiness
from rheostat_server.rpc import Context
from rheostat_server.tensors import FloatType

_pb = engine_service_pb2


class EngineService(engine_service_pb2_grpc.EngineServiceServicer):
    """Answers for the engine as a whole."""

    def __init__(self, readiness: Readiness) -> None:
        """A service of the server in this state."""
        self._readiness = readiness
        self._started_at = time.monotonic()

    async def GetModel(
        self, request: engine_service_pb2.GetModelRequest, context: Context
    ) -> engine_service_pb2.GetModelResponse:
        """The model, its sites, limits and versions."""
        return report_model(self._readiness.host())

    async def GetStats(
        self, request: engine_service_pb2.GetStatsRequest, context: Context
    ) -> engine_service_pb2.GetStatsResponse:
        """Counters and gauges."""
        host = self._readiness.host()
        workers = await host.worker_stats.recent()
        queue = host.backend.queue_stats()
        counts = host.counts
        row_bytes = host.sites.width * FloatType(host.sites.dtype).itemsize
        response = _pb.GetStatsResponse(
            running=queue.running,
            waiting=queue.waiting + host.line.waiting,
            requests=_pb.RequestCounts(
                admitted=counts.admitted,
                completed=counts.completed,
                aborted=counts.aborted,
                refused=counts.refused,
                failed=counts.failed,
            ),
            steps=[
                receipt_pb2.VariantSteps(variant=variant, steps=steps)
                for variant, steps in sorted(workers.steps.items())
            ],
            bank_rows_used=workers.bank_rows_used,
            bank_rows=host.sites.capacity.bank_rows,
            captured_rows=workers.captured_rows,
            captured_bytes=workers.captured_rows * row_bytes,
            dropped_rows=host.losses.rows,
            overrun_rows=workers.lost_rows,
            spooled_rows=host.spillway.rows if host.spillway is not None else 0,
            prefix_queried_tokens=queue.prefix_queried_tokens,
            prefix_hit_tokens=queue.prefix_hit_tokens,
            subscriptions=len(host.subscriptions),
            vectors=len(host.store),
            runs=len(host.runs),
            run_bytes=host.runs.used_bytes,
            global_version=host.server_wide.current.version,
            leaked=_leaked(host, workers),
            left_bytes=workers.left_bytes,
            plain_rows=workers.plain_rows,
            ring_bytes=workers.ring_bytes,
            encode_bytes=workers.encode_bytes,
            staging_bytes=workers.staging_bytes,
        )
        response.uptime.FromNanoseconds(int((time.monotonic() - self._started_at) * 1e9))
        return response

    async def Drain(
        self, request: engine_service_pb2.DrainRequest, context: Context
    ) -> engine_service_pb2.DrainResponse:
        """Stops admitting, waits, and ends the server."""
        self._readiness.host()
        timeout = None
        if request.HasField("timeout"):
            timeout = _seconds(request.timeout)
        drained = await self._readiness.drain_and_end(timeout)
        return _pb.DrainResponse(finished=drained.finished, aborted=drained.aborted)


def _seconds(duration: duration_pb2.Duration) -> float:
    seconds = duration.seconds + duration.nanos / 1e9
    if seconds < 0:
        raise InvalidValue("may not be negative", field="timeout")
    return seconds


def _leaked(host: EngineHost, workers: WorkerStats) -> int:
    """What is still held although no request is there to hold it."""
    if host.open_requests:
        return 0
    held = host.ledger.requests + host.store.pins + host.runs.making
    return held + workers.slots_used + workers.requests
