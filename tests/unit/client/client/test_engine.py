"""What an engine says about itself, about requests and about tokens, over both clients."""

import numpy as np
from google.protobuf import text_format

import rheostat
from rheostat import Point, Site
from rheostat_wire.v1 import engine_service_pb2, generation_service_pb2

MODEL = text_format.Parse(
    """model_name: "demo" architecture: "LlamaForCausalLM" layer_count: 3 width: 8
       vocabulary_size: 100 embedding_std: 0.0625
       dtype: DTYPE_BFLOAT16 has_tokenizer: true has_chat_template: true
       lora_names: "a"
       sites {
         point: POINT_RESID_PRE layers: 0 layers: 1 layers: 2 form: "pair"
         capture { served: true }
         ops { op: OP_ADD ability { served: true } }
         ops { op: OP_CLAMP ability { why_not: "not yet" } }
       }
       sites {
         point: POINT_RESID_MID layers: 0 layers: 1 layers: 2 form: "single" width: 8
         capture { why_not: "attention and MLP run in parallel" }
       }
       engine {
         vllm_version: "0.32.0" runner: RUNNER_V1 tensor_parallel_size: 2 pipeline_parallel_size: 1
         device: "cpu" compiled: true variants: "plain" variants: "light" prefix_caching: true
         torch_version: "2.13.0"
       }
       limits {
         model_tokens: 2048 running_requests: 64 waiting_requests: 256 bank_rows: 512
         capture_rows_per_step: 1024 tensor_message_bytes: 16777216 vector_bytes: 67108864
         inline_vector_bytes: 8388608 samples: 64 logprobs: 20
         capacity_wait { seconds: 30 } run_bytes: 31 request_buffer_bytes: 32 buffer_bytes: 33
         step_tokens: 34
       }
       build_version: "0.1.0" api_version: "rheostat.v1"
       features: FEATURE_STEERING features: FEATURE_GLOBAL_STEERING features: 99 """,
    engine_service_pb2.GetModelResponse(),
)
EXPECTED_MODEL = rheostat.ModelInfo(
    name="demo",
    architecture="LlamaForCausalLM",
    layer_count=3,
    width=8,
    vocabulary_size=100,
    embedding_std=0.0625,
    dtype="bfloat16",
    sites=(
        rheostat.SiteGroup(
            Point.RESID_PRE,
            (0, 1, 2),
            rheostat.Ability(True),
            {"add": rheostat.Ability(True), "clamp": rheostat.Ability(False, "not yet")},
            "pair",
        ),
        rheostat.SiteGroup(
            Point.RESID_MID,
            (0, 1, 2),
            rheostat.Ability(False, "attention and MLP run in parallel"),
            {},
            "single",
            8,
        ),
    ),
    has_tokenizer=True,
    has_chat_template=True,
    lora_names=("a",),
    engine=rheostat.EngineInfo(
        vllm_version="0.32.0",
        torch_version="2.13.0",
        runner="v1",
        device="cpu",
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        compiled=True,
        variants=("plain", "light"),
        prefix_caching=True,
    ),
    limits=rheostat.Limits(
        model_tokens=2048,
        running_requests=64,
        waiting_requests=256,
        bank_rows=512,
        capture_rows_per_step=1024,
        tensor_message_bytes=16777216,
        vector_bytes=67108864,
        inline_vector_bytes=8388608,
        samples=64,
        logprobs=20,
        capacity_wait=30.0,
        run_bytes=31,
        request_buffer_bytes=32,
        buffer_bytes=33,
        step_tokens=34,
    ),
    build_version="0.1.0",
    api_version="rheostat.v1",
    features=("steering", "global_steering", "unknown 99"),
)
WORDS = """demo
  model: LlamaForCausalLM, 3 layers, width 8, vocabulary 100, bfloat16
  engine: vLLM 0.32.0 on cpu, runner v1, compiled, 2 ranks
  limits: context 2048 tokens, steps of 34 tokens, 64 requests, 512 bank rows, 20 logprobs
  adapters: a
  server: 0.1.0, rheostat.v1
  features: steering, global steering, unknown 99
  resid_pre 0-2: add, capture
  resid_mid 0-2: nothing: attention and MLP run in parallel"""


