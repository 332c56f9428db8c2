"""LensService: the model's final norm and unembedding, applied to rows of a prompt."""

from collections.abc import AsyncGenerator

from rheostat_server.api.readiness import Readiness
from rheostat_server.api.rpc import Context
from rheostat_server.derivation.attribution import attribute
from rheostat_server.derivation.lens import Lenses
from rheostat_server.limits import UNREAD_SECONDS
from rheostat_server.tasks.interruption import while_read
from rheostat_wire.v1 import lens_service_pb2, lens_service_pb2_grpc


class LensService(lens_service_pb2_grpc.LensServiceServicer):
    """Reads rows, and takes logits apart."""

    def __init__(self, readiness: Readiness) -> None:
        """A service of the server in this state."""
        self._readiness = readiness
        self._lenses = Lenses()

    def Lens(
        self, request: lens_service_pb2.LensRequest, context: Context
    ) -> AsyncGenerator[lens_service_pb2.LensResponse, None]:
        """Reads the rows of a prompt."""
        responses = self._lenses.lens(request, self._readiness.manager())
        return while_read(responses, UNREAD_SECONDS)

    async def Attribute(
        self, request: lens_service_pb2.AttributeRequest, context: Context
    ) -> lens_service_pb2.AttributeResponse:
        """Takes the logit of the token after a prompt apart."""
        return await attribute(request, self._readiness.manager())
