"""SweepService: activation patching over a grid of sites and positions."""

from collections.abc import AsyncGenerator

from rheostat_server.api.readiness import Readiness
from rheostat_server.api.rpc import Context
from rheostat_server.limits import UNREAD_SECONDS
from rheostat_server.sweeps.sweep import Sweeps
from rheostat_server.tasks.interruption import while_read
from rheostat_wire.v1 import sweep_service_pb2, sweep_service_pb2_grpc


class SweepService(sweep_service_pb2_grpc.SweepServiceServicer):
    """Runs sweeps."""

    def __init__(self, readiness: Readiness) -> None:
        """A service of the server in this state."""
        self._readiness = readiness
        self._sweeps = Sweeps()

    def Sweep(  # type: ignore[override]  # `Rpcs` also writes lists of messages
        self, request: sweep_service_pb2.SweepRequest, context: Context
    ) -> AsyncGenerator[list[sweep_service_pb2.SweepResponse], None]:
        """Runs a grid of replacements."""
        events = self._sweeps.sweep(request, self._readiness.manager())
        return while_read(events, UNREAD_SECONDS)
