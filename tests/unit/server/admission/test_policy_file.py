"""The file of `--policy`: it is in force before the first request, or the server does not start."""

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2

from rheostat_server.admission.policy_file import read_policy
from rheostat_server.config import ServerConfig
from rheostat_server.errors import EngineFailed, EngineLost, PolicyFailed
from rheostat_server.serve import RunningServer, run
from rheostat_wire.v1 import (
    monitor_pb2,
    steering_pb2,
    steering_service_pb2,
    types_pb2,
    vector_pb2,
)

from ..conftest import FRONT_ENDS, Client
from ..fakes import INFO, PARALLEL, UNEMBEDDING, ScriptedBackend, sites_with
from ..messages import ONES, above, add, at_post1, clamp, probe, request, site_set
from ..uploads import chunk, digest, header, put, values

pb = steering_service_pb2
NAMED = vector_pb2.VectorRef(name="joy")


def policy(*steer: steering_pb2.Intervention, **fields: object) -> steering_service_pb2.Policy:
    steering = steering_pb2.Steering(interventions=steer or [add(scale=3.0)])
    return pb.Policy(steering=steering, **fields)


def with_rule(**fields: object) -> steering_service_pb2.Policy:
    rule = monitor_pb2.Rule(name="grim", conditions=[above(1.0)], stop=monitor_pb2.Stop())
    return policy(probes=[probe(**fields)], rules=[rule])


def write(folder: Path, content: steering_service_pb2.Policy | str, version: int = 7) -> str:
    """The path of a policy file."""
    path = folder / "policy.json"
    if not isinstance(content, str):
        content = json_format.MessageToJson(pb.GetGlobalResponse(policy=content, version=version))
    path.write_text(content)
    return str(path)


async def in_force(client: Client) -> steering_service_pb2.GetGlobalResponse:
    return await client.steering.GetGlobal(pb.GetGlobalRequest())


@pytest.mark.parametrize("front_ends", [0, 2])
async def test_the_first_request_runs_under_the_policy_and_shows_the_version_of_the_file(
    starter, tmp_path, front_ends
) -> None:
    backend = ScriptedBackend(openness=lambda gate, position: float(position == 3))
    running = await starter(
        backend, policy=write(tmp_path, with_rule()), front_ends=front_ends or FRONT_ENDS
    )
    events = await running.client.generate(request())
    finished = next(one.finished for one in events if one.HasField("finished"))
    receipt = events[-1].receipt
    assert (finished.reason, finished.policy_version) == (types_pb2.FINISH_REASON_RULE, 7)
    assert receipt.global_version == 7
    assert [one.rule_name for one in receipt.rules if one.server_wide] == ["grim"]
    assert running.backend.jobs[0].plan.acts[0].scale == 3.0
    answer = await in_force(running.client)
    (steer,) = answer.policy.steering.interventions
    assert (answer.version, steer.add.vector.digest) == (7, digest(ONES.tobytes()))
    assert answer.HasField("set_time")


async def test_no_request_is_served_before_the_policy_is_in_force(tmp_path) -> None:
    backend = ScriptedBackend(loading=asyncio.Event())

    async def bring_up(_: ServerConfig) -> ScriptedBackend:
        return backend

    config = {"model": "toy", "port": 0, "front_ends": FRONT_ENDS}
    server = RunningServer(ServerConfig(policy=write(tmp_path, policy()), **config))
    await server.bind()
    loading = asyncio.create_task(server.load(bring_up))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        client = Client(channel)
        await asyncio.sleep(0.2)
        health = await client.health.Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await client.refusal(request())).reason == "REASON_WARMING_UP"
        backend.loading.set()
        await loading
        events = await client.generate(request())
        assert events[-1].receipt.global_version == 7
    await server.stop(0)


async def test_a_policy_that_a_client_sets_replaces_that_of_the_file_until_a_restart(
    starter, tmp_path, caplog
) -> None:
    caplog.set_level(logging.INFO, "rheostat_server")
    path = write(tmp_path, policy())
    content = Path(path).read_text()
    running = await starter(policy=path)
    assert f"version 7 of --policy {path} is in force" in caplog.text
    set_request = pb.SetGlobalRequest(policy=policy(add(scale=5.0)), expected_version=7)
    assert (await running.client.steering.SetGlobal(set_request)).version == 8
    assert (await running.client.generate(request()))[-1].receipt.global_version == 8
    (line,) = [one for one in caplog.records if "replaces" in one.getMessage()]
    assert line.levelno == logging.WARNING
    assert line.getMessage() == (
        f"server-wide steering: version 8 replaces version 7 of --policy {path}, which a restart "
        "of the server puts in force again"
    )
    assert Path(path).read_text() == content
    await running.server.stop(0)
    again = await starter(policy=path)
    answer = await in_force(again.client)
    (steer,) = answer.policy.steering.interventions
    assert (answer.version, steer.add.scale) == (7, 3.0)


