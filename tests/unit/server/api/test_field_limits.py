"""Every field that a client can make long has a limit, which an error names over the wire."""

import asyncio
import re
from collections.abc import Iterator
from importlib import import_module

import grpc
import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rheostat_server.limits import POINTS
from rheostat_wire.v1 import types_pb2

from ..conftest import Refusal, rest
from ..fakes import ScriptedBackend
from .field_limits import CONTEXT_FIELDS, FIELD_LIMITS, UNSERVED_FIELDS

Code = grpc.StatusCode
SERVICES = {
    name: import_module(f"rheostat_wire.v1.{file}_service_pb2").DESCRIPTOR.services_by_name[name]
    for file, name in (
        ("engine", "EngineService"),
        ("generation", "GenerationService"),
        ("steering", "SteeringService"),
        ("capture", "CaptureService"),
        ("run", "RunService"),
        ("sweep", "SweepService"),
        ("lens", "LensService"),
        ("monitor", "MonitorService"),
    )
}
"""Those that are served."""

SITES = "sites { points: POINT_RESID_POST list { layers: 1 } }"
PROMPT = "token_ids { ids: [10, 11, 12] } sampling { max_tokens: 1 }"
INLINE = "dtype: DTYPE_FLOAT32 shape: [1, 4] encoding: ENCODING_RAW inline: '0123456789abcdef'"
HEADER = "header { dtype: DTYPE_FLOAT32 shape: [1, 4] total_bytes: 16 }"
SITE = "point: POINT_RESID_POST layer: 1"
RUN = (
    f"header {{ dtype: DTYPE_FLOAT32 sites {{ {SITE} }} positions {{ count: 2 }} "
    "prompt_token_ids { ids: [10, 11, 12] } }"
)
TO_RUN = f"{SITES} prompt {{ token_ids {{ ids: [10, 11, 12] }} }}"
TO_CONTRAST = f"{SITES} positive {{ text: 'a' }} negative {{ text: 'b' }}"


ANSWER = "answer { alternatives { ids: 5 } }"
PAIR = (
    "prompt { token_ids { ids: [10, 11, 12] } } corrupt { token_ids { ids: [10, 13, 12] } } "
    f"{ANSWER}"
)
GRID = f"{SITES} grades {{ token {{ metric: METRIC_LOGPROB }} }}"
TO_SWEEP = f"{GRID} pairs {{ {PAIR} }}"
TO_LENS = f"{SITES} prompt {{ token_ids {{ ids: [10, 11, 12] }} }}"
TO_ATTRIBUTE = "prompt { token_ids { ids: [10, 11, 12] } } direction { token_id: 5 }"


def steered(op: str) -> tuple[str, str]:
    return "Generate", f"{PROMPT} steering {{ interventions {{ {SITES} {op} }} }}"


def replaced(source: str) -> tuple[str, str]:
    return steered(f"where {{ include {{ positions {{}} }} }} replace {{ {source} }}")


def captured(to: str, more: str = "") -> tuple[str, str]:
    return "Generate", f"{PROMPT} captures {{ {SITES} {to} {more} }}"


def subscribed(fields: str) -> tuple[str, str]:
    return "Subscribe", f"open {{ {fields} }}"


def watched(fields: str) -> tuple[str, str]:
    return "Watch", f"open {{ filter {{ every {{}} }} {fields} }}"


RULED = ("Generate", f"{PROMPT} rules {{ name: 'a' observe {{}} }}")
ADD = steered("add { vector { name: 'v' } }")
EVERY = f"filter {{ every {{}} }} captures {{ {SITES} }}"
WHERE = "include { positions {} }"

