"""Steering from the command line: how ops are typed, what is sent, and what is printed."""

import argparse
import base64
import json
import os
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import text_format

import rheostat
from rheostat import Ablate, Add, Band, Clamp, NormAdd, Scale
from rheostat._cli import _ops, main
from rheostat_wire.digests import vector_digest
from rheostat_wire.v1 import engine_service_pb2, generation_service_pb2, steering_service_pb2

JOY_DIGEST, BARE_DIGEST = r"\xab" * 32, r"\xcd" * 32
STORED = steering_service_pb2.ListVectorsResponse()
text_format.Parse(
    """name: "joy" dtype: DTYPE_FLOAT32 shape: 1 shape: 8
       sites { points: POINT_RESID_POST range { start: 2 stop: 6 } }""",
    STORED.vectors.add(digest=b"\xab" * 32),
)
text_format.Parse(
    'name: "bare" dtype: DTYPE_FLOAT32 shape: 1 shape: 8', STORED.vectors.add(digest=b"\xcd" * 32)
)
PLAIN = [
    text_format.Parse(text, generation_service_pb2.GenerateResponse())
    for text in (
        "started {}",
        'tokens { token_ids: 1 text: " ok" }',
        "finished { reason: FINISH_REASON_LENGTH }",
        'receipt { request_id: "r1" }',
    )
]
SITES = "sites { points: POINT_RESID_MID list { layers: 3 } }"


def made(read, text: str) -> rheostat.Intervention:
    typed = read(text)
    return typed.make(*(rheostat.named(name) for name in typed.names))


A, B = rheostat.named("a/x.1"), rheostat.named("b")


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (_ops.read_steer, "b", Add(B, 1.0)),
        (_ops.read_steer, "b:-2.5", Add(B, -2.5)),
        (_ops.read_norm_add, "b", NormAdd(B, 1.0)),
        (_ops.read_norm_add, "a/x.1:1e-1", NormAdd(A, 0.1)),
        (_ops.read_ablate, "b", Ablate((B,), 1.0)),
        (_ops.read_ablate, "a/x.1,b:0.5", Ablate((A, B), 0.5)),
        (_ops.read_clamp, "b:-1..2.5", Clamp((Band(B, -1, 2.5),))),
        (_ops.read_clamp, "b:..-2", Clamp((Band(B, None, -2),))),
        (_ops.read_clamp, "b:0..:0.25", Clamp((Band(B, 0, None, 0.25),))),
        (_ops.read_clamp, "b:.5", Clamp((Band(B, 0.5, 0.5),))),
        (_ops.read_clamp, "a/x.1:..1,b:0:0.5", Clamp((Band(A, None, 1), Band(B, 0, 0, 0.5)))),
        (_ops.read_scale, "b:-1", Scale(B, -1)),
    ],
)
def test_an_op_is_read_as_people_write_it(read, text, expected):
    assert made(read, text) == expected


