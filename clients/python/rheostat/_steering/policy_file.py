"""The server-wide policy as the text of a file, which ``rheostat serve --policy`` enforces.

The server's answer names vectors by digest. Stored vectors may be lost when the server ends, so the
file has their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from google.protobuf import json_format
from google.protobuf.message import Message

from rheostat._errors import Refused
from rheostat._steering.vectors import Vector
from rheostat_wire.nested_messages import nested_messages
from rheostat_wire.v1 import steering_service_pb2, vector_pb2


def policy_vectors(policy: steering_service_pb2.Policy) -> tuple[bytes, ...]:
    """The digests of a policy's vectors, each once."""
    return tuple(dict.fromkeys(ref.digest for ref in _digest_refs(policy)))


def policy_file(
    answer: steering_service_pb2.GetGlobalResponse,
    vectors: Mapping[bytes, Vector],
    inline_bytes: int,
) -> str:
    """The text of a policy file: JSON of the message, without its time.

    ``vectors`` are those of `policy_vectors` with their numbers, by digest, and ``inline_bytes`` is
    the server's limit for each. Raises Refused if there is nothing to enforce, or if a vector is
    above the limit.
    """
    if not (answer.policy.steering.interventions or answer.policy.rules):
        raise Refused(
            f"version {answer.version} of the policy has no interventions and no rules, so there "
            "is nothing to export: set a policy first"
        )
    message = steering_service_pb2.GetGlobalResponse()
    message.CopyFrom(answer)
    message.ClearField("set_time")
    for ref in _digest_refs(message.policy):
        rows = vectors[ref.digest].rows
        assert rows is not None  # because the vector was downloaded
        if len(rows.data) > inline_bytes:
            raise Refused(
                f"vector {ref.digest.hex()[:12]} has {len(rows.data)} bytes; a policy file takes "
                f"{inline_bytes} for each. Use its rows of some layers (select), or write the file "
                "with the vector's name, and start the server with a --vector-dir that has it"
            )
        ref.inline.CopyFrom(rows.to_tensor())
    return json_format.MessageToJson(message) + "\n"


def _digest_refs(message: Message) -> Iterator[vector_pb2.VectorRef]:
    """The references by digest in a message, at any depth."""
    for ref in nested_messages(message, vector_pb2.VectorRef):
        if ref.WhichOneof("ref") == "digest":
            yield ref