CASES: dict[str, tuple[tuple[str, str], str]] = {
    "Ablate.directions": (steered("ablate {}"), "steering.interventions.ablate.directions"),
    "Answer.alternatives": (("Sweep", TO_SWEEP), "pairs.answer.alternatives"),
    "AttributeRequest.lora_name": (("Attribute", TO_ATTRIBUTE), "lora_name"),
    "CaptureRunRequest.labels": (("CaptureRun", TO_RUN), "labels"),
    "CaptureRunRequest.lora_name": (("CaptureRun", TO_RUN), "lora_name"),
    "CaptureRunRequest.run_id": (("CaptureRun", TO_RUN), "run_id"),
    "CaptureSpec.subscription_id": (captured(""), "captures.subscription_id"),
    "Chat.messages": (("Generate", "chat {}"), "chat.messages"),
    "Chat.template_variables": (
        ("Generate", "chat { messages { role: 'user' content: 'a' } }"),
        "chat.template_variables",
    ),
    "ChatMessage.role": (("Generate", "chat { messages { content: 'a' } }"), "chat.messages.role"),
    "Clamp.bands": (steered("clamp {}"), "steering.interventions.clamp.bands"),
    "Condition.probe_name": (
        steered(f"add {{ vector {{ inline {{ {INLINE} }} }} }} gate {{ conditions {{}} }}"),
        "steering.interventions.gate.conditions.probe_name",
    ),
    "Controlled.controller_name": (
        ("Generate", f"{PROMPT} controlled {{}}"),
        "controlled.controller_name",
    ),
    "DeleteNameRequest.name": (("DeleteName", ""), "name"),
    "DeleteRunRequest.run_id": (("DeleteRun", ""), "run_id"),
    "DeriveVectorsRequest.description": (("DeriveVectors", TO_CONTRAST), "description"),
    "DeriveVectorsRequest.lora_name": (("DeriveVectors", TO_CONTRAST), "lora_name"),
    "DeriveVectorsRequest.name": (("DeriveVectors", TO_CONTRAST), "name"),
    "DeriveVectorsRequest.negative": (("DeriveVectors", TO_CONTRAST), "negative"),
    "DeriveVectorsRequest.positive": (("DeriveVectors", TO_CONTRAST), "positive"),
    "Dimensions.dimensions": (
        replaced("zeros {} mask { dimensions {} }"),
        "steering.interventions.replace.mask.dimensions.dimensions",
    ),
    "FitConditionsRequest.description": (("FitConditions", TO_CONTRAST), "description"),
    "FitConditionsRequest.directions": (("FitConditions", TO_CONTRAST), "directions"),
    "FitConditionsRequest.lora_name": (("FitConditions", TO_CONTRAST), "lora_name"),
    "FitConditionsRequest.name": (("FitConditions", TO_CONTRAST), "name"),
    "FitConditionsRequest.negative": (("FitConditions", TO_CONTRAST), "negative"),
    "FitConditionsRequest.normalises": (("FitConditions", TO_CONTRAST), "normalises"),
    "FitConditionsRequest.pools": (("FitConditions", TO_CONTRAST), "pools"),
    "FitConditionsRequest.positive": (("FitConditions", TO_CONTRAST), "positive"),
    "FitConditionsRequest.rows": (("FitConditions", TO_CONTRAST), "rows"),
    "FitConditionsRequest.vectors": (("FitConditions", TO_CONTRAST), "vectors"),
    "Gate.conditions": (
        steered(f"add {{ vector {{ inline {{ {INLINE} }} }} }} gate {{}}"),
        "steering.interventions.gate.conditions",
    ),
    "GenerateRequest.captures": (("Generate", PROMPT), "captures"),
    "GenerateRequest.labels": (("Generate", PROMPT), "labels"),
    "GenerateRequest.lora_name": (("Generate", PROMPT), "lora_name"),
    "GenerateRequest.probes": (("Generate", PROMPT), "probes"),
    "GenerateRequest.request_id": (("Generate", PROMPT), "request_id"),
    "GetArtifactsRequest.page_token": (("GetArtifacts", "request_id: 'a'"), "page_token"),
    "GetArtifactsRequest.request_id": (("GetArtifacts", ""), "request_id"),
    "GetArtifactsRequest.sink_name": (("GetArtifacts", "request_id: 'a'"), "sink_name"),
    "GetRunRequest.run_id": (("GetRun", ""), "run_id"),
    "GetVectorRequest.digest": (("GetVector", ""), "digest"),
    "GetVectorRequest.name": (("GetVector", ""), "name"),
    "Labels.labels": (subscribed(f"captures {{ {SITES} }}"), "open.filter.labels.labels"),
    "LayerList.layers": (
        steered("add { vector { name: 'v' } }"),
        "steering.interventions.sites.list.layers",
    ),
    "LensRequest.lora_name": (("Lens", TO_LENS), "lora_name"),
    "LensRequest.run_id": (("Lens", ""), "run_id"),
    "LensRequest.token_ids": (("Lens", TO_LENS), "token_ids"),
    "ListRunsRequest.page_token": (("ListRuns", ""), "page_token"),
    "ListSinksRequest.page_token": (("ListSinks", ""), "page_token"),
    "ListVectorsRequest.name_prefix": (("ListVectors", ""), "name_prefix"),
    "ListVectorsRequest.page_token": (("ListVectors", ""), "page_token"),
    "MeanSource.run_id": (replaced("mean {}"), "steering.interventions.replace.mean.run_id"),
    "Policy.probes": (("SetGlobal", "policy {}"), "policy.probes"),
    "PositionList.positions": (("ReadRun", "run_id: 'kept'"), "positions.positions"),
    "Probe.name": (("Generate", PROMPT), "probes.name"),
    "PutVectorRequest.chunk": (("PutVector", HEADER), "chunk"),
    "ReadRunRequest.run_id": (("ReadRun", ""), "run_id"),
    "ReadoutList.readouts": (captured("inline {}"), "captures.projection.readouts.readouts"),
    "RenewLeaseRequest.run_id": (("RenewLease", ""), "run_id"),
    "RequestIds.request_ids": (
        subscribed(f"captures {{ {SITES} }}"),
        "open.filter.requests.request_ids",
    ),
    "ResumePoint.subscription_id": (("Subscribe", "open {}"), "open.resume.subscription_id"),
    "RunHeader.labels": (("PutRun", RUN), "header.labels"),
    "RunHeader.positions": (("PutRun", RUN), "header.positions"),
    "RunHeader.run_id": (("PutRun", RUN), "header.run_id"),
    "RunHeader.sites": (("PutRun", RUN), "header.sites"),
    "RunHeader.token_ids": (("PutRun", RUN), "header.token_ids"),
    "RunRows.positions": (("PutRun", RUN), "rows.positions"),
    "RunRows.sites": (("PutRun", RUN), "rows.sites"),
    "RunSource.run_id": (replaced("run {}"), "steering.interventions.replace.run.run_id"),
    "RunTarget.run_id": (captured("run {}"), "captures.run.run_id"),
    "Sampling.stop": (("Generate", PROMPT), "sampling.stop"),
    "Sampling.stop_token_ids": (("Generate", PROMPT), "sampling.stop_token_ids"),
    "Selector.exclude": (
        steered(f"add {{ vector {{ name: 'v' }} }} where {{ {WHERE} }}"),
        "steering.interventions.where.exclude",
    ),
    "Selector.include": (ADD, "steering.interventions.where.include"),
    "SetNameRequest.description": (
        ("SetName", f"name: 'v' digest: '{'d' * 32}'"),
        "description",
    ),
    "SetNameRequest.digest": (("SetName", "name: 'v'"), "digest"),
    "SetNameRequest.expected_digest": (
        ("SetName", f"name: 'v' digest: '{'d' * 32}'"),
        "expected_digest",
    ),
    "SetNameRequest.name": (("SetName", f"digest: '{'d' * 32}'"), "name"),
    "SharedMemoryProof.nonce": (("Subscribe", f"open {{ {EVERY} }}"), "proof.nonce"),
    "SinkTarget.options": (captured("sink { sink_name: 'disk' }"), "captures.sink.options"),
    "SinkTarget.sink_name": (captured("sink {}"), "captures.sink.sink_name"),
    "SinkTarget.tag": (captured("sink { sink_name: 'disk' }"), "captures.sink.tag"),
    "SiteSet.points": (
        ("Generate", f"{PROMPT} captures {{ sites {{ all {{}} }} inline {{}} }}"),
        "captures.sites.points",
    ),
    "Span.text": (ADD, "steering.interventions.where.include.text.text"),
    "Steering.interventions": (("Generate", PROMPT), "steering.interventions"),
    "SubscribeOpen.captures": (subscribed("filter { every {} }"), "open.captures"),
    "SubscribeOpen.namespace": (subscribed(EVERY), "open.namespace"),
    "SweepPair.groups": (("Sweep", TO_SWEEP), "pairs.groups"),
    "SweepPair.label": (("Sweep", TO_SWEEP), "pairs.label"),
    "SweepPair.run_id": (
        ("Sweep", f"{GRID} pairs {{ prompt {{ token_ids {{ ids: 10 }} }} {ANSWER} }}"),
        "pairs.run_id",
    ),
    "SweepRequest.done": (("Sweep", TO_SWEEP), "done"),
    "SweepRequest.done_values": (("Sweep", TO_SWEEP), "done_values"),
    "GenerateRequest.rules": (("Generate", PROMPT), "rules"),
    "Rule.conditions": (RULED, "rules.conditions"),
    "Rule.name": (("Generate", f"{PROMPT} rules {{ observe {{}} }}"), "rules.name"),
    "Stop.label": (("Generate", f"{PROMPT} rules {{ name: 'a' stop {{}} }}"), "rules.stop.label"),
    "SweepRequest.grades": (("Sweep", TO_SWEEP), "grades"),
    "SweepRequest.group_labels": (("Sweep", TO_SWEEP), "group_labels"),
    "SweepRequest.lora_name": (("Sweep", TO_SWEEP), "lora_name"),
    "SweepRequest.pairs": (("Sweep", TO_SWEEP), "pairs"),
    "SweepRequest.request_id": (("Sweep", TO_SWEEP), "request_id"),
    "Tensor.inline": (
        steered(f"add {{ vector {{ inline {{ {INLINE} }} }} }}"),
        "steering.interventions.add.vector.inline.inline",
    ),
    "Tensor.shape": (
        steered(f"add {{ vector {{ inline {{ {INLINE} }} }} }}"),
        "steering.interventions.add.vector.inline.shape",
    ),
    "TokenIds.ids": (ADD, "steering.interventions.where.include.token_ids.ids"),
    "WatchOpen.probes": (watched("probes {}"), "open.probes"),
    "WatchOpen.rules": (watched("probes {} rules {}"), "open.rules"),
    "WatchResume.watch_id": (("Watch", "open { resume {} }"), "open.resume.watch_id"),
    "VectorHeader.description": (("PutVector", HEADER), "header.description"),
    "VectorHeader.digest": (("PutVector", HEADER), "header.digest"),
    "VectorHeader.name": (("PutVector", HEADER), "header.name"),
    "VectorHeader.shape": (("PutVector", HEADER), "header.shape"),
    "VectorRef.digest": (steered("add {}"), "steering.interventions.add.vector.digest"),
    "VectorRef.name": (steered("add {}"), "steering.interventions.add.vector.name"),
}
"""For each field an rpc, a request in protobuf's text format, and the field's path in it."""