SYNTAX = {
    _ops.read_steer: "NAME[:SCALE], such as joy:0.5",
    _ops.read_norm_add: "NAME[:SCALE], such as joy:0.5",
    _ops.read_ablate: "NAME[,NAME...][:STRENGTH], such as joy or joy,fear:0.5",
    _ops.read_clamp: "NAME:BOUNDS[:STRENGTH][,...], such as joy:-1..2, joy:..2 or joy:0",
    _ops.read_scale: "NAME:FACTOR, such as joy:-1",
}


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (_ops.read_steer, "b:much", "'b:much' has no number in 'much'"),
        (_ops.read_steer, "b:", "'b:' has no number after a colon"),
        (_ops.read_steer, "b:nan", "'b:nan' has nan, which is not a finite number in float32"),
        (_ops.read_steer, "b:1e39", "'b:1e39' has 1e39, which is not a finite number in float32"),
        (_ops.read_steer, ":2", "':2' has no name"),
        (_ops.read_steer, "", "'' has no name"),
        (_ops.read_steer, "b=0.5", "'b=0.5' has = where a colon belongs"),
        (_ops.read_steer, "b*0.5", "'b*0.5' has * where a colon belongs"),
        (_ops.read_steer, "0.5 * b", "'0.5 * b' has * where a colon belongs"),
        (_ops.read_steer, " b", "' b' has a space before or after a name"),
        (_ops.read_steer, "b 0.5", "'b 0.5' has a space where a colon belongs"),
        (_ops.read_clamp, "a:1,b=..2", "'a:1,b=..2' has = where a colon belongs"),
        (_ops.read_norm_add, "b:1:2", "'b:1:2' has too many colons"),
        (_ops.read_ablate, "b:all", "'b:all' has no number in 'all'"),
        (_ops.read_ablate, "a,:1", "'a,:1' has a comma without a name"),
        (_ops.read_clamp, "b", "'b' has no bounds"),
        (_ops.read_clamp, "b:", "'b:' has no number after a colon"),
        (_ops.read_clamp, "b:1..x", "'b:1..x' has no number in 'x'"),
        (
            _ops.read_clamp,
            "b:-inf..1",
            "'b:-inf..1' has -inf, which is not a finite number in float32",
        ),
        (_ops.read_clamp, "b:1..2,", "'b:1..2,' has a comma without a name"),
        (_ops.read_scale, "b", "'b' has no factor"),
    ],
)
def test_an_op_that_cannot_be_read_is_told(read, text, message):
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        read(text)
    assert str(raised.value) == f"{message}: write {SYNTAX[read]}"


def test_ops_act_in_the_order_typed_at_the_sites_typed(server):
    server.on("ListVectors", STORED)
    server.on("Generate", PLAIN)
    line = ["generate", "x", "--target", server.target, "--points", "resid_mid", "--layers", "3"]
    line += ["--ablate", "bare", "--steer", "joy:2", "--clamp", "bare:..1", "--norm-add", "joy:0.5"]
    assert main([*line, "--steer", "bare", "--scale", "joy:0"]) == 0
    request = server.asked[-1]
    joy, bare = (f'{{ digest: "{digest}" }}' for digest in (JOY_DIGEST, BARE_DIGEST))
    along = "normalise: NORMALISE_UNIT vector"
    ops = (
        f"ablate {{ directions {bare} strength: 1 }}",
        f"add {{ vector {joy} scale: 2 }}",
        f"clamp {{ bands {{ read {{ {along} {bare} }} max: 1 strength: 1 }} }}",
        f"norm_add {{ vector {joy} scale: 0.5 }}",
        f"add {{ vector {bare} scale: 1 }}",
        f"scale {{ read {{ {along} {joy} }} factor: 0 }}",
    )
    assert request.steering == text_format.Parse(
        "".join(f"interventions {{ {SITES} {op} }}" for op in ops), type(request.steering)()
    )


def test_vectors_of_an_op_act_where_those_are_meant_that_are_meant_for_somewhere(server, capsys):
    server.on("ListVectors", STORED)
    server.on("Generate", PLAIN)
    line = ["generate", "x", "--target", server.target]
    assert main([*line, "--ablate", "bare,joy"]) == 0
    assert server.asked[-1].steering == text_format.Parse(
        f"""interventions {{
              sites {{ points: POINT_RESID_POST range {{ start: 2 stop: 6 }} }}
              ablate {{
                directions {{ digest: "{BARE_DIGEST}" }}
                directions {{ digest: "{JOY_DIGEST}" }}
                strength: 1
              }}
            }}""",
        type(server.asked[-1].steering)(),
    )
    capsys.readouterr()
    assert main([*line, "--ablate", "bare"]) == 2
    assert capsys.readouterr().err == (
        "rheostat: bare has no default points and layers: give them, with --points and --layers "
        "(at steering[0].sites) [REASON_MISSING_FIELD]\n"
    )


