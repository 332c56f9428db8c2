"""Generation, over both clients: the request that is sent, the events, the whole, and its ends."""

import threading

import grpc
import numpy as np
import pytest
from google.protobuf import text_format

import rheostat
from rheostat import Point, Site
from rheostat._responses.accumulator import GenerationAccumulator
from rheostat_wire.v1 import generation_service_pb2, receipt_pb2

DIGEST = b"\xab" * 32


def response(text: str) -> generation_service_pb2.GenerateResponse:
    return text_format.Parse(text, generation_service_pb2.GenerateResponse())


def captured(sample: int, layers: list[int], first: int, values: np.ndarray):
    """Rows [sites, positions, width] of resid_post, as bfloat16, from position ``first`` on."""
    message = generation_service_pb2.GenerateResponse()
    message.captured.sample = sample
    for layer in layers:
        message.captured.sites.add(point="POINT_RESID_POST", layer=layer)
    message.captured.positions.add(start=first, count=values.shape[1])
    message.captured.token_ids.extend(100 + first + i for i in range(values.shape[1]))
    message.captured.tensor.dtype = "DTYPE_BFLOAT16"
    message.captured.tensor.encoding = "ENCODING_RAW"
    message.captured.tensor.shape.extend(values.shape)
    bits = values.astype(np.float32).view(np.uint32) >> 16
    message.captured.tensor.inline = bits.astype("<u2").tobytes()
    return message


STARTED = response(
    'started { request_id: "r1" model_name: "m" prompt_token_count: 2 '
    "prompt_token_ids { ids: 5 ids: 6 } }"
)
PROMPT_ROWS = captured(0, [2, 3], 0, np.arange(12.0).reshape(2, 2, 3))
GENERATED_ROW = captured(0, [2, 3], 2, np.arange(6.0).reshape(2, 1, 3) - 4)
FIRST = response(
    """tokens {
         token_ids: 7 text: " Pa"
         logprobs {
           token { token_id: 7 logprob: -0.25 rank: 1 text: " Pa" }
           alternatives { token_id: 7 logprob: -0.25 rank: 1 text: " Pa" }
           alternatives { token_id: 8 logprob: -1.5 rank: 2 text: " Lo" }
         }
       }"""
)
SECOND = response(
    """tokens {
         offset: 1 token_ids: 9 text: "ris"
         logprobs { token { token_id: 9 logprob: -0.5 rank: 2 text: "ris" } }
       }"""
)
FINISHED = response(
    """finished {
         reason: FINISH_REASON_STOP stop_text: "." token_count: 2
         first_token_after { nanos: 250000000 } finished_after { seconds: 1 }
       }"""
)
RECEIPT = response(
    """receipt {
         request_id: "r1" prompt_token_count: 2 generated_token_count: 2
         interventions {
           intervention { origin: ORIGIN_REQUEST index: 0 op: OP_ADD }
           digests: "%s"
           sites {
             site { point: POINT_RESID_POST layer: 2 } row_count: 3
             dose { norm: 4 relative_mean: 0.5 relative_max: 0.75 }
           }
           sites { site { point: POINT_RESID_POST layer: 3 } }
           rows { positions { start: 0 count: 3 } cached_positions { start: 4 count: 1 } }
         }
         captures {
           sites { site { point: POINT_RESID_POST layer: 2 } row_count: 3 }
           sites { site { point: POINT_RESID_POST layer: 3 } row_count: 3 }
         }
         cached_prompt_token_count: 1 recomputed_token_count: 1 preemption_count: 2
         global_version: 4
       }"""
    % (r"\xab" * 32)
)
WHOLE = [STARTED, PROMPT_ROWS, FIRST, GENERATED_ROW, SECOND, FINISHED, RECEIPT]