CONTEXT_CASES: dict[str, tuple[tuple[str, str], str]] = {
    "ChatMessage.content": (
        ("Generate", "chat { messages { role: 'user' } }"),
        "chat.messages.content",
    ),
    "GenerateRequest.text": (("Generate", ""), "text"),
    "Prompt.text": (("DeriveVectors", f"{SITES} negative {{ text: 'b' }}"), "positive.text"),
    "TokenizeRequest.text": (("Tokenize", ""), "text"),
}


def short(field: FieldDescriptor) -> str:
    return field.full_name.removeprefix("rheostat.v1.")


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def is_long(field: FieldDescriptor) -> bool:
    """Whether a client can make it long."""
    texts = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return field.is_repeated or field.type in texts


def long_fields(descriptor: Descriptor, seen: set[str]) -> Iterator[str]:
    """Those of a message and of all that it holds, but for what is not served."""
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        if short(field) in UNSERVED_FIELDS:
            continue
        if is_long(field):
            yield short(field)
        if field.message_type is not None and not is_map(field):
            yield from long_fields(field.message_type, seen)


def test_every_field_that_can_be_long_has_a_limit() -> None:
    seen: set[str] = set()
    found = {
        name
        for service in SERVICES.values()
        for method in service.methods
        for name in long_fields(method.input_type, seen)
    }
    assert found == {*FIELD_LIMITS, *CONTEXT_FIELDS}
    # Sessions and watches answer these with UpdateRefused, and go on.
    answered = {"Gain.interventions", "WatchSteer.request_id"}
    answered |= {"WatchStop.label", "WatchStop.request_id"}
    later = {"WatchSteerBatch.steers"}  # not allowed in the first message; see test_watch_gains
    assert set(FIELD_LIMITS) == {*CASES, *answered, *later}
    assert set(CONTEXT_FIELDS) == set(CONTEXT_CASES)


