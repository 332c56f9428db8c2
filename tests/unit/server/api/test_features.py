"""GetModel's features: what is listed is served, and what is not listed is refused by name."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import pytest

from rheostat_wire.v1 import (
    capture_pb2,
    capture_service_pb2,
    engine_service_pb2,
    gain_pb2,
    gate_pb2,
    generation_service_pb2,
    lens_service_pb2,
    matrix_pb2,
    monitor_pb2,
    monitor_service_pb2,
    replace_pb2,
    run_service_pb2,
    steering_pb2,
    steering_service_pb2,
    sweep_pb2,
    sweep_service_pb2,
    types_pb2,
    vector_pb2,
)

from ..conftest import Refusal, Running, rest
from ..fakes import INFO, ScriptedBackend
from ..fakes import SITES as SCRIPTED_SITES
from ..messages import (
    ONES,
    above,
    add,
    along,
    at_post1,
    capture,
    clamp,
    probe,
    request,
    selector,
    site_set,
    tensor,
)
from ..messages import PROMPT as PROMPT_TOKENS
from ..talks import start

Feature = engine_service_pb2.Feature
Use = Callable[[Running], Awaitable[object]]

SITES = site_set(types_pb2.POINT_RESID_POST, layers=[1])
PROMPT = types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=[1, 2]))


def generates(**fields: object) -> Use:
    """A request that uses a feature."""
    return lambda running: running.client.generate(request(**fields), timeout=10)


def captures(**fields: object) -> Use:
    return generates(captures=[capture_pb2.CaptureSpec(sites=SITES, **fields)])


def steers(**fields: object) -> Use:
    return generates(steer=[at_post1(**fields)])


async def session(running: Running, *later: generation_service_pb2.SessionRequest) -> None:
    messages = [start(token_ids=types_pb2.TokenIds(ids=[1, 2]), steer=[add()]), *later]
    if later:
        running.backend.hold = asyncio.Event()  # no update may come after the session's end
    call = running.client.generation.Session(iter(messages), timeout=10)
    while (event := await call.read()) is not grpc.aio.EOF:
        if running.backend.hold and event.WhichOneof("event") in ("applied", "refused"):
            running.backend.hold.set()
        if event.HasField("refused"):
            status = event.refused.status
            raise _Refused(Refusal.of_status(status, grpc.StatusCode.OK, status.message))


class _Refused(Exception):
    """A session refused an update."""


async def subscribe(running: Running) -> None:
    opened = capture_service_pb2.SubscribeOpen(
        filter={"every": {}}, captures=[capture_pb2.CaptureSpec(sites=SITES)], credit_bytes=1 << 20
    )
    call = running.client.capture.Subscribe(timeout=10)
    await call.write(capture_service_pb2.SubscribeRequest(open=opened))
    assert (await call.read()).HasField("opened")
    call.cancel()


async def derive(running: Running) -> None:
    message = steering_service_pb2.DeriveVectorsRequest(
        positive=[PROMPT], negative=[PROMPT], sites=SITES
    )
    await rest(running.client.steering.DeriveVectors(message, timeout=10))


async def fit(running: Running) -> None:
    longer = types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=[1, 2, 3]))
    message = steering_service_pb2.FitConditionsRequest(
        positive=[PROMPT], negative=[longer], sites=SITES
    )
    await rest(running.client.steering.FitConditions(message, timeout=10))


async def watch(running: Running) -> None:
    opened = monitor_service_pb2.WatchOpen(filter={"every": {}}, probes=[probe()])
    messages = [monitor_service_pb2.WatchRequest(open=opened)]
    await rest(running.client.monitor.Watch(iter(messages), timeout=10))


async def move_runs(running: Running) -> None:
    """Every rpc of the feature must be served."""
    pb, stub = run_service_pb2, running.client.runs
    made = await stub.CaptureRun(pb.CaptureRunRequest(prompt=PROMPT, sites=SITES), timeout=10)
    run = (await stub.GetRun(pb.GetRunRequest(run_id=made.run.run_id), timeout=10)).run
    pieces = await rest(stub.ReadRun(pb.ReadRunRequest(run_id=run.run_id), timeout=10))
    header = pb.RunHeader(
        sites=run.sites,
        positions=run.positions,
        prompt_token_ids=run.prompt_token_ids,
        dtype=run.dtype,
    )
    rows = [
        pb.RunRows(sites=one.sites, positions=one.positions, tensor=one.tensor)
        for one in (piece.captured for piece in pieces)
    ]
    messages = [pb.PutRunRequest(header=header), *(pb.PutRunRequest(rows=one) for one in rows)]
    await stub.PutRun(iter(messages), timeout=10)


async def attribute(running: Running) -> None:
    """Every use of the feature must be refused, or none."""
    direction = vector_pb2.TokenDirection(token_id=5)
    ref = vector_pb2.VectorRef(token_direction=direction)
    pb = lens_service_pb2
    for use in (
        lambda: running.client.lens.Attribute(
            pb.AttributeRequest(prompt=PROMPT, direction=direction), timeout=10
        ),
        lambda: generates(captures=[capture(projection=along(ref))])(running),
    ):
        await use()


async def list_runs(running: Running) -> None:
    await captures(run=capture_pb2.RunTarget(run_id="kept"))(running)
    assert len((await running.client.runs.ListRuns(run_service_pb2.ListRunsRequest())).runs) == 1


UNIT = vector_pb2.Readout(vector=tensor(ONES), normalise=vector_pb2.NORMALISE_UNIT)
ELSEWHERE = steering_pb2.Band(read=UNIT, write=tensor(ONES), min=0.0)
MATRIX = capture_pb2.Projection(matrix=matrix_pb2.MatrixRef(name="sae"))
ZEROS = replace_pb2.Replace(zeros=replace_pb2.ZeroSource())
GAIN = generation_service_pb2.SessionRequest(update_id=1, gain=gain_pb2.Gain(factor=0.0))
POLICY = steering_service_pb2.Policy(steering=steering_pb2.Steering(interventions=[add()]))

SWEEP = sweep_service_pb2.SweepRequest(
    pairs=[
        sweep_pb2.SweepPair(
            prompt=PROMPT,
            zeros=replace_pb2.ZeroSource(),
            answer=sweep_pb2.Answer(alternatives=[types_pb2.TokenIds(ids=[1])]),
        )
    ],
    sites=SITES,
    grades=[sweep_pb2.Grade(token=sweep_pb2.TokenGrade(metric=sweep_pb2.METRIC_LOGPROB))],
    priority=sweep_pb2.SWEEP_PRIORITY_NORMAL,  # requests seem to wait in the scripted engine
)

SEEN = {"name": "a", "sites": SITES, "read": vector_pb2.Readout(vector=tensor(ONES))}

USES: dict[str, Use] = {
    "STEERING": generates(steer=[add()]),
    "GLOBAL_STEERING": lambda running: running.client.steering.SetGlobal(
        steering_service_pb2.SetGlobalRequest(policy=POLICY)
    ),
    "SESSIONS": session,
    "BASELINES": generates(with_baseline=True, steer=[add()]),
    "CAPTURE": generates(captures=[capture()]),
    "PROJECTIONS": generates(captures=[capture(projection=along(tensor(ONES)))]),
    "SUBSCRIPTIONS": subscribe,
    "SINKS": captures(sink=capture_pb2.SinkTarget(sink_name="mem")),
    "SPILL": generates(captures=[capture(overload=capture_pb2.OVERLOAD_SPILL)]),
    "RUNS": list_runs,
    "DERIVATION": derive,
    "LORA": generates(lora_name="fables"),
    "REPLACE": steers(replace=ZEROS, where=selector(PROMPT_TOKENS)),
    "READOUTS": generates(steer=[clamp(ELSEWHERE)]),
    "MATRICES": generates(captures=[capture(projection=MATRIX)]),
    "GATES": generates(
        probes=[probe()],
        steer=[at_post1(add=add().add, gate=gate_pb2.Gate(conditions=[above(1.0)]))],
    ),
    "RULES": generates(
        probes=[probe()],
        rules=[monitor_pb2.Rule(name="r", conditions=[above(1.0)], stop=monitor_pb2.Stop())],
    ),
    "GAINS": lambda running: session(running, GAIN),
    "RUN_TRANSFER": move_runs,
    "SWEEPS": lambda running: rest(running.client.sweep.Sweep(SWEEP, timeout=10)),
    "WATCHES": watch,
    "LENS": lambda running: rest(
        running.client.lens.Lens(
            lens_service_pb2.LensRequest(prompt=PROMPT, sites=SITES), timeout=10
        )
    ),
    "TOKEN_DIRECTIONS": attribute,
    "SIGNALS": generates(probes=[gate_pb2.Probe(signals=True, **SEEN)]),
    "CONDITIONS": fit,
    "CONTROLLERS": generates(
        probes=[probe()], steer=[add()], controlled=gain_pb2.Controlled(controller_name="pi")
    ),
}
"""How each feature is used."""

REASONS = {
    "SINKS": "REASON_SINK_NOT_FOUND",
    "LORA": "REASON_LORA_NOT_FOUND",
    "CONTROLLERS": "REASON_CONTROLLER_NOT_FOUND",
}
"""With what a feature that is not there is refused, where it is not the usual reasons."""

USUAL = ("REASON_NOT_SUPPORTED", "REASON_UNIMPLEMENTED")


def test_every_feature_has_a_use_here() -> None:
    assert [f"FEATURE_{name}" for name in USES] == Feature.keys()[1:]


@pytest.fixture(params=["bare", "whole"])
async def either(request, starter, tmp_path, monkeypatch):
    """A server that was started with nothing, and one with everything."""
    if request.param == "whole":
        monkeypatch.setattr("rheostat_server.serve.entry_points", lambda group, name: {name})
        return await starter(sinks=("mem=memory",), spool=str(tmp_path), controllers=("pi",))
    return await starter(
        ScriptedBackend(
            info=replace(INFO, loras=()),
            sites=replace(SCRIPTED_SITES, no_lens="a", no_directions="b"),
        )
    )


async def listed(running: Running) -> list[str]:
    model = await running.client.engine.GetModel(engine_service_pb2.GetModelRequest())
    return [Feature.Name(one).removeprefix("FEATURE_") for one in model.features]


@pytest.mark.parametrize("name", USES)
async def test_what_is_listed_is_served_and_the_rest_is_refused(either, name) -> None:
    if name in await listed(either):
        await USES[name](either)
        return
    with pytest.raises((grpc.aio.AioRpcError, _Refused)) as caught:
        await USES[name](either)
    error = caught.value
    refusal = error.args[0] if isinstance(error, _Refused) else Refusal.of(error)
    assert refusal.reason in ((REASONS[name],) if name in REASONS else USUAL)


async def test_sinks_spools_and_adapters_are_listed_where_they_are(either) -> None:
    optional = {"SINKS", "SPILL", "LORA", "CONTROLLERS"}
    assert optional & {*await listed(either)} in (set(), optional)
    assert {"STEERING", "CAPTURE", "SESSIONS"} <= {*await listed(either)}