EXPECTED_RECEIPT = rheostat.Receipt(
    request_id="r1",
    prompt_token_count=2,
    generated_token_count=2,
    interventions=(
        rheostat.AppliedIntervention(
            origin="request",
            index=0,
            op="add",
            digests=(DIGEST.hex(),),
            sites=(
                rheostat.AppliedSite(Site(Point.RESID_POST, 2), 3, rheostat.Dose(4.0, 0.5, 0.75)),
                rheostat.AppliedSite(Site(Point.RESID_POST, 3), 0, None),
            ),
            rows=(rheostat.AppliedRows(0, (range(3),), (range(4, 5),)),),
        ),
    ),
    captures=(
        rheostat.CaptureReceipt(
            0,
            (
                rheostat.CapturedSite(Site(Point.RESID_POST, 2), 3, 0),
                rheostat.CapturedSite(Site(Point.RESID_POST, 3), 3, 0),
            ),
        ),
    ),
    cached_prompt_token_count=1,
    recomputed_token_count=1,
    preemption_count=2,
    global_version=4,
)
PA = rheostat.TokenLogprob(7, -0.25, 1, " Pa")
LO = rheostat.TokenLogprob(8, -1.5, 2, " Lo")
LOGPROBS = (
    rheostat.TokenLogprobs(PA, (PA, LO)),
    rheostat.TokenLogprobs(rheostat.TokenLogprob(9, -0.5, 2, "ris"), ()),
)


def test_a_request_says_what_the_caller_wrote_and_nothing_else(client, server):
    server.on("Generate", WHOLE)
    joy = rheostat.named("joy", points="post_block", layers=2)
    client.run(
        lambda engine: engine.generate(
            "My day was",
            steering=[joy * 4.0],
            capture=rheostat.Capture("resid_post", layers="all", where=rheostat.positions(-1)),
            max_tokens=2,
            temperature=0,
            stop=".",
            seed=3,
            logprobs=0,
            request_id="r1",
        )
    )
    assert server.asked == [
        text_format.Parse(
            """request_id: "r1" text: "My day was"
               sampling {
                 temperature: 0 max_tokens: 2 stop: "." seed: 3 logprobs: 0
               }
               steering { interventions {
                 sites { points: POINT_RESID_POST list { layers: 2 } }
                 add { vector { name: "joy" } scale: 4 }
               } }
               captures {
                 sites { points: POINT_RESID_POST all {} }
                 where { include { positions { start: -1 } } }
                 inline {}
               }
               return_prompt_token_ids: true""",
            generation_service_pb2.GenerateRequest(),
        )
    ]


def test_a_generation_is_the_whole_of_its_stream(client, server):
    server.on("Generate", WHOLE)
    out = client.run(lambda engine: engine.generate("My day was"))
    sample = out.samples[0]
    assert len(out.samples) == 1
    assert (out.request_id, out.model_name, out.prompt_token_ids) == ("r1", "m", (5, 6))
    assert (out.text, out.token_ids, out.finish_reason) == (" Paris", (7, 9), "stop")
    assert (sample.stop, sample.first_token_after, sample.finished_after) == (".", 0.25, 1.0)
    assert out.logprobs == LOGPROBS
    assert out.prompt_logprobs == ()
    assert out.receipt == EXPECTED_RECEIPT
    found = {site: rows.tolist() for site, rows in out.activations.items()}
    assert found == {
        (Point.RESID_POST, 2): [[0, 1, 2], [3, 4, 5], [-4, -3, -2]],
        (Point.RESID_POST, 3): [[6, 7, 8], [9, 10, 11], [-1, 0, 1]],
    }
    assert out.activations["resid_post", 2].dtype == np.float32
    assert out.activations.positions("resid_post", 3).tolist() == [0, 1, 2]
    assert out.activations.token_ids("resid_post", 3).tolist() == [100, 101, 102]