def method_of(rpc: str) -> tuple[str, object]:
    """Its path, and its descriptor."""
    for service in SERVICES.values():
        for method in service.methods:
            if method.name == rpc:
                return f"/{service.full_name}/{rpc}", method
    raise AssertionError(rpc)


def put(message: Message, path: list[str], count: int) -> None:
    """Gives the field at a path so many elements, entries, characters or bytes."""
    name, *below = path
    field = message.DESCRIPTOR.fields_by_name[name]
    if below:
        inner = getattr(message, name)
        if field.is_repeated:
            inner = inner[0] if len(inner) else inner.add()
        inner.SetInParent()
        put(inner, below, count)
    elif is_map(field):
        for number in range(count):
            getattr(message, name)[f"k{number}"] = "v"
    elif field.message_type is not None:
        for _ in range(count):
            getattr(message, name).add()
    elif field.is_repeated:
        text = field.type == FieldDescriptor.TYPE_STRING
        del getattr(message, name)[:]
        getattr(message, name).extend(f"i{n}" if text else n % 2 + 1 for n in range(count))
    else:
        setattr(message, name, "x" * count if field.type != field.TYPE_BYTES else b"x" * count)


async def refusal_of(running, rpc: str, base: str, path: str, count: int) -> Refusal:
    """How a request with so much in a field is refused."""
    messages = [parsed(rpc, base)]
    streamed = method_of(rpc)[1].client_streaming
    if streamed and path.partition(".")[0] in ("chunk", "proof", "rows"):  # a later message
        messages.append(parsed(rpc, ""))
    put(messages[-1], path.split("."), count)
    return await refused(running, rpc, *messages)


