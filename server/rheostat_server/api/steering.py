"""SteeringService: stored vectors, and server-wide steering."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from copy import deepcopy
from itertools import islice

from google.protobuf import timestamp_pb2

from rheostat_server import validation
from rheostat_server.admission.global_steering import name_policy_field
from rheostat_server.api.paging import from_token, invalid_token, page_size, to_token
from rheostat_server.api.readiness import Readiness
from rheostat_server.api.rpc import Context
from rheostat_server.derivation.derive import derive_vectors
from rheostat_server.derivation.fit_conditions import fit_conditions
from rheostat_server.derivation.prompt_runner import PromptRunner
from rheostat_server.engine.persistent_vectors import Naming
from rheostat_server.errors import InvalidValue, RheostatError
from rheostat_server.limits import CHUNK_BYTES, ID_BYTES
from rheostat_server.requests.manager import RequestManager
from rheostat_server.vectors.listing import FIRST, Key
from rheostat_server.vectors.store import Entry, Name
from rheostat_server.vectors.upload import Upload, Uploads, check_default_sites, check_label
from rheostat_wire.v1 import steering_service_pb2, steering_service_pb2_grpc

_pb = steering_service_pb2


class SteeringService(steering_service_pb2_grpc.SteeringServiceServicer):
    """Stores, lists, sends and derives vectors."""

    def __init__(self, readiness: Readiness) -> None:
        """A service of the server in this state."""
        self._readiness = readiness
        self._runner = PromptRunner()
        self._uploads = Uploads()

    async def PutVector(
        self,
        request_iterator: AsyncIterator[steering_service_pb2.PutVectorRequest],
        context: Context,
    ) -> steering_service_pb2.PutVectorResponse:
        """Stores one vector."""
        manager = self._readiness.manager()
        arriving = self._uploads.receive(
            request_iterator, manager.sites.width, manager.sites.num_layers, manager.store.capacity
        )
        async with arriving as upload:
            return await _store(upload, manager)

    async def ListVectors(
        self, request: steering_service_pb2.ListVectorsRequest, context: Context
    ) -> steering_service_pb2.ListVectorsResponse:
        """Lists the stored vectors."""
        validation.text_bytes(request.name_prefix, ID_BYTES, "name_prefix")
        store = self._readiness.manager().store
        after = _key(request.page_token) if request.page_token else FIRST
        entries = store.entries(request.name_prefix, after)
        page = list(islice(entries, page_size(request.page_size)))
        more = next(entries, None) is not None
        return _pb.ListVectorsResponse(
            vectors=[_info(entry) for entry in page],
            next_page_token=_token(page[-1]) if more else "",
            used_bytes=store.used_bytes,
            capacity_bytes=store.capacity,
        )

    async def GetVector(
        self, request: steering_service_pb2.GetVectorRequest, context: Context
    ) -> AsyncGenerator[steering_service_pb2.GetVectorResponse, None]:
        """Sends one vector: a header, then chunks."""
        store = self._readiness.manager().store
        kind = validation.required(request.WhichOneof("ref"), "", "digest and name")
        name, digest = request.name, request.digest
        if kind == "name":
            validation.matches(name, validation.VECTOR_NAME, "name")
            digest = store.named(name, "name").digest
        else:
            _check_digest(digest, "digest")
        entry = store.entry(name, digest, kind)
        yield _pb.GetVectorResponse(info=_info(entry))
        data = entry.vector.data
        for start in range(0, len(data), CHUNK_BYTES):
            yield _pb.GetVectorResponse(chunk=data[start : start + CHUNK_BYTES])

    async def SetName(
        self, request: steering_service_pb2.SetNameRequest, context: Context
    ) -> steering_service_pb2.SetNameResponse:
        """Puts a name on a stored vector."""
        manager = self._readiness.manager()
        validation.matches(request.name, validation.VECTOR_NAME, "name")
        _check_digest(request.digest, "digest")
        if request.expected_digest:
            _check_digest(request.expected_digest, "expected_digest")
        check_label("", request.description, "")
        check_default_sites(request.sites, manager.sites.num_layers, "sites")
        naming = Naming(
            digest=request.digest,
            expected=request.expected_digest if request.HasField("expected_digest") else None,
            description=request.description if request.HasField("description") else None,
            # A reference to a part of a message would keep the whole message in memory.
            sites=deepcopy(request.sites) if request.HasField("sites") else None,
        )
        previous = await manager.persistent_vectors.set_name(request.name, naming)
        return _pb.SetNameResponse(previous_digest=previous)

    async def DeleteName(
        self, request: steering_service_pb2.DeleteNameRequest, context: Context
    ) -> steering_service_pb2.DeleteNameResponse:
        """Deletes a name."""
        persistent_vectors = self._readiness.manager().persistent_vectors
        validation.matches(request.name, validation.VECTOR_NAME, "name")
        digest = await persistent_vectors.delete_name(request.name, "name")
        return _pb.DeleteNameResponse(digest=digest)

    def DeriveVectors(
        self, request: steering_service_pb2.DeriveVectorsRequest, context: Context
    ) -> AsyncGenerator[steering_service_pb2.DeriveVectorsResponse, None]:
        """Derives vectors from two sets of prompts."""
        return derive_vectors(request, self._readiness.manager(), self._runner)

    def FitConditions(
        self, request: steering_service_pb2.FitConditionsRequest, context: Context
    ) -> AsyncGenerator[steering_service_pb2.FitConditionsResponse, None]:
        """Fits conditions that tell two sets of prompts apart."""
        return fit_conditions(request, self._readiness.manager(), self._runner)

    async def SetGlobal(
        self, request: steering_service_pb2.SetGlobalRequest, context: Context
    ) -> steering_service_pb2.SetGlobalResponse:
        """Replaces the server-wide steering."""
        expected = request.expected_version if request.HasField("expected_version") else None
        manager = self._readiness.manager()
        try:
            after = await manager.server_wide.set(request.policy, expected)
        except RheostatError as error:
            name_policy_field(error)
            raise
        return _pb.SetGlobalResponse(version=after.version)

    async def GetGlobal(
        self, request: steering_service_pb2.GetGlobalRequest, context: Context
    ) -> steering_service_pb2.GetGlobalResponse:
        """The server-wide steering."""
        current = self._readiness.manager().server_wide.current
        since = None if current.set_time is None else _timestamp(current.set_time)
        return _pb.GetGlobalResponse(policy=current.policy, version=current.version, set_time=since)


async def _store(upload: Upload, manager: RequestManager) -> steering_service_pb2.PutVectorResponse:
    header, vector = upload
    if not header.name:
        existed = await manager.persistent_vectors.put(vector)
        return _pb.PutVectorResponse(digest=vector.digest, existed=existed)
    sites = header.sites if header.HasField("sites") else None
    label = Name(vector.digest, header.description, sites)
    result = await manager.persistent_vectors.put_named(vector, header.name, label)
    return _pb.PutVectorResponse(
        digest=vector.digest, existed=result.existed, previous_digest=result.previous
    )


def _info(entry: Entry) -> steering_service_pb2.VectorInfo:
    label = entry.label
    return _pb.VectorInfo(
        digest=entry.vector.digest,
        name=entry.name,
        dtype=entry.vector.kind.wire,
        shape=[entry.vector.rows, entry.vector.width],
        store_time=_timestamp(entry.store_time),
        request_count=entry.users,
        description="" if label is None else label.description,
        sites=None if label is None else label.sites,
    )


def _check_digest(digest: bytes, path: str) -> None:
    if len(digest) != hashlib.sha256().digest_size:
        raise InvalidValue(f"has {len(digest)} bytes; a digest has 32", field=path)


def _timestamp(moment: float) -> timestamp_pb2.Timestamp:
    return timestamp_pb2.Timestamp(seconds=int(moment), nanos=int(moment % 1 * 1e9))


def _token(last: Entry) -> str:
    return to_token(last.name, last.vector.digest.hex())


def _key(token: str) -> Key:
    """The last entry of the previous page."""
    name, digest = from_token(token, 2)
    try:
        return Key(name, bytes.fromhex(digest))
    except ValueError as error:
        raise invalid_token() from error