def test_the_baseline_follows_the_text_and_their_distance_goes_to_stderr(server, capsys):
    lines = (
        "started {}",
        'tokens { token_ids: 1 text: " bright" }',
        'tokens { baseline: true token_ids: 2 text: " dull" }',
        'tokens { offset: 1 token_ids: 3 text: "!" }',
        "finished { reason: FINISH_REASON_LENGTH }",
        "finished { baseline: true reason: FINISH_REASON_LENGTH }",
        """divergence {
             kl: 0.25 kl: 0.5 compared: 0.75 compared: 1 mean_kl: 0.375
             baseline_logprobs: -3 baseline_logprobs: -0.5
           }""",
        'receipt { request_id: "r1" }',
    )
    parse = generation_service_pb2.GenerateResponse
    server.on("Generate", [text_format.Parse(line, parse()) for line in lines])
    line = ["generate", "x", "--target", server.target, "--baseline", "--lora", "poet"]
    line += ["--seed", "1", "--top-p", "0.5"]
    assert main(line) == 0
    assert server.asked == [
        text_format.Parse(
            """text: "x" lora_name: "poet" with_baseline: true
               sampling { max_tokens: 128 seed: 1 top_p: 0.5 }
               return_prompt_token_ids: true""",
            generation_service_pb2.GenerateRequest(),
        )
    ]
    assert capsys.readouterr() == (
        " bright!\n--- baseline\n dull\n",
        "KL from the baseline: 0.375 nats per token, most 0.5 at token 1 of 2; "
        "at least 75 % of the probability was compared\n",
    )


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (["--baseline"], True),
        (["--baseline", "--temperature", "0.5"], True),
        (["--baseline", "--temperature", "0"], False),
        (["--baseline", "--seed", "0"], False),
        ([], False),
    ],
)
def test_a_baseline_that_draws_by_itself_is_warned_of(server, capsys, flags, warned):
    server.on("Generate", PLAIN)  # without a baseline, which is another matter
    main(["generate", "x", "--target", server.target, *flags])
    said = (
        "rheostat: without --seed or --temperature 0 the text and its baseline sample differently\n"
    )
    assert (said in capsys.readouterr().err) is warned