def test_events_that_come_in_one_message_are_read_as_if_they_came_alone(client, server):
    batch = generation_service_pb2.GenerateEventBatch
    response = generation_service_pb2.GenerateResponse
    together = [WHOLE[0], *(response(batch=batch(events=WHOLE[n : n + 2])) for n in (1, 3, 5))]
    found = []
    for messages in (WHOLE, together):
        server.on("Generate", messages)
        found.append(client.stream("My day was"))
    (plain, whole), (joined, same) = found
    assert [type(event) for event in joined] == [type(event) for event in plain]
    assert (same.text, same.receipt, same.logprobs) == (whole.text, whole.receipt, whole.logprobs)


@pytest.mark.parametrize("reads", [False, True])
def test_batches_are_asked_for_where_something_is_read(client, server, reads: bool):
    server.on("Generate", WHOLE)
    probe = rheostat.probe(
        rheostat.inline(np.ones((1, 4), np.float32)), points="resid_post", layers=0
    )
    client.run(lambda engine: engine.generate("My day was", probes=probe if reads else None))
    assert server.asked[0].batches is reads


def test_a_stream_gives_every_event_in_order_and_then_the_same_whole(client, server):
    server.on("Generate", WHOLE)
    events, out = client.stream("My day was")
    rows = [event for event in events if isinstance(event, rheostat.Rows)]
    others = [event for event in events if not isinstance(event, rheostat.Rows)]
    assert others == [
        rheostat.Started("r1", "m", (5, 6)),
        rheostat.Tokens(0, " Pa", (7,), LOGPROBS[:1]),
        rheostat.Tokens(0, "ris", (9,), LOGPROBS[1:]),
        rheostat.Finished(0, "stop", ".", 0.25, 1.0),
        EXPECTED_RECEIPT,
    ]
    assert [(r.sample, r.point, r.layer, r.positions.tolist()) for r in rows] == [
        (0, Point.RESID_POST, 2, [0, 1]),
        (0, Point.RESID_POST, 3, [0, 1]),
        (0, Point.RESID_POST, 2, [2]),
        (0, Point.RESID_POST, 3, [2]),
    ]
    assert rows[1].values.tolist() == [[6, 7, 8], [9, 10, 11]]
    assert (out.text, out.receipt) == (" Paris", EXPECTED_RECEIPT)


def test_a_stream_says_which_rows_are_lost(client, server):
    lost = response("dropped { capture_index: 0 row_count: 4 positions { start: 3 count: 2 } }")
    server.on("Generate", [*WHOLE[:-1], lost, RECEIPT])
    events, out = client.stream("My day was")
    (event,) = [event for event in events if isinstance(event, rheostat.DroppedRows)]
    assert (event.sequence, event.request_id, event.capture, event.sample) == (0, "r1", 0, 0)
    assert (event.baseline, event.positions.tolist(), event.row_count) == (False, [3, 4], 4)
    assert out.activations.positions("resid_post", 2).tolist() == [0, 1, 2]


def test_samples_keep_their_own_text_and_rows(client, server):
    server.on(
        "Generate",
        [
            STARTED,
            response('tokens { sample: 1 token_ids: 3 text: "b" }'),
            captured(1, [2], 0, np.ones((1, 1, 2))),
            response('tokens { sample: 0 token_ids: 4 text: "a" }'),
            captured(0, [2], 0, np.zeros((1, 1, 2))),
            response("finished { sample: 1 reason: FINISH_REASON_STOP stop_token_id: 3 }"),
            response("finished { sample: 0 reason: FINISH_REASON_LENGTH }"),
            response(
                """receipt { request_id: "r1" captures {
                     sites { site { point: POINT_RESID_POST layer: 2 } row_count: 2 }
                   } }"""
            ),
        ],
    )
    out = client.run(lambda engine: engine.generate("x", n=2, temperature=1.0))
    told = [
        (s.text, s.token_ids, s.finish_reason, s.stop, s.activations["resid_post", 2].tolist())
        for s in out.samples
    ]
    assert told == [
        ("a", (4,), "length", None, [[0, 0]]),
        ("b", (3,), "stop", 3, [[1, 1]]),
    ]
    assert out.text == "a"