def test_the_model_and_what_can_be_done_there(client, server):
    server.on("GetModel", MODEL)
    found = client.run(lambda engine: engine.model())
    assert found == EXPECTED_MODEL
    assert found.captured(Point.RESID_PRE) == (0, 1, 2)
    assert found.captured(Point.RESID_MID) == ()
    assert found.can_capture(Site(Point.RESID_PRE, 2))
    assert not found.can_capture(Site(Point.RESID_PRE, 3))


def test_words_of_a_newer_server_are_told_as_unknown_and_its_points_left_out(client, server):
    newer = engine_service_pb2.GetModelResponse()
    newer.CopyFrom(MODEL)
    newer.dtype = newer.engine.runner = 99
    newer.sites.add(point=99)
    newer.sites[0].ops.add(op=99)
    server.on("GetModel", newer)
    found = client.run(lambda engine: engine.model())
    assert (found.dtype, found.engine.runner) == ("unknown 99", "unknown 99")
    assert [group.point for group in found.sites] == [group.point for group in EXPECTED_MODEL.sites]
    assert "unknown 99" in found.sites[0].ops


def test_the_model_in_words_and_in_a_notebook():
    assert str(EXPECTED_MODEL) == WORDS
    html = EXPECTED_MODEL._repr_html_()
    for line in WORDS.splitlines():
        for cell in line.strip().split(": ", 1):
            assert f">{cell}</t" in html


def test_the_counters(client, server):
    server.on(
        "GetStats",
        text_format.Parse(
            """running_request_count: 1 waiting_request_count: 2
               requests {
                 admitted_count: 3 completed_count: 4 aborted_count: 5 refused_count: 6
                 failed_count: 7
               }
               steps { variant: "plain" step_count: 8 } used_bank_row_count: 9 bank_row_count: 10
               captured_row_count: 11 captured_bytes: 12 dropped_row_count: 13
               prefix_queried_token_count: 14
               prefix_hit_token_count: 15 vector_count: 16 uptime { seconds: 17 nanos: 500000000 }
               leaked_count: 18 global_version: 19 left_bytes: 20 plain_row_count: 21 ring_bytes: 22
               encode_bytes: 23 spooled_row_count: 24 overrun_row_count: 25 staging_bytes: 26
               run_count: 27 run_bytes: 28 request_buffer_bytes: 29
               subscription_buffer_bytes: 30""",
            engine_service_pb2.GetStatsResponse(),
        ),
    )
    assert client.run(lambda engine: engine.stats()) == rheostat.Stats(
        running_request_count=1,
        waiting_request_count=2,
        admitted_count=3,
        completed_count=4,
        aborted_count=5,
        refused_count=6,
        failed_count=7,
        steps={"plain": 8},
        used_bank_row_count=9,
        bank_row_count=10,
        captured_row_count=11,
        captured_bytes=12,
        dropped_row_count=13,
        prefix_queried_token_count=14,
        prefix_hit_token_count=15,
        vector_count=16,
        uptime=17.5,
        leaked_count=18,
        global_version=19,
        left_bytes=20,
        plain_row_count=21,
        ring_bytes=22,
        encode_bytes=23,
        spooled_row_count=24,
        overrun_row_count=25,
        staging_bytes=26,
        run_count=27,
        run_bytes=28,
        request_buffer_bytes=29,
        subscription_buffer_bytes=30,
    )