def parsed(rpc: str, text: str) -> Message:
    """A request of an rpc."""
    return text_format.Parse(text, GetMessageClass(method_of(rpc)[1].input_type)())


async def refused(running, rpc: str, *messages: Message | str) -> Refusal:
    """How a call with these messages fails."""
    target, _ = method_of(rpc)
    requests = [parsed(rpc, one) if isinstance(one, str) else one for one in messages]
    call = running.client.channel.stream_stream(target)(
        iter([one.SerializeToString() for one in requests]), timeout=60
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return Refusal.of(caught.value)


def says(message: str, limit: int) -> bool:
    """Whether a message has the number."""
    return str(limit) in re.findall(r"\d+", message)


@pytest.mark.parametrize("name", sorted(CASES))
async def test_one_more_than_the_limit_is_refused_by_field_and_limit(
    starter, tmp_path, name: str
) -> None:
    running = await starter(sinks=(f"disk=filesystem:root={tmp_path}",))
    kept = parsed("CaptureRun", f"{TO_RUN} run_id: 'kept'")
    await running.client.runs.CaptureRun(kept)
    (rpc, base), path = CASES[name]
    refusal = await refusal_of(running, rpc, base, path, FIELD_LIMITS[name] + 1)
    assert refusal.code in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED), refusal
    assert re.sub(r"\[[^]]*\]", "", refusal.field) in (path, path.rpartition(".")[0]), refusal
    assert says(refusal.message, FIELD_LIMITS[name]), refusal


@pytest.mark.parametrize("name", sorted(CONTEXT_CASES))
async def test_a_text_that_no_context_holds_is_refused(running, name: str) -> None:
    (rpc, base), path = CONTEXT_CASES[name]
    refusal = await refusal_of(running, rpc, base, path, 2000)
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "REASON_PROMPT_TOO_LONG")
    assert says(refusal.message, 1024) or says(refusal.message, 64), refusal


UNSERVED_CASES = {
    "Policy.rules": ("SetGlobal", "policy { rules {} }"),
    "Projection.matrix": captured("inline {}", "projection { matrix {} }"),
    "Tensor.artifact": steered(
        "add { vector { inline { dtype: DTYPE_FLOAT32 shape: [1, 4] encoding: ENCODING_RAW "
        "artifact {} } } }"
    ),
    "Tensor.shm": steered(
        "add { vector { inline { dtype: DTYPE_FLOAT32 shape: [1, 4] encoding: ENCODING_RAW "
        "shm {} } } }"
    ),
}


def test_every_unserved_field_is_tried() -> None:
    assert set(UNSERVED_CASES) == UNSERVED_FIELDS


@pytest.mark.parametrize("name", sorted(UNSERVED_CASES))
async def test_what_is_not_served_is_refused_whatever_it_holds(running, name: str) -> None:
    rpc, base = UNSERVED_CASES[name]
    refusal = await refused(running, rpc, base)
    assert refusal.code in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION), refusal
    assert refusal.field, refusal


async def test_a_gain_of_too_many_is_refused_by_limit_and_the_session_goes_on(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    call = running.client.generation.Session()
    await call.write(parsed("Session", f"start {{ {PROMPT} }}"))
    gain = parsed("Session", "update_id: 1 gain { factor: 1 }")
    put(gain, ["gain", "interventions"], 100_000)
    await call.write(gain)
    while not (event := await call.read()).HasField("refused"):
        pass
    assert event.refused.status.code == Code.INVALID_ARGUMENT.value[0]
    assert says(event.refused.status.message, FIELD_LIMITS["Gain.interventions"])
    running.backend.hold.set()
    assert (await rest(call))[-1].HasField("receipt")


def test_there_are_as_many_points_as_the_limit_says() -> None:
    assert len(types_pb2.Point.values()) - 1 == POINTS
