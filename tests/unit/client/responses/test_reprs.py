"""What lists of results look like in a notebook: a line each, not a wall."""

import inspect
import re
from datetime import UTC, datetime
from pathlib import Path

import rheostat
from rheostat import Point, Site
from rheostat._responses.model import read_model, read_stats
from rheostat_wire.v1 import engine_service_pb2

AT = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
SITES = tuple(Site(Point.RESID_POST, layer) for layer in range(6))


def test_a_run_is_a_line():
    run = rheostat.RunInfo(
        "clean", SITES, (range(8),), tuple(range(8)), 24_576, AT, AT, {"team": "red"}
    )
    assert repr([run]) == (
        "[RunInfo('clean', resid_post 0-5, positions 0-7, 24576 bytes, "
        "leased until 2026-03-04 05:06:07 UTC)]"
    )


def test_a_listed_vector_is_a_line():
    joy = rheostat.Vector("ab" * 32, "joy", (1, 128), "float32", (Point.RESID_POST,), (3,))
    info = rheostat.VectorInfo(joy, "of two sets", AT, 2)
    assert repr(info) == (
        "VectorInfo('joy', abababababab, float32 [1, 128], resid_post 3, 2 users, 'of two sets')"
    )
    bare = rheostat.VectorInfo(rheostat.Vector("ab" * 32, None, (6, 128), "bfloat16"), "", AT, 0)
    assert repr(bare) == "VectorInfo(None, abababababab, bfloat16 [6, 128])"


def test_a_receipt_is_a_line_and_prints_as_more():
    receipt = rheostat.Receipt("r1", 4, 16)
    assert repr(receipt) == "Receipt('r1', 4 + 16 tokens)"
    done = rheostat.AppliedIntervention("request", 0, "add", (), (), ())
    captured = rheostat.CaptureReceipt(0, ())
    more = rheostat.Receipt("r1", 4, 16, (done, done), (captured,))
    assert repr(more) == "Receipt('r1', 4 + 16 tokens, 2 interventions, 1 capture)"


def test_counters_are_a_line_and_print_one_by_one():
    stats = read_stats(
        engine_service_pb2.GetStatsResponse(
            running_request_count=1, waiting_request_count=2, leaked_count=3
        )
    )
    assert repr(stats) == "Stats(1 running, 2 waiting, 0 completed, 0 failed, up 0 s, 3 LEAKED)"
    lines = str(stats).splitlines()
    assert lines[:2] == ["running_request_count: 1", "waiting_request_count: 2"]
    assert "leaked_count: 3" in lines
    assert ">leaked_count</td>" in stats._repr_html_()


def test_a_model_is_a_line_and_prints_as_more():
    model = read_model(
        engine_service_pb2.GetModelResponse(model_name="demo", layer_count=6, width=128)
    )
    assert repr(model) == "ModelInfo('demo', 6 layers, width 128)"
    assert len(str(model).splitlines()) > 3


def test_tokens_are_a_line_with_their_texts():
    spans = (rheostat.TextSpan(0, 0), rheostat.TextSpan(0, 2), rheostat.TextSpan(2, 5))
    found = rheostat.Tokenized((1, 8, 9), "to be", spans)
    assert repr(found) == "Tokenized(3 tokens: 1 '', 8 'to', 9 ' be')"
    one = rheostat.Tokenized((8,), "to be", spans[1:2])
    assert repr(one) == "Tokenized(1 token: 8 'to')"
    assert repr(rheostat.Tokenized((), "", ())) == "Tokenized(0 tokens)"


def test_of_many_tokens_the_first_are_shown():
    spans = tuple(rheostat.TextSpan(at, at + 1) for at in range(1000))
    shown = repr(rheostat.Tokenized(tuple(range(1000)), "x" * 1000, spans))
    assert shown.startswith("Tokenized(1000 tokens: 0 'x', 1 'x', ")
    assert shown.endswith(", 15 'x', and 984 more)")


def test_an_artifact_is_a_line():
    one = rheostat.Artifact(
        "disk", "a/rows.npz", 0, 640, "application/x-npz", "complete", 12, SITES, b"x" * 32, AT
    )
    assert repr(one) == (
        "Artifact('disk', 'a/rows.npz', 640 bytes, complete, 12 rows of resid_post 0-5)"
    )


def test_what_prints_as_more_than_a_line_is_html_in_a_notebook():
    results = {
        name
        for name, kind in vars(rheostat).items()
        if inspect.isclass(kind) and hasattr(kind, "_repr_html_")
    }
    assert results == {
        "Attribution",
        "ConditionFits",
        "Derivation",
        "Explanation",
        "Generation",
        "GlobalSteering",
        "LensResult",
        "ModelInfo",
        "Receipt",
        "Stats",
        "SweepResult",
    }


def test_one_module_makes_html_and_escapes_it():
    package = Path(rheostat.__file__).parent
    made = [
        path.name
        for path in package.rglob("*.py")
        if re.search(r'["]</?(b|pre|span|t[a-z]+)[ >]', path.read_text())
    ]
    assert made == ["_notebook.py"]


def test_what_a_server_says_is_no_markup():
    named = read_model(engine_service_pb2.GetModelResponse(model_name="<script>"))
    assert "&lt;script&gt;" in named._repr_html_()
    assert "<script>" not in named._repr_html_()
