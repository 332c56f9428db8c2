"""Signals and firings of a generation, over both clients."""

import numpy as np
import pytest

import rheostat
from rheostat_wire.v1 import generation_service_pb2, receipt_pb2

from .test_accumulator import FIRST, SECOND, response

STARTED = response('started { request_id: "r1" model_name: "m" prompt_token_count: 2 }')
TABLE = response(
    """signal_table {
         columns { probe_name: "wide" site { point: POINT_RESID_POST layer: 1 } }
         columns { probe_name: "wide" site { point: POINT_RESID_POST layer: 2 } }
         columns { probe_name: "one" site { point: POINT_RESID_POST layer: 0 } }
         columns { gate { origin: ORIGIN_REQUEST index: 3 op: OP_ADD } }
       }"""
)
FINISHED = response(
    """finished {
         reason: FINISH_REASON_RULE rule_name: "grim" rule_label: "why" token_count: 2
       }"""
)
RECEIPT = response(
    """receipt {
         request_id: "r1" prompt_token_count: 2 generated_token_count: 2
         rules {
           rule_name: "grim"
           samples { positions { start: 3 count: 1 } position_count: 1 stopped: true }
         }
         rules { rule_name: "calm" }
       }"""
)


def signals(first: int, values: np.ndarray, rows: list[int], **fields: object):
    message = generation_service_pb2.GenerateResponse()
    signals = message.signals
    signals.positions.add(start=first, count=len(values))
    signals.token_ids.extend(range(first, first + len(values)))
    signals.values.dtype, signals.values.encoding = "DTYPE_FLOAT32", "ENCODING_RAW"
    signals.values.shape.extend(values.shape)
    signals.values.inline = values.astype("<f4").tobytes()
    if rows:
        signals.firings.add(rule_name="grim", rows=rows)
    for start, count in fields.get("dropped", ()):
        signals.dropped_positions.add(start=start, count=count)
    return message


VALUES = np.arange(16, dtype=np.float32).reshape(4, 4)
WHOLE = [
    STARTED,
    TABLE,
    signals(0, VALUES[:2], [1]),
    FIRST,
    signals(3, VALUES[2:], [0], dropped=[(2, 1)]),
    SECOND,
    FINISHED,
    RECEIPT,
]


def test_signals_that_were_only_dropped_are_read(client, server) -> None:
    dropped = response("signals { dropped_positions { start: 0 count: 2 } }")
    server.on("Generate", [STARTED, TABLE, dropped, *WHOLE[3:]])
    _, out = client.stream("x")
    assert out.signals.positions.tolist() == [3, 4]
    assert out.signals.dropped.tolist() == [0, 1, 2]
    assert out.signals["wide"].tolist() == VALUES[2:, :2].tolist()


def test_the_signals_of_a_sample_are_put_together(client, server) -> None:
    server.on("Generate", WHOLE)
    events, out = client.stream("x")
    parts = [event for event in events if isinstance(event, rheostat.Signals)]
    assert [len(part) for part in parts] == [2, 2]
    found = out.signals
    assert found is out.samples[0].signals
    assert found.positions.tolist() == [0, 1, 3, 4]
    assert found.token_ids.tolist() == [0, 1, 3, 4]
    assert found["wide"].tolist() == VALUES[:, :2].tolist()
    assert found["one"].tolist() == VALUES[:, 2].tolist()
    assert found.openness(3).tolist() == VALUES[:, 3].tolist()
    assert {name: where.tolist() for name, where in found.firings.items()} == {"grim": [1, 3]}
    assert found.dropped.tolist() == [2]
    assert repr(found) == "Signals(sample=0, positions=4, columns=4, fired={'grim': 2})"
    sample = out.samples[0]
    assert (sample.finish_reason, sample.stop, sample.label) == ("rule", "grim", "why")


def test_what_has_no_signals_is_a_key_error(client, server) -> None:
    server.on("Generate", WHOLE)
    found = client.stream("x")[1].signals
    with pytest.raises(KeyError, match="no signals of a probe 'two'; there are those of one, wide"):
        found["two"]
    with pytest.raises(KeyError, match="intervention 0"):
        found.openness(0)


def test_a_generation_without_signals_has_none(client, server) -> None:
    server.on("Generate", [STARTED, FIRST, SECOND, FINISHED, RECEIPT])
    found = client.stream("x")[1].signals
    assert (len(found), found.columns, dict(found.firings)) == (0, (), {})


def test_signals_that_do_not_fit_are_the_servers_error(client, server) -> None:
    server.on("Generate", [STARTED, TABLE, signals(0, VALUES[:, :3], []), *WHOLE[3:]])
    error = client.stream("x")[1]
    assert isinstance(error, rheostat.ServerError)
    assert "do not fit together" in str(error)


def test_the_receipt_says_where_rules_fired(client, server) -> None:
    server.on("Generate", WHOLE)
    receipt = client.stream("x")[1].receipt
    assert receipt.rules == (
        rheostat.RuleReceipt("grim", (rheostat.RuleFirings(0, (range(3, 4),), 1, stopped=True),)),
        rheostat.RuleReceipt("calm", ()),
    )
    assert "rule grim: fired at position 3, stopped 1 sample" in str(receipt)
    assert "rule calm: did not fire" in str(receipt)


def test_the_receipt_says_what_watches_changed(client, server) -> None:
    changed = generation_service_pb2.GenerateResponse()
    changed.CopyFrom(RECEIPT)
    watch = changed.receipt.watches.add(watch_id="w", change_count=300, stopped_samples=[0, 2])
    added = changed.receipt.interventions.add()
    added.intervention.origin = receipt_pb2.ORIGIN_WATCH
    added.intervention.op = receipt_pb2.OP_ADD
    added.intervention.watch_id, added.intervention.update_id = "w", 5
    done = watch.changes.add(update_id=4, gain={"factor": 0.5, "interventions": [1]})
    done.first_positions.add(sample=2, position=9)
    watch.changes.add(update_id=5, layer={"intervention_count": 1})
    server.on("Generate", [STARTED, FIRST, SECOND, FINISHED, changed])
    receipt = client.stream("x")[1].receipt
    change = rheostat.WatchChange(4, {2: 9}, 0.5, (1,))
    layer = rheostat.WatchChange(5, {}, layer_size=1)
    by = rheostat.WatchReceipt("w", (change, layer), 300, stopped_samples=(0, 2))
    assert receipt.watches == (by,)
    assert "watch w: 300 changes, ended sample 0, sample 2" in str(receipt)
    assert receipt.interventions[-1].watch_id == "w"
    assert "add (watch w 5, 0): 0 rows" in str(receipt)
    assert "watch w: 300 changes" in str(receipt)