def test_the_receipt_is_shown_where_the_server_steered_everyone(server, capsys):
    receipt = text_format.Parse(
        """receipt {
             request_id: "r1"
             interventions { intervention { origin: ORIGIN_GLOBAL op: OP_CLAMP } }
           }""",
        generation_service_pb2.GenerateResponse(),
    )
    server.on("Generate", [*PLAIN[:-1], receipt])
    assert main(["generate", "x", "--target", server.target]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "  clamp (global 0): 0 rows"


@pytest.mark.parametrize(
    ("point", "origin", "times", "warned"),
    [
        ("RESID_POST", "REQUEST", 1.9, ""),
        ("MLP_OUT", "REQUEST", 8.34, ""),  # of what the MLP adds, which may be short
        ("RESID_POST", "GLOBAL", 8.34, ""),
        (
            "RESID_POST",
            "REQUEST",
            8.34,
            "rheostat: the steering at resid_post[3] has 8.34 times the norm of the residual "
            "stream, which seldom leaves a coherent text: try a smaller scale",
        ),
    ],
)
def test_steering_much_longer_than_the_stream_gives_a_warning(
    server, capsys, point, origin, times, warned
):
    sites = "".join(
        f"""sites {{
              site {{ point: POINT_{point} layer: {layer} }} row_count: 2
              dose {{ norm: 9 relative_mean: {relative} relative_max: 10 }}
            }}"""
        for layer, relative in ((2, 0.5), (3, times))
    )
    receipt = text_format.Parse(
        f"""receipt {{
              request_id: "r1"
              interventions {{ intervention {{ origin: ORIGIN_{origin} op: OP_ADD }} {sites} }}
            }}""",
        generation_service_pb2.GenerateResponse(),
    )
    server.on("Generate", [*PLAIN[:-1], receipt])
    assert main(["generate", "x", "--target", server.target]) == 0
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == (warned or "receipt of r1")


@pytest.mark.parametrize("expected", ["3", None])
def test_global_set_keeps_the_rules_of_the_policy(server, capsys, expected):
    before = text_format.Parse(
        r"""policy {
              probes {
                name: "mood" sites { points: POINT_RESID_POST list { layers: 3 } }
                read { vector { digest: "%s" } }
              }
              rules {
                name: "grim" combine: COMBINE_ALL
                conditions {
                  probe_name: "mood" above: 2
                  pool: POOL_LAST combine_sites: COMBINE_ANY for_tokens: 1
                }
                stop { label: "why" drop_sampled: true }
              }
            }
            version: 9"""
        % (r"\xab" * 32),
        steering_service_pb2.GetGlobalResponse(),
    )
    server.on("ListVectors", STORED)
    server.on("GetGlobal", before)
    server.on("SetGlobal", steering_service_pb2.SetGlobalResponse(version=10))
    line = ["global", "set", "--target", server.target, "--clamp", "joy:0", "--points", "resid_mid"]
    line += ["--layers", "3", *(["--expected-version", expected] if expected else [])]
    assert main(line) == 0
    sent = server.asked[-1]
    assert sent.expected_version == int(expected or 9)
    assert list(sent.policy.rules) == list(before.policy.rules)
    assert [one.name for one in sent.policy.probes] == ["mood"]


def test_global_set_sends_the_ops_and_prints_the_version(server, capsys):
    server.on("ListVectors", STORED)
    server.on("GetGlobal", steering_service_pb2.GetGlobalResponse())
    server.on("SetGlobal", steering_service_pb2.SetGlobalResponse(version=4))
    line = ["global", "set", "--target", server.target, "--expected-version", "3"]
    line += ["--clamp", "joy:0", "--points", "resid_mid", "--layers", "3"]
    assert main(line) == 0
    assert capsys.readouterr() == ("version 4\n", "")
    joy = f'{{ digest: "{JOY_DIGEST}" }}'
    band = f"read {{ vector {joy} normalise: NORMALISE_UNIT }} min: 0 max: 0 strength: 1"
    assert server.asked[-1] == text_format.Parse(
        f"policy {{ steering {{ interventions {{ {SITES} clamp {{ bands {{ {band} }} }} }} }} }} "
        "expected_version: 3",
        steering_service_pb2.SetGlobalRequest(),
    )


def test_global_set_without_an_op_is_a_wrong_command_line(server, capsys):
    assert main(["global", "set", "--target", server.target]) == 2
    message = "rheostat: no op is given; to remove all, use: rheostat global clear\n"
    assert (capsys.readouterr(), server.asked) == (("", message), [])


@pytest.mark.parametrize("flag", [["--points", "resid_mid"], ["--layers", "3"]])
def test_sites_without_an_op_are_a_wrong_command_line(server, capsys, flag):
    assert main(["generate", "x", "--target", server.target, *flag]) == 2
    message = "rheostat: --points and --layers are for ops, and no op is given\n"
    assert (capsys.readouterr(), server.asked) == (("", message), [])


def test_an_equals_sign_in_place_of_a_colon_is_told_before_a_server_is_asked(server, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["generate", "x", "--target", server.target, "--steer", "joy=0.5"])
    assert (raised.value.code, server.asked) == (2, [])
    said = "--steer: 'joy=0.5' has = where a colon belongs: write NAME[:SCALE], such as joy:0.5"
    assert said in capsys.readouterr().err


def test_global_clear_sets_none(server, capsys):
    server.on("SetGlobal", steering_service_pb2.SetGlobalResponse(version=5))
    assert main(["global", "clear", "--target", server.target]) == 0
    assert capsys.readouterr() == ("version 5\n", "")
    (request,) = server.asked
    assert request == steering_service_pb2.SetGlobalRequest(policy={"steering": {}})


def test_global_get_prints_a_line_for_each_intervention(server, capsys):
    held = text_format.Parse(
        f"""policy {{ steering {{ interventions {{
              {SITES}
              scale {{
                read {{ vector {{ digest: "{JOY_DIGEST}" }} normalise: NORMALISE_UNIT }} factor: 0.5
              }}
            }} }} }}
            version: 4""",
        steering_service_pb2.GetGlobalResponse(),
    )
    server.on("GetGlobal", held)
    assert main(["global", "get", "--target", server.target]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "server-wide steering, version 4",
        "  0: scale vector abababababab by 0.5 at resid_mid 3",
    ]


ROW = np.arange(8, dtype="<f4")


def scripted_export(server) -> None:
    digest = vector_digest("float32", 1, 8, ROW.tobytes())
    held = steering_service_pb2.GetGlobalResponse(version=4)
    held.policy.steering.interventions.add().add.vector.digest = digest
    server.on("GetGlobal", held)
    limits = {"inline_vector_bytes": 32}
    server.on("GetModel", engine_service_pb2.GetModelResponse(model_name="demo", limits=limits))
    info = {"digest": digest, "dtype": "DTYPE_FLOAT32", "shape": [1, 8]}
    header = steering_service_pb2.GetVectorResponse(info=info)
    server.on("GetVector", [header, steering_service_pb2.GetVectorResponse(chunk=ROW.tobytes())])


def test_global_export_writes_a_file_for_serve_and_prints_its_version(server, capsys, tmp_path):
    scripted_export(server)
    path = tmp_path / "policy.json"
    assert main(["global", "export", str(path), "--target", server.target]) == 0
    assert capsys.readouterr() == (f"{path}  version 4\n", "")
    (steer,) = json.loads(path.read_text())["policy"]["steering"]["interventions"]
    assert base64.b64decode(steer["add"]["vector"]["inline"]["inline"]) == ROW.tobytes()
    assert main(["global", "export", str(path), "--target", server.target]) == 2
    assert capsys.readouterr().err == f"rheostat: {path} exists already; --force replaces it\n"
    assert main(["global", "export", str(path), "--force", "--target", server.target]) == 0


def test_a_policy_that_cannot_be_written_leaves_the_file_as_it_was(
    server, capsys, tmp_path, monkeypatch
):
    def full(path: Path, *_: object, **__: object) -> None:
        path.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    scripted_export(server)
    path = tmp_path / "policy.json"
    path.write_text("mine")
    monkeypatch.setattr(Path, "write_text", full)
    assert main(["global", "export", str(path), "--force", "--target", server.target]) == 1
    assert capsys.readouterr().err == f"rheostat: cannot write {path}: No space left on device\n"
    assert (path.read_text(), os.listdir(tmp_path)) == ("mine", [path.name])


def test_global_export_of_no_policy_writes_nothing(server, capsys, tmp_path):
    scripted_export(server)
    server.on("GetGlobal", steering_service_pb2.GetGlobalResponse(version=5))
    path = tmp_path / "policy.json"
    assert main(["global", "export", str(path), "--target", server.target]) == 1
    assert capsys.readouterr().err == (
        "rheostat: version 5 of the policy has no interventions and no rules, so there is nothing "
        "to export: set a policy first\n"
    )
    assert not path.exists()


def test_a_version_that_does_not_hold_any_more_fails_in_one_line(server, capsys, refusal):
    code = grpc.StatusCode.FAILED_PRECONDITION
    server.on("SetGlobal", refusal.of(code, "version 7 holds", "REASON_VERSION_CONFLICT"))
    assert main(["global", "clear", "--target", server.target, "--expected-version", "6"]) == 1
    assert capsys.readouterr().err == "rheostat: version 7 holds [REASON_VERSION_CONFLICT]\n"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("9", "layer 9 is not one of the model's layers 0 to 5"),
        ("1-3", "tone has rows for layers 2-5, not for layer 1"),
    ],
)
def test_layers_without_a_row_are_told_in_words_of_the_command_line(server, capsys, typed, said):
    tone = steering_service_pb2.VectorInfo(
        digest=b"\xab" * 32, name="tone", dtype="DTYPE_FLOAT32", shape=[4, 2]
    )
    tone.sites.points.append("POINT_RESID_POST")
    tone.sites.list.layers.extend([2, 3, 4, 5])
    server.on("ListVectors", steering_service_pb2.ListVectorsResponse(vectors=[tone]))
    server.on("GetModel", engine_service_pb2.GetModelResponse(model_name="demo", layer_count=6))
    line = ["generate", "x", "--target", server.target, "--steer", "tone:0.5"]
    assert main([*line, "--points", "resid_post", "--layers", typed]) == 2
    assert capsys.readouterr().err == f"rheostat: {said}\n"