async def test_directions_of_tokens_are_computed_at_the_start(starter, tmp_path) -> None:
    token = vector_pb2.VectorRef(token_direction=vector_pb2.TokenDirection(token_id=5))
    running = await starter(policy=write(tmp_path, policy(add(token))))
    (steer,) = (await in_force(running.client)).policy.steering.interventions
    expected = UNEMBEDDING[5:6].astype("<f4").tobytes()
    assert steer.add.vector.digest == digest(expected)


async def test_names_and_digests_are_those_of_the_folder_of_vectors(starter, tmp_path) -> None:
    folder = str(tmp_path / "vectors")
    first = await starter(vector_dir=folder)
    await put(first.client, header(name="joy"), chunk(values(2.0)))
    await first.server.stop(0)
    stored = vector_pb2.VectorRef(digest=digest(values(2.0)))
    path = write(tmp_path, policy(add(NAMED), add(stored)))
    running = await starter(vector_dir=folder, policy=path)
    steers = (await in_force(running.client)).policy.steering.interventions
    assert [steer.add.vector.digest for steer in steers] == [digest(values(2.0))] * 2


async def test_the_answer_of_get_global_is_a_policy_file(starter, tmp_path) -> None:
    first = await starter(vector_dir=str(tmp_path / "vectors"))
    await put(first.client, header(name="joy"), chunk(values(2.0)))
    set_request = pb.SetGlobalRequest(policy=policy(add(NAMED)))
    for _ in range(3):
        await first.client.steering.SetGlobal(set_request)
    before = await in_force(first.client)
    assert before.HasField("set_time")
    await first.server.stop(0)
    path = write(tmp_path, json_format.MessageToJson(before))
    again = await starter(vector_dir=str(tmp_path / "vectors"), policy=path)
    after = await in_force(again.client)
    assert (after.policy, after.version) == (before.policy, 3)
    assert after.set_time.ToNanoseconds() > before.set_time.ToNanoseconds()


def test_fields_may_have_the_names_of_the_schema_and_a_byte_order_mark_may_come_first(
    tmp_path,
) -> None:
    path = tmp_path / "policy.json"
    answer = pb.GetGlobalResponse(policy=with_rule(), version=2**63 - 1)
    text = json_format.MessageToJson(answer, preserving_proto_field_name=True)
    path.write_text(text, encoding="utf-8-sig")
    assert read_policy(str(path))[1:] == (answer.policy, 2**63 - 1)
    assert json.loads(text)["policy"]["rules"][0]["conditions"][0]["probe_name"] == "mood"


STEERS = '"policy": {"steering": {"interventions": [{"add": {"scale": 1}}]}}'
BAD_VERSION = "version: a number from 1 to 9223372036854775807 is required"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty; a pipe cannot be used, because it is read twice"),
        ("{,}", "line 1 column 2"),
        ('{"version": 1} {', "Extra data: line 1 column 16"),
        ("3", "it does not begin with {"),
        ('{"polcy": {}}', "polcy: there is no such field, but policy, version, setTime"),
        (
            '{"policy": {"rules": [{}, {"nmae": "x"}]}}',
            "policy.rules[1].nmae: there is no such field, but name, conditions, ",
        ),
        ('{"policy": {}, "policy": {}}', "duplicate key policy"),
        ('{"policy": {"rules": [{"combine": "ALL"}]}}', "policy.rules[0].combine: "),
        ('{"policy": {"rules": [{"stop": {}, "observe": {}}]}}', 'multiple "action" oneof fields'),
        ('{"policy": {"rules": [{"name": 3}]}}', "policy.rules.name: "),
        ('{"version": "x"}', "version: "),
        ('{"version": -1}', "version: "),
        ('{"version": 18446744073709551616}', "version: "),
        (f"{{{STEERS}}}", BAD_VERSION),
        (f'{{{STEERS}, "version": 0}}', BAD_VERSION),
        (f'{{{STEERS}, "version": 9223372036854775808}}', BAD_VERSION),
        ('{"version": 1}', "policy: it has neither interventions"),
        ('{"policy": {"probes": [{"name": "x"}]}, "version": 1}', "policy: it has neither"),
        ("{}", "policy: it has neither"),
        ("[]", "it does not begin with {"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_policy_is_refused_by_name_and_field(tmp_path, text, said) -> None:
    path = write(tmp_path, text)
    with pytest.raises(PolicyFailed) as caught:
        read_policy(path)
    message = str(caught.value)
    assert message.startswith(f"--policy {path}: ")
    assert said in message
    assert message.count("\n") == 0


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path) -> None:
    path = tmp_path / "policy.json"
    with pytest.raises(PolicyFailed, match=f"--policy {path} cannot be read: No such file"):
        read_policy(str(path))
    with pytest.raises(PolicyFailed, match="cannot be read: Is a directory"):
        read_policy(str(tmp_path))
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(PolicyFailed, match="it is not UTF-8 at byte 7"):
        read_policy(str(path))


