"""Receipts and explanations: where interventions came from, how strong they were, how it reads."""

import pytest
from google.protobuf import text_format

import rheostat
from rheostat import Point, Site
from rheostat._responses.explanations import read_explanation
from rheostat._responses.receipts import read_receipt
from rheostat_wire.v1 import generation_service_pb2, receipt_pb2

EARLY, LATE = Site(Point.RESID_POST, 2), Site(Point.RESID_POST, 3)


def test_a_receipt_tells_steering_of_every_origin_apart():
    message = text_format.Parse(
        r"""request_id: "r1" prompt_token_count: 3 generated_token_count: 4
            interventions {
              intervention { origin: ORIGIN_GLOBAL index: 1 op: OP_CLAMP }
              digests: "\001" digests: "\002"
              sites {
                site { point: POINT_RESID_POST layer: 2 } row_count: 6
                dose { norm: 0.5 relative_mean: 0.25 relative_max: 0.75 }
              }
              sites {
                site { point: POINT_RESID_POST layer: 3 } row_count: 6
                dose { norm: 1.5 relative_mean: 0.125 relative_max: 0.5 }
              }
              rows { positions { start: 0 count: 6 } }
            }
            interventions {
              intervention { origin: ORIGIN_REQUEST index: 0 op: OP_NORM_ADD }
              sites { site { point: POINT_RESID_POST layer: 2 } row_count: 2 dose { norm: 2 } }
              rows { sample: 0 positions { start: 0 count: 2 } }
            }
            interventions {
              intervention { origin: ORIGIN_UPDATE index: 0 op: OP_ABLATE update_id: 3 }
            }
            interventions {
              intervention { origin: ORIGIN_RULE index: 2 op: OP_SCALE rule_name: "calm" }
            }
            captures {
              capture_index: 1 sites { site { point: POINT_RESID_POST layer: 2 } row_count: 6 }
              run_id: "clean"
            }
            global_version: 5 update_count: 1""",
        receipt_pb2.Receipt(),
    )
    found = read_receipt(message)
    assert found == rheostat.Receipt(
        request_id="r1",
        prompt_token_count=3,
        generated_token_count=4,
        interventions=(
            rheostat.AppliedIntervention(
                origin="global",
                index=1,
                op="clamp",
                digests=("01", "02"),
                sites=(
                    rheostat.AppliedSite(EARLY, 6, rheostat.Dose(0.5, 0.25, 0.75)),
                    rheostat.AppliedSite(LATE, 6, rheostat.Dose(1.5, 0.125, 0.5)),
                ),
                rows=(rheostat.AppliedRows(0, (range(6),), ()),),
            ),
            rheostat.AppliedIntervention(
                origin="request",
                index=0,
                op="norm_add",
                digests=(),
                sites=(rheostat.AppliedSite(EARLY, 2, rheostat.Dose(2.0, None, None)),),
                rows=(rheostat.AppliedRows(0, (range(2),), ()),),
            ),
            rheostat.AppliedIntervention("update", 0, "ablate", (), (), (), update_id=3),
            rheostat.AppliedIntervention("rule", 2, "scale", (), (), (), rule_name="calm"),
        ),
        captures=(
            rheostat.CaptureReceipt(1, (rheostat.CapturedSite(EARLY, 6, 0),), run_id="clean"),
        ),
        global_version=5,
        update_count=1,
    )
    lines = [
        "receipt of r1",
        "  tokens: 3 of the prompt (0 from the cache), 4 generated, 0 recomputed, 0 preemptions",
        "  clamp (global 1): 12 rows at resid_post 2-3, dose 0.5 to 1.5 "
        "(12.5 to 25 % of the stream, at most 75 %), positions 0-5",
        "  norm_add (request 0): 2 rows at resid_post 2, dose 2, positions 0-1",
        "  ablate (update 3, 0): 0 rows",
        "  scale (rule calm, 2): 0 rows",
        "  capture 1: 6 rows of resid_post 2, stored in run clean",
        "  server-wide steering: version 5",
        "  updates: 1 carried out",
    ]
    assert str(found).splitlines() == lines
    html = found._repr_html_()
    for line in lines[1:]:
        for cell in line.strip().split(": ", 1):
            assert f">{cell}</t" in html


