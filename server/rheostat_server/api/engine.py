"""EngineService: the model, statistics, and the end of the server."""

import time

from google.protobuf import duration, duration_pb2

from rheostat_server.api.model_report import report_model
from rheostat_server.api.readiness import Readiness
from rheostat_server.api.rpc import Context
from rheostat_server.engine.backend import WorkerStats
from rheostat_server.errors import InvalidValue
from rheostat_server.requests.manager import RequestManager
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import engine_service_pb2, engine_service_pb2_grpc

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
        return report_model(self._readiness.manager())

    async def GetStats(
        self, request: engine_service_pb2.GetStatsRequest, context: Context
    ) -> engine_service_pb2.GetStatsResponse:
        """Counters and gauges."""
        manager = self._readiness.manager()
        workers = await manager.worker_stats.recent()
        queue = manager.backend.queue_stats()
        counts = manager.counts
        row_bytes = manager.sites.width * FloatType(manager.sites.dtype).itemsize
        return _pb.GetStatsResponse(
            running_request_count=queue.running,
            waiting_request_count=(
                queue.waiting + queue.deferred + manager.admission_queue.waiting
            ),
            requests=_pb.RequestCounts(
                admitted_count=counts.admitted,
                completed_count=counts.completed,
                aborted_count=counts.aborted,
                refused_count=counts.refused,
                failed_count=counts.failed,
            ),
            steps=[
                _pb.VariantSteps(variant=variant, step_count=steps)
                for variant, steps in sorted(workers.steps.items())
            ],
            used_bank_row_count=workers.bank_rows_used,
            bank_row_count=manager.sites.capacity.bank_rows,
            captured_row_count=workers.captured_rows,
            captured_bytes=workers.captured_rows * row_bytes,
            dropped_row_count=manager.deliveries.lost_rows,
            overrun_row_count=workers.lost_rows,
            spooled_row_count=manager.spill_manager.rows if manager.spill_manager else 0,
            prefix_queried_token_count=queue.prefix_queried_token_count,
            prefix_hit_token_count=queue.prefix_hit_token_count,
            subscription_count=len(manager.subscriptions),
            vector_count=len(manager.store),
            run_count=len(manager.runs),
            run_bytes=manager.runs.used_bytes,
            global_version=manager.server_wide.current.version,
            leaked_count=_leaked(manager, workers),
            left_bytes=workers.left_bytes,
            plain_row_count=workers.plain_rows,
            ring_bytes=workers.ring_bytes,
            encode_bytes=workers.encode_bytes,
            staging_bytes=workers.staging_bytes,
            request_buffer_bytes=manager.budget.used,
            subscription_buffer_bytes=manager.subscriptions.used_bytes,
            controllers=[
                _pb.ControllerStats(
                    controller_name=name,
                    call_count=counts.calls,
                    overrun_count=counts.overruns,
                    p50=_duration(counts.p50),
                    p99=_duration(counts.p99),
                    longest=_duration(counts.longest),
                    disabled_reason=counts.disabled,
                )
                for name, counts in sorted(workers.controllers.items())
            ],
            uptime=_duration(time.monotonic() - self._started_at),
        )

    async def Drain(
        self, request: engine_service_pb2.DrainRequest, context: Context
    ) -> engine_service_pb2.DrainResponse:
        """Stops admitting, waits, and ends the server."""
        timeout = None
        if request.HasField("timeout"):
            timeout = request.timeout.seconds + request.timeout.nanos / 1e9
            if timeout < 0:
                raise InvalidValue("may not be negative", field="timeout")
        drained = await self._readiness.drain_and_end(timeout)
        return _pb.DrainResponse(
            finished_request_count=drained.finished, aborted_request_count=drained.aborted
        )


def _duration(seconds: float) -> duration_pb2.Duration:
    return duration.from_nanoseconds(int(seconds * 1e9))


def _leaked(manager: RequestManager, workers: WorkerStats) -> int:
    """Resources that are still reserved although there is no request."""
    if manager.open_requests:
        return 0
    held = manager.ledger.requests + manager.store.pins
    held += manager.runs.unfinished - manager.runs.uploads
    # Unused tables, which workers keep for a while, hold slots that are not leaked.
    slots = 0 if workers.unused_tables else workers.slots_used
    return held + manager.budget.used + slots + workers.requests
