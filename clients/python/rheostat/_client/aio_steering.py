"""The server-wide steering, of the asyncio client.

``tools/generate`` writes the synchronous twin, ``steering.py``, from this module.
"""

from __future__ import annotations

from rheostat._client import calls
from rheostat._client.aio_vectors import Vectors
from rheostat._connection.aio_connection import Connection
from rheostat._steering.global_steering import GlobalSteering, read_global
from rheostat._steering.policy_file import policy_file, policy_vectors
from rheostat._steering.rules import RulesLike
from rheostat._steering.steering import SteeringLike


class Steering:
    """The server-wide steering, which acts on every request. Setting it needs role steer_global."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def set_global(
        self,
        steering: SteeringLike,
        expected_version: int | None = None,
        *,
        rules: RulesLike = None,
    ) -> int:
        """Replace all of it for requests admitted from now on, and return its new version.

        ``rules`` observe, stop or steer every request, and the server logs each firing. ``None`` or
        ``[]`` clears what was set, interventions and rules alike. If another version than
        ``expected_version`` is in force, Refused is raised with reason "REASON_VERSION_CONFLICT";
        ``metadata["version"]`` is the version in force.
        """
        return await self._connection.unary(calls.set_global(steering, expected_version, rules))

    async def get_global(self) -> GlobalSteering:
        """The policy in force. Its interventions and rules can be passed to `set_global`."""
        return await self._connection.unary(calls.get_global(read_global))

    async def export_global(self) -> str:
        """The policy in force, as the text of a file for ``rheostat serve --policy FILE``.

        The text is JSON: the policy with the numbers of its vectors, and its version. So the file
        needs nothing that a restart loses.

        Raises Refused if the policy neither steers nor has rules, or if a vector is too large for
        the file. Raises NotFound if the policy is replaced during the call: call it again.
        """
        answer = await self._connection.unary(calls.get_global(lambda answer: answer))
        limits = (await self._connection.unary(calls.model())).limits
        stored, vectors = Vectors(self._connection), {}
        for digest in policy_vectors(answer.policy):
            vectors[digest] = await stored.get(digest=digest.hex())
        return policy_file(answer, vectors, limits.inline_vector_bytes)

    def __repr__(self) -> str:
        return f"Steering({self._connection.target!r})"