def test_prompt_logprobs_come_as_an_event_and_in_the_whole(client, server):
    told = response("prompt_logprobs { tokens { token { token_id: 6 logprob: -2 rank: 4 } } }")
    server.on("Generate", [STARTED, told, FINISHED, response("receipt {}")])
    events, out = client.stream("x", prompt_logprobs=0)
    expected = (rheostat.TokenLogprobs(rheostat.TokenLogprob(6, -2.0, 4, ""), ()),)
    assert events[1] == rheostat.PromptLogprobs(expected)
    assert out.prompt_logprobs == expected


def test_events_of_a_newer_server_are_passed_over(client, server):
    newer = generation_service_pb2.GenerateResponse.FromString(b"\xfa\x07\x00")
    server.on("Generate", [STARTED, newer, *WHOLE[1:]])
    events, out = client.stream("x")
    assert (len(events), out.text) == (9, " Paris")


def test_a_stream_that_ends_without_a_receipt_is_an_error(client, server):
    server.on("Generate", WHOLE[:-1])
    with pytest.raises(rheostat.ServerError) as raised:
        client.run(lambda engine: engine.generate("x"))
    assert str(raised.value) == "the stream ended without a receipt"


def test_fewer_rows_than_the_receipt_counts_are_data_loss(client, server):
    server.on("Generate", [event for event in WHOLE if event is not GENERATED_ROW])
    with pytest.raises(rheostat.DataLoss) as raised:
        client.run(lambda engine: engine.generate("x"))
    assert raised.value.message == "2 rows of resid_post[2] came, the receipt counts 3"
    assert raised.value.metadata == {"rows": "1"}


def test_rows_whose_bytes_do_not_fit_their_shape_are_an_error(client, server):
    broken = captured(0, [2], 0, np.zeros((1, 1, 2)))
    broken.captured.tensor.inline = b"\0\0\0"
    server.on("Generate", [STARTED, broken])
    with pytest.raises(rheostat.ServerError) as raised:
        client.run(lambda engine: engine.generate("x"))
    assert str(raised.value) == "a tensor of bfloat16 [1, 1, 2] has 3 bytes, not 4"


def test_a_failure_in_mid_stream_comes_after_the_events_before_it(client, server, refusal):
    lost = refusal.of(grpc.StatusCode.UNAVAILABLE, "a worker is gone", "REASON_ENGINE_LOST")
    server.on("Generate", [STARTED, FIRST, lost])
    events, error = client.stream("x")
    assert events == [
        rheostat.Started("r1", "m", (5, 6)),
        rheostat.Tokens(0, " Pa", (7,), LOGPROBS[:1]),
    ]
    assert isinstance(error, rheostat.Unavailable)
    assert (error.message, error.reason) == ("a worker is gone", "REASON_ENGINE_LOST")


def endless(ended: threading.Event):
    """A stream that starts and then waits for its call to end."""

    def answer(_request, context):
        context.add_callback(ended.set)
        yield STARTED
        ended.wait(10)

    return answer


def test_a_timeout_ends_the_call_on_both_sides(client, server):
    ended = threading.Event()
    server.on("Generate", endless(ended))
    with pytest.raises(rheostat.DeadlineExceeded):
        client.run(lambda engine: engine.generate("x", timeout=0.2))
    assert ended.wait(10)


def test_closing_the_client_within_an_answer_is_told_as_a_cancellation(server):
    ended = threading.Event()
    server.on("Generate", endless(ended))
    engine = rheostat.connect(server.target)
    stream = engine.stream("x")
    next(stream)
    threading.Timer(0.1, engine.close).start()  # while the loop waits for the next event
    with pytest.raises(rheostat.Cancelled) as raised:
        next(stream)
    assert raised.value.message == "the call was cancelled in this program, so it has no result"
    assert ended.wait(10)


def test_cancelling_ends_the_call_on_both_sides(client, server):
    ended = threading.Event()
    server.on("Generate", endless(ended))
    error = client.cancelled("x")
    assert isinstance(error, rheostat.Cancelled)
    assert error.message == "the call was cancelled in this program, so it has no result"
    assert ended.wait(10)


