"""The limit of every field of a request that a client can make long.

Why a table: what has no limit lets one client hold up the others. A test walks the descriptors of
all requests, and fails for a field that stands in none of the tables below. It also sends one more
than each limit allows. The checks themselves stand where the fields are read.
"""

from collections.abc import Mapping

from rheostat_server.limits import (
    CAPTURES,
    CHAT_MESSAGES,
    CHUNK_BYTES,
    DERIVED_PROMPTS,
    DIGEST_BYTES,
    DIRECTIONS,
    ID_BYTES,
    INLINE_VECTOR_BYTES,
    INTERVENTIONS,
    LABELS,
    LAYERS,
    NAME_DESCRIPTION_BYTES,
    PAGE_TOKEN_BYTES,
    POINTS,
    PROJECTIONS,
    RANGE_TOKEN_IDS,
    RANGES,
    SINK_OPTIONS,
    SPAN_BYTES,
    STOP_TEXTS,
    STOP_TOKEN_IDS,
    SUBSCRIBED_REQUESTS,
    TEMPLATE_VARIABLES,
    TENSOR_RANK,
)

FIELD_LIMITS: Mapping[str, int] = {
    "Ablate.directions": DIRECTIONS,
    "CaptureSpec.subscription_id": ID_BYTES,
    "Chat.messages": CHAT_MESSAGES,
    "Chat.template_variables": TEMPLATE_VARIABLES,
    "ChatMessage.role": ID_BYTES,
    "Clamp.bands": DIRECTIONS,
    "DeleteNameRequest.name": ID_BYTES,
    "DeleteRunRequest.run_id": ID_BYTES,
    "DeriveVectorsRequest.description": NAME_DESCRIPTION_BYTES,
    "DeriveVectorsRequest.lora_name": ID_BYTES,
    "DeriveVectorsRequest.name": ID_BYTES,
    "DeriveVectorsRequest.negative": DERIVED_PROMPTS,
    "DeriveVectorsRequest.positive": DERIVED_PROMPTS,
    "GenerateRequest.captures": CAPTURES,
    "GenerateRequest.labels": LABELS,
    "GenerateRequest.lora_name": ID_BYTES,
    "GenerateRequest.request_id": ID_BYTES,
    "GetArtifactsRequest.page_token": PAGE_TOKEN_BYTES,
    "GetArtifactsRequest.request_id": ID_BYTES,
    "GetArtifactsRequest.sink_name": ID_BYTES,
    "GetVectorRequest.digest": DIGEST_BYTES,
    "GetVectorRequest.name": ID_BYTES,
    "Labels.labels": LABELS,
    "LayerList.layers": LAYERS,
    "ListRunsRequest.page_token": PAGE_TOKEN_BYTES,
    "ListSinksRequest.page_token": PAGE_TOKEN_BYTES,
    "ListVectorsRequest.name_prefix": ID_BYTES,
    "ListVectorsRequest.page_token": PAGE_TOKEN_BYTES,
    "PutVectorRequest.chunk": CHUNK_BYTES,
    "ReadoutList.readouts": PROJECTIONS,
    "RenewLeaseRequest.run_id": ID_BYTES,
    "RequestIds.request_ids": SUBSCRIBED_REQUESTS,
    "ResumePoint.subscription_id": ID_BYTES,
    "RunTarget.run_id": ID_BYTES,
    "Sampling.stop": STOP_TEXTS,
    "Sampling.stop_token_ids": STOP_TOKEN_IDS,
    "Selector.exclude": RANGES,
    "Selector.include": RANGES,
    "SetNameRequest.description": NAME_DESCRIPTION_BYTES,
    "SetNameRequest.digest": DIGEST_BYTES,
    "SetNameRequest.expected_digest": DIGEST_BYTES,
    "SetNameRequest.name": ID_BYTES,
    "SharedMemoryProof.nonce": ID_BYTES,
    "SinkTarget.options": SINK_OPTIONS,
    "SinkTarget.sink_name": ID_BYTES,
    "SinkTarget.tag": ID_BYTES,
    "SiteSet.points": POINTS,
    "Span.text": SPAN_BYTES,
    "Steering.interventions": INTERVENTIONS,
    "SubscribeOpen.captures": CAPTURES,
    "SubscribeOpen.namespace": ID_BYTES,
    "Tensor.inline": INLINE_VECTOR_BYTES,
    "Tensor.shape": TENSOR_RANK,
    "TokenIds.ids": RANGE_TOKEN_IDS,
    "VectorHeader.description": NAME_DESCRIPTION_BYTES,
    "VectorHeader.digest": DIGEST_BYTES,
    "VectorHeader.name": ID_BYTES,
    "VectorHeader.shape": TENSOR_RANK,
    "VectorRef.digest": DIGEST_BYTES,
    "VectorRef.name": ID_BYTES,
}
"""Most elements, entries, or bytes."""

CONTEXT_FIELDS: frozenset[str] = frozenset(
    {"ChatMessage.content", "GenerateRequest.text", "Prompt.text", "TokenizeRequest.text"}
)
"""Texts. A server takes `PROMPT_TOKEN_BYTES` of them for each token of its context."""

UNSERVED_FIELDS: frozenset[str] = frozenset(
    {
        "GenerateRequest.probes",
        "GenerateRequest.rules",
        "Intervention.gate",
        "Intervention.replace",
        "Policy.probes",
        "Policy.rules",
        "Projection.matrix",
        "SessionRequest.gain",
        "Tensor.artifact",
        "Tensor.shm",
    }
)
"""Fields with which a request is refused by name, whatever they hold."""