def test_a_gated_intervention_names_its_probes_and_counts_open_rows():
    named = 'intervention { origin: ORIGIN_REQUEST op: OP_ADD gate_probe_names: "a-b" '
    named += 'gate_probe_names: "mood" } '
    steered = 'intervention { origin: ORIGIN_RULE op: OP_ADD rule_name: "calm" } '
    site, positions = "point: POINT_RESID_POST layer: 2", "positions { count: 6 }"
    acted = f"sites {{ site {{ {site} }} row_count: 1 }} rows {{ {positions} }} "
    receipt = text_format.Parse(
        f"interventions {{ {named} {acted} }} interventions {{ {steered} {acted} }}",
        receipt_pb2.Receipt(),
    )
    found = read_receipt(receipt)
    assert [one.gate_probes for one in found.interventions] == [("a-b", "mood"), ()]
    assert str(found).splitlines()[2:] == [
        "  add (request 0, gated by a-b and mood): 1 row at resid_post 2, of positions 0-5",
        "  add (rule calm, 0): 1 row at resid_post 2, of positions 0-5",
    ]
    explained = text_format.Parse(
        f"interventions {{ {named} sites {{ {site} }} selection {{ {positions} }} }}",
        generation_service_pb2.ExplainResponse(),
    )
    explanation = read_explanation(explained)
    assert explanation.interventions[0].gate_probes == ("a-b", "mood")
    assert "add (request 0, gated by a-b and mood): resid_post[2]" in str(explanation)


@pytest.mark.parametrize(
    ("op", "dose"),
    [
        ("add", "resid_post[2] (dose 0.5); positions 0-1"),
        ("norm_add", "resid_post[2] (dose 0.5 of the stream); positions 0-1"),
    ],
)
def test_an_explanation_gives_doses_in_the_unit_of_their_op(op, dose):
    message = text_format.Parse(
        f"""prompt_token_ids {{ ids: 1 ids: 2 }}
            interventions {{
              intervention {{ origin: ORIGIN_GLOBAL op: OP_{op.upper()} }}
              sites {{ point: POINT_RESID_POST layer: 2 }}
              selection {{ positions {{ count: 2 }} }}
              doses {{ site {{ point: POINT_RESID_POST layer: 2 }} norm: 0.5 }}
            }}
            interventions {{
              intervention {{ origin: ORIGIN_RULE index: 1 op: OP_CLAMP rule_name: "calm" }}
              sites {{ point: POINT_RESID_POST layer: 3 }}
              selection {{ token_ids: 13 token_ids: 42 }}
            }}
            cache_keys {{ position: 0 digest: "\\001\\002" }}
            cache_keys {{ position: 16 private: true }} global_version: 3""",
        generation_service_pb2.ExplainResponse(),
    )
    found = read_explanation(message)
    assert [one.rule_name for one in found.interventions] == ["", "calm"]
    assert found.cache_keys == (
        rheostat.CacheKey(0, "0102", False),
        rheostat.CacheKey(16, "", True),
    )
    assert str(found).splitlines() == [
        "the request would",
        "  prompt: 2 tokens",
        f"  {op} (global 0): {dose}",
        "  clamp (rule calm, 1): resid_post[3]; positions none, generated tokens 13, 42",
        "  cache key from position 0: 0102",
        "  cache key from position 16: private",
        "  bank rows: 0 new",
        "  server-wide steering: version 3",
    ]


def test_a_receipt_says_where_its_controller_was_disabled():
    receipt = read_receipt(
        text_format.Parse(
            """request_id: "r1"
               controller {
                 controller_name: "pi" disabled_reason: "it raised"
                 disabled_from { sample: 1 position: 7 }
               }""",
            receipt_pb2.Receipt(),
        )
    )
    assert receipt.controller == rheostat.ControllerReceipt("pi", "it raised", ((1, 7),))
    assert "  controller pi: disabled: it raised" in str(receipt).splitlines()