STORED = vector_pb2.VectorRef(digest=bytes(32))
FAR = site_set(types_pb2.POINT_RESID_POST, layers=[9])
ADVICE = (
    "Put the vector's numbers into the file, as rheostat global export does, or give the server "
    "the --vector-dir that holds the vector"
)


@pytest.mark.parametrize(
    ("content", "field", "advice"),
    [
        (policy(add(NAMED)), "policy.steering.interventions[0].add.vector.name", ADVICE),
        (policy(add(), add(STORED)), "policy.steering.interventions[1].add.vector.digest", ADVICE),
        (with_rule(direction=NAMED), "policy.probes[0].read.vector.name", ADVICE),
        (policy(add(sites=FAR)), "policy.steering.interventions[0].sites", "Correct the file"),
        (with_rule(sites=FAR), "policy.probes[0].sites", "Correct the file"),
        (policy(clamp()), "policy.steering.interventions[0].clamp.bands", "Correct the file"),
        (policy(at_post1()), "policy.steering.interventions[0]", "Correct the file"),
    ],
)
async def test_a_policy_that_the_model_cannot_have_ends_the_start(
    starter, tmp_path, content, field, advice
) -> None:
    path, backend = write(tmp_path, content), ScriptedBackend()
    with pytest.raises(PolicyFailed) as caught:
        await starter(backend, policy=path)
    assert str(caught.value).startswith(f"--policy {path}: {field}")
    assert str(caught.value).endswith(f". {advice}")
    assert backend.closed
    assert backend.jobs == []


async def test_a_point_that_the_model_does_not_have_ends_the_start(starter, tmp_path) -> None:
    middle = site_set(types_pb2.POINT_RESID_MID, layers=[1])
    path = write(tmp_path, policy(add(sites=middle)))
    with pytest.raises(PolicyFailed, match=r"interventions\[0\]\.sites.*run in parallel"):
        await starter(ScriptedBackend(sites=PARALLEL), policy=path)


async def test_rules_without_gates_end_the_start(starter, tmp_path) -> None:
    staged = ScriptedBackend(info=replace(INFO, pipeline_parallel=2))
    with pytest.raises(PolicyFailed, match=r"policy\.probes: probes and gates are not served"):
        await starter(staged, policy=write(tmp_path, with_rule()))


async def test_a_policy_that_needs_more_memory_than_there_is_ends_the_start(
    starter, tmp_path
) -> None:
    backend = ScriptedBackend(sites=sites_with(bank_rows=0))
    with pytest.raises(PolicyFailed, match="or give the server more memory"):
        await starter(backend, policy=write(tmp_path, policy()))


async def test_an_engine_that_dies_meanwhile_is_not_a_fault_of_the_file(starter, tmp_path) -> None:
    class Dying(ScriptedBackend):
        async def load_vectors(self, vectors: object) -> None:
            raise EngineLost("the engine died")

    with pytest.raises(EngineFailed, match="the engine died"):
        await starter(Dying(), policy=write(tmp_path, policy()))


def test_a_wrong_file_is_said_in_one_line_before_the_server_listens(tmp_path, capsys) -> None:
    path = write(tmp_path, '{"policy": {"rule": []}}')
    assert run(ServerConfig(model="demo", port=0, policy=path)) == PolicyFailed.exit_code == 11
    assert capsys.readouterr().err == (
        f"rheostat: --policy {path}: policy.rule: there is no such field, but steering, probes, "
        "rules. Correct the file\n"
    )
