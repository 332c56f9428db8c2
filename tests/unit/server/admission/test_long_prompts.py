"""What a small request asks of a long prompt is worked out on threads, and once."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rheostat_engine import Plan, Released
from rheostat_server.admission import admit as admission
from rheostat_server.admission import planning
from rheostat_server.admission.admit import AdmissionContext
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.capture import engine_captures
from rheostat_server.delivery.byte_budget import ByteCounter
from rheostat_server.delivery.sequence_rows import SequenceRows
from rheostat_server.engine.backend import Job
from rheostat_server.generation import explain
from rheostat_server.generation.receipts import estimate_receipt, write_receipt
from rheostat_server.generation.sample import Sample
from rheostat_server.limits import OFFLOAD_BYTES
from rheostat_server.prompts.prompts import Prompts
from rheostat_server.requests.sequence import EngineSequence, SequenceKind
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import generation_pb2, types_pb2

from ..admissions import admission_context, admitted
from ..characters import CharTokenizer
from ..fakes import INFO, VOCABULARY
from ..messages import add, capture, request, selector, site_set, token_range

TOKENS = 3000
EVERYWHERE = site_set(types_pb2.POINT_RESID_MID, types_pb2.POINT_RESID_POST)


def roomy() -> AdmissionContext:
    prompts = Prompts(CharTokenizer(), vocabulary=VOCABULARY, model_tokens=2 * TOKENS)
    return replace(
        admission_context(), info=replace(INFO, model_tokens=2 * TOKENS), prompts=prompts
    )


def asked(**fields: object):
    """A request whose prompt is the tokens 5 and 6 in turn."""
    ids = types_pb2.TokenIds(ids=[5, 6] * (TOKENS // 2))
    sampling = generation_pb2.Sampling(max_tokens=4)
    return request(token_ids=ids, sampling=sampling, **fields)


EVERY_OTHER = tuple((p, p + 1) for p in range(0, TOKENS, 2))
FREQUENT = selector(token_range(5), exclude=[token_range(7)])


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str], list[bool]]:
    """Notes for every call of a module's function whether it left the event loop."""

    def watch(module: object, name: str) -> list[bool]:
        calls: list[bool] = []
        function = getattr(module, name)

        def noted(*args, **kwargs):
            calls.append(threading.current_thread() is not threading.main_thread())
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, noted)
        return calls

    return watch


def test_ranges_are_looked_for_off_the_event_loop_if_they_are_many(on_threads) -> None:
    steering = on_threads(admission, "resolve_steering")
    capturing = on_threads(admission, "resolve_captures")
    admitted(asked(steer=[add()], captures=[capture()]), roomy())
    assert (steering, capturing) == ([False], [False])
    many = selector(*[token_range(5)] * 10)
    admitted(asked(steer=[add(where=many)], captures=[capture(where=many)]), roomy())
    assert (steering, capturing) == ([False, True], [False, True])


def test_the_plan_of_many_spans_is_made_off_the_event_loop(on_threads) -> None:
    capturing, packing = on_threads(planning, "engine_captures"), on_threads(Plan, "pack")
    admitted(asked(captures=[capture(where=FREQUENT)]), roomy())
    admitted(asked(steer=[add(where=FREQUENT)]), roomy())
    assert (capturing, packing) == ([True, True], [True, True])


def test_sums_at_many_sites_are_checked_off_the_event_loop(on_threads) -> None:
    checking = on_threads(admission, "check_sums")
    admitted(asked(steer=[add(sites=EVERYWHERE)]), roomy())
    admitted(asked(steer=[add(sites=EVERYWHERE)] * 250), roomy())
    assert checking == [False, True]


def test_what_captures_reach_is_united_once_for_all_sites_that_they_share(monkeypatch) -> None:
    unions: list[int] = []
    united = engine_captures.united
    monkeypatch.setattr(
        engine_captures, "united", lambda spans: (unions.append(1), united(spans))[1]
    )
    wheres = [FREQUENT, FREQUENT, selector(token_range(6)), selector(token_range(9))]
    got = admitted(asked(captures=[capture(EVERYWHERE, where=one) for one in wheres]), roomy())
    assert [len(one.sites) for one in got.plan.captures] == [6]
    assert len(unions) == 1
    unions.clear()
    got = admitted(asked(captures=[capture(EVERYWHERE, where=FREQUENT)] * 3), roomy())
    (one,) = got.plan.captures
    assert one.spans[: len(EVERY_OTHER)] == EVERY_OTHER
    assert unions == []


def test_a_long_explanation_is_written_off_the_event_loop(on_threads) -> None:
    writing = on_threads(explain, "add_runs")
    at = roomy()
    got = admitted(asked(steer=[add(where=FREQUENT)], captures=[capture(where=FREQUENT)]), at)
    manager = SimpleNamespace(epoch=0, admission=at, new_bank_row_count=lambda admitted: 3)
    answer = asyncio.run(explain.explain(got, manager))
    assert writing == [True, True]
    assert answer.new_bank_row_count == 3
    for told in (*answer.interventions, *answer.captures):
        runs = [(run.start, run.start + run.count) for run in told.selection.positions]
        assert tuple(runs[: len(EVERY_OTHER)]) == EVERY_OTHER


def done(got: AdmittedRequest) -> Sample:
    sequence = EngineSequence(
        Job(got.plan, got.prompt.token_ids, got.sampling, 0), SequenceKind.OWN, 0
    )
    sample = Sample(got, sequence, 0.0, ByteCounter())
    sample.tokens = [1, 2]
    sample.released = Released(
        request_id="r",
        doses=(),
        measured=False,
        captured={},
        lost_rows=0,
        preemptions=0,
        computed=(1000, TOKENS + 1),
    )
    return sample


def test_a_receipt_of_many_spans_is_written_off_the_event_loop() -> None:
    got = admitted(asked(steer=[add(where=FREQUENT)]), roomy())
    sample = done(got)
    assert estimate_receipt(got, [sample]) > OFFLOAD_BYTES
    (told,) = write_receipt(got, [sample], {}, {}).interventions
    positions = [(run.start, run.start + run.count) for run in told.rows[0].positions]
    cached = [(run.start, run.start + run.count) for run in told.rows[0].cached_positions]
    generated = [(TOKENS, TOKENS + 1)]
    assert cached + positions == [*EVERY_OTHER, *generated][: len(cached) + len(positions)]
    assert told.sites[0].row_count == len(positions)


def test_a_receipt_finds_the_positions_of_a_sample_once_for_all_sites(monkeypatch) -> None:
    got = admitted(asked(steer=[add(where=FREQUENT, sites=EVERYWHERE)]), roomy())
    sample = done(got)
    looks: list[int] = []
    selected = sample.selected
    monkeypatch.setattr(sample, "selected", lambda *args: (looks.append(1), selected(*args))[1])
    write_receipt(got, [sample], {}, {})
    assert len(looks) == 2


def test_samples_share_what_a_capture_reaches() -> None:
    got = admitted(asked(captures=[capture(where=FREQUENT)]), roomy())
    selection = got.captures[0].selection

    def sequence_rows() -> SequenceRows:
        captures = dict(enumerate(got.captures))
        return SequenceRows(got.prompt.token_ids, captures, (), FloatType.FLOAT32, ByteCounter())

    sequence_rows()
    made = selection.edges
    sequence_rows()
    assert selection.edges is made
    assert made.spans == selection.reach
