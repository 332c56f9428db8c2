"""The policy as the text of a file for a server, over both clients."""

import numpy as np
import pytest
from google.protobuf import json_format, text_format

import rheostat
from rheostat_wire.digests import vector_digest
from rheostat_wire.v1 import engine_service_pb2, tensor_pb2
from rheostat_wire.v1 import steering_service_pb2 as pb

BITS = np.arange(8, dtype=np.uint16).reshape(2, 4)
THIRDS = np.arange(4, dtype="<f4").reshape(1, 4) / 3
TALL = np.zeros((2, 4), "<f4")
JOY = vector_digest("bfloat16", 2, 4, BITS.tobytes())
MOOD = vector_digest("float32", 1, 4, THIRDS.tobytes())
LARGE = vector_digest("float32", 2, 4, TALL.tobytes())
STORED = {
    JOY: (tensor_pb2.DTYPE_BFLOAT16, BITS),
    MOOD: (tensor_pb2.DTYPE_FLOAT32, THIRDS),
    LARGE: (tensor_pb2.DTYPE_FLOAT32, TALL),
}


def held(**digests: bytes) -> pb.GetGlobalResponse:
    """The answer of a server whose policy has these vectors."""
    text = """policy {
          steering {
            interventions {
              sites { points: POINT_RESID_POST list { layers: 2 layers: 3 } }
              add { vector { digest: "JOY" row_layers { layers: 3 layers: 2 } } scale: 0.1 }
            }
            interventions {
              sites { points: POINT_RESID_POST list { layers: 2 } }
              clamp { bands { read { vector { digest: "MOOD" } } max: 3e-7 } }
            }
          }
          probes {
            name: "mood" sites { points: POINT_RESID_POST list { layers: 3 } }
            read { vector { digest: "MOOD" } }
          }
          rules {
            name: "grim" conditions { probe_name: "mood" above: 2 }
            steer { interventions {
              sites { points: POINT_RESID_POST list { layers: 3 } }
              ablate { directions { digest: "MOOD" } }
            } }
          }
        }
        version: 9007199254740993 set_time { seconds: 1700000000 }"""
    for name, digest in digests.items():
        escaped = "".join(f"\\x{byte:02x}" for byte in digest)
        text = text.replace(f'"{name}"', f'"{escaped}"')
    return text_format.Parse(text, pb.GetGlobalResponse())


def sent(request: pb.GetVectorRequest, _: object) -> list[pb.GetVectorResponse]:
    dtype, rows = STORED[request.digest]
    info = pb.VectorInfo(digest=request.digest, dtype=dtype, shape=rows.shape)
    return [pb.GetVectorResponse(info=info), pb.GetVectorResponse(chunk=rows.tobytes())]


@pytest.fixture
def scripted(server):
    server.on("GetGlobal", held(JOY=JOY, MOOD=MOOD))
    server.on("GetVector", sent)
    limits = {"inline_vector_bytes": 16}
    server.on("GetModel", engine_service_pb2.GetModelResponse(model_name="demo", limits=limits))
    return server


def test_a_policy_is_exported_with_its_version_and_the_numbers_of_its_vectors(client, scripted):
    text = client.run(lambda engine: engine.steering.export_global())
    assert text.endswith("}\n")
    found = json_format.Parse(text, pb.GetGlobalResponse())
    expected = held(JOY=JOY, MOOD=MOOD)
    expected.ClearField("set_time")
    policy = expected.policy
    refs = [
        policy.steering.interventions[0].add.vector,
        policy.steering.interventions[1].clamp.bands[0].read.vector,
        policy.probes[0].read.vector,
        policy.rules[0].steer.interventions[0].ablate.directions[0],
    ]
    for ref in refs:
        dtype, rows = STORED[ref.digest]
        raw = {"encoding": tensor_pb2.ENCODING_RAW, "inline": rows.tobytes()}
        ref.inline.CopyFrom(tensor_pb2.Tensor(dtype=dtype, shape=rows.shape, **raw))
    assert found == expected
    asked = [one.digest for one in scripted.asked if isinstance(one, pb.GetVectorRequest)]
    assert asked == [JOY, MOOD], "each vector is fetched once"


def test_a_vector_that_a_file_cannot_hold_is_refused_with_a_way_out(client, scripted):
    scripted.on("GetGlobal", held(JOY=JOY, MOOD=LARGE))
    with pytest.raises(rheostat.Refused, match=r"has 32 bytes.* 16 for each.*--vector-dir"):
        client.run(lambda engine: engine.steering.export_global())


@pytest.mark.parametrize("policy", [{}, {"steering": {}}, {"probes": [{"name": "mood"}]}])
def test_a_policy_that_does_nothing_is_not_exported(client, scripted, policy):
    scripted.on("GetGlobal", pb.GetGlobalResponse(policy=policy, version=3))
    with pytest.raises(rheostat.Refused, match="version 3 of the policy has no interventions"):
        client.run(lambda engine: engine.steering.export_global())