def test_a_receipt_tells_in_words_what_was_done():
    assert str(EXPECTED_RECEIPT) == (
        "receipt of r1\n"
        "  tokens: 2 of the prompt (1 from the cache), 2 generated, 1 recomputed, 2 preemptions\n"
        "  add (request 0): 3 rows at resid_post 2-3, dose 4 (50 % of the stream, at most 75 %), "
        "positions 0-2 and from the cache 4\n"
        "  capture 0: 6 rows of resid_post 2-3"
    )


def test_a_receipt_tells_once_what_is_the_same_in_several_samples():
    same = tuple(rheostat.AppliedRows(sample, (range(4),), ()) for sample in (0, 1))
    done = rheostat.AppliedIntervention("request", 0, "add", (), (), (*same, same[0]))
    told = str(rheostat.Receipt("r", 1, 1, interventions=(done,))).splitlines()[-1]
    assert told == "  add (request 0): 0 rows, positions 0-3 in 3 samples"


def test_a_notebook_shows_text_escaped_and_the_receipt(client, server):
    hostile = response('tokens { token_ids: 1 text: "<script>" }')
    server.on("Generate", [STARTED, hostile, FINISHED, response('receipt { request_id: "r1" }')])
    out = client.run(lambda engine: engine.generate("x"))
    assert repr(out) == (
        "Generation('r1', Sample(text='<script>', tokens=1, finish_reason='stop', "
        "activations=0 sites))"
    )
    html = out._repr_html_()
    assert '<pre style="white-space:pre-wrap">&lt;script&gt;</pre>' in html
    assert "0 of the prompt (0 from the cache), 0 generated" in html
    assert "<script>" not in html


def test_every_reason_to_finish_has_a_word(client, server):
    from rheostat_wire.v1 import types_pb2

    words = []
    for name, number in types_pb2.FinishReason.items():
        end = generation_service_pb2.GenerateResponse()
        end.finished.reason = number
        if name != "FINISH_REASON_UNSPECIFIED":
            server.on("Generate", [STARTED, end, response("receipt {}")])
            words.append(client.run(lambda engine: engine.generate("x")).finish_reason)
    assert words == ["stop", "length", "aborted", "rule", "error", "watch"]


def test_a_sample_says_why_a_watch_ended_it(client, server):
    end = response('finished { reason: FINISH_REASON_WATCH watch_label: "grim" token_count: 2 }')
    server.on("Generate", [STARTED, end, response("receipt {}")])
    (sample,) = client.run(lambda engine: engine.generate("x")).samples
    assert (sample.finish_reason, sample.stop, sample.label) == ("watch", None, "grim")


def test_every_op_and_origin_of_a_receipt_has_a_word(client, server):
    message = generation_service_pb2.GenerateResponse()
    for op in receipt_pb2.Op.values()[1:]:
        message.receipt.interventions.add().intervention.op = op
    for origin in receipt_pb2.Origin.values()[1:]:
        message.receipt.interventions.add().intervention.origin = origin
    server.on("Generate", [STARTED, FINISHED, message])
    done = client.run(lambda engine: engine.generate("x")).receipt.interventions
    ops = ["add", "norm_add", "ablate", "clamp", "scale", "replace"]
    assert [one.op for one in done[: len(ops)]] == ops
    origins = ["global", "request", "rule", "update", "watch"]
    assert [one.origin for one in done[len(ops) :]] == origins


def test_nothing_is_kept_of_rows_that_cannot_be_read() -> None:
    accumulator = GenerationAccumulator(generation_service_pb2.GenerateRequest())
    broken = captured(1, [2], 0, np.zeros((1, 1, 3)))
    broken.captured.token_ids.append(7)
    with pytest.raises(rheostat.ServerError):
        accumulator.add(broken)
    for message in (STARTED, FINISHED, response("receipt {}")):
        accumulator.add(message)
    assert len(accumulator.result().samples) == 1