def test_explain_asks_about_the_very_request_and_reads_the_answer(client, server):
    server.on(
        "Explain",
        text_format.Parse(
            r"""prompt_token_count: 2 prompt_token_ids { ids: 5 ids: 6 }
                interventions {
                  intervention { origin: ORIGIN_REQUEST index: 0 op: OP_ADD }
                  sites { point: POINT_RESID_PRE layer: 1 }
                  selection {
                    positions { start: 0 count: 2 } positions { start: 4 count: 1 }
                    token_ids: 7 excluded_token_ids: 8
                  }
                  digests: "\001\002"
                  doses { site { point: POINT_RESID_PRE layer: 1 } norm: 2.5 }
                }
                captures {
                  capture_index: 0 sites { point: POINT_RESID_POST layer: 2 }
                  selection { positions { start: 1 count: 1 } } payload_bytes: 16
                }
                cache_keys { position: 0 digest: "\003" private: true }
                new_bank_row_count: 1 global_version: 3""",
            generation_service_pb2.ExplainResponse(),
        ),
    )
    vector = rheostat.inline(np.ones(2, np.float16), points="resid_pre", layers=1)
    found = client.run(
        lambda engine: engine.explain(
            "x", steering=vector, capture=rheostat.Capture("resid_post", 2), max_tokens=3
        )
    )
    assert server.asked == [
        text_format.Parse(
            r"""request {
                  text: "x" sampling { max_tokens: 3 }
                  steering { interventions {
                    sites { points: POINT_RESID_PRE list { layers: 1 } }
                    add {
                      vector { inline {
                        dtype: DTYPE_FLOAT16 shape: 1 shape: 2 encoding: ENCODING_RAW
                        inline: "\000\074\000\074"
                      } }
                      scale: 1
                    }
                  } }
                  captures { sites { points: POINT_RESID_POST list { layers: 2 } } inline {} }
                  return_prompt_token_ids: true
                }""",
            generation_service_pb2.ExplainRequest(),
        )
    ]
    assert found == rheostat.Explanation(
        prompt_token_ids=(5, 6),
        interventions=(
            rheostat.ResolvedIntervention(
                origin="request",
                index=0,
                op="add",
                sites=(Site(Point.RESID_PRE, 1),),
                selection=rheostat.Selection((range(2), range(4, 5)), (7,), (8,)),
                digests=("0102",),
                doses={Site(Point.RESID_PRE, 1): 2.5},
            ),
        ),
        captures=(
            rheostat.ResolvedCapture(
                0, (Site(Point.RESID_POST, 2),), rheostat.Selection((range(1, 2),)), 16
            ),
        ),
        cache_keys=(rheostat.CacheKey(0, "03", True),),
        new_bank_row_count=1,
        global_version=3,
    )
    assert str(found) == (
        "the request would\n"
        "  prompt: 2 tokens\n"
        "  add (request 0): resid_pre[1] (dose 2.5); positions 0-1, 4, generated tokens 7 "
        "but not 8\n"
        "  capture 0: resid_post[2]; positions 1; 16 bytes\n"
        "  cache key from position 0: private\n"
        "  bank rows: 1 new"  # version 3 of the server-wide steering adds nothing
    )


def test_tokens_come_with_the_pieces_of_text_that_they_stand_for(client, server):
    server.on(
        "Tokenize",
        text_format.Parse(
            """token_ids { ids: 1 ids: 8 ids: 9 } text: "to be"
               starts: 0 starts: 0 starts: 2 ends: 0 ends: 2 ends: 5""",
            generation_service_pb2.TokenizeResponse(),
        ),
    )
    found = client.run(lambda engine: engine.tokenize("to be"))
    assert server.asked == [generation_service_pb2.TokenizeRequest(text="to be")]
    spans = (rheostat.TextSpan(0, 0), rheostat.TextSpan(0, 2), rheostat.TextSpan(2, 5))
    assert found == rheostat.Tokenized((1, 8, 9), "to be", spans)
    client.run(lambda engine: engine.tokenize(" be", special_tokens=False))
    assert server.asked[1] == generation_service_pb2.TokenizeRequest(
        text=" be", add_special_tokens=False
    )
    assert found.pieces == ("", "to", " be")


async def test_the_synchronous_client_works_inside_a_running_event_loop(server):
    server.on("GetModel", MODEL)
    with rheostat.connect(server.target) as engine:
        assert engine.model() == EXPECTED_MODEL