def test_sites_that_need_a_newer_client_are_counted_and_the_rest_is_kept():
    known, newer = "point: POINT_RESID_POST layer: 2", "point: 9 layer: 2"
    receipt = read_receipt(
        text_format.Parse(
            f"""request_id: "r1"
                interventions {{
                  intervention {{ origin: ORIGIN_GLOBAL op: OP_ADD }}
                  sites {{ site {{ {known} }} row_count: 6 }}
                  sites {{ site {{ {newer} }} row_count: 6 }}
                }}
                captures {{
                  sites {{ site {{ {newer} }} row_count: 6 }}
                  sites {{ site {{ {known} }} row_count: 6 }}
                }}""",
            receipt_pb2.Receipt(),
        )
    )
    assert receipt.interventions == (
        rheostat.AppliedIntervention(
            "global", 0, "add", (), (rheostat.AppliedSite(EARLY, 6, None),), (), unknown_sites=1
        ),
    )
    assert receipt.captures == (
        rheostat.CaptureReceipt(0, (rheostat.CapturedSite(EARLY, 6, 0),), unknown_sites=1),
    )
    assert str(receipt).splitlines()[2:] == [
        "  add (global 0): 6 rows at resid_post 2, 1 site unknown to this client",
        "  capture 0: 6 rows of resid_post 2, 1 site unknown to this client",
    ]
    explanation = read_explanation(
        text_format.Parse(
            f"""interventions {{
                  intervention {{ origin: ORIGIN_GLOBAL op: OP_ADD }}
                  sites {{ {known} }} sites {{ {newer} }} selection {{ positions {{ count: 1 }} }}
                  doses {{ site {{ {known} }} norm: 2 }} doses {{ site {{ {newer} }} norm: 3 }}
                }}
                captures {{ sites {{ {newer} }} selection {{ positions {{ count: 1 }} }} }}""",
            generation_service_pb2.ExplainResponse(),
        )
    )
    (steered,), (captured,) = explanation.interventions, explanation.captures
    assert (steered.sites, steered.doses, steered.unknown_sites) == ((EARLY,), {EARLY: 2}, 1)
    assert (captured.sites, captured.unknown_sites) == ((), 1)
    assert str(explanation).splitlines()[2:4] == [
        "  add (global 0): resid_post[2] (dose 2), 1 site unknown to this client; positions 0",
        "  capture 0: 1 site unknown to this client; positions 0; 0 bytes",
    ]


def test_rows_that_were_not_touched_read_the_same_whatever_kept_them():
    site = rheostat.AppliedSite(EARLY, 0, None)
    kept = rheostat.AppliedRows(0, (), ())
    idle = [
        rheostat.AppliedIntervention("request", 0, "add", (), (site,), rows)
        for rows in ((), (kept,), (kept, rheostat.AppliedRows(1, (), ())))
    ]
    told = [str(rheostat.Receipt("r", 1, 1, interventions=(one,))).splitlines() for one in idle]
    assert [lines[-1] for lines in told] == ["  add (request 0): 0 rows at resid_post 2"] * 3


def test_positions_from_the_cache_alone_are_told():
    rows = (rheostat.AppliedRows(0, (), (range(2),)),)
    done = rheostat.AppliedIntervention("request", 0, "add", (), (), rows)
    told = str(rheostat.Receipt("r", 1, 1, interventions=(done,))).splitlines()[-1]
    assert told == "  add (request 0): 0 rows, positions none and from the cache 0-1"


@pytest.mark.parametrize(("origin", "shown"), [("global", True), ("request", False)])
def test_the_version_of_server_wide_steering_is_told_where_some_acted(origin, shown):
    done = rheostat.AppliedIntervention(origin, 0, "add", (), (), ())
    told = str(rheostat.Receipt("r", 1, 1, interventions=(done,), global_version=9))
    assert ("server-wide steering: version 9" in told) is shown
    assert "server-wide" not in str(rheostat.Receipt("r", 1, 1, global_version=9))


def test_one_of_a_thing_is_told_in_the_singular():
    receipt = read_receipt(
        text_format.Parse(
            """request_id: "r1" preemption_count: 1
               interventions {
                 intervention { origin: ORIGIN_REQUEST op: OP_ADD }
                 sites { site { point: POINT_RESID_POST layer: 2 } row_count: 1 }
               }
               captures {
                 sites { site { point: POINT_RESID_POST layer: 2 } row_count: 1 }
               }
               rules {
                 rule_name: "a"
                 samples { sample: 0 positions { start: 4 count: 1 } position_count: 1 }
               }
               watches {
                 watch_id: "w" change_count: 1 hold_count: 1 held_duration { seconds: 2 }
               }""",
            receipt_pb2.Receipt(),
        )
    )
    told = str(receipt)
    assert "1 preemption\n" in told
    assert "  add (request 0): 1 row at resid_post 2" in told
    assert "  capture 0: 1 row of resid_post 2" in told
    assert "rule a: fired at position 4" in told
    assert "  watch w: 1 change, held 1 time for 2.0 s" in told
    explanation = read_explanation(
        text_format.Parse("prompt_token_ids { ids: 5 }", generation_service_pb2.ExplainResponse())
    )
    assert "  prompt: 1 token\n" in str(explanation)
